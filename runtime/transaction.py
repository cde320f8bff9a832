"""Transaction: one step's hold on blocks and states, from reservation to commit or rollback.

Used as a context manager: leaving it without `commit` returns every block the step reserved and hands the head's rows
back to be fed again; the states' active banks were never written, so the engine is as before the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from runtime.fixed_state import FixedStates, StateView
from runtime.packing import Segment
from runtime.request import Request, slot_of, table_of
from runtime.scheduler import RowPlan


class Transaction:
    """Reserves blocks for all rows, drafts included, and the state view of their slots."""

    def __init__(self, plan: Sequence[RowPlan], states: FixedStates | None) -> None:
        self.plan = plan
        self._states = states
        self._committed = False
        self._head_before = {row.request: (row.request.head_length, list(row.request.unread_hidden)) for row in plan}
        self.view: StateView | None = states.view([slot_of(row.request) for row in plan]) if states else None
        self._blocks_before = {
            row.request: table_of(row.request).grow(row.request.num_cached + row.length) for row in plan
        }

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            for request, blocks in self._blocks_before.items():
                table_of(request).shrink(blocks)
            for request, (length, unread) in self._head_before.items():
                request.head_length, request.unread_hidden = length, unread

    def segments(self, drafts: dict[Request, list[int]]) -> list[Segment]:
        """The packed rows: each request's next known tokens, then its drafts."""
        segments: list[Segment] = []
        for row in self.plan:
            request = row.request
            known = request.known(request.num_cached, request.num_cached + row.num_tokens)
            segments.append(Segment([*known, *drafts.get(request, ())], request.num_cached, table_of(request).blocks))
        return segments

    def capture_counts(self) -> list[int]:
        """Tokens to capture per row: every token of a row with drafts, none of the others."""
        return [row.length if row.num_drafts else 0 for row in self.plan]

    def commit(self, kept: Sequence[int]) -> None:
        """Keeps the first kept[row] tokens of each row: prepares states (may fail), then publishes (cannot)."""
        if self._states and self.view:
            self._states.prepare(self.view, kept, [row.length for row in self.plan])
            self._states.commit(self.view)
        for row, count in zip(self.plan, kept, strict=True):
            request = row.request
            request.num_cached += count
            table = table_of(request)
            table.shrink(table.pool.blocks_for(request.num_cached))
        self._committed = True
