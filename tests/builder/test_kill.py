"""An export that is killed, or that a disk fails, at any of its steps: the old package or the new one, never a mixture.

Killed is the process (SIGKILL), not the machine: what a power cut leaves depends on the flushes, whose order
test_flushes_come_before_the_name checks.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

import builder
from builder import staging
from builder.errors import MachineError
from builder.exporter import ExportOptions
from fixtures import writer
from fixtures.writer import Config, Tensors, Tiny
from tests.builder.test_package import lasting, without_exchange
from tests.builder.victim import Order, Outcome

REPOSITORY = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
"""Flushes cost nothing there, and there are thousands of them here."""
EARLY = 18
"""Moments of each case that lie before the first flush of a folder; all that come later are tried."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    where = MEMORY if os.access(MEMORY, os.W_OK) else tmp_path_factory.getbasetemp()
    with tempfile.TemporaryDirectory(prefix="draftsmith-kill-", dir=where) as folder:
        yield Path(folder)


@dataclass(frozen=True)
class Bench:
    """Two checkpoints, the packages that whole exports make of them by layout, and where exports are tried."""

    home: Path
    new: Path

    @property
    def out(self) -> Path:
        return self.home / "there" / "out"

    def package(self, weights: str) -> Path:
        return self.home / f"new {weights}"

    def reset(self, existing: bool) -> None:
        """A folder with the old package or with nothing in it."""
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()
        if existing:
            shutil.copytree(self.home / "old", self.out, copy_function=os.link)


def two_layers(tensors: Tensors, config: Config) -> None:
    """One of each kind, which is soon exported."""
    config |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    for name in list(tensors):
        if name.startswith(("model.layers.1.", "model.layers.2.", "model.layers.3.")):
            array = tensors.pop(name)
            if name.startswith("model.layers.3."):
                tensors[name.replace(".3.", ".1.", 1)] = array


@pytest.fixture(scope="module")
def bench(home: Path) -> Bench:
    """The old package is of another model and has files that the new one has not."""
    old = writer.write(home / "old checkpoint", "compressed-tensors", Tiny(seed=1))
    new = writer.write(home / "new checkpoint", "modelopt", Tiny(mtp=False), two_layers)
    (old / "merges.txt").write_text("a b\n")
    builder.export(old, home / "old", ExportOptions(weights="link"))
    for weights in ("link", "copy"):
        builder.export(new, home / f"new {weights}", ExportOptions(weights=weights))  # type: ignore[arg-type]
    return Bench(home, new)


@pytest.fixture(scope="module")
def victim(bench: Bench) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-m", "tests.builder.victim", str(bench.new), str(bench.home / "scratch")]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def tell(victim: subprocess.Popen[str], order: Order) -> Outcome:
    assert victim.stdin and victim.stdout
    victim.stdin.write(json.dumps(asdict(order)) + "\n")
    victim.stdin.flush()
    return Outcome(**json.loads(victim.stdout.readline()))


# Kills


@dataclass(frozen=True)
class Case:
    """existing: an old package is replaced. exchange: the file system can swap two names."""

    weights: str
    existing: bool
    exchange: bool = True

    def order(self, bench: Bench, kill_at: int | None) -> Order:
        return Order(str(bench.new), str(bench.out), self.weights, self.existing, self.exchange, kill_at)


CASES = {
    "new": Case("copy", existing=False),
    "exchanged": Case("link", existing=True),
    "exchanged, copied": Case("copy", existing=True),
    "renamed twice": Case("link", existing=True, exchange=False),
}


POSSIBLE = {
    "new": {"none", "new"},
    "exchanged": {"old", "new"},
    "exchanged, copied": {"old", "new"},
    "renamed twice": {"old", "set aside", "new"},
}


def steps_of(victim: subprocess.Popen[str], bench: Bench, case: Case) -> tuple[list[str], int]:
    """The steps of a whole export, and the number of the first that belongs to publishing."""
    bench.reset(case.existing)
    outcome = tell(victim, case.order(bench, None))
    assert outcome.status == 0 and outcome.error is None
    assert lasting(bench.out) == lasting(bench.package(case.weights))
    steps = outcome.steps
    return steps, next(i for i, step in enumerate(steps) if step.startswith("fsync ") and step.endswith("/overlays"))


def moments(steps: list[str], flush: int) -> list[int]:
    """All from the flush on, and some that are spread evenly over what comes before."""
    return sorted({i * flush // EARLY for i in range(EARLY)} | set(range(flush, len(steps))))


@pytest.mark.parametrize("name", CASES)
def test_a_kill_leaves_the_old_package_or_the_new_one(victim: subprocess.Popen[str], bench: Bench, name: str) -> None:
    case = CASES[name]
    steps, flush = steps_of(victim, bench, case)
    old, new = lasting(bench.home / "old"), lasting(bench.package(case.weights))
    seen = set()
    for moment in moments(steps, flush):
        bench.reset(case.existing)
        outcome = tell(victim, case.order(bench, moment))
        assert os.WIFSIGNALED(outcome.status) and os.WTERMSIG(outcome.status) == signal.SIGKILL
        state = found(bench, old, new)
        seen.add(state)
        assert state in POSSIBLE[name], steps[moment]
        go_on(victim, bench, case, state)
        assert lasting(bench.out) == new, steps[moment]
        assert [path.name for path in bench.out.parent.iterdir()] == ["out"], steps[moment]
    assert seen == POSSIBLE[name]  # else the moments were not the right ones


def found(bench: Bench, old: dict[str, bytes], new: dict[str, bytes]) -> str:
    """What stands under the target's name, compared file by file; anything that is not whole is a failure."""
    if bench.out.exists():
        made = lasting(bench.out)
        return "old" if made == old else "new" if made == new else "a mixture"
    aside = staging._previous(bench.out)
    if not aside.exists():
        return "none"
    return "set aside" if lasting(aside) == old else "a mixture"


def go_on(victim: subprocess.Popen[str], bench: Bench, case: Case, state: str) -> None:
    """The next run; where a package was set aside, first one that has no leave to replace it and puts it back."""
    if state == "set aside":
        plain = Order(str(bench.new), str(bench.out), case.weights, False, case.exchange, None)
        refused = tell(victim, plain)
        assert refused.error and "something there already; pass --force" in refused.error
        assert lasting(bench.out) == lasting(bench.home / "old")
    again = Order(str(bench.new), str(bench.out), case.weights, state != "none", case.exchange, None)
    outcome = tell(victim, again)
    assert outcome.status == 0 and outcome.error is None, outcome


def test_moments_are_many_and_lie_where_it_matters(victim: subprocess.Popen[str], bench: Bench) -> None:
    """So that the test above cannot come to try nothing."""
    tried, publishing = 0, 0
    for case in CASES.values():
        steps, flush = steps_of(victim, bench, case)
        tried += len(moments(steps, flush))
        publishing += len(steps) - flush
        kinds = {step.partition(" ")[0] for step in steps}
        assert kinds >= {"os.mkdir", "open", "write", "fsync"}
        assert ("exchanged" in kinds) == (case.existing and case.exchange)
        assert ("os.rename" in kinds) == (not case.existing or not case.exchange)
        assert ("os.link" in kinds) == (case.weights == "link")
        assert ("os.remove" in kinds) == case.existing or case.weights == "link"  # of a reflink that failed
    assert tried >= 100 and publishing >= 50


@pytest.mark.parametrize("name", CASES)
def test_flushes_come_before_the_name(victim: subprocess.Popen[str], bench: Bench, name: str) -> None:
    """Each file that was written is flushed, then both folders, then comes the name, then the folder it is in."""
    case = CASES[name]
    steps, flush = steps_of(victim, bench, case)
    naming = ("exchange",) if case.existing and case.exchange else ("os.rename", f"{bench.out.parent}/.partial-")
    published = next(i for i, step in enumerate(steps) if step.startswith(" ".join(naming)))
    partials = {step.split("/.partial-")[1].split("/")[0] for step in steps[:published] if "/.partial-" in step}
    (partial,) = {part for part in partials if part}

    def inside(kind: str) -> list[str]:
        prefix = f"{bench.out.parent}/.partial-{partial}"
        return [
            step.removeprefix(f"{kind} {prefix}").removeprefix("/")
            for step in steps[:published]
            if step.startswith(f"{kind} {prefix}")
        ]

    written, flushed = inside("open"), inside("fsync")
    if case.weights == "link":
        written.remove("model.safetensors")  # an attempt at a reflink, which a hard link came after
    assert set(flushed) == {*written, "overlays", ""} and len(written) >= 7
    assert flushed[-2:] == ["overlays", ""]
    assert f"fsync {bench.out.parent}" in steps[published:] and f"fsync {bench.out.parent}" not in steps[:published]
    assert not any(step.startswith(("write", "open")) for step in steps[flush:])


# Errors


class Fault:
    """The n-th call of a function of `os` raises; all others go through."""

    def __init__(self, name: str, number: int, code: int) -> None:
        self.name, self.number, self.code = name, number, code
        self.calls = 0

    @contextmanager
    def in_place(self) -> Iterator[None]:
        real = getattr(os, self.name)

        def call(*args: Any, **kwargs: Any) -> Any:
            cleaning = sys._getframe(1).f_globals["__name__"] == "shutil"  # what cannot be removed stays, of course
            self.calls += not cleaning
            if self.calls == self.number and not cleaning:
                raise OSError(self.code, os.strerror(self.code))
            return real(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, self.name, call)
            yield

    @property
    def happened(self) -> bool:
        return self.calls >= self.number


WRITING = ("write", "copy_file_range", "preadv", "ftruncate")
"""What these do does not depend on what is there, so one case is enough."""
NAMING = ("fsync", "open", "mkdir", "chmod", "link", "rename")
FAULTS = [("exchanged, copied", call) for call in WRITING] + [
    (name, call) for name in ("new", "exchanged", "renamed twice") for call in NAMING
]
TOLERATED = {"open": 3, "link": 1, "mkdir": 1, "rename": 1}
"""How many an export may do without: a look at leftovers and locks, a link, a folder that is there already, a better
name for what is deleted."""


@pytest.mark.parametrize(("name", "call"), FAULTS)
def test_an_error_at_any_call_leaves_things_as_they_were(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, call: str
) -> None:
    """One call after the other fails until none is left that could."""
    case = CASES[name]
    if not case.exchange:
        without_exchange(monkeypatch)
    options = ExportOptions(weights=case.weights, force=case.existing)  # type: ignore[arg-type]
    old, new = lasting(bench.home / "old"), lasting(bench.package(case.weights))
    out = bench.out if case.existing else bench.out / "deeper" / "out"  # whose parents are made, and go again
    number, tolerated = 0, 0
    while True:
        number += 1
        fault = Fault(call, number, (errno.ENOSPC, errno.EIO)[number % 2])
        bench.reset(case.existing)
        try:
            with fault.in_place():
                builder.export(bench.new, out, options)
        except MachineError as error:
            assert fault.happened and str(out.parent) in str(error)
            assert ("no space left" if number % 2 == 0 else "Input/output error") in str(error)
            assert not case.existing or lasting(out) == old
        else:
            tolerated += fault.happened
            assert sorted(lasting(out)) == sorted(new)
        left = [path.name for path in bench.out.parent.iterdir()]
        assert left == (["out"] if case.existing or out.exists() else []), (call, number)
        if not fault.happened:
            break
    assert tolerated <= TOLERATED.get(call, 0)
    assert number > {"write": 30, "copy_file_range": 20, "fsync": 8, "open": 8}.get(call, 0)
