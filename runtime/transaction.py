"""Transaction: one step's hold on blocks, slots and states, from reservation to commit or rollback.

Used as a context manager: leaving it without `commit` gives back every block and slot that the step took and hands the
head's rows back to be fed again. The states' active banks and committed cache rows are never written by a step, so the
engine is then as before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from builder.errors import MachineError
from runtime.blocks import BlockPool, BlockTable
from runtime.failures import Boundary
from runtime.fixed_state import FixedStates, StateView
from runtime.packing import Array, Segment
from runtime.request import Request, slot_of, table_of
from runtime.scheduler import RowPlan


class RollbackFailed(MachineError):
    """What a failed step held could not be given back; only Engine.reset() mends that."""


@dataclass(frozen=True)
class _Before:
    """What a step may change of a request before its commit."""

    num_blocks: int
    head_length: int
    unread_hidden: list[Array]

    @classmethod
    def of(cls, request: Request) -> _Before:
        blocks = len(request.table.blocks) if request.table else 0
        return cls(blocks, request.head_length, list(request.unread_hidden))


class Transaction:
    """reserve, then run what is to run, then prepare and commit. reach is told of every boundary."""

    def __init__(
        self,
        rows: Sequence[RowPlan],
        pool: BlockPool,
        states: FixedStates | None,
        reach: Callable[[Boundary], None],
    ) -> None:
        self.rows = rows
        self.view: StateView | None = None
        self._pool = pool
        self._states = states
        self._reach = reach
        self._before: dict[Request, _Before] = {}
        self._committed = False

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._committed:
            return
        try:
            self._reach("rollback")
            self._roll_back()
        except BaseException as failure:
            raise RollbackFailed(
                f"a step failed ({error}), and so did giving back what it held ({failure}); call Engine.reset()"
            ) from failure

    def reserve(self, in_step_with: int | None) -> None:
        """Takes blocks for all rows, drafts included, and slots for new requests, on the bank of `in_step_with`.

        `rows` are then in the order of their slots: states that lie side by side are not gathered.
        """
        for row in self.rows:
            request = row.request
            self._before[request] = _Before.of(request)
            if row.admitted:
                request.table = BlockTable(self._pool)
                request.slot = self._states.take(in_step_with) if self._states else None
            table_of(request).grow(row.reserved_tokens)
            self._reach("reserve")
        if self._states:
            self.rows = sorted(self.rows, key=lambda row: slot_of(row.request))
            self.view = self._states.view([slot_of(row.request) for row in self.rows])

    def _roll_back(self) -> None:
        """In reverse order, so that the pool hands out the same blocks and slots again."""
        admitted = {row.request for row in self.rows if row.admitted}
        for request, before in reversed(self._before.items()):
            if request.table:
                request.table.shrink(before.num_blocks)
            if request in admitted:
                if self._states and request.slot is not None:
                    self._states.give_back(request.slot)
                request.table, request.slot = None, None
            request.head_length, request.unread_hidden = before.head_length, before.unread_hidden

    def segments(self, drafts: Mapping[Request, Sequence[int]]) -> list[Segment]:
        """The packed rows: each request's next known tokens, then its drafts."""
        segments: list[Segment] = []
        for row in self.rows:
            request = row.request
            known = request.known(request.num_cached, request.num_cached + row.num_tokens)
            segments.append(Segment([*known, *drafts.get(request, ())], request.num_cached, table_of(request).blocks))
        return segments

    def capture_counts(self) -> list[int]:
        """Tokens to capture per row: all of them in a step with drafts, else none."""
        drafting = any(row.num_drafts for row in self.rows)
        return [row.length if drafting else 0 for row in self.rows]

    def prepare(self, kept: Sequence[int]) -> None:
        """Brings the inactive banks to the states after the first kept[row] tokens of each row; may fail."""
        if self._states and self.view:
            self._states.prepare(self.view, kept, [row.length for row in self.rows])

    def commit(self, kept: Sequence[int]) -> None:
        """Publishes what was prepared and keeps kept[row] more cached tokens. Cannot fail, only be interrupted."""
        self._committed = True
        if self._states and self.view:
            self._states.commit(self.view)
        for row, count in zip(self.rows, kept, strict=True):
            request = row.request
            request.num_cached += count
            if not request.is_prefill:  # the rest of a prompt keeps the blocks that it entered with
                table_of(request).shrink(self._pool.blocks_for(request.num_cached))
