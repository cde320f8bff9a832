"""PackedBatch: the rows of one step, several requests side by side, as the arrays both graphs take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from builder import contract
from runtime.lowering.spreading import ATTENDED_LENGTHS, MAX_SPREAD_ROWS, SPREAD_CONTEXT

Array = NDArray[Any]
UNMAPPED = -1


@dataclass(frozen=True)
class Segment:
    """One request's part of a step: tokens to feed, tokens already in the cache, and its blocks."""

    token_ids: Sequence[int]
    past_length: int
    blocks: Sequence[int]


class BatchShape(NamedTuple):
    """Packed rows, requests, columns of the block table, and what attention takes for sequences: requests, or rows."""

    num_tokens: int
    batch_size: int
    num_columns: int
    num_sequences: int


def shape_of(segments: Sequence[Segment], *, spread: bool) -> BatchShape:
    """spread: the graph is on a device and has ATTENDED_LENGTHS, so that rows may be sequences of their own.

    Columns are as many as the next power of two there: for every new shape kernels are chosen, and runs recorded.
    """
    lengths = [len(segment.token_ids) for segment in segments]
    num_tokens, batch_size = sum(lengths), len(segments)
    num_columns = max(len(segment.blocks) for segment in segments)
    if not spread:
        return BatchShape(num_tokens, batch_size, num_columns, batch_size)
    context = max(segment.past_length for segment in segments)
    apart = max(lengths) <= MAX_SPREAD_ROWS and context >= SPREAD_CONTEXT
    return BatchShape(num_tokens, batch_size, 1 << (num_columns - 1).bit_length(), num_tokens if apart else batch_size)


class PackedBatch:
    """Input arrays of one shape, filled anew for each step; all int32 but token and position ids (int64)."""

    def __init__(self, shape: BatchShape, *, spread: bool) -> None:
        self.shape = shape
        self._apart = shape.num_sequences == shape.num_tokens  # as requests of one row each are in any case
        self._by_shape = False
        self.arrays: dict[str, Array] = {
            contract.INPUT_IDS: np.zeros(shape.num_tokens, np.int64),
            contract.POSITION_IDS: np.zeros((3, shape.num_tokens), np.int64),
            contract.BLOCK_TABLE: np.full((shape.num_sequences, shape.num_columns), UNMAPPED, np.int32),
            contract.CUMULATIVE_LENGTHS: np.zeros(shape.batch_size + 1, np.int32),
            contract.PAST_LENGTHS: np.zeros(shape.num_sequences, np.int32),
            contract.ATTENTION_METADATA: np.zeros(3, np.int32),
        }
        if spread:
            self.arrays[ATTENDED_LENGTHS] = np.arange(shape.num_sequences + 1, dtype=np.int32)

    def fill(self, segments: Sequence[Segment], block_size: int | None = None) -> None:
        """segments must have this batch's shape, or fewer blocks.

        block_size: given where longest query and context are to be bounded by the shape instead of told as they are: a
        recorded run keeps what it was told of them, and its longest context may once be as short as a token.
        """
        ids, positions = self.arrays[contract.INPUT_IDS], self.arrays[contract.POSITION_IDS]
        table, bounds = self.arrays[contract.BLOCK_TABLE], self.arrays[contract.CUMULATIVE_LENGTHS]
        past = self.arrays[contract.PAST_LENGTHS]
        start = longest_query = longest_context = 0
        for row, segment in enumerate(segments):
            length, blocks = len(segment.token_ids), len(segment.blocks)
            end, context = start + length, segment.past_length + length
            ids[start:end] = segment.token_ids
            positions[:, start:end] = range(segment.past_length, context)
            rows = slice(start, end) if self._apart else slice(row, row + 1)
            table[rows, :blocks] = segment.blocks
            table[rows, blocks:] = UNMAPPED
            bounds[row + 1] = end
            past[rows] = range(segment.past_length, context) if self._apart else segment.past_length
            longest_query, longest_context = max(longest_query, length), max(longest_context, context)
            start = end
        if self._apart:
            longest_query = 1
        elif ATTENDED_LENGTHS in self.arrays:
            self.arrays[ATTENDED_LENGTHS][:] = bounds
        self._by_shape = block_size is not None
        shortest = longest_context
        if block_size is not None:
            longest_query = self.shape.num_tokens - self.shape.num_sequences + 1
            longest_context, shortest = self.shape.num_columns * block_size, 1
        self.arrays[contract.ATTENTION_METADATA][:] = (longest_query, longest_context, shortest)

    def advance(self, token_ids: Sequence[int]) -> None:
        """The same rows one position further, for a batch of one token a request."""
        self.arrays[contract.INPUT_IDS][:] = token_ids
        self.arrays[contract.POSITION_IDS] += 1
        self.arrays[contract.PAST_LENGTHS] += 1
        if not self._by_shape:
            self.arrays[contract.ATTENTION_METADATA][1:] += 1
