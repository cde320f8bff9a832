"""Chains of drafts that stay on a device, here in a CPU's memory addressed as a GPU's, until they are all there."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from builder import contract
from builder.errors import DraftsmithError, MachineError
from runtime import Engine, EngineOptions
from runtime.draft_memory import DraftMemory
from runtime.head import HeadModel
from runtime.loading import LoadedPackage
from runtime.lowering.choosing import SCORED_ROWS
from runtime.packing import Segment
from runtime.place import DeviceArray
from tests.runtime.conftest import ADDRESSED

K_OF_REQUEST = (0, 3, 1, 2, 3, 0, 2, 1)


def speculate(package: LoadedPackage, prompts: list[list[int]], batch: int) -> tuple[Engine, list[Any]]:
    engine = Engine(package, EngineOptions(num_blocks=64, max_batch_size=batch))
    requests = [engine.submit(prompt, 64, k) for prompt, k in zip(prompts, K_OF_REQUEST, strict=True)]
    while engine.has_work:
        engine.step()
    return engine, requests


@pytest.mark.parametrize("batch", [1, 8])
def test_requests_that_draft_less_leave_the_chain(
    addressed: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    batch: int,
) -> None:
    """Every request has the tokens and counts of its own K; a token fed to the wrong row would change the counts."""
    _, requests = speculate(addressed, prompts, batch)
    assert [request.token_ids for request in requests] == greedy_tokens
    for index, (request, k) in enumerate(zip(requests, K_OF_REQUEST, strict=True)):
        expected = tuple(reference[f"accepted_evaluated_k{k}"][index]) if k else (0, 0)
        assert (request.stats.draft_tokens_accepted, request.stats.draft_tokens_evaluated) == expected


def test_nothing_is_read_before_the_last_run_of_a_chain(
    addressed: LoadedPackage, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy to the host a step, behind as many runs as the longest chain has; those run from device memory alone."""
    events: list[str] = []
    read, run = DraftMemory.read, HeadModel.run_on_device
    monkeypatch.setattr(DraftMemory, "read", lambda self, counts: events.append("read") or read(self, counts))
    monkeypatch.setattr(HeadModel, "run_on_device", lambda self, *args: events.append(str(args[0])) or run(self, *args))
    engine, _ = speculate(addressed, prompts, 8)
    assert engine.proposer
    steps = "".join(events).split("read")
    assert steps.pop() == ""
    assert "012" in steps
    assert set(steps) <= {"0", "01", "012"}
    later = [run.bound for key, run in engine.proposer.head._runs._kept.items() if key[0] == "device" and key[3]]
    assert later
    for bound in later:
        assert isinstance(bound.inputs[contract.INPUT_IDS], DeviceArray)
        assert isinstance(bound.inputs[contract.HIDDEN_STATES], DeviceArray)
        assert isinstance(bound.inputs[SCORED_ROWS], np.ndarray)
        assert all(isinstance(array, DeviceArray) for array in bound.outputs.values())


def test_drafts_of_no_number_are_an_error(addressed: LoadedPackage, prompts: list[list[int]]) -> None:
    engine = Engine(addressed, EngineOptions(num_blocks=4, max_batch_size=1))
    request = engine.submit(prompts[0], 8, 3)
    engine.step()
    assert engine._hidden
    engine._hidden.rows.write(np.full(engine._hidden.rows.shape, np.nan))
    with pytest.raises(DraftsmithError, match=re.escape("not numbers")):
        engine.step()
    assert len(request.token_ids) == 1


def test_ids_and_logits_come_in_one_piece(addressed: LoadedPackage) -> None:
    assert addressed.package.mtp
    memory = DraftMemory(addressed.package.mtp.io, 2, 3, ADDRESSED)
    block = np.concatenate(
        [np.arange(6, dtype=np.int64).view(np.uint8), np.array([0, 1, np.nan, 3, 4, np.inf], np.float32).view(np.uint8)]
    )
    memory._block.write(block)
    assert memory.read([2, 1]) == [[0, 1], [3]]
    for counts in ([3, 1], [1, 3]):
        with pytest.raises(DraftsmithError, match="not numbers"):
            memory.read(counts)


def test_a_chain_that_was_not_planned_for_is_refused(addressed: LoadedPackage) -> None:
    assert addressed.package.mtp
    head = HeadModel(addressed.package.mtp, addressed.mtp(), 4, 16, depth=2, num_rows=1)
    rows = [np.zeros(1, np.int64)] * 2
    with pytest.raises(AssertionError, match="a chain of 1 requests and 3 runs was not planned for"):
        head.run_on_device(2, [Segment([1], 0, [0])], [0])
    with pytest.raises(AssertionError, match="a chain of 2 requests and 1 runs"):
        head.run_on_device(0, [Segment([1], 0, [0]), Segment([1], 0, [1])], [0, 1], rows)
    with pytest.raises(AssertionError, match="was not told where the target leaves its hidden states"):
        head.run_on_device(0, [Segment([1], 0, [0])], [0], rows[:1])


def test_recording_may_begin_and_end_between_chains(addressed: LoadedPackage, prompts: list[list[int]]) -> None:
    """Runs of the two ways have keys of their own."""
    engine = Engine(addressed, EngineOptions(num_blocks=4, max_batch_size=1))
    engine.submit(prompts[0], 32, 3)
    seen: list[int] = []
    for watching in (False, True, False, True):
        for _ in range(3):
            assert engine.proposer
            engine.proposer.head.on_run = (lambda segments, outputs: seen.append(1)) if watching else None
            engine.step()
    assert len(seen) > 6


@pytest.mark.parametrize("seed", range(4))
def test_schedules_with_failures_in_the_middle_of_chains(
    addressed: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs fail before and after any stage, requests arrive, are preempted, and bring drafts of their own."""
    rng, run = random.Random(seed), HeadModel.run_on_device

    def unsteady(self: HeadModel, *arguments: Any) -> None:
        if rng.random() < 0.07:
            raise MachineError("before")
        run(self, *arguments)
        if rng.random() < 0.07:
            raise MachineError("after")

    monkeypatch.setattr(HeadModel, "run_on_device", unsteady)
    options = EngineOptions(num_blocks=24, max_batch_size=rng.choice([2, 3, 8]), max_scheduled_tokens=200)
    engine = Engine(addressed, options)
    requests = [engine.submit(prompt, 64, rng.choice([0, 1, 2, 3, 3])) for prompt in prompts]
    own = requests[::3]
    while engine.has_work:
        if rng.random() < 0.05 and engine._running:
            engine.preempt(rng.choice(engine._running))
        for request in engine._running:
            if request in own and rng.random() < 0.1 and not request.is_prefill and not request.finish_reason:
                request.propose([1, 2])
        with contextlib.suppress(MachineError):
            engine.step()
    assert [request.token_ids for request in requests] == greedy_tokens
    assert engine.stats.aborted_steps and engine.stats.preemptions
    others = [request.stats for request in requests if request not in own]
    accepted, evaluated = (
        sum(getattr(stats, name) for stats in others) for name in ("draft_tokens_accepted", "draft_tokens_evaluated")
    )
    assert accepted > 0.7 * evaluated > 0, "it is 0.8 without any of this, and nothing where a row is fed another's"
