"""TargetModel: the target graph with its caches and states."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder import contract
from builder.reader import Package
from runtime.fixed_state import FixedStates, StateGeometry, StateView
from runtime.packing import Array, BatchShape, PackedBatch, Segment, shape_of
from runtime.paged_cache import PagedCache
from runtime.prepared import Prepared, PreparedRuns, RunObserver, row_output
from runtime.session import Session


class TargetModel:
    """Runs packed steps. Caches change in place; states only in the inactive bank of a view."""

    def __init__(self, package: Package, session: Session, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.package = package
        self._session = session
        self._cache = PagedCache(package.target.io, package.full_layers, num_blocks, block_size)
        self._runs = PreparedRuns()
        self.on_run: RunObserver | None = None
        geometry = StateGeometry.of(package)
        self.states = FixedStates(geometry, num_slots) if geometry else None

    def run(
        self, segments: Sequence[Segment], view: StateView | None, capture_counts: Sequence[int]
    ) -> tuple[Array, Array]:
        """logits [T, vocab] and hidden states [T, hidden], valid until the next run of the same shape."""
        shape = shape_of(segments)
        bind_checkpoints = self.package.checkpoints > 0 and any(capture_counts)
        key = (shape, view.key if view else None, bind_checkpoints)
        prepared = self._runs.get(key, lambda: self._prepare(shape, view, bind_checkpoints))
        prepared.batch.fill(segments)
        if self.package.capacity:
            prepared.extra[contract.CAPTURE_COUNT][:] = capture_counts
            prepared.extra[contract.CAPTURE_ACTIVE][0] = any(capture_counts)
        prepared.bound.run()
        outputs = prepared.logits, prepared.hidden
        if self.on_run:
            self.on_run(segments, outputs)
        return outputs

    def _prepare(self, shape: BatchShape, view: StateView | None, bind_checkpoints: bool) -> Prepared:
        """bind_checkpoints: on steps that draft, because on others the graph makes none."""
        batch, io = PackedBatch(shape), self.package.target.io
        extra: dict[str, Array] = {}
        if self.package.capacity:
            extra[contract.CAPTURE_COUNT] = np.zeros(shape.batch_size, np.int32)
            extra[contract.CAPTURE_ACTIVE] = np.zeros(1, np.int32)
        logits, hidden = (row_output(io, name, shape.num_tokens) for name in (contract.LOGITS, contract.HIDDEN_STATES))
        states_in, states_out = (view.inputs, view.outputs) if view else ({}, {})
        checkpoints = self.states.checkpoints(view) if self.states and view and bind_checkpoints else {}
        bound = self._session.bind(
            {**batch.arrays, **extra, **self._cache.inputs, **states_in},
            {
                contract.LOGITS: logits,
                contract.HIDDEN_STATES: hidden,
                **self._cache.outputs,
                **states_out,
                **checkpoints,
            },
        )
        return Prepared(batch, extra, logits, hidden, bound)
