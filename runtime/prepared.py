"""Prepared: a run of one shape, bound to arrays of its own that are filled anew each time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from builder.contract import IoSpec
from runtime.packing import Array, PackedBatch, Segment
from runtime.place import Place
from runtime.sampling import greedy
from runtime.session import BoundRun

MAX_KEPT_RUNS = 64
MAX_KEPT_BYTES = 1 << 22
"""Prepared runs whose outputs are larger are not kept: binding anew costs nothing beside such a step."""

RunObserver = Callable[[Sequence[Segment], tuple[Array, Array]], None]
"""Sees the packed rows of a run and its (logits, hidden states)."""


@dataclass(frozen=True)
class Choice:
    """Packed rows [R], in order, that get logits in a run, and the best token of each."""

    rows: Array
    token_ids: Array

    @classmethod
    def of(cls, num_scored: int) -> Choice:
        return cls(np.zeros(num_scored, np.int64), np.zeros(num_scored, np.int64))

    def places(self, rows: Sequence[int]) -> Array:
        """Where these packed rows stand among the scored ones."""
        return np.searchsorted(self.rows, rows)


@dataclass(frozen=True)
class Prepared:
    """batch holds the packed inputs, extra the graph's other inputs; logits [T, vocab], hidden [T, hidden].

    choice: where the graph chooses itself; logits are then of its rows alone, and fetched only by runs prepared so.
    """

    batch: PackedBatch
    extra: dict[str, Array]
    logits: Array
    hidden: Array
    bound: BoundRun
    choice: Choice | None = None

    def best(self, rows: Sequence[int]) -> list[int]:
        """The best token of each of these rows."""
        if self.choice is not None:
            chosen: list[int] = self.choice.token_ids[self.choice.places(rows)].tolist()
            return chosen
        return greedy(self.logits if len(rows) == len(self.logits) else self.logits[rows])

    def scores(self, rows: Sequence[int]) -> Array:
        """Logits of these rows."""
        return self.logits[rows if self.choice is None else self.choice.places(rows)]


class PreparedRuns:
    """The most recently used prepared runs, by shape and memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()

    def get(self, key: tuple[object, ...], prepare: Callable[[], Prepared]) -> Prepared:
        """The run kept under `key`, or a new one."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        prepared = prepare()
        if prepared.logits.nbytes + prepared.hidden.nbytes <= MAX_KEPT_BYTES:
            self._kept[key] = prepared
            if len(self._kept) > MAX_KEPT_RUNS:
                self._kept.popitem(last=False)
        return prepared


def row_output(io: IoSpec, name: str, num_tokens: int, place: Place) -> Array:
    """An uninitialized array for an output [num_tokens, width]."""
    spec = io.output(name)
    return np.empty((num_tokens, int(spec.shape[1])), place.array_type(spec))
