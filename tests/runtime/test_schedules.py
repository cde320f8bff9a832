"""Random schedules of the engine over a model that shows every wrong commit; SCHEDULES says how many.

Arrivals, changes of K, own proposals, cancels, preemptions, failures at every boundary, failed rollbacks and resets, in
pools from tiny to ample. After every step everything committed is compared with what the tokens alone demand.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from builder.contract import PAST_KEY
from builder.errors import Refused
from runtime import Engine, EngineOptions, FailAt, InjectedFailure, Request
from runtime.failures import Boundary
from runtime.request import slot_of, table_of
from runtime.transaction import RollbackFailed
from tests.runtime.fakes import CAPACITY, VOCAB, FakeHead, FakeTarget, after, cached, fake_package, plain

SCHEDULES = int(os.environ.get("SCHEDULES", "300"))
TOKENS = st.integers(0, VOCAB - 1)


@dataclass
class Held:
    """The boundary to fail at, if any, and what the engine held when the step had been planned."""

    fail: FailAt | None = None
    engine: Engine | None = None
    before: dict[Request, tuple[Any, ...]] = field(default_factory=dict)
    free: tuple[list[int], list[int]] = ([], [])

    def __call__(self, boundary: Boundary, step: int) -> None:
        if boundary == "plan" and self.engine:
            self.before = snapshot(self.engine)
            self.free = free(self.engine)
        if self.fail:
            self.fail(boundary, step)


def free(engine: Engine) -> tuple[list[int], list[int]]:
    """Blocks and slots that nobody holds, in the order in which they will be taken."""
    assert engine.target.states
    return list(engine._pool._free), list(engine.target.states._free)


def snapshot(engine: Engine) -> dict[Request, tuple[Any, ...]]:
    """Everything committed of every running request, to the byte."""
    return {request: committed(engine, request) for request in engine._running}


def committed(engine: Engine, request: Request) -> tuple[Any, ...]:
    states, table, proposer = engine.target.states, table_of(request), engine.proposer
    assert states
    slot = slot_of(request)
    bank = states._active[slot]
    caches = [cached(engine.target._cache.inputs[PAST_KEY.format(1)], table.blocks, request.num_cached)]
    if proposer:
        caches.append(cached(proposer.head._cache.inputs[PAST_KEY.format(0)], table.blocks, request.head_length))
    return (
        *(request.num_cached, request.head_length, request.prefill_end, tuple(request.token_ids), request.proposed),
        *(tuple(table.blocks), slot, bank, states._generation[slot]),
        *(states._conv[bank, :, slot].tobytes(), states._recurrent[bank, :, slot].tobytes()),
        *(cache.tobytes() for cache in caches),
        b"".join(rows.tobytes() for rows in request.unread_hidden),
        repr(request.stats),
    )


class Schedules(RuleBasedStateMachine):
    """One engine, whatever may happen to it, and plain greedy decoding as the judge."""

    happened: ClassVar[Counter[str]] = Counter()
    """What all schedules that came to their end have gone through."""

    @initialize(
        block_size=st.integers(1, 8),
        tokens_in_pool=st.integers(14, 70),
        batch=st.integers(1, 4),
        scheduled=st.integers(1, 30),
        drafts=st.integers(1, CAPACITY - 1),
        wrong_every=st.integers(0, 4),
        repeats=st.sampled_from([1, 1, 1, 3]),
        proposer=st.sampled_from(["mtp", "mtp", "mtp", "ngram"]),
        dense=st.booleans(),
    )
    def make(
        self,
        block_size: int,
        tokens_in_pool: int,
        batch: int,
        scheduled: int,
        drafts: int,
        wrong_every: int,
        repeats: int,
        proposer: Any,
        dense: bool,
    ) -> None:
        self.head = FakeHead(wrong_every, repeats)
        self.watch = Held()
        self.engine = Engine(
            fake_package(FakeTarget(repeats), self.head, dense=dense),
            EngineOptions(
                num_blocks=max(1, tokens_in_pool // block_size),
                block_size=block_size,
                max_batch_size=batch,
                max_scheduled_tokens=scheduled,
                max_draft_tokens=drafts,
                proposer=proposer,
            ),
            self.watch,
        )
        self.watch.engine = self.engine
        self.requests: list[tuple[Request, tuple[int, ...]]] = []

    @property
    def live(self) -> list[Request]:
        return [request for request, _ in self.requests if not request.finish_reason]

    @rule(
        prompt=st.lists(TOKENS, min_size=1, max_size=14),
        new=st.integers(1, 16),
        drafts=st.integers(0, CAPACITY - 1),
        stops=st.lists(TOKENS, max_size=2),
    )
    def submit(self, prompt: list[int], new: int, drafts: int, stops: list[int]) -> None:
        pool = self.engine._pool
        fits = pool.blocks_for(len(prompt) + new - 1) <= pool.num_blocks
        try:
            request = self.engine.submit(prompt, new, min(drafts, self.engine.max_draft_tokens), stops)
        except Refused as refusal:
            assert not fits and refusal.subject == "--num-blocks"
            return
        assert fits
        self.requests.append((request, tuple(plain(prompt, new, stops))))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            lengths = {request: len(request.token_ids) for request, _ in self.requests}
            gained = self.engine.step()
            assert {request: len(request.token_ids) - length for request, length in lengths.items()} == {
                request: len(gained.get(request, ())) for request in lengths
            }

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def change_k(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.live))
        request.set_draft_tokens(data.draw(st.integers(0, self.engine.max_draft_tokens)))

    @precondition(lambda self: self.live)
    @rule(data=st.data(), right=st.integers(0, 4), wrong=st.lists(TOKENS, max_size=3))
    def propose(self, data: st.DataObject, right: int, wrong: list[int]) -> None:
        request = data.draw(st.sampled_from(self.live))
        known = [*request.prompt, *request.token_ids]
        drafts = [*plain(known, right), *wrong] if right else wrong
        request.propose(drafts[: self.engine.max_draft_tokens])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.live)).cancel()

    @precondition(lambda self: self.engine._running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(self.engine._running)))

    @rule(boundary=st.sampled_from(get_args(Boundary)[:-1]), occurrence=st.integers(1, 2))
    def fail(self, boundary: Boundary, occurrence: int) -> None:
        """A failed step changes nothing of the requests that it did not have to preempt, to the byte."""
        self.engine._retire()
        preempted = self.engine.stats.preemptions
        self.watch.fail = FailAt(boundary, self.engine._step_number + 1, occurrence)
        try:
            self.engine.step()
        except InjectedFailure:
            now = snapshot(self.engine)
            assert now == {request: self.watch.before[request] for request in now}
            if self.engine.stats.preemptions == preempted:
                assert set(now) == set(self.watch.before)
                assert free(self.engine) == self.watch.free
        self.watch.fail = None

    @precondition(lambda self: len(self.live) > 1)
    @rule()
    def fail_twice(self) -> None:
        """A rollback that fails breaks the engine until it is reset."""
        self.watch.fail = FailAt("rollback", self.engine._step_number + 1)
        run = self.engine.target.run

        def failing(*arguments: Any, **more: Any) -> Any:
            raise InjectedFailure("the run")

        self.engine.target.run = failing  # type: ignore[method-assign]
        try:
            self.engine.step()
        except RollbackFailed:
            with pytest.raises(RollbackFailed):
                self.engine.step()
            self.reset()
        finally:
            self.engine.target.run = run  # type: ignore[method-assign]
            self.watch.fail = None

    @precondition(lambda self: len(self.live) > 2)
    @rule()
    def reset(self) -> None:
        self.engine.reset()
        assert not self.engine.has_work
        assert self.engine._pool.num_free == self.engine._pool.num_blocks

    @invariant()
    def blocks_and_slots_are_owned_once(self) -> None:
        if not hasattr(self, "engine"):
            return
        engine, states = self.engine, self.engine.target.states
        assert states
        owned = [block for request in engine._running for block in table_of(request).blocks]
        assert sorted([*owned, *engine._pool._free]) == list(range(engine._pool.num_blocks))
        slots = [slot_of(request) for request in engine._running]
        assert sorted([*slots, *states._free]) == list(range(engine.options.max_batch_size))
        assert not any(
            request.table and request.table.blocks
            for request, _ in self.requests
            if request.finish_reason and request not in engine._running
        )

    @invariant()
    def all_that_is_committed_is_what_the_tokens_demand(self) -> None:
        if not hasattr(self, "engine"):
            return
        for request in self.engine._running:
            if request.finish_reason:
                continue
            check_committed(self.engine, request)
        assert self.head.mismatches == 0

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(2000):
            if not self.engine.has_work:
                break
            self.engine.step()
            self.all_that_is_committed_is_what_the_tokens_demand()
        assert not self.engine.has_work, "the engine does not come to an end"
        assert self.engine._pool.num_free == self.engine._pool.num_blocks
        for request, expected in self.requests:
            tokens = tuple(request.token_ids)
            assert tokens == (expected[: len(tokens)] if request.finish_reason == "cancelled" else expected)
        stats = self.engine.stats
        self.happened.update(
            accepted=stats.draft_tokens_accepted,
            rejected=stats.correction_tokens,
            preempted=stats.preemptions,
            aborted=stats.aborted_steps,
            finished=1,
        )


def check_committed(engine: Engine, request: Request) -> None:
    """Caches and states of a request equal those of a model that was fed its committed tokens and nothing else."""
    tokens = [*request.prompt, *request.token_ids]
    fed: Sequence[int] = tokens[: request.num_cached]
    target, proposer, states = engine.target, engine.proposer, engine.target.states
    assert states
    blocks = table_of(request).blocks
    keys = cached(target._cache.inputs[PAST_KEY.format(1)], blocks, len(fed))
    assert keys.tolist() == [[token + 1, position] for position, token in enumerate(fed)]
    slot = slot_of(request)
    bank, state = states._active[slot], after(fed)
    assert states._recurrent[bank, :, slot].ravel().tolist() == [state.first, state.second]
    shown = [0, 0, *(token + 1 for token in fed)][-2:]
    assert states._conv[bank, :, slot, 0].tolist() == [shown, shown]
    if proposer:  # Its head's row p holds token p + 1; with what it has not read yet it is level with the target.
        rows = cached(proposer.head._cache.inputs[PAST_KEY.format(0)], blocks, request.head_length)
        assert rows.tolist() == [[token + 1, i] for i, token in enumerate(tokens[1 : request.head_length + 1])]
        assert request.head_length + sum(map(len, request.unread_hidden)) == request.num_cached
    if not request.is_prefill and request.num_cached > request.prefill_end:
        assert request.num_cached == len(tokens) - 1
    assert len(blocks) * engine._pool.block_size >= request.num_cached


def test_random_schedules_give_plain_greedys_tokens() -> None:
    """Every rule, invariant and teardown judges; what is asserted here is that there was something to judge."""
    Schedules.happened.clear()
    run_state_machine_as_test(
        Schedules,
        settings=settings(
            max_examples=SCHEDULES,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )
    print(dict(Schedules.happened))
    assert Schedules.happened["finished"] >= SCHEDULES / 2
    assert min(Schedules.happened.values()) >= SCHEDULES / 30


def test_the_fake_tells_orders_apart() -> None:
    """The judge would be worthless if exchanging, leaving out or repeating a token went unseen."""
    random = np.random.default_rng(0)
    for _ in range(200):
        tokens = random.integers(0, VOCAB, 9).tolist()
        i, j = sorted(random.choice(9, 2, replace=False).tolist())
        exchanged = list(tokens)
        exchanged[i], exchanged[j] = tokens[j], tokens[i]
        if tokens[i] != tokens[j]:
            assert after(exchanged) != after(tokens)
        assert after(tokens[:i] + tokens[i + 1 :]) != after(tokens)
        assert after([*tokens[:i], tokens[i], *tokens[i:]]) != after(tokens)
