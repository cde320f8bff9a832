"""TargetModel: the target graph with its caches and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from builder import contract
from builder.reader import Package
from runtime.device_state import DeviceStates
from runtime.fixed_state import FixedStates, StateGeometry, StateView
from runtime.hidden_memory import HiddenMemory
from runtime.lowering.choosing import SCORED_ROWS
from runtime.packing import Array, BatchShape, PackedBatch, Segment, shape_of
from runtime.paged_cache import PagedCache
from runtime.place import DeviceArray, Place
from runtime.prepared import MAX_KEPT_BYTES, Choice, Prepared, PreparedRuns, RunObserver, row_output
from runtime.session import Session
from runtime.unpacked import PACKED_ROWS


class Fetch(NamedTuple):
    """What only some runs need. checkpoints: on steps that draft, because on others the graph makes none."""

    logits: bool
    hidden: bool
    checkpoints: bool
    num_scored: int
    capture: bool


class TargetModel:
    """Runs packed steps. Caches change in place; states only in the inactive bank of a view."""

    def __init__(
        self,
        package: Package,
        session: Session,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        taps: Sequence[str] = (),
        memory: HiddenMemory | None = None,
        unpacked: Session | None = None,
    ) -> None:
        """taps: outputs [num_tokens, hidden] that an edit added to the session's graph, fetched by every run.

        memory: where hidden states stay on a device; without, every run brings them. unpacked: the same graph over
        unpacked weights, for steps of many rows.
        """
        self.package = package
        self._taps = tuple(taps)
        self._memory = memory
        self._session = session
        self._unpacked = unpacked
        self._place = session.place
        self._block_size = block_size
        self._cache = PagedCache(package.target.io, package.full_layers, num_blocks, block_size, session.place)
        self._runs = PreparedRuns()
        self.on_run: RunObserver | None = None
        self.states = _states(package, num_slots, session.place)

    def run(
        self,
        segments: Sequence[Segment],
        view: StateView | None,
        capture_counts: Sequence[int],
        *,
        scored: Sequence[int] | None = None,
        with_logits: bool = True,
        with_hidden: bool = True,
        capture: bool = False,
    ) -> Prepared:
        """What the run gives, valid until the next run of the same shape. Hidden states that stay on a device are
        numbers [T] of rows there.

        scored: packed rows that choose a token, None for all; with_logits, with_hidden: somebody looks at their logits,
        at hidden states. All are heeded where the graph chooses, else everything is there. capture: the shape will come
        again, so the run may be recorded where the session records.
        """
        shape = shape_of(segments, spread=self._place.spreads)
        if scored is None or self.on_run:
            scored = range(shape.num_tokens)
        everything = self._place.is_host or self.on_run is not None
        fetch = Fetch(
            logits=with_logits or everything,
            hidden=with_hidden or everything,
            checkpoints=self.package.checkpoints > 0 and self._place.is_host and any(capture_counts),
            num_scored=max(1, len(scored)),
            capture=capture and self._records(shape) and self.on_run is None and not with_logits,
        )
        key = (shape, view.key if view else None, fetch, self._memory.bank if self._memory else 0)
        prepared = self._runs.get(key, lambda: self._prepare(shape, view, fetch))
        prepared.batch.fill(segments, self._block_size if fetch.capture else None)
        if prepared.choice and scored:
            prepared.choice.rows[:] = scored
        if self.package.capacity:
            prepared.extra[contract.CAPTURE_COUNT][:] = capture_counts
            # Kernels clear what they were told not to capture, and nobody reads what nobody captured.
            idle = capture and not self._place.is_host and not self.package.checkpoints
            prepared.extra[contract.CAPTURE_ACTIVE][0] = any(capture_counts) or idle
        prepared.bound.run()
        if self.on_run:
            hidden = self._memory.read(prepared.hidden) if self._memory else prepared.hidden
            self.on_run(segments, (prepared.logits, hidden))
        return prepared

    def _records(self, shape: BatchShape) -> bool:
        """Whether runs of a shape may be recorded: a recording that is not kept would be made anew at every step."""
        return self._session.records and self._hidden_bytes(shape) <= MAX_KEPT_BYTES

    def _hidden_bytes(self, shape: BatchShape) -> int:
        spec = self.package.target.io.output(contract.HIDDEN_STATES)
        return shape.num_tokens * int(spec.shape[1]) * self._place.array_type(spec).itemsize

    def _prepare(self, shape: BatchShape, view: StateView | None, fetch: Fetch) -> Prepared:
        batch, io = PackedBatch(shape, spread=self._place.spreads), self.package.target.io
        extra: dict[str, Array] = {}
        if self.package.capacity:
            extra[contract.CAPTURE_COUNT] = np.zeros(shape.batch_size, np.int32)
            extra[contract.CAPTURE_ACTIVE] = np.zeros(1, np.int32)
        choice = None if self._place.is_host else Choice.of(fetch.num_scored, io, self._place)
        num_rows = fetch.num_scored if choice else shape.num_tokens
        logits = row_output(io, contract.LOGITS, num_rows if fetch.logits else 0, self._place)
        hidden, hidden_output = self._hidden(shape.num_tokens if fetch.hidden else 0)
        taps = {name: row_output(io, contract.HIDDEN_STATES, shape.num_tokens, self._place) for name in self._taps}
        states_in, states_out = (view.inputs, view.outputs) if view else ({}, {})
        checkpoints = self.states.checkpoints(view) if self.states and view and fetch.checkpoints else {}
        many = shape.num_tokens > PACKED_ROWS
        session = self._unpacked if self._unpacked and many else self._session
        bound = session.bind(
            {
                **batch.arrays,
                **extra,
                **({SCORED_ROWS: choice.rows} if choice else {}),
                **self._cache.inputs,
                **states_in,
            },
            {
                **({contract.LOGITS: logits} if fetch.logits else {}),
                **(choice.outputs if choice else {}),
                **({contract.HIDDEN_STATES: hidden_output} if fetch.hidden else {}),
                **taps,
                **self._cache.outputs,
                **states_out,
                **checkpoints,
            },
            capture=fetch.capture,
        )
        on_device = self._hidden_bytes(shape) if self._memory else 0
        return Prepared(batch, extra, logits, hidden, bound, choice, tuple(taps.values()), on_device)

    def _hidden(self, num_tokens: int) -> tuple[Array, Array | DeviceArray]:
        """What a run says of its hidden states, and where they go."""
        if self._memory:
            numbers = self._memory.numbers(num_tokens)
            return numbers, self._memory.part(numbers)
        hidden = row_output(self.package.target.io, contract.HIDDEN_STATES, num_tokens, self._place)
        return hidden, hidden


def _states(package: Package, num_slots: int, place: Place) -> FixedStates | None:
    geometry = StateGeometry.of(package)
    if geometry is None or place.is_host:
        return FixedStates(geometry, num_slots) if geometry else None
    conv = package.target.io.input(contract.PAST_CONV.format(geometry.layers[0]))
    return DeviceStates(replace(geometry, checkpoints=0), num_slots, place, place.array_type(conv))
