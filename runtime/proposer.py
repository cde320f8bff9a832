"""MtpProposer: chained drafts from the MTP head, whose own cache follows every committed token.

Row p of the head is (target hidden p, token p + 1). Stage 0 feeds the rows a request has committed since the head
last saw it, so the last row drafts the token after the newest one; each later stage feeds the draft and the head's
own hidden state. Later stages write beyond head_length and are simply overwritten: rolling back costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from runtime.draft_memory import DraftMemory
from runtime.head import HeadModel
from runtime.packing import Array, Segment
from runtime.prepared import Prepared
from runtime.request import Request, table_of
from runtime.scheduler import RowPlan


@dataclass(frozen=True)
class HeadRows:
    """What one request feeds the head: token ids [n] and hidden states from position `past_length` on.

    hidden: the states [n, hidden], or the numbers [n] of their rows on a device.
    """

    request: Request
    token_ids: list[int]
    hidden: Array
    past_length: int

    def filled(self, length: int) -> HeadRows:
        """At least `length` rows, the further ones of no meaning: what they leave in the cache lies behind head_length,
        where the next run writes before anything reads.
        """
        missing = length - len(self.token_ids)
        if missing <= 0:
            return self
        numbers = np.concatenate([self.hidden, np.repeat(self.hidden[-1:], missing)])
        return replace(self, token_ids=[*self.token_ids, *[0] * missing], hidden=numbers)

    @property
    def segment(self) -> Segment:
        return Segment(self.token_ids, self.past_length, table_of(self.request).blocks)


@dataclass(frozen=True)
class HeadWork:
    """Drafts by request, and who took part in each run of the head."""

    drafts: dict[Request, list[int]]
    runs: tuple[tuple[Request, ...], ...]


class MtpProposer:
    """Drafts by the head, row by row of a step, and keeps its cache behind every committed token."""

    def __init__(self, head: HeadModel) -> None:
        self.head = head

    def follow(self, requests: Sequence[Request]) -> HeadWork:
        """Feeds rows of prompts whose next token is known already; the last row of a prompt is held for stage 0."""
        fed = [(request, request.prefill_end - 1 - request.head_length) for request in requests]
        rows = [unread_rows(request, limit) for request, limit in fed if request.unread_hidden and limit > 0]
        if not rows:
            return HeadWork({}, ())
        self._feed(rows, ())
        return HeadWork({}, (tuple(row.request for row in rows),))

    def _feed(self, rows: Sequence[HeadRows], scored: Sequence[int]) -> Prepared:
        prepared = self.head.run([row.segment for row in rows], [row.hidden for row in rows], scored)
        for row in rows:
            row.request.mark_read(len(row.token_ids))
        return prepared

    def draft(self, plans: Sequence[RowPlan]) -> HeadWork:
        """plan.num_drafts drafts for each decode row. Every row's head catches up, also one that drafts nothing.

        Requests stand by the number of their drafts, most first: those that go on are then the first rows of every
        run, and what a run leaves is fed to the next one as it lies.
        """
        wanted = {plan.request: plan.num_drafts for plan in plans}
        unread = [unread_rows(plan.request) for plan in plans if plan.request.unread_hidden]
        if not unread:
            return HeadWork({}, ())
        rows = sorted(unread, key=lambda row: -wanted[row.request])
        requests, counts = [row.request for row in rows], [wanted[row.request] for row in rows]
        active = [sum(count > stage for count in counts) for stage in range(counts[0])]
        if not active:
            self._feed(rows, ())
        tokens = self._chain(rows, active) if active else []
        drafts = {
            request: [tokens[stage][row] for stage in range(count)]
            for row, (request, count) in enumerate(zip(requests, counts, strict=True))
            if count
        }
        return HeadWork(drafts, (tuple(requests), *(tuple(requests[:count]) for count in active[1:])))

    def _chain(self, rows: Sequence[HeadRows], active: Sequence[int]) -> list[list[int]]:
        """Tokens by run: all rows in the first one, of which the first active[s] draft in run s."""
        if self.head.memory and not self.head.on_run:
            return self._chain_on_device(self.head.memory, rows, active)
        last = _last_rows(rows, rows, active[0])
        requests = [row.request for row in rows]
        run = self._feed(rows, last)
        tokens, hidden = [run.best(last)], run.hidden[last]
        for stage, count in enumerate(active[1:], 1):
            given = tokens[-1][:count]
            segments = [chained(request, token, stage) for request, token in zip(requests, given, strict=False)]
            if stage > 1 and count == active[stage - 1]:
                run = self.head.run_on(run, segments, given)
            else:
                run = self.head.run(segments, [hidden[:count]])
            hidden = run.hidden
            tokens.append(run.best(range(count)))
        return tokens

    def _chain_on_device(self, memory: DraftMemory, rows: Sequence[HeadRows], active: Sequence[int]) -> list[list[int]]:
        """The same without a look at any token before the last run is done.

        Where runs are recorded, each request feeds as many rows as if all its drafts had been accepted: how many were
        changes from step to step, and every number of rows would be a recording of its own.
        """
        fed = rows
        if self.head.records:
            fed = [row.filled(1 + sum(place < count for count in active)) for place, row in enumerate(rows)]
        last = _last_rows(rows, fed, active[0])
        self.head.run_on_device(0, [row.segment for row in fed], last, [row.hidden for row in fed])
        for row in rows:
            row.request.mark_read(len(row.token_ids))
        for stage, count in enumerate(active[1:], 1):
            segments = [chained(row.request, 0, stage) for row in rows[:count]]
            self.head.run_on_device(stage, segments, range(count))
        return memory.read(active)


def _last_rows(rows: Sequence[HeadRows], fed: Sequence[HeadRows], count: int) -> list[int]:
    """The packed row that ends each of the first `count` requests' rows, of which more may have been fed."""
    starts = accumulate((len(row.token_ids) for row in fed), initial=0)
    return [start + len(row.token_ids) - 1 for start, row in zip(starts, rows, strict=False)][:count]


def chained(request: Request, draft: int, stage: int) -> Segment:
    """A draft fed behind head_length; the next stage 0 overwrites what it leaves in the cache."""
    return Segment([draft], request.head_length + stage - 1, table_of(request).blocks)


def unread_rows(request: Request, limit: int | None = None) -> HeadRows:
    """At most `limit` rows behind head_length: hidden states the target has committed, with the token after each."""
    hidden = request.unread()[:limit]
    start = request.head_length
    return HeadRows(request, request.known(start + 1, start + 1 + len(hidden)), hidden, start)
