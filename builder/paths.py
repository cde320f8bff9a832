"""What lies at a path that somebody named: asked in one place, because asking can itself fail."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

from builder.errors import MachineError

NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EBADF, errno.ENAMETOOLONG, errno.EINVAL)
"""Errors by which the system says that nothing can be there, a name longer than it can store among them."""


def exists(path: Path) -> bool:
    """Raises MachineError for a path that may not be looked at."""
    return _asked(path, Path.exists)


def is_file(path: Path) -> bool:
    """Raises MachineError for a path that may not be looked at."""
    return _asked(path, Path.is_file)


def _asked(path: Path, ask: Callable[[Path], bool]) -> bool:
    try:
        return ask(path)
    except OSError as error:
        if error.errno in NOTHING_THERE:
            return False
        raise MachineError(f"{path}: {error.strerror or error}; it cannot be looked at") from error
