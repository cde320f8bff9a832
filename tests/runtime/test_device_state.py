"""States that are moved by graphs, here on the CPU's provider, against NumPy's own and against float64.

On a GPU the same graphs run on the same addresses; only the provider differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import pytest

from builder import contract
from builder.errors import DraftsmithError, MachineError
from runtime import Engine, EngineOptions, FailAt, InjectedFailure, SamplingOptions, state_moves, state_replay
from runtime import session as session_module
from runtime.device_state import DeviceStates
from runtime.fixed_state import FixedStates, StateGeometry, StateView
from runtime.loading import LoadedPackage
from runtime.place import GPU, HOST
from runtime.prepared import Choice
from runtime.recording import dump
from tests.runtime.answers import counts_of, oracle_counts, run_to_the_end
from tests.runtime.conftest import ADDRESSED

GEOMETRY = StateGeometry(layers=(0, 2, 5), conv=(10, 3), recurrent=(4, 5, 3), key_heads=2, capacity=4)
FLOAT32 = np.dtype(np.float32)


def both(slots: int) -> tuple[FixedStates, DeviceStates]:
    return FixedStates(GEOMETRY, slots), DeviceStates(GEOMETRY, slots, ADDRESSED, FLOAT32)


def fill(states: tuple[FixedStates, DeviceStates], seed: int) -> None:
    random = np.random.default_rng(seed)
    for name in ("_conv", "_recurrent"):
        values = random.standard_normal(getattr(states[0], name).shape).astype(np.float32)
        getattr(states[0], name)[:] = values
        getattr(states[1], name).write(values)


def run_step(
    views: tuple[StateView, StateView], seed: int, counts: list[int], layers: Sequence[int] = GEOMETRY.layers
) -> None:
    """What a graph would have written: updates of the first counts[row] tokens, NaN behind them, and the states after
    these tokens.
    """
    random = np.random.default_rng(seed)
    rows, capacity = len(counts), GEOMETRY.capacity
    heads, value_dim, key_dim = GEOMETRY.recurrent
    for layer in layers:
        updates = random.standard_normal((rows, capacity, GEOMETRY.conv[0])).astype(np.float32)
        decays = random.uniform(0, 1, (rows, capacity, heads)).astype(np.float32)
        decays[:, 0, 0] = 0.0  # a decay may be nothing at all
        keys = random.standard_normal((rows, capacity, GEOMETRY.key_heads, key_dim)).astype(np.float32)
        deltas = random.standard_normal((rows, capacity, heads, value_dim)).astype(np.float32)
        conv, recurrent = (
            views[0].inputs[n.format(layer)].copy() for n in (contract.PAST_CONV, contract.PAST_RECURRENT)
        )
        for row, count in enumerate(counts):
            conv[row] = np.concatenate([conv[row], updates[row, :count].T], axis=1)[:, count:]
            recurrent[row] = recurrence(recurrent[row], decays[row, :count], keys[row, :count], deltas[row, :count])
            updates[row, count:] = 0
            for part in (decays, keys, deltas):
                part[row, count:] = np.nan
        capsule = np.concatenate([part.reshape(rows, -1) for part in (decays, keys, deltas)], axis=1)
        for name, values in (
            (contract.PRESENT_CONV, conv),
            (contract.PRESENT_RECURRENT, recurrent),
            (contract.CONV_UPDATE, updates),
            (contract.RECURRENT_UPDATE, capsule),
        ):
            views[0].outputs[name.format(layer)][:] = values
            _poke(views[1].outputs[name.format(layer)], values)


def recurrence(state: Any, decays: Any, keys: Any, deltas: Any) -> Any:
    """S [Hv, dv, dk] = decay S + outer(delta, key) in float64, a key for each group of Hv / Hk heads."""
    for decay, key, delta in zip(decays, keys, deltas, strict=True):
        each = np.repeat(key, len(decay) // len(key), axis=0).astype(np.float64)
        state = decay[:, None, None].astype(np.float64) * state + delta[:, :, None].astype(np.float64) * each[:, None]
    return state


def _poke(array: Any, values: np.ndarray[Any, Any]) -> None:
    whole = array.owner.numpy()
    start = array.address - array.owner.data_ptr()
    whole[start : start + array.nbytes] = np.ascontiguousarray(values, array.dtype).view(np.uint8).ravel()
    array.owner.update_inplace(whole)


def same(states: tuple[FixedStates, DeviceStates], slots: list[int]) -> None:
    """The active states of both, by slot."""
    assert states[0]._active == states[1]._active
    for slot in slots:
        bank = states[0]._active[slot]
        for name in ("_conv", "_recurrent"):
            host, device = getattr(states[0], name), getattr(states[1], name).read()
            np.testing.assert_allclose(device[bank, :, slot], host[bank, :, slot], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", range(6))
def test_random_steps_leave_the_same_states(seed: int) -> None:
    """Takes, views side by side and gathered, whole and partial commits, slots given back and taken anew."""
    random = np.random.default_rng(seed)
    states = both(4)
    fill(states, seed)
    live: list[int] = []
    for step in range(14):
        if len(live) < 4 and random.random() < 0.5:
            companion = live[0] if live and random.random() < 0.7 else None
            slot, other = (s.take(companion) for s in states)
            assert slot == other
            live.append(slot)
            same(states, live)
        if not live:
            continue
        chosen = [slot for slot in sorted(live) if random.random() < 0.7] or live[:1]
        if random.random() < 0.3:
            chosen.reverse()
        views = states[0].view(chosen), states[1].view(chosen)
        assert views[0].key == views[1].key
        for layer in GEOMETRY.layers:
            for name in (contract.PAST_CONV, contract.PAST_RECURRENT):
                given = views[1].inputs[name.format(layer)].read()  # type: ignore[attr-defined]
                np.testing.assert_allclose(given, views[0].inputs[name.format(layer)], rtol=1e-4, atol=1e-5)
        lengths = [int(random.integers(1, GEOMETRY.capacity + 1)) for _ in chosen]
        run_step(views, 100 * seed + step, lengths)
        kept = [int(random.integers(0, length + 1)) for length in lengths]
        for side, view in zip(states, views, strict=True):
            side.prepare(view, kept, lengths)
            side.commit(view)
        same(states, live)
        if random.random() < 0.2:
            gone = live.pop(int(random.integers(len(live))))
            for side in states:
                side.give_back(gone)


def test_a_part_of_device_memory_is_where_it_should_be() -> None:
    array = ADDRESSED.device_zeros((3, 4, 5), FLOAT32)
    values = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    array.write(values)
    for key in (1, slice(1, 3), (2, 3), (2, slice(1, 3)), (0, 1, slice(2, 4)), slice(None)):
        np.testing.assert_array_equal(array[key].read(), values[key])
    with pytest.raises(AssertionError, match="in one piece"):
        array[:, 1]
    with pytest.raises(IndexError, match="3 of 3"):
        array[3]


@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_replaying_at_once_is_the_recurrence(capacity: int) -> None:
    """Against float64, token by token."""
    random = np.random.default_rng(capacity)
    geometry = StateGeometry((0, 1), (6, 3), (4, 5, 3), 2, capacity)
    states = DeviceStates(geometry, 2, ADDRESSED, FLOAT32)
    slot = states.take()
    conv, recurrent = (random.standard_normal(a.shape).astype(np.float32) for a in (states._conv, states._recurrent))
    states._conv.write(conv)
    states._recurrent.write(recurrent)
    view = states.view([slot])
    decays = random.uniform(0.2, 1, (2, capacity, 4)).astype(np.float32)
    keys = random.standard_normal((2, capacity, 2, 3)).astype(np.float32)
    deltas = random.standard_normal((2, capacity, 4, 5)).astype(np.float32)
    raw = random.standard_normal((2, 1, capacity, 6)).astype(np.float32)
    for index, layer in enumerate(geometry.layers):
        flat = np.concatenate([part[index].ravel() for part in (decays, keys, deltas)])
        _poke(view.outputs[contract.RECURRENT_UPDATE.format(layer)], flat)
        _poke(view.outputs[contract.CONV_UPDATE.format(layer)], raw[index])
    for kept in range(capacity):
        states.prepare(view, [kept], [capacity])
        for index in range(2):
            expected = recurrence(
                recurrent[0, index, slot], decays[index, :kept], keys[index, :kept], deltas[index, :kept]
            )
            np.testing.assert_allclose(states._recurrent.read()[1, index, slot], expected, rtol=1e-5, atol=1e-5)
            rows = np.concatenate([conv[0, index, slot], raw[index, 0, :kept].T], axis=1)[:, -3:]
            np.testing.assert_array_equal(states._conv.read()[1, index, slot], rows)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_the_whole_loop_over_device_memory(
    addressed: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    drafts: int,
    batch: int,
) -> None:
    engine = Engine(addressed, EngineOptions(num_blocks=64, max_batch_size=batch, max_draft_tokens=drafts))
    requests = run_to_the_end(engine, prompts, drafts)
    assert isinstance(engine.target.states, DeviceStates)
    assert [request.token_ids for request in requests] == greedy_tokens
    fetched = [contract.HIDDEN_STATES in run.bound.outputs for run in engine.target._runs._kept.values()]
    assert fetched and set(fetched) == {drafts > 0}, "nobody but a head reads them"
    if drafts:
        counts = counts_of(requests)
        assert counts == oracle_counts(reference, drafts)


def test_arrivals_preemption_and_failures_over_device_memory(
    addressed: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    """Slots that do not lie side by side are gathered; one request samples, and needs logits."""
    engine = Engine(addressed, EngineOptions(num_blocks=14, block_size=16, max_batch_size=3, max_scheduled_tokens=40))
    requests = [engine.submit(prompt, 40, i % 4) for i, prompt in enumerate(prompts)]
    sampled = [engine.submit(prompts[0], 20, k, sampling=SamplingOptions(0.8, seed=1)) for k in (0, 3)]
    step = 0
    while engine.has_work:
        if step % 9 == 8:
            engine._watch = FailAt("prepare", step)
        if step in (11, 30):
            engine.preempt(engine._running[0])
        with contextlib.suppress(InjectedFailure):
            engine.step()
        step += 1
    assert [request.token_ids for request in requests] == [tokens[:40] for tokens in greedy_tokens]
    assert sampled[0].token_ids == sampled[1].token_ids
    assert engine.stats.aborted_steps > 2
    assert engine.stats.preemptions >= 2


def test_logits_that_are_no_numbers_are_an_error_where_the_graph_chooses(
    addressed: LoadedPackage, prompts: list[list[int]]
) -> None:
    """The best logit of each row is looked at, though the others stay where they are."""
    engine = Engine(addressed, EngineOptions(num_blocks=4, max_batch_size=1, max_draft_tokens=0))
    request = engine.submit(prompts[0], 8, 0)
    engine.step()
    assert engine.target.states is not None
    engine.target.states._recurrent.write(np.full(engine.target.states._recurrent.shape, np.nan, np.float32))
    with pytest.raises(DraftsmithError, match="not numbers"):
        engine.step()
    assert len(request.token_ids) == 1


@pytest.mark.parametrize("checkpoints", [0, 4])
def test_nothing_is_cleared_in_a_plain_step_that_nobody_captures(
    addressed: LoadedPackage, prompts: list[list[int]], checkpoints: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But where active capture makes a graph compute a series of checkpoints, nobody asks for it in vain."""
    monkeypatch.setattr(addressed, "package", dataclasses.replace(addressed.package, checkpoints=checkpoints))
    engine = Engine(addressed, EngineOptions(num_blocks=4, max_batch_size=1, max_draft_tokens=0))
    engine.submit(prompts[0], 4, 0)
    engine.step()
    (prompt,) = engine.target._runs._kept.values()
    assert prompt.extra[contract.CAPTURE_ACTIVE].tolist() == [0]
    engine.step()
    plain = next(reversed(engine.target._runs._kept.values()))
    assert plain.extra[contract.CAPTURE_ACTIVE].tolist() == [0 if checkpoints else 1]


def test_memory_that_cannot_be_had_is_named() -> None:
    with pytest.raises(MachineError, match=r"bytes of memory on cpu are needed .*\(--num-blocks\)"):
        ADDRESSED.device_zeros((1 << 60,), FLOAT32)


def test_rows_without_logits_are_never_mistaken_for_others() -> None:
    choice = Choice(np.array([3, 5]), np.array([7, 8]), np.zeros((2, 1), np.float32))
    assert choice.best([5]) == [8]
    with pytest.raises(AssertionError, match="a row without logits"):
        choice.best([4])


def test_logits_are_fetched_where_somebody_needs_them(addressed: LoadedPackage, prompts: list[list[int]]) -> None:
    engine = Engine(addressed, EngineOptions(num_blocks=4, max_batch_size=1))
    engine.submit(prompts[0], 8, 3)
    while engine.has_work:
        engine.step()
    assert all(not run.logits.size for run in engine.target._runs._kept.values())
    scored = {len(run.choice.rows) for run in engine.target._runs._kept.values() if run.choice}
    assert scored <= {1, 2, 3, 4}, "a prompt has logits for its last row alone"
    arrays = dump(addressed, prompts[1], 3, EngineOptions(num_blocks=4, max_batch_size=1))
    assert arrays["logits"].shape == (len(prompts[1]), addressed.package.vocab_size)


@pytest.mark.parametrize(
    ("providers", "usable", "found"),
    [
        (["CPUExecutionProvider"], True, "has no CUDA provider; install draftsmith[cuda]"),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], False, "no usable GPU was found (no device)"),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], True, None),
    ],
)
def test_auto_takes_a_gpu_that_can_be_used_and_cuda_says_what_is_missing(
    providers: list[str], usable: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA provider is listed on machines without a GPU, too."""

    def make(*arguments: Any) -> None:
        if not usable:
            raise RuntimeError("no device")

    monkeypatch.setattr(session_module.ort, "get_available_providers", lambda: providers)
    monkeypatch.setattr(session_module.ort, "preload_dlls", lambda: None)
    monkeypatch.setattr(session_module.ort.OrtValue, "ortvalue_from_shape_and_type", make)
    session_module.missing_for_gpu.cache_clear()
    try:
        assert session_module.place_for("cpu") is HOST
        assert session_module.place_for("auto") is (HOST if found else GPU)
        if found:
            with pytest.raises(MachineError, match=re.escape(found)):
                session_module.place_for("cuda")
    finally:
        session_module.missing_for_gpu.cache_clear()


@pytest.mark.parametrize(("layers", "recorded"), [(1, True), (30, True), (48, True), (74, False), (111, False)])
def test_replay_of_many_layers_takes_few_addresses_at_once(
    layers: int, recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What more than 32 would do to a recording is no error. Layers stay in order however they are split."""
    geometry = dataclasses.replace(GEOMETRY, layers=tuple(range(layers)))
    assert state_replay.can_be_recorded(geometry) == recorded
    graphs: list[bytes] = []
    real = state_moves.bare_session
    monkeypatch.setattr(
        state_moves, "bare_session", lambda model, *place, **more: graphs.append(model) or real(model, *place, **more)
    )
    host, device = FixedStates(geometry, 2), DeviceStates(geometry, 2, ADDRESSED, FLOAT32)
    fill((host, device), layers)
    slots = [host.take(), host.take()]
    assert [device.take(), device.take()] == slots
    nodes = onnx.load_from_string(graphs[-1]).graph.node
    joints = [max(len(node.input), len(node.output)) for node in nodes if node.op_type in ("Concat", "Split")]
    assert joints and (max(joints) <= 32) == recorded
    views = host.view(slots), device.view(slots)
    run_step(views, layers, [4, 3], geometry.layers)
    for states, view in zip((host, device), views, strict=True):
        states.prepare(view, [2, 3], [4, 3])
        states.commit(view)
    same((host, device), slots)
