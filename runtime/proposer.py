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
from runtime.packing import Array, PackedBatch, Segment, shape_of
from runtime.request import Request
from runtime.sampling import greedy
from runtime.scheduler import RowPlan
from runtime.session import Session
from runtime.target import Prepared, PreparedRuns, RunObserver, cache_outputs, paged_caches, row_outputs
from runtime.telemetry import Stats


@dataclass(frozen=True)
class HeadRows:
    """What one request feeds the head: token ids [n] and hidden states [n, hidden] from position `past_length` on."""

    request: Request
    token_ids: list[int]
    hidden: Array
    past_length: int

    def segment(self) -> Segment:
        table = self.request.table
        return Segment(self.token_ids, self.past_length, table.blocks if table else ())


class MtpProposer:
    """The head graph with a cache of its own, indexed by the target's block tables."""

    def __init__(self, graph: GraphFile, session: Session, num_blocks: int, block_size: int) -> None:
        self._io = graph.io
        self._session = session
        self._caches = paged_caches(graph.io, (0,), num_blocks, block_size)
        self._runs = PreparedRuns()
        self.on_run: RunObserver | None = None

    def run(self, rows: Sequence[HeadRows]) -> tuple[Array, Array]:
        """logits [T, vocab] and hidden states [T, hidden] of all rows, valid until the next run of the same shape."""
        segments = [row.segment() for row in rows]
        shape = shape_of(segments)
        prepared = self._runs.get((shape,))
        if prepared is None:
            batch = PackedBatch(shape)
            width = int(self._io.input(contract.HIDDEN_STATES).shape[1])
            extra = {contract.HIDDEN_STATES: np.empty((shape.num_tokens, width), np.float32)}
            arrays = row_outputs(self._io, shape.num_tokens, (contract.LOGITS, contract.HEAD_HIDDEN_STATES))
            bound = self._session.bind(
                {**batch.arrays, **extra, **self._caches}, {**arrays, **cache_outputs(self._caches)}
            )
            prepared = Prepared(batch, extra, arrays, bound)
            self._runs.keep((shape,), prepared)
        prepared.batch.fill(segments)
        np.concatenate([row.hidden for row in rows], out=prepared.extra[contract.HIDDEN_STATES])
        prepared.bound.run()
        outputs = prepared.outputs[contract.LOGITS], prepared.outputs[contract.HEAD_HIDDEN_STATES]
        if self.on_run:
            self.on_run(segments, outputs)
        return outputs

    def prime(self, requests: Sequence[Request], stats: Stats) -> None:
        """Feeds prompt rows whose next token is known from the prompt; the last row of a prompt is held for stage 0."""
        rows = [row for request in requests if request.unread_hidden and (row := self._prompt_rows(request))]
        if rows:
            self._feed(rows, stats)

    def _prompt_rows(self, request: Request) -> HeadRows | None:
        hidden = request.take_unread_hidden()
        start = request.head_length
        feedable = min(len(hidden), len(request.prompt) - 1 - start)
        if feedable < len(hidden):
            request.unread_hidden.append(hidden[feedable:])
        if not feedable:
            return None
        return HeadRows(request, request.known(start + 1, start + 1 + feedable), hidden[:feedable], start)

    def _feed(self, rows: Sequence[HeadRows], stats: Stats) -> tuple[Array, Array]:
        outputs = self.run(rows)
        stats.draft_forward_passes += 1
        for row in rows:
            row.request.head_length += len(row.token_ids)
        return outputs

    def draft(self, plans: Sequence[RowPlan], stats: Stats) -> dict[Request, list[int]]:
        """plan.num_drafts drafts for each decode row. Every row's head catches up, also one that drafts nothing."""
        active = [plan for plan in plans if plan.request.unread_hidden]
        if not active:
            return {}
        rows = [unread_rows(plan.request) for plan in active]
        logits, hidden = self._feed(rows, stats)
        last = [end - 1 for end in accumulate(len(row.token_ids) for row in rows)]
        chosen, states = greedy(logits[last]), hidden[last]
        drafts: dict[Request, list[int]] = {plan.request: [] for plan in active if plan.num_drafts}
        for stage in range(1, max(plan.num_drafts for plan in active) + 1):
            kept = [index for index, plan in enumerate(active) if plan.num_drafts >= stage]
            for index in kept:
                drafts[active[index].request].append(chosen[index])
            kept = [index for index in kept if active[index].num_drafts > stage]
            if not kept:
                break
            rows = [self._chained(active[index].request, chosen[index], states[index], stage) for index in kept]
            logits, states = self.run(rows)
            stats.draft_forward_passes += 1
            chosen, active = greedy(logits), [active[index] for index in kept]
        return drafts

    def _chained(self, request: Request, draft: int, hidden: Array, stage: int) -> HeadRows:
        return HeadRows(request, [draft], hidden[None], request.head_length + stage - 1)


def unread_rows(request: Request) -> HeadRows:
    """The rows behind head_length: hidden states the target has committed, with the token after each."""
    hidden = request.take_unread_hidden()
    start = request.head_length
    return HeadRows(request, request.known(start + 1, start + 1 + len(hidden)), hidden, start)
