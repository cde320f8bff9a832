"""Checkpoint: the tensors of a safetensors folder, by header alone.

Decisions: an index, where present, is the allow-list of (tensor, shard) pairs, so a stray shard or a stale tensor is
never read; shard names are plain base names; nothing but JSON and safetensors is opened, so no repository code runs
and nothing is unpickled. The format is 8 little-endian bytes of header length, a JSON header, then the data.
"""

import contextlib
import errno
import io
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from builder.errors import MachineError, Refused

INDEX_NAME = "model.safetensors.index.json"
MAX_JSON_BYTES = 1 << 26
"""Of a header or a JSON file. The safetensors library takes headers up to 100 MB; MAX_JSON_VALUES ends them sooner."""
MAX_JSON_VALUES = 1 << 21
"""Python objects take up to thirty times the bytes of their JSON: tokenizers have 1 million, a header 8 a tensor."""
MAX_JSON_DEPTH = 64
MAX_TENSORS = 1 << 19
MAX_RANK = 16
MAX_FILE_NAME_BYTES = 255
PIECE_ALIGNMENT = 16
MAX_SIZE = 1 << 63
"""Largest number a header may hold as a size or an offset."""

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I16": np.dtype(np.int16),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """What the operating system refuses becomes a MachineError that names the file."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise MachineError(f"{where}: {error.strerror or error}; the checkpoint cannot be read") from error


@dataclass(frozen=True)
class TensorRef:
    """Where a tensor's bytes lie. offset and nbytes are in bytes, offset from the start of the file."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> NDArray[Any]:
        """The tensor in its stored dtype, row-major. Reads exactly its bytes, and none of a hole in a sparse file."""
        raw = np.zeros(self.nbytes, np.uint8)
        with reading(self.file), self.opened() as file:
            for start, end in self.stored_parts(file):
                file.seek(self.offset + start)
                _read_into(file, raw.data[start:end])
        return raw.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape)

    @contextlib.contextmanager
    def opened(self) -> Iterator[io.FileIO]:
        """The file, which is long enough. Raises Refused where it was cut short, MachineError where it is not opened.

        Errors of whoever uses it are not all of reading: a full disk is none.
        """
        with reading(self.file):
            opened = self.file.open("rb", buffering=0)
        with opened as file:
            size = os.fstat(file.fileno()).st_size
            if size < self.offset + self.nbytes:
                raise Refused(
                    f"{self.file.name} tensor {self.name}",
                    expected=f"{self.nbytes} bytes",
                    found=f"{max(0, size - self.offset)}",
                    remedy="the file changed while it was read; run again",
                )
            yield file

    def stored_parts(self, file: io.FileIO) -> Iterator[tuple[int, int]]:
        """Begin and end within the tensor of what a sparse file stores, in whole values; a hole reads as zeros."""
        for begin, end in _data_extents(file.fileno(), self.offset, self.offset + self.nbytes):
            last = -(-(end - self.offset) // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
            yield (begin - self.offset) // PIECE_ALIGNMENT * PIECE_ALIGNMENT, min(last, self.nbytes)


def _data_extents(descriptor: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """The parts of a file's range that are stored; all of it where the system does not tell."""
    if not hasattr(os, "SEEK_DATA"):
        yield start, end
        return
    while start < end:
        try:
            begin = os.lseek(descriptor, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole follows
                return
            yield start, end
            return
        stop = min(os.lseek(descriptor, begin, os.SEEK_HOLE), end)
        if begin < end:
            yield begin, stop
        start = max(begin, stop)


def _read_into(file: io.FileIO, buffer: memoryview) -> None:
    """Fills the buffer; a signal may cut a read short, and so does a file that shrinks."""
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise OSError(errno.EIO, "the file shrank while it was read", file.name)
        buffer = buffer[count:]


class Checkpoint(Mapping[str, TensorRef]):
    """A folder with config.json and safetensors shards, as a mapping of tensor name to TensorRef."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise Refused(self.folder, expected="a checkpoint folder", found="no such folder", remedy="check the path")
        self.config: dict[str, Any] = self._config()
        with reading(self.folder):
            self._tensors = _read_tensors(self.folder)
            self._stamps = {path: _stamp(path) for path in self.files}

    def __getitem__(self, name: str) -> TensorRef:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def _config(self) -> dict[str, Any]:
        document = self.json("config.json")
        if document is None:
            raise Refused(
                self.folder / "config.json",
                expected="a file",
                found="nothing",
                remedy="give a complete checkpoint folder",
            )
        return document

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object beside the weights, or None where the file is absent."""
        path = self.folder / name
        with reading(path):
            return read_json_object(path) if path.is_file() else None

    @cached_property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({ref.file for ref in self._tensors.values()}))

    def refuse_changed(self) -> None:
        """Raises Refused where a shard is not the file any more whose header was read."""
        for path, stamp in self._stamps.items():
            with reading(path):
                changed = _stamp(path) != stamp
            if changed:
                raise Refused(
                    path, expected="the file that it was", found="another one, or a change", remedy="run again"
                )

    def unlisted_shards(self) -> list[Path]:
        """Safetensors files in the folder that no tensor is read from: an index is an allow-list."""
        return sorted(path for path in self.folder.glob("*.safetensors") if path not in self.files and path.is_file())

    @cached_property
    def prefix(self) -> str:
        """Prefix of the text model's tensors: vision-language checkpoints nest it one level deeper.

        The final norm speaks where the embedding is missing, because a tied LM head may stand for it.
        """
        for leaf in ("embed_tokens.weight", "norm.weight"):
            for prefix in ("model.language_model.", "model."):
                if f"{prefix}{leaf}" in self:
                    return prefix
        raise Refused(
            f"{self.folder.name} model.embed_tokens.weight",
            expected="an embedding under model. or model.language_model.",
            found="none",
            remedy="check that every shard is there",
        )


def _stamp(path: Path) -> tuple[int, int, int, int]:
    """What tells a file from another one of that name, and from itself after a change."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_json_object(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise Refused(path, expected=f"at most {MAX_JSON_BYTES} bytes", found=size, remedy="check the file")
    try:
        document = _bounded_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise Refused(path, expected="JSON in UTF-8", found=error, remedy="fetch the file again") from None
    if not isinstance(document, dict):
        raise Refused(path, expected="a JSON object", found=type(document).__name__, remedy="fetch the file again")
    return document


def _bounded_json(raw: bytes, hook: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Parsed JSON in memory that follows from its limits. Raises ValueError or RecursionError.

    Marks are counted before anything is made of them; those inside strings count too, which costs a tokenizer little.
    The depth is a precaution: what the parser just manages could be too deep for whoever prints or compares it.
    """
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_JSON_VALUES:
        raise ValueError(f"more than {MAX_JSON_VALUES} values")
    document = json.loads(raw.decode("utf-8"), object_pairs_hook=hook)
    level = [document]
    for _ in range(MAX_JSON_DEPTH):
        level = [child for value in level for child in _children(value) if isinstance(child, dict | list)]
        if not level:
            return document
    raise ValueError(f"nested deeper than {MAX_JSON_DEPTH}")


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _read_tensors(folder: Path) -> dict[str, TensorRef]:
    index = folder / INDEX_NAME
    if index.is_file():
        return _indexed_tensors(folder, index)
    shards = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if len(shards) != 1:
        raise Refused(
            folder,
            expected=f"one .safetensors file or {INDEX_NAME}",
            found=", ".join(path.name for path in shards) or "neither",
            remedy="fetch the missing files",
        )
    return read_header(shards[0])


def _indexed_tensors(folder: Path, index: Path) -> dict[str, TensorRef]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Refused(
            f"{INDEX_NAME} weight_map", expected="tensor to shard names", found=weight_map, remedy="fetch it again"
        )
    headers: dict[str, dict[str, TensorRef]] = {}
    tensors: dict[str, TensorRef] = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or shard not in headers:
            headers[shard] = read_header(_shard_path(folder, shard))
            _refuse_too_many(sum(map(len, headers.values())))
        if name not in headers[shard]:
            raise Refused(
                f"{shard} tensor {name}",
                expected="the tensor the index assigns to it",
                found="none",
                remedy="fetch the shard again",
            )
        tensors[name] = headers[shard][name]
    return tensors


def _refuse_too_many(tensors: int) -> None:
    if tensors > MAX_TENSORS:
        raise Refused(
            INDEX_NAME, expected=f"at most {MAX_TENSORS} tensors", found=tensors, remedy="do not use this index"
        )


def _shard_path(folder: Path, shard: object) -> Path:
    plain = isinstance(shard, str) and shard not in ("", ".", "..") and not any(c in shard for c in "/\\\0")
    too_long = len(str(shard).encode("utf-8", "surrogatepass")) > MAX_FILE_NAME_BYTES
    if not plain or too_long or not str(shard).endswith(".safetensors"):
        raise Refused(
            f"{INDEX_NAME} shard {shard!r}",
            expected="a plain .safetensors file name",
            found="a path",
            remedy="do not use this index",
        )
    path = folder / str(shard)
    if not path.is_file():
        raise Refused(path, expected="the shard the index names", found="no file", remedy="finish the download")
    return path


def read_header(path: Path) -> dict[str, TensorRef]:
    """Every tensor of one safetensors file, checked against the file's size. Raises Refused."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little") if size >= 8 else 0
        if not 2 <= length <= min(size - 8, MAX_JSON_BYTES):
            raise Refused(
                path,
                expected="a safetensors header",
                found=f"a length of {length} in a file of {size} bytes",
                remedy="fetch the file again",
            )
        raw = file.read(length)
    try:
        header = _bounded_json(raw, _without_duplicates)
    except (ValueError, RecursionError) as error:
        raise Refused(path, expected="a JSON header", found=str(error), remedy="fetch the file again") from None
    if not isinstance(header, dict):
        raise Refused(
            path, expected="a JSON object as header", found=type(header).__name__, remedy="fetch the file again"
        )
    header.pop("__metadata__", None)
    start = 8 + length
    refs = {name: _tensor_ref(path, name, entry, start, size) for name, entry in header.items()}
    _refuse_overlaps(path, refs)
    return refs


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are distinct and are text: the last of two entries would win unseen."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise ValueError("the same key twice")
    for key in entries:
        key.encode("utf-8")  # a lone surrogate raises, as a ValueError
    return entries


def _tensor_ref(path: Path, name: str, entry: Any, start: int, size: int) -> TensorRef:
    def refuse(expected: str, found: object) -> Refused:
        return Refused(f"{path.name} tensor {name}", expected=expected, found=found, remedy="fetch the file again")

    if not name.isprintable():  # names end up in warnings, reports and graphs
        raise refuse("a name of printable characters", ascii(name))
    if not isinstance(entry, dict):
        raise refuse("an object with dtype, shape and data_offsets", entry)
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        raise refuse(f"a dtype of {', '.join(NUMPY_DTYPES)}", dtype)
    if not _all_naturals(shape) or len(shape) > MAX_RANK:
        raise refuse(f"a shape of up to {MAX_RANK} non-negative integers", shape)
    if not _all_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("data_offsets [begin, end]", offsets)
    nbytes = math.prod(shape) * NUMPY_DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise refuse(f"{nbytes} bytes for {dtype} {list(shape)}", f"{offsets[1] - offsets[0]}")
    if start + offsets[1] > size:
        raise refuse(f"data up to byte {start + offsets[1]}", f"a file of {size} bytes: it is cut short")
    return TensorRef(name, path, dtype, tuple(shape), start + offsets[0], nbytes)


def _all_naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < MAX_SIZE for v in values)


def _refuse_overlaps(path: Path, refs: dict[str, TensorRef]) -> None:
    ordered = sorted((ref for ref in refs.values() if ref.nbytes), key=lambda ref: ref.offset)
    for before, after in itertools.pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise Refused(
                f"{path.name} tensor {after.name}",
                expected=f"bytes from {before.offset + before.nbytes} on",
                found=f"an overlap with {before.name}",
                remedy="fetch the file again",
            )
