"""MtpProposer: chained drafts from the MTP head, whose own cache follows every committed token.

Row p of the head is (target hidden p, token p + 1). Stage 0 feeds the rows a request has committed since the head
last saw it, so the last row drafts the token after the newest one; each later stage feeds the draft and the head's
own hidden state. Later stages write beyond head_length and are simply overwritten: rolling back costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from builder import contract
from builder.reader import GraphFile
from runtime.lowering.choosing import SCORED_ROWS
from runtime.packing import Array, BatchShape, PackedBatch, Segment, shape_of
from runtime.paged_cache import PagedCache
from runtime.prepared import Choice, Prepared, PreparedRuns, RunObserver, row_output
from runtime.request import Request, table_of
from runtime.scheduler import RowPlan
from runtime.session import Session

MAX_CAPTURED_ROWS = 8
"""Rows of a request that a recorded run of the head may have: more come from prompts, whose shapes never repeat."""


@dataclass(frozen=True)
class HeadRows:
    """What one request feeds the head: token ids [n] and hidden states [n, hidden] from position `past_length` on."""

    request: Request
    token_ids: list[int]
    hidden: Array
    past_length: int

    @property
    def segment(self) -> Segment:
        return Segment(self.token_ids, self.past_length, table_of(self.request).blocks)


@dataclass(frozen=True)
class HeadWork:
    """Drafts by request, and who took part in each run of the head."""

    drafts: dict[Request, list[int]]
    runs: tuple[tuple[Request, ...], ...]


class MtpProposer:
    """The head graph with a cache of its own, indexed by the target's block tables."""

    def __init__(self, graph: GraphFile, session: Session, num_blocks: int, block_size: int) -> None:
        self._io = graph.io
        self._session = session
        self._place = session.place
        self._block_size = block_size
        self._cache = PagedCache(graph.io, (0,), num_blocks, block_size, session.place)
        self._runs = PreparedRuns()
        self.on_run: RunObserver | None = None

    def run(
        self, segments: Sequence[Segment], hidden: Sequence[Array], scored: Sequence[int] | None = None
    ) -> Prepared:
        """Feeds each request's tokens [n] with hidden states [n, hidden]; what it gives is valid until the next run.

        scored: packed rows that draft a token, None for all; heeded where the graph chooses.
        """
        shape = shape_of(segments)
        if scored is None or self.on_run:
            scored = range(shape.num_tokens)
        key = (shape, len(scored), self.on_run is not None)
        prepared = self._runs.get(key, lambda: self._prepare(shape, max(1, len(scored))))
        if prepared.choice and scored:
            prepared.choice.rows[:] = scored
        prepared.batch.fill(segments, self._block_size if self._captures(shape) else None)
        np.concatenate(hidden, out=prepared.extra[contract.HIDDEN_STATES])
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

    def _prepare(self, shape: BatchShape, num_scored: int) -> Prepared:
        batch, io = PackedBatch(shape), self._io
        width = int(io.input(contract.HIDDEN_STATES).shape[1])
        extra = {
            contract.HIDDEN_STATES: np.empty(
                (shape.num_tokens, width), self._place.array_type(io.input(contract.HIDDEN_STATES))
            )
        }
        with_logits = self._place.is_host or self.on_run is not None
        choice = None if self._place.is_host else Choice.of(num_scored, io, self._place)
        num_rows = num_scored if choice else shape.num_tokens
        logits = row_output(io, contract.LOGITS, num_rows if with_logits else 0, self._place)
        hidden = row_output(io, contract.HEAD_HIDDEN_STATES, shape.num_tokens, self._place)
        bound = self._session.bind(
            {**batch.arrays, **extra, **({SCORED_ROWS: choice.rows} if choice else {}), **self._cache.inputs},
            {
                **({contract.LOGITS: logits} if with_logits else {}),
                **(choice.outputs if choice else {}),
                contract.HEAD_HIDDEN_STATES: hidden,
                **self._cache.outputs,
            },
            capture=self._captures(shape),
        )
        return Prepared(batch, extra, logits, hidden, bound, choice)

    def _captures(self, shape: BatchShape) -> bool:
        """Whether to record runs of a shape: those that come again at every step."""
        again = shape.num_tokens <= MAX_CAPTURED_ROWS * shape.batch_size
        return again and self._session.records and self.on_run is None

    def follow(self, requests: Sequence[Request]) -> HeadWork:
        """Feeds rows of prompts whose next token is known already; the last row of a prompt is held for stage 0."""
        fed = [(request, request.prefill_end - 1 - request.head_length) for request in requests]
        rows = [unread_rows(request, limit) for request, limit in fed if request.unread_hidden and limit > 0]
        if not rows:
            return HeadWork({}, ())
        self._feed(rows, ())
        return HeadWork({}, (tuple(row.request for row in rows),))

    def _feed(self, rows: Sequence[HeadRows], scored: Sequence[int]) -> Prepared:
        prepared = self.run([row.segment for row in rows], [row.hidden for row in rows], scored)
        for row in rows:
            row.request.mark_read(len(row.token_ids))
        return prepared

    def draft(self, plans: Sequence[RowPlan]) -> HeadWork:
        """plan.num_drafts drafts for each decode row. Every row's head catches up, also one that drafts nothing."""
        rows = [unread_rows(plan.request) for plan in plans if plan.request.unread_hidden]
        if not rows:
            return HeadWork({}, ())
        last = [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
        run = self._feed(rows, last)
        runs = [tuple(row.request for row in rows)]
        chosen, hidden = run.best(last), run.hidden[last]
        wanted = {plan.request: plan.num_drafts for plan in plans if plan.num_drafts}
        drafts = {row.request: [token] for row, token in zip(rows, chosen, strict=True) if row.request in wanted}
        states = {row.request: state[None] for row, state in zip(rows, hidden, strict=True)}
        active: list[Request] = []
        for stage in range(1, max(wanted.values(), default=0)):
            before, active = active, [request for request in drafts if wanted[request] > stage]
            segments = [chained(request, drafts[request][-1], stage) for request in active]
            if active == before:
                run = self.run_on(run, segments, [drafts[request][-1] for request in active])
            else:
                run = self.run(segments, [states[request] for request in active])
            runs.append(tuple(active))
            states = {request: run.hidden[i : i + 1].copy() for i, request in enumerate(active)}
            for request, token in zip(active, run.best(range(len(active))), strict=True):
                drafts[request].append(token)
        return HeadWork(drafts, tuple(runs))


def chained(request: Request, draft: int, stage: int) -> Segment:
    """A draft fed behind head_length; the next stage 0 overwrites what it leaves in the cache."""
    return Segment([draft], request.head_length + stage - 1, table_of(request).blocks)


def unread_rows(request: Request, limit: int | None = None) -> HeadRows:
    """At most `limit` rows behind head_length: hidden states the target has committed, with the token after each."""
    hidden = request.unread()[:limit]
    start = request.head_length
    return HeadRows(request, request.known(start + 1, start + 1 + len(hidden)), hidden, start)
