"""FixedStates: convolution and recurrent states of the linear-attention layers, two banks per slot.

A step reads each row's active bank and writes its inactive one, so nothing committed is ever overwritten. Where only
a prefix of a row's tokens is kept, the inactive bank is rebuilt from the active one by replaying the captured state
updates in float32, or taken from the step's checkpoints where the package has them; then the slot's banks swap. All
layers of a kind lie in one array, [bank, layer, slot, ...].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder import contract
from builder.reader import Package

Array = NDArray[Any]
MAX_VIEWS = 256


@dataclass(frozen=True)
class StateGeometry:
    """Shapes of one slot of one layer: conv [C, K - 1], recurrent [Hv, dv, dk]; key_heads is Hk of the capsule.

    checkpoints: states of each row that a step with drafts shows, 0 where it is rolled back by replay.
    """

    layers: tuple[int, ...]
    conv: tuple[int, ...]
    recurrent: tuple[int, ...]
    key_heads: int
    capacity: int
    checkpoints: int = 0

    @classmethod
    def of(cls, package: Package) -> StateGeometry | None:
        """None for a model without linear-attention layers."""
        if not package.linear_layers:
            return None
        first = package.linear_layers[0]
        io = package.target.io
        return cls(
            package.linear_layers,
            tuple(map(int, io.input(contract.PAST_CONV.format(first)).shape[1:])),
            tuple(map(int, io.input(contract.PAST_RECURRENT.format(first)).shape[1:])),
            package.linear_num_key_heads,
            package.capacity,
            package.checkpoints,
        )

    @property
    def bytes_per_slot(self) -> int:
        return 2 * self._state_bytes

    @property
    def staged_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of a row of a layer, in the order of Stage."""
        updates = (self.capacity, self.conv[0]), (self.capacity * self.capsule_width,)
        return self.conv, self.conv, self.recurrent, self.recurrent, *updates

    @property
    def staged_bytes_per_slot(self) -> int:
        """Beside bytes_per_slot: what a step gathers and captures."""
        return 4 * len(self.layers) * sum(math.prod(shape) for shape in self.staged_shapes)

    @property
    def checkpoint_bytes_per_slot(self) -> int:
        """Beside bytes_per_slot, as soon as a step drafts."""
        return self.checkpoints * self._state_bytes

    @property
    def _state_bytes(self) -> int:
        return 4 * len(self.layers) * int(np.prod(self.conv) + np.prod(self.recurrent))

    @property
    def capsule_width(self) -> int:
        heads, value_dim, key_dim = self.recurrent
        return heads + self.key_heads * key_dim + heads * value_dim


@dataclass(frozen=True)
class StateView:
    """Arrays of one step by graph name. `key` names the memory, so that equal keys may share a prepared run."""

    slots: tuple[int, ...]
    key: tuple[int, ...]
    inputs: dict[str, Any]
    outputs: dict[str, Any]
    stage: Stage


@dataclass(frozen=True)
class Stage:
    """Buffers for a number of rows, in NumPy or on a device.

    conv_in to recurrent_out: gathered states, where rows do not lie side by side; then the captured updates.
    """

    conv_in: Any
    conv_out: Any
    recurrent_in: Any
    recurrent_out: Any
    conv_update: Any
    capsule: Any


class FixedStates:
    """num_slots slots; a slot is one request's states in every linear-attention layer."""

    def __init__(self, geometry: StateGeometry, num_slots: int) -> None:
        self.geometry = geometry
        self._allocate(num_slots)
        self._active = [0] * num_slots
        self._generation = [0] * num_slots
        self._reserved: tuple[int, ...] = ()
        self._free = list(range(num_slots - 1, -1, -1))
        self._stages: dict[int, Stage] = {}
        self._views: dict[tuple[int, ...], StateView] = {}
        self._series: tuple[Array, Array] | None = None

    def _allocate(self, num_slots: int) -> None:
        layers = len(self.geometry.layers)
        self._conv: Any = np.zeros((2, layers, num_slots, *self.geometry.conv), np.float32)
        self._recurrent: Any = np.zeros((2, layers, num_slots, *self.geometry.recurrent), np.float32)
        self._outer = np.empty((layers, *self.geometry.recurrent), np.float32)
        self._staged: list[Any] = [
            np.zeros((layers * num_slots, *shape), np.float32) for shape in self.geometry.staged_shapes
        ]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, in_step_with: int | None = None) -> int:
        """A zeroed slot, on the same bank as the slot `in_step_with`, so that both can be bound as one view."""
        slot = self._free[-1]
        bank = 0 if in_step_with is None else self._active[in_step_with]
        self._zero(bank, slot)  # may fail on a device: the slot is still free then
        self._free.pop()
        self._active[slot] = bank
        self._generation[slot] += 1
        return slot

    def _zero(self, bank: int, slot: int) -> None:
        self._conv[bank, :, slot] = 0
        self._recurrent[bank, :, slot] = 0

    def give_back(self, slot: int) -> None:
        """Keeps the lowest free slot on top, so that live slots stay side by side."""
        self._free.append(slot)
        self._free.sort(reverse=True)

    def bank_of(self, slot: int) -> int:
        return self._active[slot]

    def better_place(self, slot: int, total: int, bank: int) -> tuple[int, int] | None:
        """Bank and slot where the next step wants a live slot's states, so that it need not gather them: on `bank`, and
        among the first `total` slots, of which one is free if `slot` is none of them. None if they lie there.
        """
        place = bank, slot if slot < total else self._free[-1]
        return None if place == (self._active[slot], slot) else place

    def copy_to(self, slot: int, place: tuple[int, int]) -> None:
        """Copies a slot's states to where nobody's are. May fail, and changes nothing that counts."""
        bank, target = place
        for array in (self._conv, self._recurrent):
            array[bank, :, target] = array[self._active[slot], :, slot]

    def move_to(self, slot: int, place: tuple[int, int]) -> None:
        """Makes the copy the slot's states; the old slot is free if it is another one. Cannot fail."""
        bank, target = place
        if target != slot:
            self._free.pop()
            self.give_back(slot)
        self._active[target] = bank
        for changed in {slot, target}:
            self._generation[changed] += 1

    def view(self, slots: Sequence[int]) -> StateView:
        """The step's arrays for these slots in row order: views of the banks where possible, gathered copies else."""
        slots = tuple(slots)
        self._reserved = self._generations(slots)
        bank = self._active[slots[0]]
        side_by_side = slots == tuple(range(slots[0], slots[0] + len(slots)))
        if side_by_side and all(self._active[slot] == bank for slot in slots):
            key = (len(slots), bank, slots[0])
            if key not in self._views:
                if len(self._views) >= MAX_VIEWS:
                    self._views.clear()
                rows, layers = slice(slots[0], slots[0] + len(slots)), range(len(self.geometry.layers))
                states, nexts = (
                    tuple([array[side, layer, rows] for layer in layers] for array in (self._conv, self._recurrent))
                    for side in (bank, 1 - bank)
                )
                self._views[key] = self._named(slots, key, states, nexts)
            return self._views[key]
        return self._gathered(slots)

    def _gathered(self, slots: tuple[int, ...]) -> StateView:
        stage = self._stage(len(slots))
        banks = [self._active[slot] for slot in slots]
        stage.conv_in[:] = self._conv[banks, :, list(slots)].swapaxes(0, 1)
        stage.recurrent_in[:] = self._recurrent[banks, :, list(slots)].swapaxes(0, 1)
        return self._named(
            slots, (len(slots),), (stage.conv_in, stage.recurrent_in), (stage.conv_out, stage.recurrent_out)
        )

    def _named(
        self, slots: tuple[int, ...], key: tuple[int, ...], states: Sequence[Any], nexts: Sequence[Any]
    ) -> StateView:
        """states, nexts: convolutions, then recurrences, of each layer by its place in the geometry."""
        stage = self._stage(len(slots))
        inputs: dict[str, Any] = {}
        outputs: dict[str, Any] = {}
        for index, layer in enumerate(self.geometry.layers):
            inputs[contract.PAST_CONV.format(layer)] = states[0][index]
            inputs[contract.PAST_RECURRENT.format(layer)] = states[1][index]
            outputs[contract.PRESENT_CONV.format(layer)] = nexts[0][index]
            outputs[contract.PRESENT_RECURRENT.format(layer)] = nexts[1][index]
            if self.geometry.capacity:
                outputs[contract.CONV_UPDATE.format(layer)] = stage.conv_update[index]
                outputs[contract.RECURRENT_UPDATE.format(layer)] = stage.capsule[index]
        return StateView(slots, key, inputs, outputs, stage)

    def _stage(self, rows: int) -> Stage:
        """For any number of rows the same memory, in the shapes of that number."""
        if rows not in self._stages:
            layers = len(self.geometry.layers)
            self._stages[rows] = Stage(
                *(array[: layers * rows].reshape(layers, rows, *array.shape[1:]) for array in self._staged)
            )
        return self._stages[rows]

    def checkpoints(self, view: StateView) -> dict[str, Array]:
        """Arrays for the states after each token of a step with drafts; none where a package is rolled back by replay.

        Every view has the same memory, which is taken when the first step drafts.
        """
        geometry = self.geometry
        if not geometry.checkpoints:
            return {}
        if self._series is None:
            size = (len(geometry.layers), self._conv.shape[2], geometry.checkpoints)
            self._series = (
                np.empty((*size, *geometry.conv), np.float32),
                np.empty((*size, *geometry.recurrent), np.float32),
            )
        rows = len(view.slots)
        names = contract.checkpoint_names(geometry.layers)
        arrays = [series[layer, :rows] for layer in range(len(geometry.layers)) for series in self._series]
        return dict(zip(names, arrays, strict=True))

    def prepare(self, view: StateView, kept: Sequence[int], lengths: Sequence[int]) -> None:
        """Brings each row's inactive bank to the state after its first kept[row] of lengths[row] tokens.

        The last step that may fail; nothing that is committed has changed yet.
        """
        gathered = len(view.key) == 1
        for row, slot in enumerate(view.slots):
            bank = 1 - self._active[slot]
            if kept[row] == 0:
                self._conv[bank, :, slot] = self._conv[1 - bank, :, slot]
                self._recurrent[bank, :, slot] = self._recurrent[1 - bank, :, slot]
            elif kept[row] < lengths[row] and self.geometry.checkpoints:
                self._pick(row, slot, kept[row], lengths[row])
            elif kept[row] < lengths[row]:
                self._replay(view.stage, row, slot, kept[row])
            elif gathered:
                self._conv[bank, :, slot] = view.stage.conv_out[:, row]
                self._recurrent[bank, :, slot] = view.stage.recurrent_out[:, row]

    def _pick(self, row: int, slot: int, kept: int, length: int) -> None:
        """The checkpoint after `kept` of a row's tokens; convolutions lie from the left, recurrences from the right."""
        if self._series is None:
            raise AssertionError("checkpoints were not bound in this step")
        bank = 1 - self._active[slot]
        conv, recurrent = self._series
        self._conv[bank, :, slot] = conv[:, row, kept - 1]
        self._recurrent[bank, :, slot] = recurrent[:, row, self.geometry.checkpoints - length + kept - 1]

    def _replay(self, stage: Stage, row: int, slot: int, kept: int) -> None:
        """Shift-appends raw rows to the convolution; S = decay * S + outer(delta, key) token by token, in float32."""
        bank = self._active[slot]
        width = self.geometry.conv[1]
        appended = stage.conv_update[:, row, :kept].swapaxes(1, 2)
        old, new = self._conv[bank, :, slot], self._conv[1 - bank, :, slot]
        new[..., : width - min(kept, width)] = old[..., min(kept, width) :]
        new[..., width - min(kept, width) :] = appended[..., -width:]
        decays, keys, deltas = self._factors(stage.capsule[:, row])
        before, state = self._recurrent[bank, :, slot], self._recurrent[1 - bank, :, slot]
        for token in range(kept):
            np.multiply(before, decays[:, token, :, None, None], out=state)
            np.multiply(deltas[:, token, :, :, None], keys[:, token, :, None, :], out=self._outer)
            state += self._outer
            before = state

    def _factors(self, capsule: Array) -> tuple[Array, Array, Array]:
        """capsule [layers, capacity * width] to decays [layers, capacity, Hv], keys [.., dk] and deltas [.., dv]."""
        geometry = self.geometry
        layers, capacity = len(geometry.layers), geometry.capacity
        heads, value_dim, key_dim = geometry.recurrent
        first = capacity * heads
        second = first + capacity * geometry.key_heads * key_dim
        decays = capsule[:, :first].reshape(layers, capacity, heads)
        keys = capsule[:, first:second].reshape(layers, capacity, geometry.key_heads, key_dim)
        deltas = capsule[:, second:].reshape(layers, capacity, heads, value_dim)
        return decays, np.repeat(keys, heads // geometry.key_heads, axis=2), deltas

    def reset(self) -> None:
        """Takes every slot back."""
        self._free = list(range(len(self._active) - 1, -1, -1))

    def _generations(self, slots: Sequence[int]) -> tuple[int, ...]:
        """How often each slot was taken or committed; what was prepared for one generation fits no other."""
        return tuple(self._generation[slot] for slot in slots)

    def commit(self, view: StateView) -> None:
        """Swaps the banks of the view's slots. Cannot fail, but for a view that is not the newest: a slot of it was
        taken or committed since, or another view made.
        """
        if self._generations(view.slots) != self._reserved:
            raise AssertionError("the slots were taken or committed since this step began")
        for slot in view.slots:
            self._active[slot] ^= 1
            self._generation[slot] += 1
