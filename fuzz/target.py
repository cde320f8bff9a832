"""What must hold for every folder: a success or a refusal, soon, in little memory, with nothing foreign touched.

    python -m fuzz.target --runs 100000 --seed 1      random inputs, reproducible by seed and number
    python -m fuzz.target --atheris -- -runs=100000   inputs led by coverage (needs atheris)
    python -m fuzz.target --replay FILE               one saved input again

Builder is imported inside functions, so that atheris can instrument it first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Any

import click

from fuzz import mutations

MAX_SECONDS = 5.0
"""Of processor time: what else the machine does is no finding. The wall clock may show ten times as much."""
MAX_BYTES = 1 << 30
ADDRESS_SPACE = 8 << 30
"""Where the kernel ends an allocation, so that a finding costs a MemoryError and not the machine."""
INPUT_BYTES = 256
READ = {"merges.txt", "vocab.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"} | {
    *(mutations.INDEX, "config.json", "hf_quant_config.json", "generation_config.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
}
"""The only files of a checkpoint, beside *.safetensors, that may be opened."""
FORBIDDEN = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.", "socket.")


class Finding(Exception):
    """Something that must not happen, other than an exception of the builder's."""


class TooLong(BaseException):
    """Raised by an alarm; not an Exception, so that nothing in between takes it for one of its own."""


class Watch:
    """An audit hook, which can never be taken away, and which looks only while `on`."""

    def __init__(self) -> None:
        self.on = False
        self.checkpoint = self.output = ""
        self.violations: list[str] = []
        sys.addaudithook(self._hook)

    @contextlib.contextmanager
    def over(self, checkpoint: Path, output: Path) -> Iterator[None]:
        """Raises Finding where the block opened, imported or ran anything but what belongs to an export."""
        self.checkpoint, self.output = os.path.abspath(checkpoint), os.path.abspath(output)
        self.violations.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False
        if self.violations:
            raise Finding(f"foreign access: {self.violations[0]}")

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            self._opened(args[0], args[2])
        elif event.startswith(FORBIDDEN):
            self.violations.append(f"{event} {args!r}")
        elif event == "import" and mutations.TRAP in str(args[0]):
            self.violations.append(f"import of {args[0]}")
        elif event == "exec" and mutations.TRAP in getattr(args[0], "co_filename", ""):
            self.violations.append(f"exec of {args[0]}")

    def _opened(self, path: object, flags: object) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor that somebody opened before
        if path == "overlays":
            return  # rmtree opens what is inside a package by its bare name, from the folder's descriptor
        home, _, name = os.path.abspath(os.fsdecode(path)).rpartition("/")
        if f"{home}/{name}/".startswith(f"{self.output}/"):
            return
        reading = isinstance(flags, int) and flags & os.O_ACCMODE == os.O_RDONLY
        if home != self.checkpoint or not reading or not (name in READ or name.endswith(".safetensors")):
            self.violations.append(f"open of {path!r}")


@dataclass
class Target:
    """Runs inputs in a folder of its own and counts what became of them.

    exports: one input in so many goes through the whole export. seconds: alarms after so long (see MAX_SECONDS); None
    where somebody else keeps the time (libFuzzer has the alarm signal for itself). memory: what the process may hold;
    None where it holds other things, too. peak: the most it held during an input.
    """

    home: Path
    exports: int = 10
    seconds: float | None = MAX_SECONDS
    memory: int | None = MAX_BYTES
    peak: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        """Every import that happens on first use happens here, before anyone watches what is opened."""
        from builder.inspection import inspect
        from builder.planning import plan

        for number in range(len(mutations.BASES)):
            mutations.write(mutations.base(number), self.home / "checkpoint")
            inspect(self.home / "checkpoint")
            plan(self.home / "checkpoint")
            self._export(random.Random(number))
            shutil.rmtree(self.home / "written")
        self.counts.clear()

    def run(self, data: bytes) -> None:
        """One input. Raises whatever must not happen."""
        from builder.errors import MachineError, Refused

        draft, _ = mutations.mutated(data)
        mutations.write(draft, self.home / "checkpoint")
        self.counts["executions"] += 1
        forget_peak()
        try:
            with self._alarm(), numeric_warnings(), self.watch.over(self.home / "checkpoint", self.home / "written"):
                self._exercise(zlib.crc32(data))
        except (Refused, MachineError) as refusal:
            self.counts["refused"] += 1
            self.counts["refused as MachineError"] += isinstance(refusal, MachineError)
            check_text(str(refusal))
            self._check_nothing_left()
        else:
            self.counts["succeeded"] += 1
        finally:
            shutil.rmtree(self.home / "written", ignore_errors=True)
            held = peak_bytes()
            self.peak = max(self.peak, held)
        if self.memory is not None and held > self.memory:
            raise Finding(f"memory: {held} bytes")

    def _exercise(self, lot: int) -> None:
        """Headers, modules and scales of every input; the whole export or inspect() and plan() of some, by lot."""
        from builder.checkpoint import Checkpoint
        from builder.inspection import inspect
        from builder.planning import plan
        from builder.source import read_source

        checkpoint = Checkpoint(self.home / "checkpoint")
        self.counts["past the header parser"] += 1
        for ref in checkpoint.values():
            if ref.offset + ref.nbytes > ref.file.stat().st_size:
                raise Finding(f"tensor {ref.name} ends outside its file")
        if lot % self.exports == 0:
            self._export(random.Random(lot))
        elif lot // self.exports % 20 == 0:
            self.counts["inspections"] += 1
            check_warnings(inspect(self.home / "checkpoint")["warnings"])
            self.counts["inspected"] += 1
        elif lot // self.exports % 20 == 1:
            self.counts["plans"] += 1
            check_warnings(plan(self.home / "checkpoint").warnings)
            self.counts["planned"] += 1
        else:
            check_warnings(read_source(checkpoint, "auto").warnings)
            self.counts["sources read"] += 1

    def _export(self, rng: random.Random) -> None:
        import builder

        options = builder.ExportOptions(
            weights=rng.choice(("auto", "link", "copy")),
            dtype=rng.choice(("auto", "bfloat16")),
            mtp=rng.choice(("auto", "auto", "off", "require")),
            checkpoints=rng.choice(("compact", "off")),
            context_length=rng.choice((None, None, 1)),
        )
        out = self.home / "written" / "package"
        self.counts["exports"] += 1
        check_warnings(builder.export(self.home / "checkpoint", out, options).warnings)
        builder.inspect(out)
        for path in out.rglob("*"):
            if path.is_file() and mutations.SECRET.encode() in path.read_bytes():
                raise Finding(f"{path.name} carries what lies outside the checkpoint")
        self.counts["exported"] += 1

    def _check_nothing_left(self) -> None:
        """A refused export takes everything with it, the folder it made for its package too."""
        left = [path.name for path in self.home.iterdir() if path.name.startswith((".partial", "written"))]
        if left:
            raise Finding(f"leftovers: {', '.join(left)}")

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        if self.seconds is None:
            yield
            return
        timers = ((signal.ITIMER_PROF, signal.SIGPROF, 1), (signal.ITIMER_REAL, signal.SIGALRM, 10))
        before = [signal.signal(number, _too_long) for _, number, _ in timers]
        for timer, _, factor in timers:
            signal.setitimer(timer, factor * self.seconds)
        try:
            yield
        finally:
            for (timer, number, _), handler in zip(timers, before, strict=True):
                signal.setitimer(timer, 0)
                signal.signal(number, handler)


@contextlib.contextmanager
def numeric_warnings() -> Iterator[None]:
    """numpy's warnings of overflow or invalid values are raised: nobody can act on one that appears on a terminal."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TooLong


def check_text(text: str) -> None:
    """What a person gets to read is one line of characters that any terminal takes."""
    if not text.isprintable():
        raise Finding(f"text that is no line: {text!r}")


def check_warnings(lines: list[str]) -> None:
    for line in lines:
        check_text(line)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forget_peak() -> None:
    """So that each input is measured for itself. Where /proc does not allow it the peak is that of all before, too."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def signature(error: BaseException) -> str:
    """What tells one finding from another: its type and the builder's innermost function."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/builder/" in frame.filename]
    place = f" in {Path(frames[-1].filename).name} {frames[-1].name}" if frames else ""
    detail = f" {str(error).partition(':')[0]}" if isinstance(error, Finding) else ""
    return f"{type(error).__name__}{detail}{place}"


def save(folder: Path, name: str, data: bytes, error: BaseException) -> Path:
    """A reproducer for --replay, and beside it what happened."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{sha256(name.encode()).hexdigest()[:12]}.bin"
    path.write_bytes(data)
    mutated = ", ".join(mutations.mutated(data)[0].done)
    lines = [name, f"mutations: {mutated}", *traceback.format_exception(error, limit=-40)]
    path.with_suffix(".txt").write_text("\n".join(lines), "utf-8", "backslashreplace")
    return path


def random_runs(target: Target, numbers: range, seed: int, findings: Path) -> Counter[str]:
    """Runs the inputs of a seed with these numbers. Returns how often each finding was made; its first is saved."""
    found: Counter[str] = Counter()
    started = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):  # whoever has seen enough gets the totals so far
        for done, number in enumerate(numbers, 1):
            _random_run(target, f"{seed}:{number}", found, findings)
            if done % 5000 == 0:
                counts = ", ".join(f"{name} {count}" for name, count in target.counts.items())
                click.echo(f"{done / (time.monotonic() - started):.0f}/s, {counts}", err=True)
    report(target, found, time.monotonic() - started)
    return found


def _random_run(target: Target, name: str, found: Counter[str], findings: Path) -> None:
    data = random.Random(name).randbytes(INPUT_BYTES)
    try:
        target.run(data)
    except (Exception, TooLong) as error:
        kind = signature(error)
        found[kind] += 1
        if found[kind] == 1:
            click.echo(f"{name} {kind}: {save(findings, kind, data, error)}", err=True)


def report(target: Target, found: Counter[str], seconds: float) -> None:
    total = max(1, target.counts["executions"])
    for name, count in target.counts.items():
        click.echo(f"{name:24} {count:8} {100 * count / total:6.1f}%")
    click.echo(f"{'findings':24} {found.total():8} of {len(found)} kinds")
    for name, count in found.most_common():
        click.echo(f"  {count:6} {name}")
    click.echo(f"{total / max(seconds, 1e-9):.0f} executions/s, peak RSS {target.peak >> 20} MB")


def led_by_coverage(home: Path, exports: int, arguments: tuple[str, ...]) -> None:
    """libFuzzer's loop. It never returns; a finding ends it and leaves a crash-* or timeout-* file for --replay."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    with atheris.instrument_imports(include=["builder"]):
        import builder.exporter
        import builder.inspection
        import builder.planning  # noqa: F401
    target = Target(home, exports, seconds=None)
    limits = [f"-timeout={MAX_SECONDS:.0f}", f"-rss_limit_mb={MAX_BYTES >> 20}", f"-max_len={INPUT_BYTES}"]
    atheris.Setup([sys.argv[0], *limits, *arguments], target.run)
    try:
        atheris.Fuzz()
    finally:
        report(target, Counter(), 0)


def replay(target: Target, files: tuple[Path, ...], keep: Path | None) -> None:
    """Runs saved inputs with their tracebacks shown. keep: where the last one's checkpoint is left."""
    for path in files:
        data = path.read_bytes()
        click.echo(f"{path}: {', '.join(mutations.mutated(data)[0].done)}")
        if keep:
            mutations.write(mutations.mutated(data)[0], keep / "checkpoint")
        target.run(data)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--runs", default=1000, show_default=True, help="Random inputs to run.")
@click.option("--first", default=0, show_default=True, help="Number of the first input, to go on from there.")
@click.option("--seed", default=0, show_default=True, help="Which random inputs.")
@click.option("--exports", default=10, show_default=True, help="One input in so many is exported whole.")
@click.option("--findings", type=click.Path(path_type=Path), default=Path("build/fuzz"), show_default=True)
@click.option("--replay", "files", type=click.Path(path_type=Path, exists=True), multiple=True, help="Saved inputs.")
@click.option("--keep", type=click.Path(path_type=Path), help="With --replay: leave the checkpoint in this folder.")
@click.option("--atheris", is_flag=True, help="Let coverage lead; further arguments go to libFuzzer.")
@click.argument("arguments", nargs=-1)
def main(
    runs: int,
    first: int,
    seed: int,
    exports: int,
    findings: Path,
    files: tuple[Path, ...],
    keep: Path | None,
    atheris: bool,
    arguments: tuple[str, ...],
) -> None:
    """Feed damaged checkpoints to the builder and count what becomes of them. Exits 1 where anything was found."""
    faulthandler.enable()  # a crash of native code would end the run without a word
    resource.setrlimit(resource.RLIMIT_DATA, (ADDRESS_SPACE, ADDRESS_SPACE))
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="draftsmith-fuzz-", dir=memory if memory.is_dir() else None) as home:
        if atheris:
            led_by_coverage(Path(home), exports, arguments)
        elif files:
            replay(Target(Path(home), exports), files, keep)
        elif random_runs(Target(Path(home), exports), range(first, first + runs), seed, findings):
            sys.exit(1)


if __name__ == "__main__":
    main()
