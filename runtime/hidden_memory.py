"""HiddenMemory: the target's hidden states on a device, where the head reads them by the numbers of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import onnxruntime as ort

from builder.contract import TensorSpec
from runtime.bound_run import BoundRun
from runtime.place import Array, DeviceArray, Place, ir_type
from runtime.request import Request
from runtime.state_moves import INDEX, gather_rows, load_move
from runtime.state_replay import Input


class HiddenMemory:
    """rows [2 * step_rows + seats * seat_rows, hidden]: two banks that steps write by turns, then seats.

    A step that fails has written over nothing that its requests still have to feed to the head: those rows lie in the
    other bank. Rows of a request that sits steps out move to a seat before their bank is written again. A request's
    unread rows are numbers of rows here.
    """

    def __init__(self, spec: TensorSpec, step_rows: int, seats: int, seat_rows: int, place: Place) -> None:
        """spec: the target's output. step_rows: packed rows of the longest step. seat_rows: most that is ever unread
        between two steps, of each of `seats` requests.
        """
        self._place, self._step_rows, self._seats, self._seat_rows = place, step_rows, seats, seat_rows
        self._bank = 0
        shape = (2 * step_rows + seats * seat_rows, int(spec.shape[1]))
        self.rows = place.device_zeros(shape, place.array_type(spec))

    @property
    def bank(self) -> int:
        """The one that the step at hand writes."""
        return self._bank

    @property
    def _start(self) -> int:
        return self._bank * self._step_rows

    def numbers(self, num_tokens: int) -> Array:
        """int64 [num_tokens]: where the packed rows of the step at hand are."""
        if num_tokens > self._step_rows:
            raise AssertionError(f"a step of {num_tokens} rows, {self._step_rows} were planned for")
        return np.arange(self._start, self._start + num_tokens, dtype=np.int64)

    def part(self, numbers: Array) -> DeviceArray:
        """The memory of rows whose numbers follow one another."""
        start = int(numbers[0]) if len(numbers) else 0
        return self.rows[start : start + len(numbers)]

    def read(self, numbers: Array) -> Array:
        """[n, hidden] on the host, by a copy of the whole memory; for observers."""
        return self.rows.read()[numbers]

    def make_room(self, running: Sequence[Request]) -> None:
        """Before a step: no unread row stays in the bank that it writes. May fail; a row is the same wherever it lies.

        With nobody there the first bank comes next, in step with the states' banks: recorded runs hold both.
        """
        if not running:
            self._bank = 0
        for request in running:
            if any(self._is_due(numbers) for numbers in request.unread_hidden):
                numbers = request.unread()
                request.unread_hidden = [self._seated(numbers, self._free_seat(running))]

    def turn(self) -> None:
        """Behind a committed step: the next one writes the other bank."""
        self._bank ^= 1

    def _is_due(self, numbers: Array) -> bool:
        return bool(np.any((numbers >= self._start) & (numbers < self._start + self._step_rows)))

    def _free_seat(self, running: Sequence[Request]) -> int:
        """The first row of a seat where no request has rows."""
        held = {number for request in running for numbers in request.unread_hidden for number in numbers.tolist()}
        first = 2 * self._step_rows
        for start in range(first, first + self._seats * self._seat_rows, self._seat_rows):
            if held.isdisjoint(range(start, start + self._seat_rows)):
                return start
        raise AssertionError(f"more than {self._seats} requests hold hidden states")

    def _seated(self, numbers: Array, start: int) -> Array:
        if len(numbers) > self._seat_rows:
            raise AssertionError(f"{len(numbers)} unread rows of a request, {self._seat_rows} were planned for")
        session = _gather_session(self._place, self.rows.dtype, self.rows.shape[1])
        seat = np.arange(start, start + len(numbers), dtype=np.int64)
        BoundRun(session, self._place, {"bank": self.rows, "source": numbers}, {"out": self.part(seat)}).run()
        return seat


@lru_cache(maxsize=8)
def _gather_session(place: Place, dtype: np.dtype[np.generic], width: int) -> ort.InferenceSession:
    bank: Input = (ir_type(dtype), ("N", width))
    return load_move(place, {"bank": bank, "source": INDEX}, gather_rows, {"out": bank})
