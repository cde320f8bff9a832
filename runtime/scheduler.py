"""The plan of a step: who runs, on how many tokens, with how many drafts, and who must give up blocks for it.

A plan is made from the requests' states and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from runtime.request import Request


@dataclass(frozen=True)
class RowPlan:
    """One request in a step, as it stood when the step was planned.

    num_tokens known tokens are fed, then num_drafts drafts. samples: the row ends with a token to choose, which all
    but the inner chunks of a prompt do. admitted: the request has neither blocks nor a slot yet.
    """

    request: Request
    num_tokens: int
    is_prefill: bool
    samples: bool
    num_drafts: int = 0
    admitted: bool = False

    @classmethod
    def of(cls, request: Request, num_tokens: int, *, admitted: bool = False) -> RowPlan:
        samples = request.num_cached + num_tokens == request.num_known
        return cls(request, num_tokens, request.is_prefill, samples, admitted=admitted)

    @property
    def length(self) -> int:
        return self.num_tokens + self.num_drafts

    @property
    def reserved_tokens(self) -> int:
        """Tokens that the request has blocks for in this step: a prompt has them all from its first chunk on."""
        return max(self.request.num_cached + self.length, self.request.prefill_end if self.is_prefill else 0)


@dataclass(frozen=True)
class StepPlan:
    """Rows in packed order: decodes, then prompt chunks. preempted requests lose their blocks before the step;
    deferred ones keep theirs and wait for others to give some back.
    """

    rows: tuple[RowPlan, ...]
    preempted: tuple[Request, ...] = ()
    deferred: tuple[Request, ...] = ()


@dataclass(frozen=True)
class StepLimits:
    """What a step may take: packed tokens, requests in the batch, drafts a request, and free blocks of a size."""

    max_tokens: int
    max_requests: int
    max_draft_tokens: int
    free_blocks: int
    block_size: int


class _Room:
    """Packed tokens and free blocks that are left while a plan is made."""

    def __init__(self, limits: StepLimits) -> None:
        self.tokens = limits.max_tokens
        self.blocks = limits.free_blocks
        self._block_size = limits.block_size

    def missing(self, request: Request, tokens: int) -> int:
        """Blocks that `request` lacks for `tokens` tokens in all."""
        owned = len(request.table.blocks) if request.table else 0
        return max(0, -(-tokens // self._block_size) - owned)


def plan_step(
    running: Sequence[Request], waiting: Sequence[Request], limits: StepLimits, wanted: Callable[[Request], int]
) -> StepPlan:
    """Decode rows first, then prompt chunks and new requests, each in the order given; drafts with what is left.

    running is in order of admission: where blocks run out, the last one gives up its own for an earlier one.
    wanted: drafts that a request would take. There are none in a step that holds prompt rows: the recurrent op may
    then run a chunked kernel that captures no updates to roll back by.
    """
    room = _Room(limits)
    kept = list(running)
    decodes, preempted, deferred = _decodes(kept, room)
    prefills = _chunks(kept, room)
    if not preempted:
        prefills += _admissions(waiting, limits.max_requests - len(kept), room)
    if limits.max_draft_tokens and not prefills:
        decodes = [_with_drafts(row, min(wanted(row.request), limits.max_draft_tokens), room) for row in decodes]
    return StepPlan((*decodes, *prefills), tuple(preempted), tuple(deferred))


def _decodes(kept: list[Request], room: _Room) -> tuple[list[RowPlan], list[Request], list[Request]]:
    """Rows of one token, the requests that gave way to them (removed from `kept`), and those that found no block."""
    rows: list[RowPlan] = []
    preempted: list[Request] = []
    deferred: list[Request] = []
    for request in [request for request in kept if not request.is_prefill]:
        if request in preempted or not room.tokens:
            continue
        needed = room.missing(request, request.num_cached + 1)
        while needed > room.blocks and kept[-1] is not request:
            victim = kept.pop()
            preempted.append(victim)
            room.blocks += len(victim.table.blocks) if victim.table else 0
        if needed > room.blocks:
            deferred.append(request)
            continue
        room.blocks -= needed
        room.tokens -= 1
        rows.append(RowPlan.of(request, 1))
    return rows, preempted, deferred


def _chunks(kept: Sequence[Request], room: _Room) -> list[RowPlan]:
    """The next tokens of every prompt that has its blocks already."""
    rows = []
    for request in kept:
        if request.is_prefill and room.tokens:
            rows.append(_chunk(request, room))
    return rows


def _admissions(waiting: Sequence[Request], seats: int, room: _Room) -> list[RowPlan]:
    """First chunks of waiting requests, in order, while there are blocks for the whole prompt and a token more."""
    rows: list[RowPlan] = []
    for request in waiting:
        needed = room.missing(request, request.prefill_end)
        with_next = room.missing(request, min(request.prefill_end + 1, request.max_cached))
        if len(rows) == seats or not room.tokens or max(needed, with_next) > room.blocks:
            break  # nobody overtakes: a long prompt would wait for ever
        room.blocks -= needed
        rows.append(replace(_chunk(request, room), admitted=True))
    return rows


def _chunk(request: Request, room: _Room) -> RowPlan:
    length = min(request.prefill_end - request.num_cached, room.tokens)
    room.tokens -= length
    return RowPlan.of(request, length)


def _with_drafts(row: RowPlan, wanted: int, room: _Room) -> RowPlan:
    """As many drafts as are wanted, useful, and fit what is left of tokens and blocks."""
    request = row.request
    drafts = min(wanted, request.draft_room, room.tokens)
    if drafts <= 0:
        return row
    first = request.num_cached + 1
    while room.missing(request, first + drafts) - room.missing(request, first) > room.blocks:
        drafts -= 1
    room.blocks -= room.missing(request, first + drafts) - room.missing(request, first)
    room.tokens -= drafts
    return replace(row, num_drafts=drafts)
