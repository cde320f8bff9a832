"""Hidden states that stay on a device, here in a CPU's memory addressed as a GPU's, from the target to the head."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pytest

import runtime.prepared as prepared_module
import runtime.target as target_module
from builder import contract
from runtime import Engine, EngineOptions, FailAt, InjectedFailure
from runtime.failures import Boundary
from runtime.head import HeadModel
from runtime.hidden_memory import HiddenMemory
from runtime.loading import LoadedPackage
from runtime.lowering.feeding import FED_ROWS
from runtime.packing import Segment
from runtime.place import DeviceArray
from runtime.request import Request
from tests.runtime.answers import counts_of, oracle_counts, run_to_the_end
from tests.runtime.conftest import ADDRESSED
from tests.runtime.idlers import let_sit_out

SPEC = contract.TensorSpec(contract.HIDDEN_STATES, "float32", ("num_tokens", 4))
BOUNDARIES = [boundary for boundary in get_args(Boundary) if boundary != "rollback"]


def memory_of(step_rows: int = 4, seats: int = 2, seat_rows: int = 2) -> HiddenMemory:
    memory = HiddenMemory(SPEC, step_rows, seats, seat_rows, ADDRESSED)
    memory.rows.write(np.arange(np.prod(memory.rows.shape)).reshape(memory.rows.shape))
    return memory


def holder(*numbers: int) -> Request:
    return Request((1,), 8, 3, unread_hidden=[np.array([number]) for number in numbers])


def test_steps_write_two_banks_by_turns() -> None:
    memory = memory_of()
    seen = []
    for _ in range(3):
        seen.append(memory.numbers(3).tolist())
        memory.turn()
    assert seen == [[0, 1, 2], [4, 5, 6], [0, 1, 2]]
    part = memory.part(np.array([4, 5]))
    assert (part.shape, part.address) == ((2, 4), memory.rows.address + 4 * 4 * 4)
    with pytest.raises(AssertionError, match="a step of 5 rows, 4 were planned for"):
        memory.numbers(5)


def test_rows_of_who_sits_out_move_before_their_bank_is_written_again() -> None:
    memory = memory_of()
    memory.turn()
    first, second, newer = holder(4, 6), holder(7), holder(1)
    values = [memory.read(request.unread()) for request in (first, second, newer)]
    memory.make_room([first, newer, second])
    assert [request.unread().tolist() for request in (first, second, newer)] == [[8, 9], [10], [1]]
    memory.make_room([first, newer, second])
    assert [request.unread().tolist() for request in (first, second, newer)] == [[8, 9], [10], [1]]
    for request, expected in zip((first, second, newer), values, strict=True):
        np.testing.assert_array_equal(memory.read(request.unread()), expected)
    first.unread_hidden = []
    third = holder(5)
    memory.make_room([second, third])
    assert third.unread().tolist() == [8], "a seat is free again as soon as nobody's rows lie there"


def test_what_was_not_planned_for_is_refused() -> None:
    memory = memory_of(seats=1)
    with pytest.raises(AssertionError, match="3 unread rows of a request, 2 were planned for"):
        memory.make_room([holder(0, 1, 2)])
    with pytest.raises(AssertionError, match="more than 1 requests hold hidden states"):
        memory.make_room([holder(0), holder(1)])


def test_with_nobody_there_the_first_bank_comes_next() -> None:
    memory = memory_of()
    memory.turn()
    memory.make_room([holder(0)])
    assert memory.bank == 1
    memory.make_room([])
    assert memory.bank == 0


def test_the_head_is_fed_the_rows_of_their_numbers(addressed: LoadedPackage) -> None:
    """In any order, twice, and not the others: as if their values were given."""
    package = addressed.package
    assert package.mtp
    spec = package.target.io.output(contract.HIDDEN_STATES)
    memory = HiddenMemory(spec, 3, 1, 1, ADDRESSED)
    values = np.random.default_rng(0).standard_normal(memory.rows.shape).astype(np.float32)
    memory.rows.write(values)
    numbers = np.array([5, 0, 3, 3])
    found = []
    for hidden in (numbers, values[numbers]):
        head = HeadModel(package.mtp, addressed.mtp(), 2, 16, fed=memory)
        head.on_run = lambda segments, outputs: found.append([array.copy() for array in outputs])
        head.run([Segment([7, 8, 9], 0, [0]), Segment([4], 0, [1])], [hidden[:3], hidden[3:]])
    for by_number, by_value in zip(*found, strict=True):
        np.testing.assert_array_equal(by_number, by_value)
    assert len(np.unique(found[0][0], axis=0)) == 4


def test_no_hidden_state_passes_through_the_host(addressed: LoadedPackage, prompts: list[list[int]]) -> None:
    engine = Engine(addressed, EngineOptions(num_blocks=64, max_batch_size=3, max_scheduled_tokens=40))
    for k, prompt in enumerate(prompts[:4]):
        engine.submit(prompt, 16, k)
    while engine.has_work:
        engine.step()
    assert engine.proposer
    for model, name in ((engine.target, contract.HIDDEN_STATES), (engine.proposer.head, contract.HEAD_HIDDEN_STATES)):
        runs = [run.bound for run in model._runs._kept.values()]
        assert runs
        for bound in runs:
            inputs = {index: array for index, array in bound.inputs.items() if index == contract.HIDDEN_STATES}
            assert bool(inputs) == (model is not engine.target)
            states = [*inputs.values(), *([bound.outputs[name]] if name in bound.outputs else [])]
            assert states
            assert all(isinstance(array, DeviceArray) for array in states)
            on_host = [array for array in bound.outputs.values() if isinstance(array, np.ndarray)]
            assert all(array.size <= 16 for array in on_host), "tokens and their logits alone come back"


def unsteady(addressed: LoadedPackage, prompts: list[list[int]], batch: int) -> tuple[Engine, list[Request]]:
    """Every step fails once, at one boundary after the other, before it succeeds."""
    engine = Engine(addressed, EngineOptions(num_blocks=64, max_batch_size=batch))
    requests = [engine.submit(prompt, 64, 3) for prompt in prompts]
    attempts = 0
    while engine.has_work:
        engine._watch = FailAt(BOUNDARIES[attempts // 2 % len(BOUNDARIES)], attempts) if attempts % 2 == 0 else None
        with contextlib.suppress(InjectedFailure):
            engine.step()
        attempts += 1
    return engine, requests


@pytest.mark.parametrize("batch", [1, 8])
def test_a_failed_step_leaves_the_rows_that_are_fed_again(
    addressed: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    batch: int,
) -> None:
    engine, requests = unsteady(addressed, prompts, batch)
    assert engine.stats.aborted_steps > 30
    assert [request.token_ids for request in requests] == greedy_tokens
    assert counts_of(requests) == oracle_counts(reference)


def test_one_bank_alone_would_lose_them(
    addressed: LoadedPackage, prompts: list[list[int]], reference: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above sees it."""
    monkeypatch.setattr(HiddenMemory, "turn", lambda self: None)
    monkeypatch.setattr(HiddenMemory, "make_room", lambda self, running: None)
    _, requests = unsteady(addressed, prompts, 8)
    accepted = sum(accepted for accepted, _ in counts_of(requests))
    assert accepted < int(reference["accepted_evaluated_k3"][:, 0].sum()) - 8


@pytest.mark.parametrize("seed", range(3))
def test_every_unread_row_is_the_one_that_a_host_holds(
    addressed: LoadedPackage,
    trained: LoadedPackage,
    prompts: list[list[int]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Step by step beside an engine on the host, where any request may sit some steps out."""
    rng, idle = random.Random(seed), let_sit_out(monkeypatch)
    options = EngineOptions(num_blocks=40, block_size=16, max_batch_size=4, max_scheduled_tokens=20)
    engines = [Engine(package, options) for package in (addressed, trained)]
    pairs = [
        [engine.submit(prompt[: 9 + k], 40, k) for engine in engines]
        for prompt, k in zip(prompts, (3, 1, 2, 3, 0, 3, 2, 3), strict=True)
    ]
    moved = step = 0
    while engines[0].has_work:
        fails = rng.choice(BOUNDARIES) if rng.random() < 0.2 else None
        if rng.random() < 0.4:
            idle.clear()
            idle.update(rng.sample(range(4), rng.randrange(4)))
        victim = rng.randrange(len(pairs)) if rng.random() < 0.03 else None
        for side, engine in enumerate(engines):
            engine._watch = FailAt(fails, step) if fails else None
            if victim is not None:
                engine.preempt(pairs[victim][side])
            with contextlib.suppress(InjectedFailure):
                engine.step()
        step += 1
        memory = engines[0]._hidden
        assert memory
        for on_device, on_host in pairs:
            assert on_device.token_ids == on_host.token_ids
            assert bool(on_device.unread_hidden) == bool(on_host.unread_hidden)
            if on_device.unread_hidden:
                numbers = on_device.unread()
                moved += int(numbers.min() >= 2 * 20)
                np.testing.assert_allclose(memory.read(numbers), on_host.unread(), rtol=1e-4, atol=1e-4)
    assert moved > 20, "or nobody sat out"
    assert not engines[1].has_work


@pytest.fixture
def recorded(addressed: LoadedPackage, monkeypatch: pytest.MonkeyPatch) -> LoadedPackage:
    """Runs as where CUDA graphs are recorded, without a recording."""
    for session in (addressed.target, addressed.mtp()):
        monkeypatch.setattr(session, "records", True)
        monkeypatch.setattr(session, "_recorded", 0)
        monkeypatch.setattr(session, "unrecorded", 0)
    return addressed


@pytest.mark.parametrize("batch", [1, 8])
def test_recorded_runs_have_few_shapes(
    recorded: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    batch: int,
) -> None:
    """However many drafts were accepted; tokens and counts are those of a head that was fed nothing more."""
    engine = Engine(recorded, EngineOptions(num_blocks=128, block_size=16, max_batch_size=batch))
    requests = run_to_the_end(engine, prompts)
    assert [request.token_ids for request in requests] == greedy_tokens
    assert counts_of(requests) == oracle_counts(reference)
    assert engine.proposer
    firsts = [key[1] for key in engine.proposer.head._runs._kept if key[0] == "device" and key[3] == 0]
    assert len(firsts) <= 12, "as many as there are batch sizes, widths of the block table, and ends of texts"
    assert {shape.num_columns for shape in firsts} <= {1, 2, 4, 8, 16}
    assert recorded.target.unrecorded == recorded.mtp().unrecorded == 0


def test_requests_of_different_drafts_where_runs_are_recorded(
    recorded: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
) -> None:
    engine = Engine(recorded, EngineOptions(num_blocks=64, block_size=16, max_batch_size=8))
    drafts = (0, 3, 1, 2, 3, 0, 2, 1)
    requests = [engine.submit(prompt, 64, k) for prompt, k in zip(prompts, drafts, strict=True)]
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == greedy_tokens
    expected = [tuple(reference[f"accepted_evaluated_k{k}"][i]) if k else (0, 0) for i, k in enumerate(drafts)]
    assert counts_of(requests) == expected


def test_recordings_outlive_a_reset(
    recorded: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], reference: Mapping[str, Any]
) -> None:
    """In the middle of texts, on either bank: later texts are right, and what was recorded before serves them."""
    engine = Engine(recorded, EngineOptions(num_blocks=64, max_batch_size=1))
    sessions, counts = (recorded.target, recorded.mtp()), []
    for steps in (3, 4, 5):
        engine.submit(prompts[0], 64, 3)
        for _ in range(steps):
            engine.step()
        engine.reset()
        requests = [engine.submit(prompt, 64, 3) for prompt in prompts]
        while engine.has_work:
            engine.step()
        assert [request.token_ids for request in requests] == greedy_tokens
        assert counts_of(requests) == oracle_counts(reference)
        counts.append([session._recorded for session in sessions])
    assert all(counts[0]) and counts[1:] == counts[:-1]


def test_fed_rows_are_named_in_every_run_of_a_head_on_a_device(addressed: LoadedPackage) -> None:
    names = [entry.name for entry in addressed.mtp()._session.get_inputs()]
    assert FED_ROWS in names
    assert FED_ROWS not in [entry.name for entry in addressed.target._session.get_inputs()]


def test_geometry_of_seats(addressed: LoadedPackage) -> None:
    """A step never has more rows than the caches have room for, however many are asked for."""
    engine = Engine(addressed, EngineOptions(num_blocks=4, block_size=16, max_batch_size=3, max_scheduled_tokens=9999))
    assert engine._hidden
    assert engine._hidden.rows.shape[0] == 2 * 64 + 3 * 4
    plain = dataclasses.replace(engine.options, max_draft_tokens=0)
    assert Engine(addressed, plain)._hidden is None


def test_prompts_push_no_recording_out(recorded: LoadedPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of prompts are not kept, though nothing of them is fetched: their shapes never come again."""
    for module in (prepared_module, target_module):
        monkeypatch.setattr(module, "MAX_KEPT_BYTES", 30 * 256 * 4)
    engine = Engine(recorded, EngineOptions(num_blocks=4, max_batch_size=1))

    def serve(length: int, new_tokens: int) -> None:
        engine.submit([1] * length, new_tokens, 3, ())
        while engine.has_work:
            engine.step()

    for _ in range(2):
        serve(8, 12)
    sessions = recorded.target, recorded.mtp()
    before = [session._recorded for session in sessions]
    assert all(before)
    for length in range(40, 110):
        serve(length, 1)
    serve(8, 12)
    assert [session._recorded for session in sessions] == before
