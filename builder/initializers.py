"""Initializers of a package's graphs as raw bytes: their types, where they lie, and whether two are equal.

Nothing here knows what the bytes mean, so every element type is compared alike, those of less than a byte included.
Bytes are equal unread where both are the same range of the same file (device and inode: linked packages share shards);
all others are read and hashed. What a manifest says of a file is not believed: a byte that changed after the export is
what a comparison is to find.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from builder import digests
from builder.changes import Changes, between
from builder.errors import MachineError, Refused
from builder.progress import Progress
from builder.structure import type_name

CHUNK_BYTES = 1 << 22
RE_EXPORT = "export the package again"
WIDEST = {"float_data": "<f4", "double_data": "<f8", "int64_data": "<i8", "uint64_data": "<u8", "int32_data": "<i4"}
FIELDS = {
    "float32": ("float_data", "<f4"),
    "complex64": ("float_data", "<f4"),
    "double": ("double_data", "<f8"),
    "complex128": ("double_data", "<f8"),
    "int64": ("int64_data", "<i8"),
    "uint64": ("uint64_data", "<u8"),
    "uint32": ("uint64_data", "<u4"),
    "int32": ("int32_data", "<i4"),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16"), ("int32_data", "<u2")),
}
"""The typed field of an element type and what its entries stand for. Source: onnx.proto, TensorProto."""
BYTE_FIELD = ("int32_data", "u1")
"""Of every other type: an entry is one byte, with more than one element where these are smaller."""

Range = tuple[Any, int, int]
"""A file (device and inode) or inline bytes (their digest), offset and length: equal ranges hold equal bytes."""


@dataclass(frozen=True)
class Place:
    """Where bytes lie. file: its name in the package, the graph's own for inline bytes; path: None for those."""

    file: str
    path: Path | None
    range: Range

    @property
    def length(self) -> int:
        return self.range[2]


@dataclass(frozen=True)
class Initializer:
    dtype: str
    shape: tuple[int, ...]
    place: Place


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the operating system refuses becomes a MachineError that names the file: not every error knows it."""
    try:
        yield
    except OSError as error:
        raise MachineError(f"{error.filename or path}: {error.strerror or error}; it cannot be read") from error


def read(folder: Path, file: str, graph: onnx.GraphProto) -> dict[str, Initializer]:
    """By name. Raises Refused, naming the tensor, where external bytes lie not inside a file of the package."""
    return {
        tensor.name: Initializer(type_name(tensor.data_type), tuple(tensor.dims), _place(folder, file, tensor))
        for tensor in graph.initializer
    }


def _place(folder: Path, file: str, tensor: onnx.TensorProto) -> Place:
    if tensor.data_location != onnx.TensorProto.EXTERNAL:
        data = inline_bytes(tensor)
        return Place(file, None, (_digest_of(data), 0, len(data)))
    entries = {entry.key: entry.value for entry in tensor.external_data}
    return place(folder, f"{file} tensor {tensor.name}", entries)


def place(folder: Path, subject: str, entries: Mapping[str, Any]) -> Place:
    """entries: location, offset (0 if absent) and length (the rest of the file if absent), as text or numbers."""
    name = entries.get("location")
    if not isinstance(name, str) or Path(name).name != name or not os.path.isfile(folder / name):
        raise Refused(subject, expected="a file of the package, by plain name", found=name, remedy=RE_EXPORT)
    status = (folder / name).stat()
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", status.st_size - offset))
    except (TypeError, ValueError, OverflowError) as error:
        raise Refused(subject, expected="an offset and a length", found=error, remedy=RE_EXPORT) from None
    if offset < 0 or length < 0 or offset + length > status.st_size:
        raise Refused(
            subject,
            expected=f"bytes inside {name}, {status.st_size} long",
            found=f"{length} from {offset} on",
            remedy=RE_EXPORT,
        )
    return Place(name, folder / name, ((status.st_dev, status.st_ino), offset, length))


def inline_bytes(tensor: onnx.TensorProto) -> bytes:
    """The bytes raw_data would have, also of a tensor whose elements lie in a typed field; texts with their lengths."""
    if tensor.HasField("raw_data"):
        return bytes(tensor.raw_data)
    name = type_name(tensor.data_type)
    if name == "string":
        return b"".join(len(text).to_bytes(8, "little") + text for text in tensor.string_data)
    field, entry = FIELDS.get(name, BYTE_FIELD)
    return np.array(getattr(tensor, field), WIDEST[field]).astype(entry).tobytes()


def _digest_of(data: bytes) -> str:
    hasher = digests.HASHERS[digests.XXH3]()
    hasher.update(data)
    return f"{digests.XXH3}:{hasher.hexdigest()}"


def digests_of(pairs: Iterable[tuple[Place, Place]], progress: Progress) -> dict[Range, str]:
    """Of the ranges whose equality only their bytes can tell, each read once, in the order they lie in their files."""
    unknown = {
        one.range: one
        for pair in pairs
        if pair[0].range != pair[1].range and pair[0].length == pair[1].length
        for one in pair
    }
    order = sorted(unknown.values(), key=lambda one: (str(one.path), one.range[1:]))
    total, done, found = sum(one.length for one in order), 0, {}
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for one in order:
        found[one.range] = _digest(one, buffer)
        done += one.length
        progress("comparing weights", done, total)
    return found


def _digest(one: Place, buffer: memoryview) -> str:
    """Raises MachineError, also where the file has become shorter."""
    source, offset, length = one.range
    if one.path is None:
        return str(source)
    hasher = digests.HASHERS[digests.XXH3]()
    with reading(one.path), one.path.open("rb", buffering=0) as file:
        file.seek(offset)
        while length:
            count = file.readinto(buffer[:length])
            if not count:
                raise MachineError(f"{one.path}: it became shorter while it was read; compare again")
            hasher.update(buffer[:count])
            length -= count
    return f"{digests.XXH3}:{hasher.hexdigest()}"


def equal(a: Place, b: Place, found: Mapping[Range, str]) -> bool:
    """found: digests_of() pairs with this one among them."""
    return a.range == b.range or (a.length == b.length and found[a.range] == found[b.range])


def pairs(a: Mapping[str, Initializer], b: Mapping[str, Initializer]) -> list[tuple[Place, Place]]:
    """Places of those that both have with one type and shape."""
    return [
        (own.place, b[name].place)
        for name, own in a.items()
        if name in b and (own.dtype, own.shape) == (b[name].dtype, b[name].shape)
    ]


def compare(a: Mapping[str, Initializer], b: Mapping[str, Initializer], found: Mapping[Range, str]) -> Changes:
    """Facts: dtype, shape, length in bytes; where these are equal and the bytes are not, the digests of both."""
    kinds = between({name: _facts(own) for name, own in a.items()}, {name: _facts(own) for name, own in b.items()})
    alike = [name for name in a if name in b and name not in kinds.changed]
    apart = [name for name in alike if not equal(a[name].place, b[name].place, found)]
    contents = between(*({name: {"digest": found[side[name].place.range]} for name in apart} for side in (a, b)))
    return Changes(kinds.added, kinds.removed, kinds.changed | contents.changed)


def _facts(one: Initializer) -> dict[str, Any]:
    return {"dtype": one.dtype, "shape": list(one.shape), "bytes": one.place.length}


def moved(a: Mapping[str, Initializer], b: Mapping[str, Initializer], changes: Changes) -> Counter[tuple[str, str]]:
    """How many equal initializers lie elsewhere, by the files they lie in: at another offset where it is one file.

    changes: compare() of the same two.
    """
    return Counter(
        (own.place.file, b[name].place.file)
        for name, own in a.items()
        if name in b
        and name not in changes.changed
        and (own.place.file, own.place.range[1]) != (b[name].place.file, b[name].place.range[1])
    )
