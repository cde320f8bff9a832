"""Where a step's time goes on a GPU: the kernels of a plain step or of a round of drafts, by name.

Kernels are timed by the driver, through torch's profiler, which sees every kernel of the process; their sum is what no
change outside of them can go below, and what the step takes beyond it is launches, copies and Python.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import click

import runtime
from benchmarks.gpu import make, ready, timed

HOST_GAP = 50.0
"""Microseconds without a kernel, from which on the device is taken to wait for the host."""


@dataclass(frozen=True)
class Kernel:
    """Of one step: how often it ran, and microseconds of all of them."""

    name: str
    count: float
    microseconds: float


@dataclass(frozen=True)
class Profile:
    """Kernels and copies of one step, the longest first; microseconds between two of them, and without any."""

    kernels: list[Kernel]
    between: float
    waiting: float


def profile(step: Callable[[], object], steps: int) -> Profile:
    """Of `steps` steps, on average."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
    rows = [(row.key, row.count, row.self_device_time_total) for row in found.key_averages()]
    listed = [Kernel(name, count / steps, time / steps) for name, count, time in rows if time]
    events = [event.time_range for event in found.events() if event.device_type == DeviceType.CUDA]
    spans = sorted((event.start, event.end) for event in events)
    ends = accumulate((end for _, end in spans), max)
    gaps = [max(0.0, start - end) for (start, _), end in zip(spans[1:], ends, strict=False)]
    short = sum(gap for gap in gaps if gap < HOST_GAP)
    return Profile(sorted(listed, key=lambda kernel: -kernel.microseconds), short / steps, (sum(gaps) - short) / steps)


@click.command()
@click.option("--package", type=click.Path(path_type=Path), help="A package; a look-alike of 27B without.")
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 16), show_default=True)
@click.option("--draft-tokens", multiple=True, type=int, default=(0, 3), show_default=True)
@click.option("--steps", default=8, show_default=True)
@click.option("--cuda-graph/--no-cuda-graph", default=True, show_default=True)
@click.option("--rows", default=24, show_default=True, help="Kernels listed.")
def main(
    package: Path | None, batches: list[int], draft_tokens: list[int], steps: int, cuda_graph: bool, rows: int
) -> None:
    """Print the kernels of a step."""
    with tempfile.TemporaryDirectory() as folder:
        loaded = runtime.load(package or make(Path(folder)), "cuda", cuda_graph=cuda_graph)
        for drafts in draft_tokens:
            for batch in batches:
                engine = ready(loaded, drafts, batch, 3 * steps + 8)
                seconds = timed(engine.step, steps, warm_up=6)
                show(f"K={drafts}, batch {batch}", seconds, profile(engine.step, steps), rows)


def show(case: str, seconds: float, found: Profile, rows: int) -> None:
    total, count = sum(k.microseconds for k in found.kernels), sum(k.count for k in found.kernels)
    click.echo(f"{case}: {1e3 * seconds:.2f} ms a step, {total / 1e3:.2f} ms of it in {count:.0f} kernels and copies")
    click.echo(f"  while profiled: {found.between:.0f} us between them, {found.waiting:.0f} us waiting for the host")
    for kernel in found.kernels[:rows]:
        click.echo(f"  {kernel.microseconds:9.1f} us {kernel.count:7.1f} x  {kernel.name[:150]}")


if __name__ == "__main__":
    main()
