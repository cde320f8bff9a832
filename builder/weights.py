"""Where each initializer's bytes come from, and where they are put.

A Weight is either Stored (the checkpoint's own bytes, untouched) or Computed (a named transform of them, in float32).
Placing streams one weight at a time into a data file, so peak memory is that of the largest tensor; two initializers
with the same source share one byte range, which is how both graphs share embedding and LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from builder.checkpoint import TensorRef
from builder.errors import Refused

LARGE_BYTES = 1 << 16
"""Tensors of this size and above start at a multiple of it, so that a runtime can map them into memory."""
SMALL_ALIGNMENT = 256
CHUNK_BYTES = 1 << 24
FLOAT16_MAX = 65504.0
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = tuple(map(np.dtype, (np.float16, np.float32, ml_dtypes.bfloat16)))

Array = NDArray[Any]


@dataclass(frozen=True)
class Stored:
    """The bytes of `ref` as they are, read as `dtype` with `shape` (NVFP4 block scales are E4M3 kept as uint8)."""

    ref: TensorRef
    dtype: ir.DataType
    shape: tuple[int, ...]

    @property
    def key(self) -> object:
        return self.ref.file, self.ref.offset, self.ref.nbytes

    @property
    def nbytes(self) -> int:
        return self.ref.nbytes

    @property
    def origin(self) -> str:
        return self.ref.name


@dataclass(frozen=True)
class Computed:
    """`transform` names what `compute` does to the tensor `origin` (None: to no tensor), into `dtype`."""

    transform: str
    origin: str | None
    shape: tuple[int, ...]
    compute: Callable[[], Array]
    dtype: ir.DataType = ir.DataType.FLOAT

    @property
    def key(self) -> object:
        return self.transform, self.origin

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64) * self.dtype.itemsize)


Weight = Stored | Computed


@dataclass(frozen=True)
class Placement:
    """A byte range of a data file: offset and length in bytes."""

    file: str
    offset: int
    length: int


def place(weights: Iterable[Weight], file: BinaryIO, file_name: str, narrowed: set[object]) -> dict[object, Placement]:
    """Streams each distinct weight into `file`; returns its place by Weight.key.

    narrowed: keys of weights that the graph casts to float16; a value beyond its range is refused by tensor name.
    """
    placed: dict[object, Placement] = {}
    for weight in weights:
        if weight.key in placed:
            continue
        alignment = LARGE_BYTES if weight.nbytes >= LARGE_BYTES else SMALL_ALIGNMENT
        file.write(bytes(-file.tell() % alignment))
        offset = file.tell()
        for chunk in _chunks(weight):
            _refuse_not_finite(weight, chunk)
            if weight.key in narrowed:
                _refuse_beyond_float16(weight, chunk)
            file.write(chunk.reshape(-1).view(np.uint8).data)
        placed[weight.key] = Placement(file_name, offset, file.tell() - offset)
    return placed


def _chunks(weight: Weight) -> Iterator[Array]:
    if isinstance(weight, Computed):
        values = np.ascontiguousarray(weight.compute())
        if values.shape != weight.shape or values.dtype != weight.dtype.numpy():
            raise AssertionError(f"{weight.transform} of {weight.origin} gave {values.dtype} {values.shape}")
        yield values
        return
    dtype = weight.dtype.numpy()
    with weight.ref.file.open("rb") as file:
        file.seek(weight.ref.offset)
        left = weight.nbytes
        while left:
            piece = file.read(min(CHUNK_BYTES, left))
            if not piece:
                raise Refused(
                    f"{weight.ref.file.name} tensor {weight.ref.name}",
                    expected=f"{left} more bytes",
                    found="the end of the file",
                    remedy="the file changed while it was read; run again",
                )
            left -= len(piece)
            yield np.frombuffer(piece, dtype)


def _refuse_not_finite(weight: Weight, values: Array) -> None:
    """NaN or infinity in a weight turns every token after it into noise without an error."""
    if values.dtype == E4M3:
        finite = not ((values.view(np.uint8) & 0x7F) == 0x7F).any()
    else:
        with np.errstate(invalid="ignore"):  # a signalling NaN would be warned of, too
            finite = values.dtype not in FLOATS or bool(np.isfinite(values).all())
    if not finite:
        raise Refused(
            f"tensor {weight.origin}",
            expected="finite numbers",
            found="NaN or infinity",
            remedy="fetch or quantize it again",
        )


def _refuse_beyond_float16(weight: Weight, values: Array) -> None:
    if values.dtype not in FLOATS or not values.size:
        return
    widened = values.astype(np.float32)
    largest = float(max(widened.max(), -widened.min()))
    if largest > FLOAT16_MAX:
        raise Refused(
            f"tensor {weight.origin}",
            expected=f"values within {FLOAT16_MAX:.0f} for float16",
            found=largest,
            remedy="export with --dtype bfloat16",
        )
