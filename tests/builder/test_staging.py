"""A folder appears whole or not at all: leftovers of killed runs, names in the way, and file systems that cannot swap.

tests/builder/test_kill.py ends whole exports at every step; here are the parts.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import builder
from builder import staging
from builder.exporter import ExportOptions
from tests.builder.test_package import contents, lasting, without_exchange
from tests.conftest import TinyFactory

REPOSITORY = Path(__file__).parents[2]
SHORT = ["out", "a", "a-b", "a.b", "[a]*", "日本 🙂"]
LONG = ["x" * 150, "x" * 255, "語" * 85, "🙂" * 63 + "abc", "\udcff" * 200]
"""Up to 255 bytes, the most that a file system takes; one is no text."""
NAMES = [*SHORT, *LONG]


def everything(folder: Path) -> bool:
    """Any folder may be replaced or removed: these tests are about names."""
    return True


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def names(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir())


def partial(out: Path) -> Path:
    """A leftover as a killed run has it: made by the code itself, its lock released by the kernel."""
    with staging.staging(out) as made:
        (made / "file").write_text("half")
        kept = shutil.copytree(made, made.with_name(made.name + "~"))
    return kept.rename(made)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """The staging folder of a run that goes on, in another process, for the target `out`."""
    code = (
        "import sys; from pathlib import Path; from builder import staging\n"
        f"with staging.staging(Path({str(tmp_path / 'out')!r})) as folder:\n"
        "    (folder / 'file').write_text('mine')\n"
        "    print(folder, flush=True); sys.stdin.read()\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with run:
        assert run.stdout
        yield Path(run.stdout.readline().strip())
        run.kill()


# Leftovers


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_what_a_killed_run_left_is_removed(tmp_path: Path, name: str) -> None:
    left = partial(tmp_path / name)
    assert len(os.fsencode(left.name)) <= 255
    assert staging.recover(tmp_path / name, everything) == [f"{left.name} was removed: a killed run had left it"]
    assert names(tmp_path) == []
    assert staging.recover(tmp_path / name, everything) == []


def test_what_a_run_works_on_is_left_alone(tmp_path: Path, held: Path) -> None:
    """Until it is gone, by whatever way."""
    assert staging.recover(tmp_path / "out", everything) == []
    assert contents(held) == {"file": b"mine"}
    with staging.staging(tmp_path / "out") as second:  # two runs at once do not meet
        assert second != held and sorted(tmp_path.iterdir()) == sorted([second, held])
    assert names(tmp_path) == [held.name]


def test_a_killed_runs_lock_is_gone_with_it(tmp_path: Path) -> None:
    code = (
        "import os, signal; from pathlib import Path; from builder import staging\n"
        f"with staging.staging(Path({str(tmp_path / 'out')!r})) as folder:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=False)
    assert run.returncode == -signal.SIGKILL and len(names(tmp_path)) == 1
    assert len(staging.recover(tmp_path / "out", everything)) == 1 and names(tmp_path) == []


def previous(out: Path) -> Path:
    """Where the old folder waits between two renames."""
    return staging._previous(out)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_what_was_set_aside_is_put_back_where_its_name_is_free(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    folder(previous(out), "old")
    assert len(os.fsencode(previous(out).name)) <= 255
    assert staging.recover(out, everything) == [f"{out} was put back: a run was killed while it replaced it"]
    assert contents(tmp_path) == {f"{name}/file": b"old"}


def test_what_was_set_aside_goes_where_the_new_one_is_in_place(tmp_path: Path) -> None:
    folder(tmp_path / "out", "new")
    folder(previous(tmp_path / "out"), "old")
    assert staging.recover(tmp_path / "out", everything) == [".previous-out was removed: a killed run had left it"]
    assert contents(tmp_path) == {"out/file": b"new"}


@pytest.mark.parametrize("there", [False, True])
def test_somebody_elses_folder_of_that_name_is_left_alone(tmp_path: Path, there: bool) -> None:
    """It is no package, so no run of ours set it aside."""
    folder(previous(tmp_path / "out"), "thesis")
    if there:
        folder(tmp_path / "out", "new")
    before = contents(tmp_path)
    assert staging.recover(tmp_path / "out", lambda folder: False) == []
    assert contents(tmp_path) == before


@pytest.mark.parametrize("swaps", [True, False], ids=["exchange", "two renames"])
def test_what_appears_in_the_last_moment_is_not_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swaps: bool
) -> None:
    """Between the first look at the target and the swap somebody puts a folder there."""
    if not swaps:
        monkeypatch.setattr(staging, "_renameat2", lambda first, second, flags: False)
    out = tmp_path / "out"
    for replaceable in (None, lambda folder: (folder / "file").read_bytes() != b"thesis"):
        with staging.staging(out) as made:
            (made / "file").write_text("new")
            folder(out, "thesis")
            with pytest.raises(FileExistsError):
                staging.publish(made, out, replaceable)
            assert (out / "file").read_text() == "thesis" and (made / "file").read_text() == "new"
        assert names(tmp_path) == ["out"]
        shutil.rmtree(out)


def test_what_is_being_deleted_is_never_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a package would be what is left of it, under a name that promises a whole one."""

    def killed(path: Path) -> None:
        (path / "file").unlink(missing_ok=True)
        raise KeyboardInterrupt

    out = folder(tmp_path / "out", "old")
    (out / "other").touch()
    without_exchange(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_remove", killed)
        with pytest.raises(KeyboardInterrupt), staging.staging(out) as made:
            staging.publish(made, out, everything)
    assert not previous(out).exists()
    folder(previous(out), "older")
    with monkeypatch.context() as patch:
        patch.setattr(staging, "_remove", killed)
        with pytest.raises(KeyboardInterrupt):
            staging.recover(out, everything)
    assert not previous(out).exists()
    assert len(staging.recover(out, everything)) == 2 and names(tmp_path) == ["out"]


def test_what_was_set_aside_by_a_run_that_goes_on_is_its_own(tmp_path: Path) -> None:
    """Another run looks while this one is between its two renames."""
    out = folder(tmp_path / "out", "old")
    seen = []
    with staging.staging(out) as made, pytest.MonkeyPatch.context() as patch:
        (made / "file").write_text("new")
        without_exchange(patch)
        real = Path.rename

        def rename(path: Path, target: Path) -> Path:
            if path == made:
                code = "from pathlib import Path; from builder import staging; "
                code += f"print(staging.recover(Path({str(out)!r}), lambda folder: True))"
                run = subprocess.run(
                    [sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True, text=True
                )
                seen.append((run.stdout.strip(), names(tmp_path)))
            return real(path, target)

        patch.setattr(Path, "rename", rename)
        staging.publish(made, out, everything)
    assert seen == [("[]", sorted([made.name, ".previous-out"]))]
    assert contents(tmp_path) == {"out/file": b"new"}


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_another_targets_leftovers_are_left_alone(tmp_path: Path, name: str) -> None:
    """Names that begin alike, or that a pattern would match."""
    others = [other for other in [*NAMES, f"{name[:60]}-12345678", f"{name[:60]}-", "b"] if other != name]
    for other in others:
        partial(tmp_path / other)
        folder(previous(tmp_path / other), "old")
    for stray in (".partial-", ".partial", f".partial-{name[:20]}", f".partial-{name[:20]}-1234567", ".previous-"):
        folder(tmp_path / stray, "theirs")
    before = contents(tmp_path)
    assert len(before) == 2 * len(others) + 5
    assert staging.recover(tmp_path / name, everything) == []
    assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "link"])
def test_only_a_folder_is_a_leftover(tmp_path: Path, kind: str) -> None:
    """A link of that name is neither followed nor removed."""
    theirs = folder(tmp_path / "theirs", "kept")
    for path in (tmp_path / ".partial-out-abcd1234", previous(tmp_path / "out")):
        if kind == "file":
            path.write_text("kept")
        else:
            path.symlink_to(theirs)
    before = names(tmp_path)
    assert staging.recover(tmp_path / "out", everything) == []
    assert names(tmp_path) == before and contents(theirs) == {"file": b"kept"}


def test_there_may_be_nothing_to_look_through(tmp_path: Path) -> None:
    assert staging.recover(tmp_path / "missing" / "out", everything) == []
    (tmp_path / "file").touch()
    assert staging.recover(tmp_path / "file" / "out", everything) == []


def without_locks(patch: pytest.MonkeyPatch) -> None:
    """As on some network file systems."""

    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    patch.setattr(staging.fcntl, "flock", flock)


def test_without_locks_nothing_is_deleted_on_a_guess(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = partial(tmp_path / "out")
    folder(previous(tmp_path / "out"), "old")
    without_locks(monkeypatch)
    assert staging.recover(tmp_path / "out", everything) == []
    assert names(tmp_path) == sorted([left.name, ".previous-out"])
    monkeypatch.setattr(staging, "fcntl", None)
    assert staging.recover(tmp_path / "out", everything) == []
    assert names(tmp_path) == sorted([left.name, ".previous-out"])


@pytest.mark.parametrize("locks", ["refused", "unknown"])
def test_without_locks_a_folder_is_published_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, locks: str
) -> None:
    if locks == "refused":
        without_locks(monkeypatch)
    else:
        monkeypatch.setattr(staging, "fcntl", None)
    for content in ("first", "second"):
        with staging.staging(tmp_path / "out") as made:
            (made / "file").write_text(content)
            assert staging.publish(made, tmp_path / "out", everything) is None
        assert contents(tmp_path) == {"out/file": content.encode()}


# A staging folder


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_staging_folder_lies_beside_its_target_and_goes_again(tmp_path: Path, name: str) -> None:
    with staging.staging(tmp_path / name) as made:
        assert made.parent == tmp_path and made.name.startswith(".partial-")
        assert made.stat().st_mode & 0o777 == 0o755  # once published it is read by others, too
    assert names(tmp_path) == []


def test_parents_are_made_and_go_with_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "out"
    with pytest.raises(KeyboardInterrupt), staging.staging(out):
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    with staging.staging(out) as made:
        staging.publish(made, out, everything)
    assert out.is_dir()


def test_parents_that_somebody_uses_meanwhile_stay(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staging.staging(tmp_path / "a" / "b" / "out"):
        (tmp_path / "a" / "theirs").touch()
        raise KeyboardInterrupt
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["theirs"]


@pytest.mark.parametrize("owner", [os, Path], ids=["open", "chmod"])
def test_a_staging_folder_that_cannot_be_had_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any
) -> None:
    """Neither itself nor its parents."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(owner, "open" if owner is os else "chmod", fail)
        patch.setattr(shutil, "_use_fd_functions", False)  # so that rmtree can do without os.open
        with pytest.raises(OSError, match="Too many open files"), staging.staging(tmp_path / "a" / "b" / "out"):
            pytest.fail("it was had")
    assert names(tmp_path) == []


def test_a_folder_that_was_cleaned_before_it_was_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another run, which took it for a leftover."""
    real, removed = Path.chmod, []

    def chmod(path: Path, mode: int) -> None:
        if not removed:
            path.rmdir()
            removed.append(path)
        real(path, mode)

    monkeypatch.setattr(Path, "chmod", chmod)
    with staging.staging(tmp_path / "out") as made:
        assert removed and made != removed[0] and made.is_dir()


def test_a_folder_that_another_run_locked_first_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refused = staging._lock, []

    def lock(descriptor: int) -> bool:
        if not refused:
            refused.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            shutil.rmtree(refused[0])  # whoever holds the lock is about to do so
            return False
        return real(descriptor)

    monkeypatch.setattr(staging, "_lock", lock)
    with staging.staging(tmp_path / "out") as made:
        assert str(made) != refused[0]


# Publishing


@pytest.fixture(params=["exchange", "two renames"])
def swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "two renames":
        without_exchange(monkeypatch)
    return str(request.param)


def test_a_new_folder_is_renamed(tmp_path: Path, swap: str) -> None:
    with staging.staging(tmp_path / "out") as made:
        (made / "file").write_text("new")
        assert staging.publish(made, tmp_path / "out", everything) is None
    assert contents(tmp_path) == {"out/file": b"new"}


def test_an_old_folder_is_replaced(tmp_path: Path, swap: str) -> None:
    folder(tmp_path / "out", "old")
    (tmp_path / "out" / "stale").touch()
    with staging.staging(tmp_path / "out") as made:
        (made / "file").write_text("new")
        said = staging.publish(made, tmp_path / "out", everything)
    assert contents(tmp_path) == {"out/file": b"new"} and names(tmp_path) == ["out"]
    assert said == (
        None
        if swap == "exchange"
        else f"{tmp_path} cannot swap two folders in one step: had this run been killed between two renames, the old "
        "package would have waited in .previous-out for the next run to put it back"
    )


def test_the_exchange_is_one_step(tmp_path: Path) -> None:
    """Both names exist before and after; inodes have changed places."""
    first, second = folder(tmp_path / "first", "1"), folder(tmp_path / "second", "2")
    before = first.stat().st_ino, second.stat().st_ino
    assert staging._exchange(first, second)
    assert (second.stat().st_ino, first.stat().st_ino) == before
    with pytest.raises(FileNotFoundError, match="missing"):
        staging._exchange(first, tmp_path / "missing")


class NoLibrary:
    """A C library without renameat2."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, None])
def test_a_system_that_cannot_exchange_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """An old kernel, a file system without it, a C library without the call. Nothing has moved then."""
    first, second = folder(tmp_path / "first", "1"), folder(tmp_path / "second", "2")

    class Library(NoLibrary):
        def renameat2(self, *args: Any) -> int:
            return -1

    monkeypatch.setattr(staging.ctypes, "CDLL", NoLibrary if code is None else Library)
    monkeypatch.setattr(staging.ctypes, "get_errno", lambda: code)
    assert staging._exchange(first, second) is False
    assert contents(tmp_path) == {"first/file": b"1", "second/file": b"2"}
    if code is not None:
        monkeypatch.setattr(staging.ctypes, "get_errno", lambda: errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            staging._exchange(first, second)


@pytest.mark.parametrize("fault", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
def test_a_name_that_cannot_be_flushed_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str, existing: bool, fault: BaseException
) -> None:
    """Whoever reads that the package was not written finds the old one, or none."""
    if existing:
        folder(tmp_path / "out", "old")

    def sync(path: Path) -> None:
        raise fault

    monkeypatch.setattr(staging.files, "sync", sync)
    with pytest.raises(type(fault)), staging.staging(tmp_path / "out") as made:
        (made / "file").write_text("new")
        staging.publish(made, tmp_path / "out", everything)
    assert contents(tmp_path) == ({"out/file": b"old"} if existing else {})
    assert names(tmp_path) == (["out"] if existing else [])


def test_a_second_rename_that_fails_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "out", "old")
    without_exchange(monkeypatch)
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        if path.name.startswith(".partial-"):
            assert previous(tmp_path / "out").is_dir()
            raise KeyboardInterrupt
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), staging.staging(tmp_path / "out") as made:
        staging.publish(made, tmp_path / "out", everything)
    assert contents(tmp_path) == {"out/file": b"old"} and names(tmp_path) == ["out"]


# A whole export


def test_an_export_that_cannot_swap_says_what_that_means(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, home = tiny("modelopt"), tmp_path / "home"
    assert builder.export(checkpoint, home / "out").warnings == []
    assert builder.export(checkpoint, home / "out", ExportOptions(force=True)).warnings == []
    without_exchange(monkeypatch)
    assert builder.export(checkpoint, home / "new").warnings == []
    (line,) = builder.export(checkpoint, home / "out", ExportOptions(force=True)).warnings
    assert re.fullmatch(rf"{re.escape(str(home))} cannot swap two folders in one step: .* put it back", line)
    assert names(home) == ["new", "out"] and lasting(home / "out") == lasting(home / "new")


@pytest.mark.parametrize("force", [True, False])
def test_the_run_after_a_kill_between_two_renames_puts_the_package_back(
    tiny: TinyFactory, tmp_path: Path, force: bool
) -> None:
    """Then goes on as asked: it replaces the package, or refuses to."""
    checkpoint, out = tiny("modelopt"), tmp_path / "home" / "out"
    builder.export(checkpoint, out)
    before = contents(out)
    script = f"""
import os, signal
from pathlib import Path
import builder
from builder import staging
staging._exchange = lambda folder, out: False
real = Path.rename
def rename(path, target):
    if path.name.startswith(".partial-"):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(path, target)
Path.rename = rename
builder.export({str(checkpoint)!r}, {str(out)!r}, builder.ExportOptions(force=True))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False)
    assert run.returncode == -signal.SIGKILL
    assert not out.exists() and contents(previous(out)) == before
    if force:
        first, second = builder.export(checkpoint, out, ExportOptions(force=True)).warnings
        assert first == f"{out} was put back: a run was killed while it replaced it"
        assert second.endswith("was removed: a killed run had left it")
    else:
        with pytest.raises(builder.errors.Refused, match="something there already; pass --force"):
            builder.export(checkpoint, out)
        assert contents(out) == before
    assert names(out.parent) == ["out"]
