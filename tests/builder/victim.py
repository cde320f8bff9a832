"""A warm process that exports when told to, in a child that may be killed at any of its steps.

Started as `python -m tests.builder.victim CHECKPOINT SCRATCH`; an Order a line on stdin, an Outcome a line on stdout.
A step is whatever changes the disk: names made and removed, writes, flushes, locks, and the exchange of two names.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import builder
from builder import staging
from builder.errors import DraftsmithError
from builder.exporter import ExportOptions

CHANGES = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.chmod", "os.truncate", "shutil.rmtree"}
LOCKS = {"fcntl.flock", "fcntl.ioctl"}


@dataclass(frozen=True)
class Order:
    """kill_at: number of the step before which the child dies; a write is cut in half. exchange: whether it can."""

    checkpoint: str
    out: str
    weights: Any
    force: bool
    exchange: bool
    kill_at: int | None


@dataclass(frozen=True)
class Outcome:
    """status: as os.waitpid gives it. error: the one line of a refusal. steps: of a child that lived, in order."""

    status: int
    error: str | None
    warnings: list[str]
    steps: list[str]


class Steps:
    """Counts steps and dies at the one that it was told."""

    def __init__(self, kill_at: int | None) -> None:
        self.kill_at = kill_at
        self.names: list[str] = []

    def __call__(self, name: str, last_words: Callable[[], object] | None = None) -> None:
        if len(self.names) == self.kill_at:
            if last_words:
                last_words()
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


def watch(step: Steps, exchange: bool) -> None:
    """Makes every change of the disk a step. This process does nothing else afterwards."""

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES:
            step(f"{event} {args[0]}")
        elif event in LOCKS:
            step(event)
        elif event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE != os.O_RDONLY:
            step(f"open {args[0]}")

    write, copy, fsync, rename = os.write, os.copy_file_range, os.fsync, staging._renameat2

    def watched_write(descriptor: int, data: memoryview) -> int:
        step("write", lambda: write(descriptor, data[: len(data) // 2]))
        return write(descriptor, data)

    def watched_copy(source: int, target: int, count: int, offset: int) -> int:
        step("copy", lambda: copy(source, target, count // 2, offset))
        return copy(source, target, count, offset)

    def watched_fsync(descriptor: int) -> None:
        step(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        fsync(descriptor)

    def watched_renaming(first: Path, second: Path, flags: int) -> bool:
        """With a flag, so without an audit event. Without the call both kinds fall back to plain renames."""
        kind = "exchange" if flags == staging.RENAME_EXCHANGE else "os.rename"
        if not exchange:
            step(f"not {kind}d")
            return False
        step(kind if kind == "exchange" else f"{kind} {first}")
        done = rename(first, second, flags)
        step(f"{kind}d")
        return done

    os.write, os.copy_file_range, os.fsync = watched_write, watched_copy, watched_fsync  # type: ignore[assignment]
    staging._renameat2 = watched_renaming
    sys.addaudithook(audit)


def child(order: Order, result: int) -> None:
    step = Steps(order.kill_at)
    error, warnings = None, []
    with os.fdopen(result, "w") as file:
        watch(step, order.exchange)
        try:
            options = ExportOptions(weights=order.weights, force=order.force)
            warnings = builder.export(order.checkpoint, order.out, options).warnings
        except DraftsmithError as failure:
            error = str(failure)
        names, step.kill_at = list(step.names), None
        file.write(json.dumps([error, warnings, names]))
    os._exit(0)


def obey(order: Order) -> Outcome:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        child(order, writing)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    return Outcome(status, *(json.loads(text) if text else (None, [], [])))


def main(checkpoint: str, scratch: str) -> None:
    for weights in ("link", "copy"):  # every import and cache that a child would need time for
        builder.export(checkpoint, scratch, ExportOptions(weights=weights, force=True))  # type: ignore[arg-type]
    shutil.rmtree(scratch)
    for line in sys.stdin:
        print(json.dumps(asdict(obey(Order(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
