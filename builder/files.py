"""How a package's files are written: through one door, hashed as the bytes pass, and flushed before they count.

Bytes of another file are copied by the kernel (copy_file_range) while a second thread reads them for their digest:
nothing has to pass through this process before it is written, so a copy takes as long as cp does.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from builder import digests

REGION_BYTES = 1 << 26
"""Copied and read side by side; the second of the two finds them in the page cache."""
SYNC_FILE_RANGE_WRITE = 2
"""Of sync_file_range(2). Source: include/uapi/linux/fs.h."""
PIECE_BYTES = 1 << 18
"""Read at once; it stays in the processor's cache until it is hashed."""
NO_KERNEL_COPY = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)

See = Callable[[memoryview], object]


class NewFile:
    """A file that did not exist before, written from start to end.

    Use as a context manager; leaving it flushes the file to the disk. `digest` is that of everything written.
    """

    def __init__(self, path: Path, algorithm: str) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._hasher = digests.HASHERS[algorithm]()
        self._algorithm = algorithm
        self._reader = ThreadPoolExecutor(1)
        self.size = 0

    def write(self, data: Any) -> None:
        """data: bytes, or an array's contiguous memory. Raises OSError."""
        view = memoryview(data).cast("B")
        self._hasher.update(view)
        self.size += len(view)
        self._write(view)

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[os.write(self._descriptor, view) :]

    def skip(self, length: int) -> None:
        """Appends zeros that take no room where the file system can leave a hole."""
        zeros = bytes(min(length, PIECE_BYTES))
        for start in range(0, length, PIECE_BYTES):
            self._hasher.update(zeros[: length - start])
        self.size += length
        os.lseek(self._descriptor, self.size, os.SEEK_SET)

    def copy(self, source: int, start: int, end: int, see: See) -> None:
        """Appends the bytes from start to end of the open file `source`; `see` is given them in order, too.

        Pieces that `see` gets begin at a multiple of 256 KiB from `start`. Raises OSError, and what `see` raises.
        """
        for begin in range(start, end, REGION_BYTES):
            stop = min(begin + REGION_BYTES, end)
            reading = self._reader.submit(self._read, source, begin, stop, see)
            try:
                self._copy(source, begin, stop)
            finally:
                reading.result()
            self._reader.submit(_start_writing, self._descriptor, self.size, stop - begin)
            self.size += stop - begin

    def _read(self, source: int, start: int, end: int, see: See) -> None:
        for piece in pieces(source, start, end):
            self._hasher.update(piece)
            see(piece)

    def _copy(self, source: int, start: int, end: int) -> None:
        while start < end and hasattr(os, "copy_file_range"):
            try:
                count = os.copy_file_range(source, self._descriptor, end - start, start)
            except OSError as error:
                if error.errno in NO_KERNEL_COPY:
                    break
                raise
            if not count:
                raise _cut_short()
            start += count
        for piece in pieces(source, start, end):
            self._write(piece)

    @property
    def digest(self) -> str:
        return f"{self._algorithm}:{self._hasher.hexdigest()}"

    def __enter__(self) -> NewFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._reader.shutdown()
        try:
            if kind is None:
                os.ftruncate(self._descriptor, self.size)  # a hole at the end has no byte that would make it last
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


def pieces(source: int, start: int, end: int) -> Iterator[memoryview]:
    """The bytes from start to end of an open file. A piece is valid until the next one is asked for."""
    buffer = np.empty(min(PIECE_BYTES, end - start), np.uint8).data
    while start < end:
        wanted = buffer[: end - start]
        filled = 0
        while filled < len(wanted):  # a signal may cut a read short
            count = os.preadv(source, [wanted[filled:]], start + filled)
            if not count:
                raise _cut_short()
            filled += count
        yield wanted
        start += filled


def _start_writing(descriptor: int, start: int, length: int) -> None:
    """Has the system begin to write a range to the disk, so that the flush at the end finds little left to do."""
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:  # glibc has it, others may not; nothing depends on it
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(length), ctypes.c_uint(SYNC_FILE_RANGE_WRITE))


def _cut_short() -> OSError:
    return OSError(errno.EIO, "a file of the checkpoint shrank while it was read")


def write(path: Path, data: bytes) -> str:
    """Writes a small file and flushes it. Returns its digest. Raises OSError."""
    with NewFile(path, digests.SHA256) as file:
        file.write(data)
    return file.digest


def sync(path: Path) -> None:
    """Flushes a file, or a folder: a rename lasts only once the folder it happened in is flushed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
