"""DeviceStates: FixedStates whose banks, captured updates and moves stay on a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.fixed_state import FixedStates, StateGeometry, StateView
from runtime.place import Array, DeviceArray, Place, ir_type
from runtime.state_moves import StateMoves


class DeviceStates(FixedStates):
    """Slots, banks, views and commits are FixedStates'; states are moved by graphs instead of NumPy.

    Rows are brought back by replaying captured updates; a package's dense checkpoints are not asked for.
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
        """All rows that keep a part of their tokens in one pass, and all others that were gathered in another."""
        part = [row for row in range(len(view.slots)) if kept[row] < lengths[row]]
        rest = [row for row in range(len(view.slots)) if kept[row] == lengths[row]]
        if part:
            self._replay_rows(view, part, kept)
        if rest and len(view.key) == 1:
            slots = [view.slots[row] for row in rest]
            target = self._places([1 - self._active[slot] for slot in slots], slots)
            rows = self._stage_rows(view, rest)
            for kind, array, out in self._kinds(view.stage.conv_out, view.stage.recurrent_out):
                self._moves.copy(kind, _flat(array), _flat(out, 2), rows, target)

    def _replay_rows(self, view: StateView, rows: Sequence[int], kept: Sequence[int]) -> None:
        slots = [view.slots[row] for row in rows]
        active = [self._active[slot] for slot in slots]
        moved = {
            "source": self._places(active, slots),
            "row": self._stage_rows(view, rows),
            "kept": np.tile(np.array([kept[row] for row in rows], np.int64), len(self.geometry.layers)),
            "target": self._places([1 - bank for bank in active], slots),
        }
        for kind, array, updates in self._kinds(view.stage.conv_update, view.stage.capsule):
            self._moves.replay(kind, _flat(array), _flat(updates, 2), moved)

    def _kinds(self, conv: DeviceArray, recurrent: DeviceArray) -> list[tuple[str, DeviceArray, DeviceArray]]:
        return [("conv", self._conv, conv), ("recurrent", self._recurrent, recurrent)]

    def _places(self, banks: Sequence[int], slots: Sequence[int]) -> Array:
        """Rows of a flattened bank array: every slot of the first layer, then of the next."""
        layers = len(self.geometry.layers)
        first = np.asarray(banks, np.int64) * layers * self._num_slots + np.asarray(slots, np.int64)
        return np.add.outer(np.arange(layers) * self._num_slots, first).ravel()

    def _stage_rows(self, view: StateView, rows: Sequence[int]) -> Array:
        """Rows of a flattened stage array, in the same order."""
        return np.add.outer(np.arange(len(self.geometry.layers)) * len(view.slots), np.array(rows, np.int64)).ravel()


def _flat(array: DeviceArray, axes: int = 3) -> DeviceArray:
    """The first `axes` axes as one."""
    return array.reshape(int(np.prod(array.shape[:axes])), *array.shape[axes:])
