"""How a shard comes into a package without its bytes: as a reflink, else as a hard link, else as a copy.

A reflink shares the disk's blocks until either file is changed. A hard link is the same file under a second name: who
changes one in place changes both, so checkpoints that are edited in place should be copied.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from builder import digests, files
from builder.progress import Progress

try:
    import fcntl
except ImportError:  # pragma: no cover  # not on Windows, which has no reflinks of this kind either
    fcntl = None  # type: ignore[assignment]

FICLONE = 0x40049409
"""The request of ioctl(2) by which Linux clones a file. Source: include/uapi/linux/fs.h."""

How = Literal["reflink", "hardlink", "copy"]


@dataclass(frozen=True)
class Brought:
    """How a shard came, why not better (None: it could not be better), and its digest where one was made or known."""

    how: How
    reason: str | None = None
    digest: str | None = None

    @property
    def linked(self) -> bool:
        return self.how != "copy"


def bring(source: Path, target: Path, progress: Progress, *, may_copy: bool = True) -> Brought | None:
    """Makes `target` from `source`; a link to a cache's blob is resolved first. None where only a copy would do and
    it may not. Raises OSError where copying fails.
    """
    real = source.resolve(strict=True)
    known = digests.free_of_charge(source)
    if (reason := _reflink(real, target)) is None:
        return Brought("reflink", digest=known)
    try:
        os.link(real, target)
    except OSError as error:
        reason = f"{reason}; no hard link: {error.strerror}"
        return _copy(real, target, reason, progress) if may_copy else None
    return Brought("hardlink", reason, known)


def _reflink(source: Path, target: Path) -> str | None:
    """None where it worked, else why not, with nothing left behind."""
    if fcntl is None:
        return "no reflink: not on this system"
    try:
        with source.open("rb") as reading, target.open("xb") as writing:
            fcntl.ioctl(writing, FICLONE, reading.fileno())
            os.fsync(writing.fileno())
        return None
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
        return f"no reflink: {error.strerror}"


def _copy(source: Path, target: Path, reason: str, progress: Progress) -> Brought:
    done = 0

    def see(piece: memoryview) -> None:
        nonlocal done
        done += len(piece)
        progress(f"copying {source.name}", done, total)

    with source.open("rb", buffering=0) as reading, files.NewFile(target, digests.XXH3) as file:
        total = os.fstat(reading.fileno()).st_size
        file.copy(reading.fileno(), 0, total, see)
    return Brought("copy", reason, file.digest)
