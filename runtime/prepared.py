"""Prepared: a run of one shape, bound to arrays of its own that are filled anew each time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from builder.contract import LOGITS, IoSpec
from runtime.bound_run import BoundRun
from runtime.lowering.choosing import BEST_LOGITS, TOKEN_IDS
from runtime.packing import Array, PackedBatch, Segment
from runtime.place import Place
from runtime.sampling import greedy, refuse_unnumbered

MAX_KEPT_RUNS = 64
MAX_KEPT_BYTES = 1 << 22
"""Prepared runs whose logits and hidden states are larger, on the host or a device, are not kept: they are of prompts,
whose shapes seldom come again, and binding anew costs nothing beside such a step.
"""

RunObserver = Callable[[Sequence[Segment], tuple[Array, Array]], None]
"""Sees the packed rows of a run and its (logits, hidden states)."""


@dataclass(frozen=True)
class Choice:
    """Packed rows [R], in order, that get logits in a run, the best token of each, and its logit [R, 1]."""

    rows: Array
    token_ids: Array
    logits: Array

    @classmethod
    def of(cls, num_scored: int, io: IoSpec, place: Place) -> Choice:
        """For a graph's own type of logits."""
        logits_type = place.array_type(io.output(LOGITS))
        rows, token_ids = np.zeros(num_scored, np.int64), np.zeros(num_scored, np.int64)
        return cls(rows, token_ids, np.zeros((num_scored, 1), logits_type))

    @property
    def outputs(self) -> dict[str, Array]:
        return {TOKEN_IDS: self.token_ids, BEST_LOGITS: self.logits}

    def places(self, rows: Sequence[int]) -> Array:
        """Where these packed rows stand among the scored ones."""
        places = np.searchsorted(self.rows, rows)
        if not np.array_equal(self.rows[places], rows):
            raise AssertionError("a row without logits was asked for")
        return places

    def best(self, rows: Sequence[int]) -> list[int]:
        """The best token of each row. Raises DraftsmithError where its logit is no number."""
        places = self.places(rows)
        refuse_unnumbered(self.logits[places, 0])
        chosen: list[int] = self.token_ids[places].tolist()
        return chosen


@dataclass(frozen=True)
class Prepared:
    """batch holds the packed inputs, extra the graph's other inputs; logits [T, vocab], hidden [T, hidden].

    choice: where the graph chooses itself; logits are then of its rows alone, and fetched only by runs prepared so.
    taps: what was asked for beside that, [T, hidden] each. device_bytes: of hidden states that are not fetched.
    """

    batch: PackedBatch
    extra: dict[str, Array]
    logits: Array
    hidden: Array
    bound: BoundRun
    choice: Choice | None = None
    taps: tuple[Array, ...] = ()
    device_bytes: int = 0

    def best(self, rows: Sequence[int]) -> list[int]:
        """The best token of each of these rows."""
        if self.choice is not None:
            return self.choice.best(rows)
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
        if prepared.logits.nbytes + prepared.hidden.nbytes + prepared.device_bytes <= MAX_KEPT_BYTES:
            self._kept[key] = prepared
            if len(self._kept) > MAX_KEPT_RUNS:
                self._kept.popitem(last=False)
        return prepared


def row_output(io: IoSpec, name: str, num_tokens: int, place: Place) -> Array:
    """An uninitialized array for an output [num_tokens, width]."""
    spec = io.output(name)
    return np.empty((num_tokens, int(spec.shape[1])), place.array_type(spec))
