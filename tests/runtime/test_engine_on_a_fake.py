"""The loop's known ways to go wrong, each on a model whose tokens tell (fakes.py)."""

from __future__ import annotations

import pytest

from builder.errors import Refused
from runtime import Engine, EngineOptions, Request
from tests.runtime.fakes import CAPACITY, FakeHead, FakeTarget, fake_package, plain


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize("arrival", range(9))
def test_a_prompt_joins_while_another_request_drafts(arrival: int) -> None:
    """Case A44: 70 tokens in chunks of 23 beside a decode row; the last chunk is one token long, like a decode.

    The fake captures nothing for a batch with a long row, as a chunked kernel does.
    """
    engine = Engine(fake_package(), EngineOptions(num_blocks=64, max_batch_size=2, max_scheduled_tokens=24))
    prompt = [i % 11 for i in range(70)]
    drafting = engine.submit([1, 2, 3], 60, 3)
    for _ in range(arrival):
        engine.step()
    joining = engine.submit(prompt, 10, 3)
    chunks = []
    while engine.has_work:
        before = joining.num_cached, drafting.stats.draft_tokens_proposed, joining.is_prefill
        engine.step()
        if before[2] and joining.num_cached > before[0]:
            chunks.append(joining.num_cached - before[0])
            assert drafting.stats.draft_tokens_proposed == before[1], "no drafts beside a prompt"
    assert chunks[-1] == 1 or arrival == 0
    assert drafting.token_ids == plain([1, 2, 3], 60)
    assert joining.token_ids == plain(prompt, 10)
    assert joining.stats.draft_tokens_proposed > 0, "drafting resumes"


@pytest.mark.parametrize("short_by", range(7))
@pytest.mark.parametrize("drafts", [0, 2, CAPACITY - 1])
def test_the_last_positions_of_the_context(short_by: int, drafts: int) -> None:
    """Case A47: prompts that leave 0 to 6 positions, in a pool of exactly the context."""
    context = 24
    prompt = [i % 7 for i in range(context - short_by)]
    engine = Engine(
        fake_package(head=FakeHead(0), context_length=context),
        EngineOptions(num_blocks=6, block_size=4, max_batch_size=1),
    )
    request = engine.submit(prompt, 20, drafts)
    finish(engine)
    assert request.token_ids == plain(prompt, short_by)
    assert request.finish_reason == "length"
    assert request.stats.draft_tokens_proposed <= max(0, short_by - 2)
    assert (engine.stats.target_forward_passes == 0) == (short_by == 0), "no room, no run"


def test_a_full_context_after_a_short_request() -> None:
    """Case A48: one process, six blocks of four; the second request uses what the first one gave back, and all else."""
    engine = Engine(fake_package(context_length=24), EngineOptions(num_blocks=6, block_size=4, max_batch_size=2))
    for prompt, new in (([1, 2], 3), ([i % 5 for i in range(14)], 10), ([3], 23)):
        request = engine.submit(prompt, new, 3)
        finish(engine)
        assert request.token_ids == plain(prompt, new)
        assert engine.load.free_blocks == 6


def test_admission_counts_every_token_once() -> None:
    """Case A49: three blocks of four hold twelve cached tokens, and the newest token needs no place."""
    engine = Engine(fake_package(), EngineOptions(num_blocks=3, block_size=4, max_batch_size=2))
    with pytest.raises(Refused, match=r"--num-blocks: expected 4 blocks of 4 tokens .* found 3"):
        engine.submit([1] * 13, 1)
    with pytest.raises(Refused, match=r"--num-blocks: expected 4 blocks of 4 tokens .* found 3"):
        engine.submit([1] * 12, 2)
    whole, small = engine.submit([1] * 12, 1), engine.submit([2] * 4, 2)
    engine.step()
    assert engine.load.waiting_requests == 1, "the second one waits for blocks; it is not refused"
    finish(engine)
    assert (whole.token_ids, small.token_ids) == (plain([1] * 12, 1), plain([2] * 4, 2))


@pytest.mark.parametrize("accepted", range(CAPACITY))
def test_a_stop_id_at_every_place_of_an_accepted_draft(accepted: int) -> None:
    """Case A46: with several stop ids the first one counts; what lies behind it is not delivered and not counted."""
    prompt = [4, 2]
    text = plain(prompt, 30)
    head = FakeHead(0)
    place = next(i for i in range(1 + accepted, 30) if text[i] not in text[:i])
    engine = Engine(fake_package(FakeTarget(), head), EngineOptions(num_blocks=30, max_batch_size=1))
    request = engine.submit(
        prompt, 30, CAPACITY - 1, stop_token_ids=[text[place], *{*range(13)} - {*text[: place + 1]}]
    )
    finish(engine)
    assert request.token_ids == text[: place + 1]
    assert request.finish_reason == "stop"
    stats = request.stats
    assert stats.tokens_emitted == len(request.token_ids) - 1, "all but the prompt's own token"
    assert stats.tokens_queued == stats.tokens_emitted + stats.tokens_discarded
    assert stats.draft_tokens_accepted + stats.bonus_tokens + stats.correction_tokens == stats.tokens_emitted


def preempted_at(step: int) -> tuple[Request, Request, Engine]:
    engine = Engine(fake_package(head=FakeHead(4)), EngineOptions(num_blocks=30, max_batch_size=2))
    first, second = engine.submit([1, 2, 3], 30, 3), engine.submit([4, 5], 30, 4)
    for _ in range(step):
        engine.step()
    engine.preempt(first)
    finish(engine)
    return first, second, engine


@pytest.mark.parametrize("step", range(1, 8))
def test_a_preempted_request_goes_on_exactly(step: int) -> None:
    first, second, engine = preempted_at(step)
    assert (first.token_ids, second.token_ids) == (plain([1, 2, 3], 30), plain([4, 5], 30))
    assert (first.stats.preemptions, second.stats.preemptions, engine.stats.preemptions) == (1, 0, 1)
    assert first.stats.draft_tokens_accepted > 0


def test_blocks_that_run_out_make_the_last_one_wait_and_nobody_starve() -> None:
    """Five requests of five blocks in a pool of eight: they come in as prompts, outgrow it, and all end."""
    engine = Engine(fake_package(), EngineOptions(num_blocks=8, block_size=4, max_batch_size=5))
    prompts = [[i + 1] * 3 for i in range(5)]
    requests = [engine.submit(prompt, 17, 2) for prompt in prompts]
    ends: list[Request] = []
    while engine.has_work:
        engine.step()
        ends += [request for request in requests if request.finish_reason and request not in ends]
    assert [request.token_ids for request in requests] == [plain(prompt, 17) for prompt in prompts]
    assert engine.stats.preemptions > 0
    assert ends[0] is requests[0], "the first one in is never thrown out"
