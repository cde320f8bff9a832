"""HeadModel: the MTP head's graph with a cache of its own, run through the host or, in a chain, on a device alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder import contract
from builder.reader import GraphFile
from runtime.draft_memory import DraftMemory
from runtime.hidden_memory import HiddenMemory
from runtime.lowering.choosing import BEST_LOGITS, SCORED_HIDDEN, SCORED_ROWS, TOKEN_IDS
from runtime.lowering.feeding import FED_ROWS
from runtime.packing import Array, BatchShape, PackedBatch, Segment, shape_of
from runtime.paged_cache import PagedCache
from runtime.place import DeviceArray
from runtime.prepared import Choice, Prepared, PreparedRuns, RunObserver, row_output
from runtime.session import Session

MAX_CAPTURED_ROWS = 8
"""Rows of a request that a recorded run of the head may have: more come from prompts, whose shapes never repeat."""


class HeadModel:
    """Runs packed rows of the head, whose cache is indexed by the target's block tables.

    depth, num_rows: drafts of the longest chain, and requests that draft at once, as memory on a device has to know.
    fed: where the target leaves its hidden states on a device.
    """

    def __init__(
        self,
        graph: GraphFile,
        session: Session,
        num_blocks: int,
        block_size: int,
        *,
        depth: int = 1,
        num_rows: int = 1,
        fed: HiddenMemory | None = None,
    ) -> None:
        self._io = graph.io
        self._session = session
        self._place = session.place
        self._block_size = block_size
        self._cache = PagedCache(graph.io, (0,), num_blocks, block_size, session.place)
        self.memory = None if session.place.is_host else DraftMemory(graph.io, depth, num_rows, session.place)
        self._fed = fed
        self._runs = PreparedRuns()
        self.on_run: RunObserver | None = None

    @property
    def records(self) -> bool:
        return self._session.records

    def run(
        self, segments: Sequence[Segment], hidden: Sequence[Array], scored: Sequence[int] | None = None
    ) -> Prepared:
        """Feeds each request's tokens [n] with hidden states [n, hidden], or with the numbers [n] of the target's on a
        device; what it gives is valid until the next run.

        scored: packed rows that draft a token, None for all; heeded where the graph chooses.
        """
        shape = shape_of(segments, spread=self._place.spreads)
        captured = shape.num_tokens == shape.batch_size and self._captures(shape)  # others seldom come again
        if scored is None or self.on_run:
            scored = range(shape.num_tokens)
        numbered = hidden[0].ndim == 1
        key = ("host", shape, len(scored), self.on_run is not None, numbered)
        prepared = self._runs.get(key, lambda: self._prepare(shape, max(1, len(scored)), numbered, captured))
        if prepared.choice and scored:
            prepared.choice.rows[:] = scored
        prepared.batch.fill(segments, self._block_size if captured else None)
        np.concatenate(hidden, out=prepared.extra[FED_ROWS if numbered else contract.HIDDEN_STATES])
        return self._launch(prepared, segments)

    def run_on(self, prepared: Prepared, segments: Sequence[Segment], token_ids: Sequence[int]) -> Prepared:
        """The same one-token rows a position further, each fed its new token and its own hidden state."""
        prepared.batch.advance(token_ids)
        prepared.extra[contract.HIDDEN_STATES][:] = prepared.hidden
        return self._launch(prepared, segments)

    def _launch(self, prepared: Prepared, segments: Sequence[Segment]) -> Prepared:
        prepared.bound.run()
        if self.on_run:
            self.on_run(segments, (prepared.logits, prepared.hidden))
        return prepared

    def _prepare(self, shape: BatchShape, num_scored: int, numbered: bool, captured: bool) -> Prepared:
        batch, io = PackedBatch(shape, spread=self._place.spreads), self._io
        extra = {} if numbered else {contract.HIDDEN_STATES: self._hidden_input(shape)}
        if not self._place.is_host:
            extra[FED_ROWS] = np.arange(shape.num_tokens)
        with_logits = self._place.is_host or self.on_run is not None
        choice = None if self._place.is_host else Choice.of(num_scored, io, self._place)
        num_rows = num_scored if choice else shape.num_tokens
        logits = row_output(io, contract.LOGITS, num_rows if with_logits else 0, self._place)
        hidden = row_output(io, contract.HEAD_HIDDEN_STATES, shape.num_tokens if with_logits else 0, self._place)
        bound = self._session.bind(
            {
                **batch.arrays,
                **extra,
                **({contract.HIDDEN_STATES: self._target_rows} if numbered else {}),
                **({SCORED_ROWS: choice.rows} if choice else {}),
                **self._cache.inputs,
            },
            {
                **({contract.LOGITS: logits} if with_logits else {}),
                **(choice.outputs if choice else {}),
                **({contract.HEAD_HIDDEN_STATES: hidden} if with_logits else {}),
                **self._cache.outputs,
            },
            capture=captured,
        )
        on_device = shape.num_tokens * row_output(io, contract.HEAD_HIDDEN_STATES, 1, self._place).nbytes
        return Prepared(batch, extra, logits, hidden, bound, choice, device_bytes=on_device if numbered else 0)

    def run_on_device(
        self, stage: int, segments: Sequence[Segment], scored: Sequence[int], numbers: Sequence[Array] = ()
    ) -> None:
        """Run `stage` of a chain, which leaves its tokens in `memory`. The first one is fed target rows by `numbers`.

        The others find tokens and hidden states there; of their segments only number, length and place count.
        """
        shape = shape_of(segments, spread=self._place.spreads)
        key = ("device", shape, len(scored), stage)
        prepared = self._runs.get(key, lambda: self._prepare_stage(shape, len(scored), stage))
        prepared.extra[SCORED_ROWS][:] = scored
        prepared.batch.fill(segments, self._block_size if self._captures(shape) else None)
        if not stage:
            np.concatenate(numbers, out=prepared.extra[FED_ROWS])
        prepared.bound.run()

    def _prepare_stage(self, shape: BatchShape, num_scored: int, stage: int) -> Prepared:
        """Behind the first run, tokens and hidden states are the first rows that the run before has left."""
        memory = self.memory
        if memory is None or stage >= memory.depth or max(num_scored, shape.batch_size) > memory.rows:
            raise AssertionError(f"a chain of {shape.batch_size} requests and {stage + 1} runs was not planned for")
        batch = PackedBatch(shape, spread=self._place.spreads)
        extra = {SCORED_ROWS: np.zeros(num_scored, np.int64), FED_ROWS: np.arange(shape.num_tokens)}
        chained: dict[str, DeviceArray] = {}
        if stage:
            rows = slice(0, shape.num_tokens)
            chained[contract.INPUT_IDS] = memory.token_ids[stage - 1, rows]
            chained[contract.HIDDEN_STATES] = memory.hidden[stage - 1, rows]
        else:
            chained[contract.HIDDEN_STATES] = self._target_rows
        made = slice(0, num_scored)
        outputs = {
            TOKEN_IDS: memory.token_ids[stage, made],
            BEST_LOGITS: memory.logits[stage, made].reshape(num_scored, 1),
            SCORED_HIDDEN: memory.hidden[stage, made],
        }
        bound = self._session.bind(
            {**batch.arrays, **extra, **chained, **self._cache.inputs},
            {**outputs, **self._cache.outputs},
            capture=self._captures(shape),
        )
        none = np.empty((0, 0), np.float32)
        return Prepared(batch, extra, none, none, bound)

    @property
    def _target_rows(self) -> DeviceArray:
        if self._fed is None:
            raise AssertionError("the head was not told where the target leaves its hidden states")
        return self._fed.rows

    def _hidden_input(self, shape: BatchShape) -> Array:
        spec = self._io.input(contract.HIDDEN_STATES)
        return np.empty((shape.num_tokens, int(spec.shape[1])), self._place.array_type(spec))

    def _captures(self, shape: BatchShape) -> bool:
        """Whether to record runs of a shape: those that come again at every step."""
        again = shape.num_tokens <= MAX_CAPTURED_ROWS * shape.batch_size
        return again and self._session.records and self.on_run is None
