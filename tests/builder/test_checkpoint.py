"""Headers, shards and the index: what is read is what safetensors itself reads, and nothing else is opened."""

from __future__ import annotations

import errno
import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

import builder
from builder import checkpoint
from builder.checkpoint import INDEX_NAME, NUMPY_DTYPES, Checkpoint, TensorRef, read_header
from builder.errors import MachineError, Refused
from fixtures.writer import Tiny
from tests.builder import oracle
from tests.builder.test_package import LAYOUTS, substance
from tests.conftest import TinyFactory

Header = dict[str, Any]


def test_real_checkpoints_read_as_safetensors_reads_them(real_checkpoint: Path) -> None:
    expected = oracle.read_checkpoint(real_checkpoint)
    checkpoint = Checkpoint(real_checkpoint)
    assert set(checkpoint) == set(expected) and len(checkpoint) == len(expected)
    for name, ref in checkpoint.items():
        assert (ref.name, ref.dtype, ref.shape) == (name, expected[name].dtype, expected[name].shape)
        assert ref.nbytes == len(expected[name].data)
        assert ref.read().tobytes() == expected[name].data


def test_every_stored_type_reads_back(tmp_path: Path) -> None:
    """F8_E8M0 is left to the header tests: the library's NumPy side does not write it."""
    arrays = {
        name: np.arange(6).reshape(2, 3).astype(dtype) for name, dtype in NUMPY_DTYPES.items() if name != "F8_E8M0"
    }
    arrays["scalar"] = np.array(2.5, np.float32)
    arrays["empty"] = np.zeros((0, 4), ml_dtypes.bfloat16)
    save_file(arrays, tmp_path / "all.safetensors")
    refs = read_header(tmp_path / "all.safetensors")
    for name, array in arrays.items():
        read = refs[name].read()
        assert read.dtype == array.dtype and read.shape == array.shape and read.tobytes() == array.tobytes()


# One file, by hand


def write_file(path: Path, header: Header | bytes, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(begin: int = 0, end: int = 8, dtype: object = "F32", shape: object = (2,)) -> Header:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


def test_a_handwritten_file_reads(tmp_path: Path) -> None:
    data = struct.pack("<2f", 1.5, -2) + bytes([0x7F, 0x80])
    header = {"__metadata__": {"format": "pt"}, "a": entry(), "b": entry(8, 10, "F8_E8M0")}
    refs = read_header(write_file(tmp_path / "x.safetensors", header, data))
    assert list(refs) == ["a", "b"]
    assert refs["a"].read().tolist() == [1.5, -2.0]
    assert refs["b"].read().astype(np.float32).tolist() == [1.0, 2.0]  # 2 ** (byte - 127)


BROKEN = {
    "a length beyond the file": ({"a": entry()}, bytes(8), 1 << 40, "a safetensors header"),
    "a length of nothing": (b"", b"", 0, "a safetensors header"),
    "no JSON": (b"{nonsense}", b"", None, "a JSON header"),
    "no UTF-8": (b'{"\xff": 1}', b"", None, "a JSON header"),
    "JSON too deep": (b'{"a":' * 100_000, b"", None, "a JSON header"),
    "a list": (b"[1, 2]", b"", None, "a JSON object as header, found list"),
    "an entry that is no object": ({"a": [0, 8]}, bytes(8), None, "tensor a: expected an object"),
    "an unknown type": ({"a": entry(dtype="F4")}, bytes(8), None, "tensor a: expected a dtype of"),
    "a type that is no text": ({"a": entry(dtype=["F32"])}, bytes(8), None, "tensor a: expected a dtype of"),
    "no type": ({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8), None, "tensor a: expected a dtype of"),
    "a negative size": ({"a": entry(shape=(-2,))}, bytes(8), None, "tensor a: expected a shape"),
    "a fractional size": ({"a": entry(shape=(2.0,))}, bytes(8), None, "tensor a: expected a shape"),
    "a boolean size": ({"a": entry(shape=(True, 2))}, bytes(8), None, "tensor a: expected a shape"),
    "no shape": ({"a": entry(shape=None)}, bytes(8), None, "tensor a: expected a shape"),
    "offsets in reverse": ({"a": entry(8, 0)}, bytes(8), None, "tensor a: expected data_offsets"),
    "a negative offset": ({"a": entry(-8, 0)}, bytes(8), None, "tensor a: expected data_offsets"),
    "one offset": (
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        bytes(8),
        None,
        "tensor a: expected data_offsets",
    ),
    "too few bytes for the shape": ({"a": entry(0, 4)}, bytes(8), None, "expected 8 bytes for F32 [2], found 4"),
    "too many bytes for the shape": ({"a": entry(0, 12)}, bytes(12), None, "expected 8 bytes for F32 [2], found 12"),
    "a file cut short": ({"a": entry(), "b": entry(8, 16)}, bytes(15), None, "tensor b: expected data up to byte"),
    "two tensors on one byte": ({"a": entry(), "b": entry(7, 15)}, bytes(16), None, "an overlap with a"),
    "one tensor inside another": (
        {"a": entry(0, 16, shape=(4,)), "b": entry(4, 12)},
        bytes(16),
        None,
        "an overlap with a",
    ),
    "a shape that overflows": ({"a": entry(shape=(1 << 62, 1 << 62))}, bytes(8), None, "bytes for F32"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_header_is_refused(tmp_path: Path, case: str) -> None:
    header, data, length, expected = BROKEN[case]
    path = write_file(tmp_path / "broken.safetensors", header, data, length)  # type: ignore[arg-type]
    with pytest.raises(Refused) as caught:
        read_header(path)
    assert "broken.safetensors" in str(caught.value) and str(expected) in str(caught.value)


@pytest.mark.parametrize("size", [0, 7])
def test_a_file_too_short_for_a_length_is_refused(tmp_path: Path, size: int) -> None:
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(Refused, match=f"in a file of {size} bytes"):
        read_header(tmp_path / "x.safetensors")


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32), "b": np.ones(2, np.int64)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    for size in range(len(whole)):
        (tmp_path / "cut.safetensors").write_bytes(whole[:size])
        with pytest.raises(Refused):
            read_header(tmp_path / "cut.safetensors")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_a_damaged_header_never_points_outside_its_file(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any bytes of the header changed: refused, or every tensor still lies inside the file and reads."""
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.uint8)}, path)
    raw = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, end - 1))] = data.draw(st.sampled_from(b'0123456789-",:[]{}eUIF8\x00\xff'))
    path.write_bytes(raw)
    try:
        refs = read_header(path)
    except Refused:
        return
    for ref in refs.values():
        assert 0 <= ref.offset <= ref.offset + ref.nbytes <= len(raw)
        assert ref.read().nbytes == ref.nbytes


def test_a_file_that_shrinks_after_its_header_was_read_is_refused(tmp_path: Path) -> None:
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "x.safetensors")
    ref = read_header(tmp_path / "x.safetensors")["a"]
    os.truncate(tmp_path / "x.safetensors", ref.offset + 4)
    with pytest.raises(Refused, match="tensor a: expected 12 bytes, found 4; the file changed"):
        ref.read()


# Folders


def sharded(folder: Path, shards: dict[str, dict[str, np.ndarray]], index: dict[str, object] | None) -> Path:
    """A folder with these shards; `index` maps tensors to shard names."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
    if index is not None:
        (folder / INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    return folder


def ones(value: float = 1) -> np.ndarray:
    return np.full(2, value, np.float32)


def test_the_index_is_an_allow_list(tmp_path: Path) -> None:
    """Stale copies in other shards, tensors the index does not name and stray files are never read."""
    folder = sharded(
        tmp_path,
        {
            "a.safetensors": {"x": ones(1), "y": ones(-1), "stale": ones()},
            "b.safetensors": {"x": ones(-1), "y": ones(2)},
        },
        {"x": "a.safetensors", "y": "b.safetensors"},
    )
    (folder / "model.safetensors").write_bytes(b"a stray file that is no safetensors file at all")
    checkpoint = Checkpoint(folder)
    assert {name: ref.read()[0] for name, ref in checkpoint.items()} == {"x": 1, "y": 2}
    assert [path.name for path in checkpoint.files] == ["a.safetensors", "b.safetensors"]


def test_a_lone_shard_needs_no_index_and_two_do(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"weights.safetensors": {"x": ones()}}, None)
    assert list(Checkpoint(folder)) == ["x"]
    save_file({"y": ones()}, folder / "more.safetensors")
    with pytest.raises(Refused, match=r"found more\.safetensors, weights\.safetensors"):
        Checkpoint(folder)


def test_no_shard_is_refused_and_a_pickle_is_none(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {}, None)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(Refused, match="found neither"):
        Checkpoint(folder)


def test_a_shard_that_was_not_downloaded_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"a.safetensors": {"x": ones()}}, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(Refused, match=r"b\.safetensors: expected the shard the index names, found no file"):
        Checkpoint(folder)


def test_a_tensor_its_shard_does_not_have_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path, {"a.safetensors": {"x": ones()}}, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(Refused, match=r"a\.safetensors tensor y"):
        Checkpoint(folder)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Every path opened while the test runs. An audit hook cannot be taken away, so it is switched off instead."""
    paths: list[str] = []
    recording = [True]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if recording[0] and event == "open":
            paths.append(str(args[0]))

    sys.addaudithook(hook)
    yield paths
    recording[0] = False


ESCAPES = [
    "../evil.safetensors",
    "{}/evil.safetensors",  # absolute
    "sub/evil.safetensors",
    "sub\\evil.safetensors",
    "..\\evil.safetensors",
    "evil.safetensors\0.safetensors",
    "",
    ".",
    "..",
    "evil.bin",
    "config.json",
    None,
    7,
    ["a.safetensors"],
    {"a.safetensors": 1},
]


@pytest.mark.parametrize("shard", ESCAPES, ids=repr)
def test_an_index_cannot_name_anything_but_a_shard_beside_it(tmp_path: Path, opened: list[str], shard: object) -> None:
    for place in (tmp_path, tmp_path / "inner" / "sub"):
        place.mkdir(parents=True, exist_ok=True)
        save_file({"x": ones()}, place / "evil.safetensors")
    name = shard.format(tmp_path) if isinstance(shard, str) else shard
    folder = sharded(tmp_path / "inner", {}, {"x": name})
    opened.clear()
    with pytest.raises(Refused, match=r"model\.safetensors\.index\.json shard"):
        Checkpoint(folder)
    assert [Path(path).name for path in opened] == ["config.json", INDEX_NAME]


@pytest.mark.parametrize(
    "text", ["[]", '{"weight_map": {}}', '{"weight_map": ["a"]}', "{}", "nonsense", "\xff", "[" * 99999]
)
def test_a_broken_index_is_refused(tmp_path: Path, text: str) -> None:
    folder = sharded(tmp_path, {"a.safetensors": {"x": ones()}}, None)
    (folder / INDEX_NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(Refused, match=r"model\.safetensors\.index\.json"):
        Checkpoint(folder)


@pytest.mark.parametrize(
    ("content", "found"),
    [(None, "found nothing"), (b"[]", "found list"), (b"{", "JSON in UTF-8"), (b'{"a": "\xff"}', "JSON in UTF-8")],
)
def test_a_broken_config_is_refused(tmp_path: Path, content: bytes | None, found: str) -> None:
    folder = sharded(tmp_path, {"a.safetensors": {"x": ones()}}, None)
    (folder / "config.json").unlink()
    if content is not None:
        (folder / "config.json").write_bytes(content)
    with pytest.raises(Refused, match=r"config\.json") as caught:
        Checkpoint(folder)
    assert found in str(caught.value)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(Refused, match="no such folder"):
            Checkpoint(path)


def test_the_prefix_follows_the_embedding(tmp_path: Path) -> None:
    for prefix in ("model.", "model.language_model."):
        folder = sharded(tmp_path / prefix, {"a.safetensors": {f"{prefix}embed_tokens.weight": ones()}}, None)
        assert Checkpoint(folder).prefix == prefix
    with pytest.raises(Refused, match=r"model\.embed_tokens\.weight"):
        _ = Checkpoint(sharded(tmp_path / "none", {"a.safetensors": {"x": ones()}}, None)).prefix


def test_a_file_the_system_withholds_is_the_machines_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sharded(tmp_path, {"a.safetensors": {"x": ones()}}, None)
    ref = Checkpoint(folder)["x"]

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", str(folder / "a.safetensors"))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_read_into", refuse)
        with pytest.raises(MachineError, match=r"a\.safetensors: Permission denied"):
            ref.read()
    monkeypatch.setattr(Path, "open", refuse)
    for reading in (ref.read, lambda: Checkpoint(folder)):
        with pytest.raises(MachineError, match=r"a\.safetensors: Permission denied"):
            reading()


def test_a_snapshot_of_links_into_a_blob_store_reads_like_the_folder(tiny: TinyFactory, tmp_path: Path) -> None:
    """Names are those of the snapshot, not of the blobs, and nothing is written on either side."""
    plain = tiny("modelopt", Tiny(vision=True))
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(plain.iterdir())):
        (blobs / f"{number:040x}").write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    for folder in (blobs, snapshot):
        folder.chmod(0o555)
    before = [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))]
    outputs = tmp_path.parent / f"{tmp_path.name}-outputs"
    for ours, options in LAYOUTS.items():
        builder.export(snapshot, outputs / "of links" / ours, options)
        assert [(path, path.stat().st_mtime_ns) for path in sorted(tmp_path.rglob("*"))] == before
        builder.export(plain, outputs / "plain" / ours, options)
        assert substance(outputs / "of links" / ours) == substance(outputs / "plain" / ours)
    assert not any(path.is_symlink() for path in outputs.rglob("*"))
    for folder in (blobs, snapshot):
        folder.chmod(0o755)


# Holes


HOLE = 1 << 16
"""No file system's blocks are larger, so that a hole of this size at a multiple of it is one."""


@pytest.fixture
def holey(tmp_path: Path) -> Path:
    """Bytes that are not 0, a hole, some more, two holes, and bytes that end in the middle of a block."""
    path = tmp_path / "holey"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for number, size in ((0, HOLE), (2, HOLE), (5, 4999)):
            file.seek(number * HOLE)
            file.write(rng.integers(1, 256, size, np.uint8).tobytes())
    if path.stat().st_blocks * 512 >= path.stat().st_size:
        pytest.skip("the file system has no sparse files")
    return path


RANGES = {
    "all of it": (0, 5 * HOLE + 4999),
    "stored bytes alone": (3, HOLE - 3),
    "a hole alone": (HOLE, HOLE),
    "the inside of a hole": (HOLE + 777, 1234),
    "over the edge into a hole": (HOLE - 13, 28),
    "out of a hole": (2 * HOLE - 5, 9),
    "across a hole": (HOLE - 1, HOLE + 2),
    "odd at both ends": (77, 3 * HOLE + 1),
    "ending in a hole": (2 * HOLE + 1, 2 * HOLE + 100),
    "the last byte": (5 * HOLE + 4998, 1),
    "nothing": (HOLE + 3, 0),
}
SYSTEMS = ("as it is", "no SEEK_DATA", "refused")


def seekless(patch: pytest.MonkeyPatch, system: str) -> None:
    """A system that does not know of holes, or a file system that does not tell."""

    def lseek(descriptor: int, offset: int, whence: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    if system == "no SEEK_DATA":
        patch.delattr(os, "SEEK_DATA")
    elif system == "refused":
        patch.setattr(os, "lseek", lseek)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", RANGES)
def test_a_tensor_over_holes_reads_as_the_files_bytes(
    holey: Path, monkeypatch: pytest.MonkeyPatch, name: str, system: str
) -> None:
    """At any offset, also where no value begins at a block. Parts cut no value in two and leave out only zeros."""
    offset, length = RANGES[name]
    expected = np.fromfile(holey, np.uint8)[offset : offset + length]
    ref = TensorRef("x", holey, "U8", (length,), offset, length)
    seekless(monkeypatch, system)
    assert np.array_equal(ref.read(), expected)
    found, last = np.zeros(length, np.uint8), 0
    for start, end in parts(ref):
        assert start % 16 == 0 and last <= start <= end <= length and (end == length or end % 16 == 0)
        found[start:end] = expected[start:end]
        last = end
    assert np.array_equal(found, expected)


def parts(ref: TensorRef) -> list[tuple[int, int]]:
    with ref.opened() as file:
        return list(ref.stored_parts(file))


@pytest.mark.parametrize("dtype", sorted(set(NUMPY_DTYPES) - {"BOOL"}))
def test_values_over_holes_are_whole(holey: Path, dtype: str) -> None:
    """At an offset of 5, some lie across every edge."""
    kind = NUMPY_DTYPES[dtype]
    count = 3 * HOLE // kind.itemsize
    ref = TensorRef("x", holey, dtype, (count,), 5, count * kind.itemsize)
    assert ref.read().tobytes() == holey.read_bytes()[5 : 5 + ref.nbytes] and ref.read().dtype == kind
    assert all(start % kind.itemsize == end % kind.itemsize == 0 for start, end in parts(ref))


def test_holes_are_not_read(holey: Path) -> None:
    """A sparse checkpoint of the size of a real one takes no time."""
    assert parts(TensorRef("x", holey, "U8", (5 * HOLE,), 0, 5 * HOLE)) == [(0, HOLE), (2 * HOLE, 3 * HOLE)]
    assert parts(TensorRef("x", holey, "U8", (HOLE,), HOLE, HOLE)) == []


def test_a_file_that_shrank_is_no_result(holey: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is opened, or while it is read."""
    ref = TensorRef("x", holey, "U8", (HOLE,), 0, HOLE)
    real = checkpoint._read_into

    def shrink(file: Any, buffer: memoryview) -> None:
        os.truncate(holey, 5000)
        real(file, buffer)

    monkeypatch.setattr(checkpoint, "_read_into", shrink)
    with pytest.raises(MachineError, match="holey: the file shrank while it was read"):
        ref.read()
    with pytest.raises(Refused, match="tensor x: expected 65536 bytes, found 5000; the file changed"):
        ref.read()


def test_errors_of_whoever_uses_an_open_tensor_are_its_own(holey: Path) -> None:
    """A full disk is no fault of the checkpoint."""
    ref = TensorRef("x", holey, "U8", (HOLE,), 0, HOLE)
    with pytest.raises(OSError, match="No space left"), ref.opened():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
