"""Where each initializer's bytes come from, and where they are put.

A Weight is either Stored (the checkpoint's own bytes, untouched) or Computed (a named transform of them, in float32).
Placing streams one weight at a time into a data file, so peak memory is that of the largest tensor; two initializers
with the same source share one byte range, which is how both graphs share embedding and LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.values import ValueCheck

LARGE_BYTES = 1 << 16
"""Tensors of this size and above start at a multiple of it, so that a runtime can map them into memory."""
SMALL_ALIGNMENT = 256
CHUNK_BYTES = 1 << 24

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


@dataclass(frozen=True)
class Placed:
    """Places by Weight.key, and what was odd about the values."""

    places: dict[object, Placement]
    warnings: list[str]


def place(weights: Iterable[Weight], file: BinaryIO, file_name: str, narrowed: set[object]) -> Placed:
    """Streams each distinct weight into `file`, its values checked on the way.

    narrowed: keys of weights that the graph casts to float16; a value beyond its range is refused by tensor name, and
    values that it turns into zeros are counted.
    """
    places: dict[object, Placement] = {}
    warnings: list[str] = []
    for weight in weights:
        if weight.key in places:
            continue
        alignment = LARGE_BYTES if weight.nbytes >= LARGE_BYTES else SMALL_ALIGNMENT
        file.write(bytes(-file.tell() % alignment))
        offset = file.tell()
        check = ValueCheck(weight.origin, narrowed=weight.key in narrowed)
        for chunk in _chunks(weight):
            check.feed(chunk)
            file.write(chunk.reshape(-1).view(np.uint8).data)
        places[weight.key] = Placement(file_name, offset, file.tell() - offset)
        warnings += filter(None, [check.warning()])
    return Placed(places, warnings)


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
