"""Where each initializer's bytes come from, and where they are put.

A Weight is either Stored (the checkpoint's own bytes, untouched) or Computed (a named transform of them, in float32).
Stored bytes may stay where they are, in a linked shard; all others are streamed into a data file one weight at a time,
so peak memory is that of the largest tensor. Two initializers with the same source share one byte range, which is how
both graphs share embedding and LM head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from builder.checkpoint import TensorRef, reading
from builder.files import NewFile, pieces
from builder.values import ValueCheck

LARGE_BYTES = 1 << 16
"""Tensors of this size and above start at a multiple of it, so that a runtime can map them into memory."""
SMALL_ALIGNMENT = 256
DATA_FILE, TRANSFORMED_FILE = "weights.data", "transformed.data"
"""All weights of a copied package, and of a linked one those that are not the checkpoint's bytes."""
CHUNK_BYTES = 1 << 24

Array = NDArray[Any]


@dataclass(frozen=True)
class Placement:
    """A byte range of a data file: offset and length in bytes."""

    file: str
    offset: int
    length: int


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

    @property
    def sources(self) -> tuple[TensorRef, ...]:
        return (self.ref,)

    @property
    def in_place(self) -> Placement:
        """Where the bytes are if the shard itself is in the package, under its own name."""
        return Placement(self.ref.file.name, self.ref.offset, self.ref.nbytes)


@dataclass(frozen=True)
class Computed:
    """`transform` names what `compute` does to the tensors `sources` (none: it makes a table), into `dtype`.

    compute gives the array, or pieces of it in order along its first axis where the whole would take too much memory.
    """

    transform: str
    sources: tuple[TensorRef, ...]
    shape: tuple[int, ...]
    compute: Callable[[], Array | Iterator[Array]]
    dtype: ir.DataType = ir.DataType.FLOAT

    @property
    def key(self) -> object:
        return self.transform, tuple((ref.file, ref.offset, ref.nbytes) for ref in self.sources)

    @property
    def origin(self) -> str | None:
        return self.sources[0].name if self.sources else None

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64) * self.dtype.itemsize)


Weight = Stored | Computed


@dataclass(frozen=True)
class Placed:
    """Places by Weight.key, and what was odd about the values."""

    places: dict[object, Placement]
    warnings: list[str]


def place(weights: Iterable[Weight], file: NewFile, file_name: str, narrowed: set[object]) -> Placed:
    """Streams each distinct weight into `file`, its values checked on the way.

    narrowed: keys of weights that the graph casts to float16; a value beyond its range is refused by tensor name, and
    values that it turns into zeros are counted.
    """
    places: dict[object, Placement] = {}
    checks: list[ValueCheck] = []
    for weight in weights:
        if weight.key in places:
            continue
        alignment = LARGE_BYTES if weight.nbytes >= LARGE_BYTES else SMALL_ALIGNMENT
        file.write(bytes(-file.size % alignment))
        places[weight.key] = Placement(file_name, file.size, weight.nbytes)
        checks.append(ValueCheck(weight.origin, narrowed=weight.key in narrowed))
        if isinstance(weight, Stored):
            _copy(weight, file, checks[-1])
        else:
            _write(weight, file, checks[-1])
    return Placed(places, _odd(checks))


def check_in_place(weights: Iterable[Stored], narrowed: set[object]) -> list[str]:
    """Reads and judges weights that stay where they are, as place() does. Returns what was odd."""
    checks: list[ValueCheck] = []
    for weight in weights:
        checks.append(ValueCheck(weight.origin, narrowed=weight.key in narrowed))
        dtype, offset = weight.dtype.numpy(), weight.ref.offset
        with reading(weight.ref.file), weight.ref.opened() as source:
            for start, end in weight.ref.stored_parts(source):
                for piece in pieces(source.fileno(), offset + start, offset + end):
                    checks[-1].feed(np.frombuffer(piece, dtype))
    return _odd(checks)


def _odd(checks: Iterable[ValueCheck]) -> list[str]:
    return [line for check in checks if (line := check.warning())]


def _write(weight: Computed, file: NewFile, check: ValueCheck) -> None:
    made = weight.compute()
    end = file.size + weight.nbytes
    for values in [made] if isinstance(made, np.ndarray) else made:
        whole = values.shape if made is values else (weight.shape[0], *values.shape[1:])
        if whole != weight.shape or values.dtype != weight.dtype.numpy():
            raise AssertionError(f"{weight.transform} of {weight.origin} gave {values.dtype} {values.shape}")
        check.feed(values)
        flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), CHUNK_BYTES):
            file.write(flat[start : start + CHUNK_BYTES])
    if file.size != end:
        raise AssertionError(f"{weight.transform} of {weight.origin} gave {file.size - end} bytes more than promised")


def _copy(weight: Stored, file: NewFile, check: ValueCheck) -> None:
    """Holes of a sparse checkpoint stay holes."""
    dtype, offset, done = weight.dtype.numpy(), weight.ref.offset, 0

    def see(piece: memoryview) -> None:
        check.feed(np.frombuffer(piece, dtype))

    with weight.ref.opened() as source:
        for start, end in weight.ref.stored_parts(source):
            file.skip(start - done)
            file.copy(source.fileno(), offset + start, offset + end, see)
            done = end
    file.skip(weight.nbytes - done)
