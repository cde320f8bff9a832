"""Slots of a batch lie side by side, on one bank and in the order of its rows, so that steps need not gather states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from builder.errors import MachineError
from runtime import Engine, EngineOptions
from runtime.device_state import DeviceStates
from runtime.fixed_state import FixedStates, StateGeometry
from runtime.hidden_memory import HiddenMemory
from runtime.loading import LoadedPackage
from runtime.request import slot_of
from runtime.transaction import RollbackFailed
from tests.runtime.conftest import ADDRESSED
from tests.runtime.idlers import let_sit_out

GEOMETRY = StateGeometry(layers=(0, 2, 5), conv=(10, 3), recurrent=(4, 5, 3), key_heads=2, capacity=4)


def states_of(on_device: bool, slots: int) -> FixedStates:
    if on_device:
        return DeviceStates(GEOMETRY, slots, ADDRESSED, np.dtype(np.float32))
    return FixedStates(GEOMETRY, slots)


def filled(states: FixedStates) -> dict[str, Any]:
    random, values = np.random.default_rng(0), {}
    for name in ("_conv", "_recurrent"):
        array = getattr(states, name)
        values[name] = random.standard_normal(array.shape).astype(np.float32)
        if isinstance(array, np.ndarray):
            array[:] = values[name]
        else:
            array.write(values[name])
    return values


def found(states: FixedStates, name: str) -> Any:
    array = getattr(states, name)
    return array if isinstance(array, np.ndarray) else array.read()


def settled(states: FixedStates, slot: int, total: int) -> int:
    """As the engine does it, in step with slot 0."""
    place = states.better_place(slot, total, states.bank_of(0))
    if place is None:
        return slot
    states.copy_to(slot, place)
    states.move_to(slot, place)
    return place[1]


@pytest.mark.parametrize("on_device", [False, True])
def test_a_slot_moves_into_the_gap_and_to_the_others_bank(on_device: bool) -> None:
    states = states_of(on_device, 4)
    slots = [states.take() for _ in range(4)]
    assert slots == [0, 1, 2, 3]
    states.commit(states.view([0, 2]))  # these two sit on the other bank
    states.give_back(1)
    values = filled(states)
    moved = [settled(states, slot, 3) for slot in (0, 2, 3)]
    assert moved == [0, 2, 1]
    assert [states._active[slot] for slot in moved] == [1, 1, 1]
    assert states._free == [3]
    for name, before in values.items():
        after = found(states, name)
        for slot, (bank, old) in {0: (1, 0), 2: (1, 2), 1: (0, 3)}.items():
            np.testing.assert_array_equal(after[1, :, slot], before[bank, :, old])
    view = states.view(sorted(moved))
    assert len(view.key) == 3, "side by side"
    states.commit(view)


@pytest.mark.parametrize("on_device", [False, True])
def test_nothing_moves_without_need(on_device: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(on_device, 3)
    slots = [states.take() for _ in range(3)]
    monkeypatch.setattr(states, "copy_to", lambda slot, place: pytest.fail("moved"))
    assert [settled(states, slot, 3) for slot in slots] == slots
    states.give_back(1)
    assert [settled(states, slot, 3) for slot in (0, 2)] == [0, 2], "a new request takes the gap"


@pytest.fixture(params=["host", "device"])
def package(request: pytest.FixtureRequest, trained: LoadedPackage, addressed: LoadedPackage) -> LoadedPackage:
    return trained if request.param == "host" else addressed


def test_requests_that_come_and_go_are_never_gathered(
    package: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They end in any order, with others waiting and without; a preempted one comes back."""
    for kind in (FixedStates, DeviceStates):
        monkeypatch.setattr(kind, "_gathered", lambda self, slots: pytest.fail(f"gathered {slots}"))
    engine = Engine(package, EngineOptions(num_blocks=64, max_batch_size=4))
    lengths = (30, 9, 41, 17, 24, 12, 35, 20)
    requests = [engine.submit(p, n, i % 4) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))]
    steps, order = 0, []
    while engine.has_work:
        engine.step()
        steps += 1
        order = [request for request in order if request in engine._running]
        assert engine._running[: len(order)] == order, "who is admitted first stays first"
        order = list(engine._running)
        if steps == 5:
            engine.preempt(engine._running[1])
            order = list(engine._running)
        if engine._running and steps > 1:
            assert len({slot_of(request) for request in engine._running}) == len(engine._running)
    for request, tokens, length in zip(requests, greedy_tokens, lengths, strict=True):
        assert request.token_ids == tokens[:length]


def test_who_sat_out_is_gathered_once_and_then_in_step_again(
    package: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    idle = let_sit_out(monkeypatch)
    gathered: list[tuple[int, ...]] = []
    for kind in (FixedStates, DeviceStates):
        real = kind._gathered
        monkeypatch.setattr(
            kind, "_gathered", lambda self, slots, real=real: gathered.append(slots) or real(self, slots)
        )
    engine = Engine(package, EngineOptions(num_blocks=16, max_batch_size=3))
    requests = [engine.submit(prompt, 24, 2) for prompt in prompts[:3]]
    for step in range(60):
        idle.clear()
        if step == 4:
            idle.add(1)
        if engine.has_work:
            engine.step()
    assert gathered == [(0, 2)]
    assert [request.token_ids for request in requests] == [tokens[:24] for tokens in greedy_tokens[:3]]


@pytest.mark.parametrize("seed", range(3))
def test_moves_that_fail_change_nothing(
    package: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Copies of states and of hidden rows, before anything was copied and after; the step is repeated."""
    rng, failed = random.Random(seed), 0

    def unsteady(real: Any) -> Any:
        def copy(self: Any, *arguments: Any) -> Any:
            nonlocal failed
            when = rng.random()
            failed += when < 0.6
            if when < 0.3:
                raise MachineError("before")
            made = real(self, *arguments)
            if when < 0.6:
                raise MachineError("after")
            return made

        return copy

    for kind, name in ((FixedStates, "copy_to"), (DeviceStates, "copy_to"), (HiddenMemory, "_seated")):
        monkeypatch.setattr(kind, name, unsteady(getattr(kind, name)))
    idle = let_sit_out(monkeypatch)
    engine = Engine(package, EngineOptions(num_blocks=64, max_batch_size=4))
    requests = [engine.submit(p, 12 + 7 * (i % 4), 2) for i, p in enumerate(prompts)]
    while engine.has_work:
        idle.clear()
        idle.update({rng.randrange(4)} if rng.random() < 0.6 else set())
        held = {request: (request.num_cached, list(request.token_ids)) for request in engine._running}
        try:
            engine.step()
        except MachineError:
            assert {r: (r.num_cached, r.token_ids) for r in engine._running}.items() <= held.items()
        assert engine.target.states
        slots = [slot_of(request) for request in engine._running]
        assert sorted([*engine.target.states._free, *slots]) == [0, 1, 2, 3]
    assert failed > 5
    for request, tokens in zip(requests, greedy_tokens, strict=True):
        assert request.token_ids == tokens[: len(request.token_ids)] and request.finish_reason == "length"


def test_an_interrupted_move_breaks_the_engine(
    package: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than that two requests hold one slot: reset mends it."""
    move = FixedStates.move_to

    def interrupted(self: FixedStates, *arguments: Any) -> None:
        move(self, *arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(FixedStates, "move_to", interrupted)
    engine = Engine(package, EngineOptions(num_blocks=16, max_batch_size=2))
    for prompt, length in zip(prompts[:2], (3, 30), strict=True):
        engine.submit(prompt, length, 0)
    with pytest.raises(KeyboardInterrupt):
        while engine.has_work:
            engine.step()
    with pytest.raises(RollbackFailed, match="while it moved states"):
        engine.step()
    engine.reset()
    monkeypatch.undo()
    request = engine.submit(prompts[2], 20, 3)
    while engine.has_work:
        engine.step()
    assert request.token_ids == greedy_tokens[2][:20]
