"""Failures at every boundary of a step, on demand; what the tool itself promises."""

from __future__ import annotations

from typing import get_args

import pytest

from builder.errors import Refused
from runtime import Engine, EngineOptions, FailAt, InjectedFailure, Request
from runtime.failures import Boundary
from runtime.transaction import RollbackFailed
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
            aborted = int(boundary != "plan")
            assert repr(engine.stats) == before[2].replace("aborted_steps=0", f"aborted_steps={aborted}")
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
        session.bind = lambda *arrays, bind=bind: (binds.append(1), bind(*arrays))[1]  # type: ignore[method-assign]
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
