"""Values of a checkpoint in runs of rows of at most CHUNK_BYTES, so memory does not grow with the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from builder.checkpoint import TensorRef
from builder.quant import codecs

CHUNK_BYTES = 1 << 23
FIRST_NOT_FINITE = {"F8_E4M3": 0x7F, "BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
"""Smallest magnitude bits (all but the sign) that are infinity or NaN. Sources: IEEE 754, OCP FP8 v1.0."""


def rows_of(ref: TensorRef, start: int, stop: int) -> TensorRef:
    """Rows [start, stop) of a tensor with at least one dimension, as a reference of their own."""
    row = ref.nbytes // ref.shape[0]
    return replace(
        ref, shape=(stop - start, *ref.shape[1:]), offset=ref.offset + start * row, nbytes=(stop - start) * row
    )


def row_ranges(ref: TensorRef, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Runs of rows [start, stop) of at most CHUNK_BYTES, or of `multiple` rows where those are larger."""
    count = ref.shape[0]
    step = max(CHUNK_BYTES // max(ref.nbytes // max(count, 1), 1) // multiple, 1) * multiple
    for start in range(0, count, step):
        yield start, min(start + step, count)


def values_of(ref: TensorRef) -> Iterator[NDArray[np.float64]]:
    """All values of a tensor of any type and rank, flat, in float64; bytes are exponents, as they are in scales."""
    flat = replace(ref, shape=(int(np.prod(ref.shape, dtype=np.int64)),))
    for start, stop in row_ranges(flat):
        stored = rows_of(flat, start, stop).read()
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            values = (codecs.decode_scale(stored) if stored.dtype == np.uint8 else stored).astype(np.float64)
        yield values
