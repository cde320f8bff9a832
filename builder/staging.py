"""A folder appears under its name whole or not at all.

It is made beside the target as `.partial-NAME-xxxxxxxx`, and its maker holds a lock on it (flock), so that a later run
tells a killed run's leftovers from the work of one that still goes on. Publishing is one rename; replacing swaps both
folders in one system call (renameat2 with RENAME_EXCHANGE). Where a file system lacks that, the old folder is first
set aside as `.previous-NAME`: at every moment one whole copy exists, under its name or under that one, and the next
run puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from builder import files

try:
    import fcntl
except ImportError:  # pragma: no cover  # without it nothing tells who is alive, so nothing is cleaned
    fcntl = None  # type: ignore[assignment]

AT_FDCWD = -100
RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
"""Of renameat2(2). Source: include/uapi/linux/fs.h."""
IN_THE_WAY = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
Replaceable = Callable[[Path], bool]
UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)
MAX_LABEL = 100


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A new folder beside `out`, gone afterwards unless it was published. Raises OSError."""
    made = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        folder, lock = _locked_folder(out)
        try:
            yield folder
        finally:
            _remove(folder)
            os.close(lock)
    finally:
        if not out.exists():
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def publish(folder: Path, out: Path, replaceable: Replaceable | None) -> str | None:
    """Gives `folder` the name `out`; what stood there is deleted once that is certain. Raises OSError, with the old
    one in place, and FileExistsError where `replaceable` (None: nothing is) does not take what stands there in that
    very moment. Returns a word for whoever asked where the swap could not be one step.
    """
    if replaceable is None or not out.exists():
        _rename_new(folder, out)
        _sync_or_undo(out.parent, lambda: out.rename(folder))
        return None
    if _exchange(folder, out):
        if not replaceable(folder):  # judged only now, when nobody can put anything else there
            _exchange(folder, out)
            raise _in_the_way(out)
        _sync_or_undo(out.parent, lambda: _exchange(folder, out))
        _remove(folder)
        return None
    if not replaceable(out):
        raise _in_the_way(out)
    _replace(folder, out)
    return (
        f"{out.parent} cannot swap two folders in one step: had this run been killed between two renames, the old "
        f"package would have waited in {_previous(out).name} for the next run to put it back"
    )


def recover(out: Path, whole: Replaceable) -> list[str]:
    """Cleans up after killed runs and puts back a package that was set aside. Returns a line for each thing done.

    whole: whether a folder is a package; what is none is neither put back nor deleted for the name `.previous-NAME`.
    """
    if fcntl is None or not out.parent.is_dir():
        return []
    done = []
    previous = _previous(out)
    with _claimed(previous) as claimed:
        if claimed and whole(previous) and out.exists():
            _discard(previous, out)
            done.append(f"{previous.name} was removed: a killed run had left it")
        elif claimed and whole(previous):
            previous.rename(out)
            done.append(f"{out} was put back: a run was killed while it replaced it")
    pattern = re.compile(rf"\.partial-{re.escape(_label(out))}-[a-z0-9_]{{8}}")
    for path in sorted(out.parent.iterdir()):
        if pattern.fullmatch(path.name):
            with _claimed(path) as claimed:
                if claimed:
                    _remove(path)
                    done.append(f"{path.name} was removed: a killed run had left it")
    return done


def _label(out: Path) -> str:
    """The name, shortened where the longer names made of it would be too long for a file system, which counts bytes."""
    name = os.fsencode(out.name)
    if len(name) <= MAX_LABEL:
        return out.name
    return f"{name[:MAX_LABEL].decode(errors='ignore')}-{hashlib.sha256(name).hexdigest()[:8]}"


def _previous(out: Path) -> Path:
    return out.parent / f".previous-{_label(out)}"


def _locked_folder(out: Path) -> tuple[Path, int]:
    """A new folder and the descriptor that holds its lock; another run may clean one up before it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".partial-{_label(out)}-", dir=out.parent))
        try:
            folder.chmod(0o777 & ~_umask())
            lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except BaseException:
            _remove(folder)
            raise
        if _lock(lock) and folder.is_dir():
            return folder, lock
        os.close(lock)


def _umask() -> int:
    """The only way to read it is to set it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _lock(descriptor: int) -> bool:
    """Whether the folder is now ours; a file system without locks says yes, as nobody else can tell either."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Whether the folder is there and nobody works on it; then nobody else will while this lasts."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        yield _lock_or_none(descriptor)
    finally:
        os.close(descriptor)


def _lock_or_none(descriptor: int) -> bool:
    """As _lock, but a file system without locks says no: nothing is deleted on a guess."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step; False where the system or the file system cannot. Raises OSError otherwise."""
    return _renameat2(first, second, RENAME_EXCHANGE)


def _rename_new(folder: Path, out: Path) -> None:
    """A rename that replaces nothing, at most an empty folder where the system cannot refuse that one, too."""
    if not _renameat2(folder, out, RENAME_NOREPLACE):
        try:
            folder.rename(out)
        except OSError as error:
            raise (_in_the_way(out) if error.errno in IN_THE_WAY else error) from None


def _in_the_way(out: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))


def _renameat2(first: Path, second: Path, flags: int) -> bool:
    """False where the system or the file system does not know it. Raises OSError otherwise."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), ctypes.c_uint(flags)) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(second))


def _replace(folder: Path, out: Path) -> None:
    """Two renames, under a lock, so that no other run takes the pause between them for an accident."""
    previous = _previous(out)
    with _claimed(out):
        out.rename(previous)
        try:
            folder.rename(out)
            _sync_or_undo(out.parent, lambda: out.rename(folder))
        except BaseException:  # an interrupt too: what was set aside is somebody's only copy
            previous.rename(out)
            raise
        _discard(previous, out)


def _discard(previous: Path, out: Path) -> None:
    """Removes it under the name of a leftover, so that half of it is never put back."""
    leftover = previous.with_name(f".partial-{_label(out)}-{secrets.token_hex(4)}")
    try:
        previous.rename(leftover)
    except OSError:  # then in place: the new one stands, and that is no error
        leftover = previous
    _remove(leftover)


def _sync_or_undo(parent: Path, undo: Callable[[], object]) -> None:
    """A name that was not flushed may be gone after a power cut, so it is taken back before that is an error."""
    try:
        files.sync(parent)
    except BaseException:
        undo()
        raise
