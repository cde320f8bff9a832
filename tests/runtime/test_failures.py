"""Failures at every boundary of a step, on demand; what the tool itself promises."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from builder.errors import DraftsmithError, Refused
from runtime import Engine, EngineOptions, FailAt, InjectedFailure, Request, RollbackFailed, SamplingOptions
from runtime.failures import Boundary
from runtime.transaction import Transaction
from tests.runtime.fakes import FakeHead, FakeTarget, fake_package, plain

STEPS: tuple[Boundary, ...] = get_args(Boundary)[:-1]
PROMPTS = ([1, 2, 3, 4, 5], [6, 7], [8])


def engine_with(watch: FailAt | None, **options: int) -> tuple[Engine, list[Request]]:
    engine = Engine(fake_package(), EngineOptions(num_blocks=16, max_batch_size=3, **options), watch)
    return engine, [engine.submit(prompt, 10, 3) for prompt in PROMPTS]


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("boundary", STEPS)
def test_a_step_that_failed_is_repeated(boundary: Boundary, step: int) -> None:
    """In the first step requests are admitted, later ones draft."""
    watch = FailAt(boundary, step)
    engine, requests = engine_with(watch)
    failures = 0
    while engine.has_work:
        before = [list(request.token_ids) for request in requests], engine._pool.num_free, repr(engine.stats)
        try:
            engine.step()
        except InjectedFailure as failure:
            failures += 1
            assert str(failure) == f"injected at {boundary} of step {step}"
            assert [request.token_ids for request in requests] == before[0]
            assert engine._pool.num_free == before[1]
            assert repr(engine.stats) == before[2].replace("aborted_steps=0", "aborted_steps=1")
    assert (failures, watch.failed) == (1, True)
    assert [request.token_ids for request in requests] == [plain(prompt, 10) for prompt in PROMPTS]


def test_a_reservation_is_all_or_nothing() -> None:
    """The second of three new requests fails: the first gives its blocks and slot back and waits on."""
    engine, requests = engine_with(FailAt("reserve", 0, occurrence=2))
    with pytest.raises(InjectedFailure):
        engine.step()
    assert engine.load.running_requests == 0
    assert engine.load.waiting_requests == 3
    assert engine.load.free_blocks == 16
    assert engine.target.states is not None
    assert engine.target.states.num_free == 3
    assert all((request.table, request.slot) == (None, None) for request in requests)
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == [plain(prompt, 10) for prompt in PROMPTS]


def test_an_engine_whose_rollback_failed_says_so_until_it_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = engine_with(FailAt("rollback", 1))
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.target, "run", lambda *arguments, **more: 1 / 0)
        for _ in range(2):
            with pytest.raises(RollbackFailed, match=r"a step failed \(division by zero\).*call Engine.reset"):
                engine.step()
    engine.reset()
    assert {request.finish_reason for request in requests} == {"cancelled"}
    assert engine.load.free_blocks == 16
    again = engine.submit(PROMPTS[0], 10, 3)
    while engine.has_work:
        engine.step()
    assert again.token_ids == plain(PROMPTS[0], 10)


def test_a_reset_keeps_sessions_caches_and_counters() -> None:
    """Prepared runs of the same shapes are bound no second time."""
    target, head = FakeTarget(), FakeHead()
    engine = Engine(fake_package(target, head), EngineOptions(num_blocks=16, max_batch_size=3))
    binds = []
    for session in (target, head):
        bind = session.bind
        session.bind = lambda *arrays, bind=bind, **more: (binds.append(1), bind(*arrays, **more))[1]  # type: ignore[method-assign]
    texts, passes = [], []
    for _ in range(2):
        requests = [engine.submit(prompt, 10, 3) for prompt in PROMPTS]
        while engine.has_work:
            engine.step()
        texts.append([request.token_ids for request in requests])
        passes.append((len(binds), engine.stats.target_forward_passes))
        engine.submit([1], 5)
        engine.reset()
        assert not engine.has_work
    assert texts[0] == texts[1] == [plain(prompt, 10) for prompt in PROMPTS]
    assert passes[1][0] == passes[0][0]
    assert passes[1][1] == 2 * passes[0][1]


def test_graph_capture_runs_the_model_several_times_and_advances_no_state_twice() -> None:
    """Case A51: a step's state outputs are never its inputs, so a repeated run gives the same."""
    engine = Engine(fake_package(FakeTarget(repeats=3), FakeHead(repeats=3)), EngineOptions(num_blocks=16))
    requests = [engine.submit(prompt, 10, 3) for prompt in PROMPTS]
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == [plain(prompt, 10) for prompt in PROMPTS]
    assert engine.stats.draft_tokens_accepted > 0


def test_an_unknown_boundary_is_refused() -> None:
    with pytest.raises(Refused, match=r"boundary: expected plan or reserve .* found commit"):
        FailAt("commit", 0)  # type: ignore[arg-type]


def test_request_order_changes_nobodys_tokens() -> None:
    """Case A35: rows of different lengths and kinds, permuted."""
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        engine = Engine(fake_package(), EngineOptions(num_blocks=16, max_batch_size=3))
        requests = {i: engine.submit(PROMPTS[i], 10, i + 1) for i in order}
        while engine.has_work:
            engine.step()
        assert [requests[i].token_ids for i in range(3)] == [plain(prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("wrong_every", [1, 2, 3])
def test_two_drafters_of_different_quality_give_the_same_tokens(wrong_every: int) -> None:
    """Case A36."""
    engine = Engine(fake_package(head=FakeHead(wrong_every)), EngineOptions(num_blocks=16))
    request = engine.submit(PROMPTS[0], 40, 4)
    while engine.has_work:
        engine.step()
    assert request.token_ids == plain(PROMPTS[0], 40)
    assert (request.stats.draft_tokens_accepted > 0) == (wrong_every > 1)


def test_the_head_is_level_with_the_target_after_every_round() -> None:
    """Case A50: the same distance after 0 to K accepted drafts."""
    engine = Engine(fake_package(), EngineOptions(num_blocks=30))
    request = engine.submit(PROMPTS[0], 60, 4)
    accepted = set()
    while engine.has_work:
        before = request.stats.draft_tokens_accepted
        engine.step()
        accepted.add(request.stats.draft_tokens_accepted - before)
        if request.finish_reason is None:
            assert request.head_length + sum(map(len, request.unread_hidden)) == request.num_cached
    assert accepted == {0, 1, 2, 3, 4} or len(accepted) >= 4


def test_k_changes_between_steps() -> None:
    engine = Engine(fake_package(head=FakeHead(0)), EngineOptions(num_blocks=30))
    request = engine.submit(PROMPTS[0], 40, 0)
    proposed = []
    for k in (0, 0, 4, 4, 1, 2):
        request.set_draft_tokens(k)
        before = request.stats.draft_tokens_proposed
        engine.step()
        proposed.append(request.stats.draft_tokens_proposed - before)
    assert proposed == [0, 0, 4, 4, 1, 2], "the first step is the prompt's"
    with pytest.raises(Refused, match=r"--draft-tokens: expected 0 to 4.* found 5"):
        request.set_draft_tokens(5)


@pytest.mark.parametrize("place", ["states", "publish", "rollback"])
def test_an_interruption_that_cannot_be_undone_is_never_overlooked(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the first bank that is swapped and the last token that is delivered, or within a rollback."""
    engine, _ = engine_with(FailAt("run", 2) if place == "rollback" else None)
    engine.step()
    engine.step()
    target, name = {
        "states": (engine.target.states, "commit"),
        "publish": (engine, "_publish"),
        "rollback": (Transaction, "_roll_back"),
    }[place]
    original = getattr(target, name)

    def interrupted(*arguments: Any) -> None:
        if place == "states":
            original(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(target, name, interrupted)
        with pytest.raises(RollbackFailed if place == "rollback" else KeyboardInterrupt):
            engine.step()
    with pytest.raises(RollbackFailed, match=r"call Engine\.reset\(\)"):
        engine.step()
    engine.reset()
    again = engine.submit(PROMPTS[0], 10, 3)
    while engine.has_work:
        engine.step()
    assert again.token_ids == plain(PROMPTS[0], 10)


@pytest.mark.parametrize("call", ["step", "reset", "preempt"])
def test_nothing_may_move_requests_in_the_middle_of_a_step(call: str) -> None:
    engine, requests = engine_with(None)
    refused = []

    def watch(boundary: Boundary, step: int) -> None:
        arguments = (requests[1],) if call == "preempt" else ()
        with pytest.raises(DraftsmithError, match="in the middle of a step") as caught:
            getattr(engine, call)(*arguments)
        refused.append(caught)

    engine._watch = watch
    while engine.has_work:
        engine.step()
    assert len(refused) > 10
    assert [request.token_ids for request in requests] == [plain(prompt, 10) for prompt in PROMPTS]


def test_a_preempted_request_comes_back_before_those_who_wait() -> None:
    engine = Engine(fake_package(), EngineOptions(num_blocks=30, max_batch_size=2))
    first, second, third = (engine.submit(prompt, 10, 3) for prompt in PROMPTS)
    engine.step()
    engine.preempt(second)
    engine.preempt(first)
    assert list(engine._waiting) == [first, second, third]
    engine.step()
    assert engine._running == [first, second]


def test_a_proposal_stands_behind_the_newest_token_or_not_at_all() -> None:
    """A token that becomes known first, as at the end of a prompt, makes it void instead of late."""
    engine = Engine(fake_package(), EngineOptions(num_blocks=30))
    request = engine.submit(PROMPTS[0], 20, 0)
    request.propose(plain(PROMPTS[0], 4))
    engine.step()
    engine.step()
    assert request.stats.draft_tokens_proposed == 0
    known = [*PROMPTS[0], *request.token_ids]
    request.propose(plain(known, 4))
    engine.step()
    assert request.stats.draft_tokens_accepted == 4
    request.propose(plain([*PROMPTS[0], *request.token_ids], 4))
    engine.preempt(request)
    while engine.has_work:
        engine.step()
    assert request.stats.draft_tokens_proposed == 4
    assert request.token_ids == plain(PROMPTS[0], 20)
    with pytest.raises(Refused, match="a request that goes on, found length"):
        request.propose([1])


def test_proposals_beyond_the_limit_are_refused() -> None:
    request = Engine(fake_package(), EngineOptions(num_blocks=30)).submit(PROMPTS[0], 20, 0)
    with pytest.raises(Refused, match="at most 4 tokens, the limit of package and engine, found 5"):
        request.propose([1] * 5)
    plain_engine = Engine(fake_package(), EngineOptions(num_blocks=30, max_draft_tokens=0))
    with pytest.raises(Refused, match="at most 0 tokens"):
        plain_engine.submit(PROMPTS[0], 20, 0).propose([1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.7], 4, 0), "prompt: expected token ids below 13, found 1.7"),
        (([1], 4.0, 0), "--max-new-tokens: expected 1 or more, found 4.0"),
        (([1], float("nan"), 0), "--max-new-tokens: expected 1 or more, found nan"),
        (([1], 4, 1.5), "--draft-tokens: expected 0 to 4.* found 1.5"),
        (([1], 4, True), "--draft-tokens: expected 0 to 4.* found True"),
        (([1], True, 0), "--max-new-tokens: expected 1 or more, found True"),
        (([1], 4, 0, [99]), "stop_token_ids: expected token ids below 13, found 99"),
        (([1], 4, 0, [-1]), "stop_token_ids: expected token ids below 13, found -1"),
    ],
)
def test_values_that_would_fail_in_a_step_are_refused_at_submission(arguments: Any, message: str) -> None:
    engine = Engine(fake_package(), EngineOptions(num_blocks=8))
    with pytest.raises(Refused, match=message):
        engine.submit(*arguments)
    with pytest.raises(Refused, match=r"--max-scheduled-tokens: expected a whole number, found 2\.5"):
        Engine(fake_package(), EngineOptions(num_blocks=8, max_scheduled_tokens=2.5))  # type: ignore[arg-type]


def test_a_slot_that_could_not_be_zeroed_is_still_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device zeroing is a run of its own, and may fail like any other."""
    engine, requests = engine_with(None)
    states = engine.target.states
    assert states is not None
    with monkeypatch.context() as patch:
        patch.setattr(states, "_zero", lambda *arguments: 1 / 0)
        for _ in range(4):
            with pytest.raises(ZeroDivisionError):
                engine.step()
            assert states.num_free == 3
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == [plain(prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("wrong", [[1.7], ["1"], [None], [True], [13]])
def test_proposals_are_whole_numbers(wrong: list[Any]) -> None:
    request = Engine(fake_package(), EngineOptions(num_blocks=30)).submit(PROMPTS[0], 20, 0)
    with pytest.raises(Refused, match="proposal: expected token ids below 13"):
        request.propose(wrong)


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int8])
def test_narrow_and_unsigned_numbers_do_not_wrap(kind: Any) -> None:
    options = EngineOptions(
        num_blocks=kind(40), max_scheduled_tokens=kind(20), max_batch_size=kind(2), max_draft_tokens=kind(3)
    )
    engine = Engine(fake_package(), options)
    sampling = SamplingOptions(1.0, top_k=kind(5), seed=kind(3))
    requests = [engine.submit([1, 2, 3], kind(12), kind(3), (), choice) for choice in (None, sampling)]
    while engine.has_work:
        engine.step()
    assert requests[0].token_ids == plain([1, 2, 3], 12)
    assert len(requests[1].token_ids) == 12
    with pytest.raises(Refused, match="--num-blocks: expected"):
        engine.submit([1] * 100, np.uint8(140), 0)


def test_numpy_numbers_are_numbers() -> None:
    engine = Engine(fake_package(), EngineOptions(num_blocks=np.int64(8)))
    prompt = np.array(PROMPTS[0], np.int32)
    request = engine.submit(
        prompt, np.int64(6), np.int32(2), np.array([12]), SamplingOptions(np.float32(0.5), seed=np.uint64(3))
    )  # type: ignore[arg-type]
    while engine.has_work:
        engine.step()
    assert len(request.token_ids) == 6 or request.finish_reason == "stop"
    assert all(type(token) is int for token in (*request.prompt, *request.token_ids))
