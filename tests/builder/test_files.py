"""New files: what is written, copied or left out as a hole, its digest, and what goes wrong on the way."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from builder import files
from builder.files import NewFile

PIECE = files.PIECE_BYTES


@pytest.fixture
def data() -> bytes:
    """More than two pieces, and no multiple of one."""
    return np.random.default_rng(0).bytes(2 * PIECE + 12_345)


@pytest.fixture
def source(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "source"
    path.write_bytes(data)
    return path


def digest(data: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


Patch = Callable[[pytest.MonkeyPatch], None]


def refused(code: int) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        def copy(*args: Any) -> int:
            raise OSError(code, os.strerror(code))

        patch.setattr(os, "copy_file_range", copy)

    return apply


def stopping(patch: pytest.MonkeyPatch) -> None:
    """A file system that copies a little, and then no more."""
    real, calls = os.copy_file_range, []

    def copy(source: int, target: int, count: int, offset: int) -> int:
        calls.append(count)
        if len(calls) > 3:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(source, target, min(count, 1000), offset)

    patch.setattr(os, "copy_file_range", copy)


def little_by_little(patch: pytest.MonkeyPatch) -> None:
    """Calls that do less than they are asked, as signals and small disks make them."""
    write, copy, read = os.write, os.copy_file_range, os.preadv
    patch.setattr(os, "write", lambda target, data: write(target, data[:777]))
    patch.setattr(
        os, "copy_file_range", lambda source, target, count, offset: copy(source, target, min(count, 70_001), offset)
    )
    patch.setattr(os, "preadv", lambda source, buffers, offset: read(source, [buffers[0][:50_003]], offset))


SYSTEMS: dict[str, Patch] = {
    "as it is": lambda patch: None,
    "without the call": lambda patch: patch.delattr(os, "copy_file_range"),
    **{errno.errorcode[code]: refused(code) for code in files.NO_KERNEL_COPY},
    "stopping": stopping,
    "little by little": little_by_little,
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_copied_is_what_was_there(
    tmp_path: Path, source: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """Any range, between other writes; whoever looks on is given the same bytes in order."""
    SYSTEMS[system](monkeypatch)
    seen = bytearray()
    with source.open("rb", buffering=0) as reading, NewFile(tmp_path / "out", "xxh3_128") as file:
        file.write(b"before")
        file.copy(reading.fileno(), 1001, len(data) - 7, seen.extend)
        file.write(np.arange(3, dtype=np.int32))
        file.copy(reading.fileno(), 0, 5, seen.extend)
        file.copy(reading.fileno(), 5, 5, seen.extend)
    expected = b"before" + data[1001:-7] + np.arange(3, dtype=np.int32).tobytes() + data[:5]
    assert (tmp_path / "out").read_bytes() == expected
    assert file.size == len(expected) and file.digest == digest(expected)
    assert seen == data[1001:-7] + data[:5]


def test_regions_are_copied_one_after_the_other(
    tmp_path: Path, source: Path, data: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "REGION_BYTES", 4096)
    monkeypatch.setattr(files, "PIECE_BYTES", 1024)
    seen: list[bytes] = []
    with source.open("rb", buffering=0) as reading, NewFile(tmp_path / "out", "xxh3_128") as file:
        file.copy(reading.fileno(), 0, len(data), lambda piece: seen.append(bytes(piece)))
    assert (tmp_path / "out").read_bytes() == data == b"".join(seen) and file.digest == digest(data)
    assert {len(piece) for piece in seen[:-1]} == {1024}


@pytest.mark.parametrize("length", [0, 1, 4096, PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("then", [b"", b"after"])
def test_what_is_skipped_is_zeros(tmp_path: Path, length: int, then: bytes) -> None:
    """Also at the end of a file, where no later byte would make room for them."""
    with NewFile(tmp_path / "out", "xxh3_128") as file:
        file.write(b"before")
        file.skip(length)
        file.write(then)
    expected = b"before" + bytes(length) + then
    assert (tmp_path / "out").read_bytes() == expected
    assert file.size == len(expected) and file.digest == digest(expected)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
def test_an_error_of_the_copy_is_an_error(
    tmp_path: Path, source: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refused(code)(monkeypatch)
    with (
        pytest.raises(OSError, match=os.strerror(code)),
        source.open("rb", buffering=0) as reading,
        NewFile(tmp_path / "out", "xxh3_128") as file,
    ):
        file.copy(reading.fileno(), 0, len(data), lambda piece: None)


@pytest.mark.parametrize("system", ["as it is", "without the call"])
def test_a_source_that_is_too_short_is_an_error(
    tmp_path: Path, source: Path, data: bytes, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    SYSTEMS[system](monkeypatch)
    with (
        pytest.raises(OSError, match="shrank while it was read"),
        source.open("rb", buffering=0) as reading,
        NewFile(tmp_path / "out", "xxh3_128") as file,
    ):
        file.copy(reading.fileno(), 0, len(data) + 1, lambda piece: None)


def test_what_the_onlooker_raises_ends_the_copy(tmp_path: Path, source: Path, data: bytes) -> None:
    def see(piece: memoryview) -> None:
        raise KeyError("seen")

    with (
        pytest.raises(KeyError, match="seen"),
        source.open("rb", buffering=0) as reading,
        NewFile(tmp_path / "out", "xxh3_128") as file,
    ):
        file.copy(reading.fileno(), 0, len(data), see)


def test_an_existing_file_is_never_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("theirs")
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            NewFile(tmp_path / name, "sha256")
    assert (tmp_path / "file").read_text() == "theirs" and not (tmp_path / "nowhere").exists()


def test_a_file_is_flushed_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that failed is not: nobody is going to use it."""
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    assert files.write(tmp_path / "small", b"abc") == (
        "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )
    files.sync(tmp_path)
    with pytest.raises(KeyError), NewFile(tmp_path / "failed", "sha256"):
        raise KeyError
    assert flushed == [str(tmp_path / "small"), str(tmp_path)]


def test_no_descriptor_stays_open(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever fails: a process may export many times."""
    before = os.listdir("/proc/self/fd")

    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("ftruncate", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, lambda *args: fail(0))
            with pytest.raises(OSError, match="Input/output"):
                files.write(tmp_path / name, b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output"):
            files.sync(tmp_path)
    assert os.listdir("/proc/self/fd") == before


def test_pieces_are_of_any_range(source: Path, data: bytes) -> None:
    with source.open("rb", buffering=0) as reading:
        for start, end in ((0, len(data)), (3, 3), (1, 2), (PIECE - 1, PIECE + 1), (7, 2 * PIECE + 7)):
            found = [bytes(piece) for piece in files.pieces(reading.fileno(), start, end)]
            assert b"".join(found) == data[start:end]
            assert all(len(piece) == PIECE for piece in found[:-1])
