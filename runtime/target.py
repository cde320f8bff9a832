"""TargetModel: the target graph with its caches and states."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from builder import contract
from builder.reader import Package
from runtime.fixed_state import FixedStates, StateGeometry, StateView
from runtime.packing import Array, BatchShape, PackedBatch, Segment, shape_of
from runtime.session import BoundRun, Session, array_type

MAX_KEPT_RUNS = 64
MAX_KEPT_BYTES = 1 << 22
"""Prepared runs whose outputs are larger are not kept: binding anew costs nothing beside such a step."""


RunObserver = Callable[[Sequence[Segment], tuple[Array, Array]], None]
"""Sees the packed rows of a run and its (logits, hidden states)."""


@dataclass(frozen=True)
class Prepared:
    """A run bound to its own input and output arrays."""

    batch: PackedBatch
    extra: dict[str, Array]
    outputs: dict[str, Array]
    bound: BoundRun


class PreparedRuns:
    """The most recently used prepared runs, by shape and memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], Prepared] = OrderedDict()

    def get(self, key: tuple[object, ...]) -> Prepared | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: tuple[object, ...], prepared: Prepared) -> None:
        if sum(array.nbytes for array in prepared.outputs.values()) > MAX_KEPT_BYTES:
            return
        self._kept[key] = prepared
        if len(self._kept) > MAX_KEPT_RUNS:
            self._kept.popitem(last=False)


def paged_caches(io: contract.IoSpec, layers: Sequence[int], num_blocks: int, block_size: int) -> dict[str, Array]:
    """Zeroed cache arrays [num_blocks, block_size, kv_heads, head_dim] by input name."""
    caches: dict[str, Array] = {}
    for layer in layers:
        for template in (contract.PAST_KEY, contract.PAST_VALUE):
            spec = io.input(template.format(layer))
            heads, dim = map(int, spec.shape[2:])
            caches[spec.name] = np.zeros((num_blocks, block_size, heads, dim), array_type(spec))
    return caches


def cache_outputs(caches: dict[str, Array]) -> dict[str, Array]:
    """The same arrays by output name: caches are updated in place."""
    return {name.replace("past_key_values", "present"): array for name, array in caches.items()}


class TargetModel:
    """Runs packed steps. Caches change in place; states only in the inactive bank of a view."""

    def __init__(self, package: Package, session: Session, num_blocks: int, block_size: int, num_slots: int) -> None:
        self.package = package
        self._session = session
        self._caches = paged_caches(package.target.io, package.full_layers, num_blocks, block_size)
        self._runs = PreparedRuns()
        self.on_run: RunObserver | None = None
        geometry = StateGeometry.of(package)
        self.states = FixedStates(geometry, num_slots) if geometry else None

    def run(
        self, segments: Sequence[Segment], view: StateView | None, capture_counts: Sequence[int]
    ) -> tuple[Array, Array]:
        """logits [T, vocab] and hidden states [T, hidden], valid until the next run of the same shape."""
        shape = shape_of(segments)
        key = (shape, view.key if view else None)
        prepared = self._runs.get(key)
        if prepared is None:
            prepared = self._prepare(shape, view)
            self._runs.keep(key, prepared)
        prepared.batch.fill(segments)
        if self.package.capacity:
            prepared.extra[contract.CAPTURE_COUNT][:] = capture_counts
            prepared.extra[contract.CAPTURE_ACTIVE][0] = any(capture_counts)
        prepared.bound.run()
        outputs = prepared.outputs[contract.LOGITS], prepared.outputs[contract.HIDDEN_STATES]
        if self.on_run:
            self.on_run(segments, outputs)
        return outputs

    def _prepare(self, shape: BatchShape, view: StateView | None) -> Prepared:
        batch = PackedBatch(shape)
        extra: dict[str, Array] = {}
        if self.package.capacity:
            extra[contract.CAPTURE_COUNT] = np.zeros(shape.batch_size, np.int32)
            extra[contract.CAPTURE_ACTIVE] = np.zeros(1, np.int32)
        outputs = row_outputs(self.package.target.io, shape.num_tokens, (contract.LOGITS, contract.HIDDEN_STATES))
        states_in, states_out = (view.inputs, view.outputs) if view else ({}, {})
        bound = self._session.bind(
            {**batch.arrays, **extra, **self._caches, **states_in},
            {**outputs, **cache_outputs(self._caches), **states_out},
        )
        return Prepared(batch, extra, outputs, bound)


def row_outputs(io: contract.IoSpec, num_tokens: int, names: Sequence[str]) -> dict[str, Array]:
    """Uninitialized arrays for outputs [num_tokens, width]."""
    specs = [io.output(name) for name in names]
    return {spec.name: np.empty((num_tokens, int(spec.shape[1])), array_type(spec)) for spec in specs}
