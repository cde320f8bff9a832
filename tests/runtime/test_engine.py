"""The engine on the trained checkpoint, against transformers' tokens and the oracle's draft counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from builder.contract import CAPTURE_ACTIVE, CAPTURE_COUNT, CUMULATIVE_LENGTHS
from builder.errors import MachineError, Refused
from runtime import Engine, EngineOptions, Request
from runtime.head import HeadModel
from runtime.loading import LoadedPackage
from runtime.target import TargetModel
from tests.runtime.answers import counts_of, oracle_counts

TOTALS = {1: (224, 278), 2: (293, 368), 3: (331, 408)}
"""Accepted and evaluated drafts over 8 prompts and 64 tokens, by an oracle made of transformers' classes."""


def finish(engine: Engine) -> None:
    for _ in range(5000):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def run_all(
    package: LoadedPackage, prompts: list[list[int]], drafts: int, batch: int, new_tokens: int = 64, **sizes: int
) -> tuple[list[Request], Engine]:
    options = EngineOptions(max_draft_tokens=drafts, max_batch_size=batch, **{"num_blocks": 64, **sizes})
    engine = Engine(package, options)
    requests = [engine.submit(prompt, new_tokens, drafts) for prompt in prompts]
    finish(engine)
    return requests, engine


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_tokens_are_those_of_transformers(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], drafts: int, batch: int
) -> None:
    requests, engine = run_all(trained, prompts, drafts, batch)
    assert [request.token_ids for request in requests] == greedy_tokens
    assert (engine.stats.draft_tokens_proposed > 0) == (drafts > 0)
    assert engine._pool.num_free == 64, "every block comes back"
    assert engine.target.states is not None
    assert engine.target.states.num_free == batch


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_draft_counts_are_the_oracles(
    trained: LoadedPackage,
    prompts: list[list[int]],
    reference: Mapping[str, NDArray[Any]],
    drafts: int,
    batch: int,
) -> None:
    requests, engine = run_all(trained, prompts, drafts, batch)
    counts = counts_of(requests)
    assert tuple(map(sum, zip(*counts, strict=True))) == TOTALS[drafts]
    assert counts == oracle_counts(reference, drafts)
    assert (engine.stats.draft_tokens_accepted, engine.stats.draft_tokens_evaluated) == TOTALS[drafts]


def test_statistics_add_up(trained: LoadedPackage, prompts: list[list[int]]) -> None:
    requests, engine = run_all(trained, prompts, 3, 1)
    stats = engine.stats
    assert stats.rounds == stats.full_accept_rounds + stats.partial_accept_rounds + stats.zero_accept_rounds
    assert stats.rounds == stats.bonus_tokens + stats.correction_tokens
    assert sum(stats.accepted_by_position) == stats.draft_tokens_accepted
    assert sum(stats.evaluated_by_position) == stats.draft_tokens_evaluated
    assert stats.draft_tokens_proposed == sum(request.stats.draft_tokens_proposed for request in requests)
    # Each request: one token from its prompt; each round its accepted drafts and one token; a last step may not draft.
    undrafted = 8 * 64 - 8 - stats.draft_tokens_accepted - stats.rounds
    assert stats.target_forward_passes == 8 + stats.rounds + undrafted


@pytest.mark.parametrize("sizes", [{"block_size": 16}, {"block_size": 7}, {"max_scheduled_tokens": 5}], ids=str)
def test_block_size_and_chunks_do_not_change_tokens(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], sizes: dict[str, int]
) -> None:
    requests, _ = run_all(trained, prompts, 3, 4, **{"num_blocks": 128, **sizes})
    assert [request.token_ids for request in requests] == greedy_tokens


def test_chunked_prompt_primes_the_head_alike(trained: LoadedPackage, prompts: list[list[int]]) -> None:
    """Case A41: the head's cache after the prompt holds one row less than the prompt, whatever the chunks."""
    caches = []
    for chunk in (1, 4, 9, 2048):
        engine = Engine(trained, EngineOptions(num_blocks=1, max_batch_size=1, max_scheduled_tokens=chunk))
        request = engine.submit(prompts[1], 8, 3)
        while request.is_prefill:
            engine.step()
        assert engine.proposer is not None
        assert request.head_length == len(prompts[1]) - 1
        cache = engine.proposer.head._cache.inputs["past_key_values.0.key"][0]
        assert np.abs(cache[: request.head_length]).min(axis=(1, 2)).max() > 0, "every row was written"
        caches.append(cache[: request.head_length].copy())
    for cache in caches[1:]:
        np.testing.assert_allclose(cache, caches[0], atol=1e-4)


def test_prefill_and_drafts_never_share_a_step(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case A44: a request arrives while another drafts; its last chunk may be one token, like a decode row."""
    run = TargetModel.run
    drafting_steps, shared_steps = [], []

    def watched(self: TargetModel, segments: Any, view: Any, capture_counts: Any, **more: Any) -> Any:
        prompt_rows = [request for request in engine._running if request.is_prefill]
        if any(capture_counts):
            drafting_steps.append(capture_counts)
            assert not prompt_rows
        elif prompt_rows and len(segments) > 1:
            shared_steps.append(segments)
        return run(self, segments, view, capture_counts, **more)

    monkeypatch.setattr(TargetModel, "run", watched)
    for arrival in range(9):
        engine = Engine(trained, EngineOptions(num_blocks=8, max_batch_size=2, max_scheduled_tokens=8))
        requests = [engine.submit(prompts[2], 40, 3)]
        for _ in range(arrival):
            engine.step()
        requests.append(engine.submit(prompts[4], 40, 3))
        finish(engine)
        assert requests[0].token_ids == greedy_tokens[2][:40]
        assert requests[1].token_ids == greedy_tokens[4][:40]
    assert drafting_steps, "drafting resumes"
    assert any(min(len(segment.token_ids) for segment in step) == 1 for step in shared_steps)


def test_a_proposal_is_for_the_next_step_only(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    """A step that cannot draft drops it: a step later it would stand at the wrong position."""
    engine = Engine(trained, EngineOptions(num_blocks=4, max_batch_size=2, max_draft_tokens=1))
    first = engine.submit(prompts[0], 16, 0)
    engine.step()
    first.propose(greedy_tokens[0][1:2])
    engine.submit(prompts[1], 4, 0)
    engine.step()
    assert first.proposed is None
    finish(engine)
    assert first.token_ids == greedy_tokens[0][:16]
    assert first.stats.draft_tokens_proposed == 0


@pytest.mark.parametrize("seed", [1, 2])
def test_any_drafter_gives_the_same_tokens(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], seed: int
) -> None:
    """Case A36: rejected drafts leave no trace. Half of the caller's drafts are right, half are random."""
    random = np.random.default_rng(seed)
    engine = Engine(trained, EngineOptions(num_blocks=1, max_batch_size=1, max_draft_tokens=3))
    request = engine.submit(prompts[3], 64, 0)
    lengths = set()
    while engine.has_work:
        known = len(request.token_ids)
        right = greedy_tokens[3][known : known + int(random.integers(0, 4))]
        wrong = random.integers(0, 2048, 3 - len(right)).tolist()
        request.propose([*right, *wrong])
        engine.step()
        lengths.add(len(request.token_ids) - known)
    assert request.token_ids == greedy_tokens[3]
    assert lengths >= {1, 2, 3, 4}, "every length of accepted prefix occurred"


def test_stop_id_inside_an_accepted_prefix_ends_the_turn(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    """Case A46: the text ends at the stop id even where the target agreed with drafts behind it."""
    cut = 0
    for position in range(1, 24):
        stop = greedy_tokens[2][position]
        expected = greedy_tokens[2][: greedy_tokens[2].index(stop) + 1]
        engine = Engine(trained, EngineOptions(num_blocks=1, max_batch_size=1))
        request = engine.submit(prompts[2], 64, 3, stop_token_ids=[stop, 2047])
        finish(engine)
        assert request.token_ids == expected
        assert request.finish_reason == "stop"
        # Every delivered token but the first is an accepted draft or a round's own token; nothing behind it counts.
        stats = engine.stats
        assert stats.draft_tokens_accepted + stats.bonus_tokens + stats.correction_tokens == len(expected) - 1
        assert stats.draft_tokens_evaluated == stats.draft_tokens_accepted + stats.correction_tokens
        cut += stats.rounds - stats.bonus_tokens - stats.correction_tokens
    assert cut > 5, "the stop id was an accepted draft with drafts behind it, several times"


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5])
def test_length_limit_is_exact_and_clamps_drafts(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], new_tokens: int
) -> None:
    requests, _ = run_all(trained, prompts[:2], 3, 2, new_tokens)
    assert [request.token_ids for request in requests] == [tokens[:new_tokens] for tokens in greedy_tokens[:2]]
    assert all(request.finish_reason == "length" for request in requests)
    assert all(request.stats.draft_tokens_proposed <= max(0, 3 * (new_tokens - 2)) for request in requests)


def test_requests_wait_for_blocks_and_are_served_in_order(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    requests, engine = run_all(trained, prompts, 3, 8, block_size=16, num_blocks=7)
    assert [request.token_ids for request in requests] == greedy_tokens
    assert engine._pool.num_free == 7


def test_a_request_that_never_fits_is_refused_with_both_numbers(trained: LoadedPackage) -> None:
    """Case A49."""
    engine = Engine(trained, EngineOptions(num_blocks=3, block_size=4, max_batch_size=1))
    with pytest.raises(Refused, match=r"--num-blocks: expected 4 blocks .* found 3"):
        engine.submit(list(range(1, 13)), 2, 0)


def test_prompt_beyond_the_context_is_refused(trained: LoadedPackage) -> None:
    engine = Engine(trained, EngineOptions(num_blocks=300, block_size=16, max_batch_size=1))
    with pytest.raises(Refused, match=r"expected at most 4096 tokens.* found 4097"):
        engine.submit([5] * 4097, 1, 0)
    with pytest.raises(Refused, match="token ids below 2048, found 2048"):
        engine.submit([2048], 1, 0)
    with pytest.raises(Refused, match="at least one token"):
        engine.submit([], 1, 0)


def test_generation_ends_at_the_context(trained: LoadedPackage) -> None:
    """Case A47: around the last positions nothing overruns, with and without drafts."""
    prompt = ([7, 11, 13, 17] * 1024)[:4093]
    engine = Engine(trained, EngineOptions(num_blocks=257, block_size=16, max_batch_size=1))
    plain, drafted = engine.submit(prompt, 64, 0), engine.submit(prompt, 64, 3)
    full = engine.submit([5] * 4096, 4, 3)
    finish(engine)
    assert len(plain.token_ids) == 3
    assert plain.token_ids == drafted.token_ids
    assert (full.token_ids, full.finish_reason) == ([], "length")


def test_more_drafts_than_the_package_allows_are_refused(trained: LoadedPackage) -> None:
    with pytest.raises(Refused, match="--draft-tokens: expected 0 to 3"):
        Engine(trained, EngineOptions(max_draft_tokens=4))
    engine = Engine(trained, EngineOptions(num_blocks=1, max_draft_tokens=1))
    with pytest.raises(Refused, match="--draft-tokens: expected 0 to 1"):
        engine.submit([1], 4, 2)


def test_a_plain_engine_has_no_head(trained: LoadedPackage) -> None:
    assert Engine(trained, EngineOptions(num_blocks=1, max_draft_tokens=0)).proposer is None


def test_cancelled_requests_leave_and_free_their_blocks(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    engine = Engine(trained, EngineOptions(num_blocks=4, max_batch_size=2))
    gone, stays, waiting = (engine.submit(prompts[i], 64, 3) for i in range(3))
    for _ in range(3):
        engine.step()
    gone.cancel()
    waiting.cancel()
    finish(engine)
    assert gone.finish_reason == waiting.finish_reason == "cancelled"
    assert stays.token_ids == greedy_tokens[1]
    assert engine._pool.num_free == 4


def test_a_failed_run_can_be_repeated(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails before its commit leaves blocks, states and requests as they were."""
    engine = Engine(trained, EngineOptions(num_blocks=16, block_size=16, max_batch_size=2))
    requests = [engine.submit(prompts[i], 64, 3) for i in (0, 5)]
    run = TargetModel.run
    calls = 0

    def failing(self: TargetModel, *arguments: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        outputs = run(self, *arguments, **more)
        if calls % 3 == 0:
            raise MachineError("injected")
        return outputs

    monkeypatch.setattr(TargetModel, "run", failing)
    failures = 0
    while engine.has_work:
        free = engine._pool.num_free
        cached = [request.num_cached for request in requests]
        try:
            engine.step()
        except MachineError:
            failures += 1
            assert [request.num_cached for request in requests] == cached
            assert engine._pool.num_free == free
    assert failures > 5
    assert [request.token_ids for request in requests] == [greedy_tokens[0], greedy_tokens[5]]


def test_a_failed_priming_is_made_up_for(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head fails after the prompt was committed: its rows are fed later, and drafting is as good as ever."""
    launch, failures = HeadModel._launch, iter([True, False, True])

    def failing(self: HeadModel, *arguments: Any) -> Any:
        if next(failures, False):
            raise MachineError("injected")
        return launch(self, *arguments)

    monkeypatch.setattr(HeadModel, "_launch", failing)
    engine = Engine(trained, EngineOptions(num_blocks=1, max_batch_size=1))
    request = engine.submit(prompts[0], 64, 3)
    errors = 0
    while engine.has_work:
        try:
            engine.step()
        except MachineError:
            errors += 1
    assert errors == 2
    assert request.token_ids == greedy_tokens[0]
    assert (request.stats.draft_tokens_accepted, request.stats.draft_tokens_evaluated) == (36, 54)


def test_capture_is_switched_on_for_drafting_steps_alone(
    trained: LoadedPackage, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """state_update_active is 1, and a row's capture_count its length, exactly where drafts are verified."""
    seen: list[tuple[int, list[int], list[int]]] = []
    prepare = TargetModel._prepare

    def watched(self: TargetModel, *arguments: Any) -> Any:
        prepared = prepare(self, *arguments)
        run = prepared.bound.run

        def record() -> None:
            active, counts = (prepared.extra[name].tolist() for name in (CAPTURE_ACTIVE, CAPTURE_COUNT))
            seen.append((active[0], counts, np.diff(prepared.batch.arrays[CUMULATIVE_LENGTHS]).tolist()))
            run()

        monkeypatch.setattr(prepared.bound, "run", record)
        return prepared

    monkeypatch.setattr(TargetModel, "_prepare", watched)
    run_all(trained, prompts[:2], 0, 2, 8)
    assert all(active == 0 and not any(counts) for active, counts, _ in seen), "plain is truly plain"
    seen.clear()
    engine = Engine(trained, EngineOptions(num_blocks=4, max_batch_size=2))
    engine.submit(prompts[0], 20, 3)
    engine.submit(prompts[1], 20, 0)
    finish(engine)
    assert {active for active, _, _ in seen} == {0, 1}
    for active, counts, lengths in seen:
        assert active == any(counts)
        assert counts == lengths if active else not any(counts)


def test_blocks_beyond_the_accepted_prefix_go_back_at_once(trained: LoadedPackage, prompts: list[list[int]]) -> None:
    """A request owns the blocks of its committed tokens and no more, also right after rejected drafts."""
    engine = Engine(trained, EngineOptions(num_blocks=80, block_size=1, max_batch_size=1))
    request = engine.submit(prompts[1], 30, 3)
    while engine.has_work:
        engine.step()
        assert 80 - engine._pool.num_free == (0 if request.finish_reason else request.num_cached)


def test_proposals_are_token_ids(trained: LoadedPackage, prompts: list[list[int]]) -> None:
    request = Engine(trained, EngineOptions(num_blocks=1)).submit(prompts[0], 4, 0)
    for wrong in (2048, -1):
        with pytest.raises(Refused, match=f"expected token ids below 2048, found {wrong}"):
            request.propose([1, wrong])


def test_requests_with_different_drafts_share_a_batch(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    engine = Engine(trained, EngineOptions(num_blocks=8, max_batch_size=8))
    requests = [engine.submit(prompt, 64, i % 4) for i, prompt in enumerate(prompts)]
    finish(engine)
    assert [request.token_ids for request in requests] == greedy_tokens
    assert [request.stats.draft_tokens_proposed > 0 for request in requests] == [i % 4 > 0 for i in range(8)]


def test_drafts_beyond_the_token_budget_are_dropped_before_a_request_waits(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    requests, _ = run_all(trained, prompts[:4], 3, 4, max_scheduled_tokens=6)
    assert [request.token_ids for request in requests] == greedy_tokens[:4]


def test_caches_beyond_free_memory_are_refused_before_they_are_made(trained: LoadedPackage) -> None:
    with pytest.raises(MachineError, match=r"caches and states need [\d,]+ bytes, [\d,]+ are available"):
        Engine(trained, EngineOptions(num_blocks=10**9))
