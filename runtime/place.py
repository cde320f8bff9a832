"""Place: where a session's caches and states live, and in which types.

On the CPU they are NumPy arrays in float32. On a GPU they are DeviceArrays in the graph's own types: memory of ONNX
Runtime's allocator that Python never reads, handed from run to run by address.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from numpy.typing import NDArray

from builder.contract import TensorSpec
from builder.errors import MachineError

Array = NDArray[Any]

WIDENED: Mapping[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float32),
    "bfloat16": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}
OWN: Mapping[str, np.dtype[Any]] = {
    **WIDENED,
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
BFLOAT16 = 16
"""onnx.TensorProto.BFLOAT16: NumPy knows no such type, so it is bound by its number."""


def element_type(dtype: np.dtype[Any]) -> Any:
    """What a binding takes for a NumPy type."""
    return BFLOAT16 if dtype == ml_dtypes.bfloat16 else dtype.type


def ir_type(dtype: np.dtype[Any]) -> ir.DataType:
    return ir.DataType.from_numpy(dtype)


@dataclass(frozen=True)
class DeviceArray:
    """C-contiguous memory on a device. Indexing by whole numbers, or by one range after them, gives a part of it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    address: int
    device: str
    owner: Any
    """Keeps the memory alive."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> DeviceArray:
        keys = index if isinstance(index, tuple) else (index,)
        shape, offset = self.shape, 0
        for depth, key in enumerate(keys):
            stride = math.prod(shape[1:]) * self.dtype.itemsize
            if isinstance(key, slice):
                if depth + 1 < len(keys) or key.step not in (None, 1):
                    raise AssertionError("a part of a device array must lie in one piece")
                start, stop, _ = key.indices(shape[0])
                offset, shape = offset + start * stride, (stop - start, *shape[1:])
            else:
                if not 0 <= key < shape[0]:
                    raise IndexError(f"{key} of {shape[0]}")
                offset, shape = offset + key * stride, shape[1:]
        return DeviceArray(shape, self.dtype, self.address + offset, self.device, self.owner)

    def read(self) -> Array:
        """A copy in NumPy, of memory made by a Place. In a step, of a chain of drafts alone."""
        start = self.address - self.owner.data_ptr()
        return self.owner.numpy()[start : start + self.nbytes].view(self.dtype).reshape(self.shape)

    def write(self, values: Array) -> None:
        """Replaces the whole of memory made by a Place; for tests and tools."""
        self.owner.update_inplace(np.ascontiguousarray(values, self.dtype).view(np.uint8).ravel())

    def reshape(self, *shape: int) -> DeviceArray:
        if math.prod(shape) != math.prod(self.shape):
            raise AssertionError(f"{self.shape} is not {shape}")
        return DeviceArray(shape, self.dtype, self.address, self.device, self.owner)


class NoMemory(MachineError):
    """A device has too little memory. what: the same without what to do about it, which is about caches and states."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; ask for fewer blocks (--num-blocks) or requests (--max-batch-size)")
        self.what = what


@dataclass(frozen=True)
class Place:
    """device: the name that bindings take. widened: float16 and bfloat16 graphs hold float32.

    is_host: memory is NumPy's. A CPU whose memory is addressed as a GPU's is serves the tests.
    """

    device: str
    widened: bool
    is_host: bool

    @property
    def spreads(self) -> bool:
        """Whether graphs tell attention of sequences of its own here (lowering/spreading.py)."""
        return not self.is_host

    def array_type(self, spec: TensorSpec) -> np.dtype[Any]:
        """The NumPy type in which a graph tensor lives here."""
        return (WIDENED if self.widened else OWN)[spec.dtype]

    def zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        """Zeroed memory: a NumPy array, or a DeviceArray."""
        return np.zeros(shape, dtype) if self.is_host else self.device_zeros(shape, dtype)

    def device_zeros(self, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceArray:
        """Zeroed memory that is addressed as a device's is. Raises NoMemory where there is not so much."""
        size = math.prod(shape) * dtype.itemsize
        with self._needing(size):
            owner = ort.OrtValue.ortvalue_from_numpy(np.zeros(size, np.uint8), self.device, 0)
        return DeviceArray(tuple(shape), dtype, owner.data_ptr(), self.device, owner)

    def device_empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> DeviceArray:
        """The same without a value in it."""
        size = math.prod(shape) * dtype.itemsize
        with self._needing(size):
            owner = ort.OrtValue.ortvalue_from_shape_and_type((size,), np.uint8, self.device, 0)
        return DeviceArray(tuple(shape), dtype, owner.data_ptr(), self.device, owner)

    @contextlib.contextmanager
    def _needing(self, size: int) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, MemoryError, ValueError) as error:
            raise NoMemory(f"{size:,} bytes of memory on {self.device} are needed and cannot be had") from error


HOST = Place("cpu", widened=True, is_host=True)
GPU = Place("cuda", widened=False, is_host=False)
