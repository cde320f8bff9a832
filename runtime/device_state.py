"""DeviceStates: FixedStates whose banks, captured updates and moves stay on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from builder import contract
from runtime.fixed_state import FixedStates, StateGeometry, StateView
from runtime.place import Array, DeviceArray, Place, ir_type
from runtime.state_moves import StateMoves


class DeviceStates(FixedStates):
    """Slots, banks, views and commits are FixedStates'; states are moved by graphs instead of NumPy.

    Rows are brought back by replaying captured updates, for which a step with drafts captures those of every row; a
    package's dense checkpoints are not asked for.
    """

    def __init__(self, geometry: StateGeometry, num_slots: int, place: Place, conv_type: np.dtype[Any]) -> None:
        self._place, self._conv_type = place, conv_type
        self._moves = StateMoves(geometry, place, ir_type(conv_type))
        self._num_slots = num_slots
        super().__init__(geometry, num_slots)

    def _allocate(self, num_slots: int) -> None:
        geometry, float32 = self.geometry, np.dtype(np.float32)
        layers = len(geometry.layers)
        self._conv = self._place.device_zeros((2, layers, num_slots, *geometry.conv), self._conv_type)
        self._recurrent = self._place.device_zeros((2, layers, num_slots, *geometry.recurrent), float32)
        types = (self._conv_type, self._conv_type, float32, float32, self._conv_type, float32)
        self._staged = [
            self._place.device_zeros((layers * num_slots, *shape), dtype)
            for shape, dtype in zip(geometry.staged_shapes, types, strict=True)
        ]
        self._zero_conv = self._place.device_zeros((1, *geometry.conv), self._conv_type)
        self._zero_recurrent = self._place.device_zeros((1, *geometry.recurrent), float32)

    def _zero(self, bank: int, slot: int) -> None:
        target = self._places([bank], [slot])
        rows = np.zeros(len(target), np.int64)
        for kind, array, zero in self._kinds(self._zero_conv, self._zero_recurrent):
            self._moves.copy(kind, _flat(array), zero, rows, target)

    def copy_to(self, slot: int, place: tuple[int, int]) -> None:
        source = self._active[slot], slot
        rows, places = (self._places([bank], [slot]) for bank, slot in (source, place))
        for kind, array, _ in self._kinds(self._zero_conv, self._zero_recurrent):
            self._moves.copy(kind, _flat(array), _flat(array), rows, places)

    def _gathered(self, slots: tuple[int, ...]) -> StateView:
        stage, layers = self._stage(len(slots)), range(len(self.geometry.layers))
        source = self._places([self._active[slot] for slot in slots], slots)
        for kind, array, out in self._kinds(stage.conv_in, stage.recurrent_in):
            self._moves.gather(kind, _flat(array), source, _flat(out, 2))
        states, nexts = (
            [[array[layer] for layer in layers] for array in arrays]
            for arrays in ((stage.conv_in, stage.recurrent_in), (stage.conv_out, stage.recurrent_out))
        )
        return self._named(slots, (len(slots),), states, nexts)

    def prepare(self, view: StateView, kept: Sequence[int], lengths: Sequence[int]) -> None:
        """Where a row keeps but a part of its tokens, every row of the step is replayed: states are then passed over
        once, and a row that keeps all its tokens gets what the run gave it, within rounding.
        """
        if any(count < length for count, length in zip(kept, lengths, strict=True)):
            self._replay_rows(view, kept)
        if len(view.key) == 1:
            target = self._places([1 - self._active[slot] for slot in view.slots], view.slots)
            rows = np.arange(len(target), dtype=np.int64)
            for kind, array, out in self._kinds(view.stage.conv_out, view.stage.recurrent_out):
                self._moves.copy(kind, _flat(array), _flat(out, 2), rows, target)

    def _replay_rows(self, view: StateView, kept: Sequence[int]) -> None:
        """From what the step read to what it wrote."""
        layers = self.geometry.layers
        inputs: dict[str, Array | DeviceArray] = {
            "conv_update": _flat(view.stage.conv_update, 2),
            "capsule": _flat(view.stage.capsule, 2),
            "kept": np.tile(np.asarray(kept, np.int64), len(layers)),
        }
        outputs: dict[str, DeviceArray] = {}
        for past, present in (
            (contract.PAST_CONV, contract.PRESENT_CONV),
            (contract.PAST_RECURRENT, contract.PRESENT_RECURRENT),
        ):
            for layer in layers:
                inputs[past.format(layer)] = view.inputs[past.format(layer)]
                outputs[present.format(layer)] = view.outputs[present.format(layer)]
        self._moves.replay(inputs, outputs)

    def _kinds(self, conv: DeviceArray, recurrent: DeviceArray) -> list[tuple[str, DeviceArray, DeviceArray]]:
        return [("conv", self._conv, conv), ("recurrent", self._recurrent, recurrent)]

    def _places(self, banks: Sequence[int], slots: Sequence[int]) -> Array:
        """Rows of a flattened bank array: every slot of the first layer, then of the next."""
        layers = len(self.geometry.layers)
        first = np.asarray(banks, np.int64) * layers * self._num_slots + np.asarray(slots, np.int64)
        return np.add.outer(np.arange(layers) * self._num_slots, first).ravel()


def _flat(array: DeviceArray, axes: int = 3) -> DeviceArray:
    """The first `axes` axes as one."""
    return array.reshape(int(np.prod(array.shape[:axes])), *array.shape[axes:])
