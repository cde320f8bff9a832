"""Replaying captured state updates: against float64, and against the graph run on the kept tokens alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from builder import contract
from runtime.fixed_state import FixedStates, StateGeometry
from runtime.loading import LoadedPackage
from runtime.packing import Segment
from runtime.target import TargetModel

GEOMETRY = StateGeometry(layers=(0, 2), conv=(10, 3), recurrent=(4, 5, 3), key_heads=2, capacity=4)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_replay_is_the_recurrence(kept: int) -> None:
    """S_t = decay_t S_{t-1} + delta_t outer key_t with key head h // (Hv / Hk); conv keeps its newest three rows."""
    random = np.random.default_rng(kept)
    states = FixedStates(GEOMETRY, 3)
    slot = [states.take() for _ in range(2)][1]
    states._conv[:] = random.standard_normal(states._conv.shape)
    states._recurrent[:] = random.standard_normal(states._recurrent.shape)
    conv, recurrent = states._conv[0, :, slot].astype(np.float64), states._recurrent[0, :, slot].astype(np.float64)
    view = states.view([0, slot])
    raw = random.standard_normal((2, 2, 4, 10)).astype(np.float32)
    decays = random.uniform(0.5, 1, (2, 4, 4)).astype(np.float32)
    keys = random.standard_normal((2, 4, 2, 3)).astype(np.float32)
    deltas = random.standard_normal((2, 4, 4, 5)).astype(np.float32)
    for index, layer in enumerate(GEOMETRY.layers):
        view.outputs[contract.CONV_UPDATE.format(layer)][:] = raw[index]
        capsule = view.outputs[contract.RECURRENT_UPDATE.format(layer)]
        capsule[:] = np.nan  # what is not captured is never read
        flat = [decays[index].ravel(), keys[index].ravel(), deltas[index].ravel()]
        capsule[1] = np.concatenate(flat)
    states.prepare(view, [4, kept], [4, 4])
    states.commit(view)
    for token in range(kept):
        conv = np.concatenate([conv[:, :, 1:], raw[:, 1, token, :, None].astype(np.float64)], axis=2)
        for head in range(4):
            outer = deltas[:, token, head, :, None].astype(np.float64) * keys[:, token, head // 2, None, :]
            recurrent[:, head] = decays[:, token, head, None, None] * recurrent[:, head] + outer
    np.testing.assert_array_equal(states._conv[1, :, slot], conv.astype(np.float32))
    np.testing.assert_allclose(states._recurrent[1, :, slot], recurrent, rtol=1e-5, atol=1e-6)
    assert states._active == [1, 1, 0]


@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_committed_prefix_is_what_the_kept_tokens_alone_give(
    trained: LoadedPackage, prompts: list[list[int]], kept: int
) -> None:
    """Two slots step together and apart, so that views and gathered states are both bound."""
    tokens = prompts[0]

    def feed(model: TargetModel, slot: int, start: int, ids: list[int], keep: int, draft: bool) -> None:
        assert model.states is not None
        view = model.states.view([slot])
        model.run([Segment(ids, start, [slot])], view, [len(ids) if draft else 0])
        model.states.prepare(view, [keep], [len(ids)])
        model.states.commit(view)

    model = TargetModel(trained.package, trained.target, num_blocks=2, block_size=64, num_slots=2)
    assert model.states is not None
    drafted, plain = model.states.take(), model.states.take()
    for slot in (drafted, plain):
        feed(model, slot, 0, tokens[:5], 5, draft=False)
    feed(model, drafted, 5, tokens[5:9], kept, draft=True)
    feed(model, plain, 5, tokens[5 : 5 + kept], kept, draft=False)
    for banks in (model.states._conv, model.states._recurrent):
        active = model.states._active
        np.testing.assert_allclose(
            banks[active[drafted], :, drafted], banks[active[plain], :, plain], rtol=1e-4, atol=1e-5
        )


def test_gathered_states_equal_views(trained: LoadedPackage, prompts: list[list[int]]) -> None:
    """Rows in slot order are bound in place, any other order is gathered; results are the same rows."""
    outputs = []
    for order in ([0, 1], [1, 0]):
        model = TargetModel(trained.package, trained.target, num_blocks=2, block_size=64, num_slots=2)
        assert model.states is not None
        for _ in order:
            model.states.take()
        for start, end in ((0, 6), (6, 9)):
            view = model.states.view(order)
            segments = [Segment(prompts[slot][start:end], start, [slot]) for slot in order]
            logits = model.run(segments, view, [0, 0]).logits
            model.states.prepare(view, [end - start] * 2, [end - start] * 2)
            model.states.commit(view)
        by_slot = logits.reshape(2, 3, -1)[np.argsort(order)].copy()
        outputs.append(by_slot)
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)


def test_a_slot_is_zeroed_before_it_is_used_again() -> None:
    states = FixedStates(GEOMETRY, 1)
    slot = states.take()
    states._conv[:] = 7
    states._recurrent[:] = 7
    states.give_back(slot)
    view = states.view([states.take()])
    assert not view.inputs[contract.PAST_CONV.format(0)].any()
    assert not view.inputs[contract.PAST_RECURRENT.format(2)].any()


def test_nothing_committed_changes_before_commit() -> None:
    """Rolling back is doing nothing: the active bank is never written, not even where a prefix is replayed."""
    states = FixedStates(GEOMETRY, 2)
    slots = [states.take(), states.take()]
    states._conv[0], states._recurrent[0] = 3, 5
    view = states.view(slots)
    for name in view.outputs:
        view.outputs[name][:] = 9
    states.prepare(view, [2, 4], [4, 4])
    assert (states._conv[0] == 3).all()
    assert (states._recurrent[0] == 5).all()


def test_a_new_slot_joins_the_bank_of_its_companion() -> None:
    """So that old and new requests can be bound as one view."""
    states = FixedStates(GEOMETRY, 2)
    first = states.take()
    states.commit(states.view([first]))
    second = states.take(first)
    assert states.view([first, second]).key == (2, 1, 0)


@pytest.mark.parametrize("checkpoints", [0, 4])
def test_a_row_that_keeps_nothing_keeps_its_state(checkpoints: int) -> None:
    """Case A45: a verifier may refuse even the anchor. To the byte, whatever the run has left in the other bank."""
    random = np.random.default_rng(0)
    states = FixedStates(replace(GEOMETRY, checkpoints=checkpoints), 2)
    slots = [states.take() for _ in range(2)]
    states._conv[:] = random.standard_normal(states._conv.shape)
    states._recurrent[:] = random.standard_normal(states._recurrent.shape)
    before = [(states._conv[0, :, slot].tobytes(), states._recurrent[0, :, slot].tobytes()) for slot in slots]
    view = states.view(slots)
    states.checkpoints(view)
    states.prepare(view, [0, 0], [4, 1])
    states.commit(view)
    assert [(states._conv[1, :, s].tobytes(), states._recurrent[1, :, s].tobytes()) for s in slots] == before


def test_a_view_that_is_not_the_newest_is_not_committed() -> None:
    """What was prepared for one generation of a slot fits no other."""
    states = FixedStates(GEOMETRY, 2)
    slot = states.take()
    view = states.view([slot])
    states.commit(view)
    with pytest.raises(AssertionError, match="taken or committed"):
        states.commit(view)
    view = states.view([slot])
    states.give_back(slot)
    assert states.take() == slot
    with pytest.raises(AssertionError, match="taken or committed"):
        states.commit(view)
