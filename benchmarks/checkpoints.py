"""Tokens per second of the trained checkpoint with dense checkpoints, as a ratio of those with compact ones.

Both packages take turns on every prompt, alone and eight in a batch, with and without drafts; the figure of each is the
median over repetitions.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np

import builder
import runtime
from fixtures import TRAINED
from runtime import Engine, EngineOptions, LoadedPackage

KINDS = ("compact", "dense")


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--draft-tokens", default=3, show_default=True)
def main(repeats: int, new_tokens: int, draft_tokens: int) -> None:
    """Print tokens/s and ratios."""
    reference = np.load(TRAINED / "reference.npz")
    prompts = [reference[name].tolist() for name in reference.files if name.startswith("prompt_")][:8]
    with tempfile.TemporaryDirectory() as folder:
        packages = {}
        for kind in KINDS:
            builder.export(TRAINED, Path(folder) / kind, builder.ExportOptions(checkpoints=kind))  # type: ignore[arg-type]
            packages[kind] = runtime.load(Path(folder) / kind)
        for batch in (1, 8):
            for drafts in (0, draft_tokens):
                speeds = measure(packages, prompts, batch, new_tokens, drafts, repeats)
                medians = {kind: statistics.median(values) for kind, values in speeds.items()}
                shown = ", ".join(f"{kind} {medians[kind]:.0f} tokens/s" for kind in KINDS)
                click.echo(f"batch {batch}, K={drafts}: {shown}: {medians['dense'] / medians['compact']:.2f}x")


def measure(
    packages: dict[str, LoadedPackage],
    prompts: Sequence[list[int]],
    batch: int,
    new_tokens: int,
    drafts: int,
    repeats: int,
) -> dict[str, list[float]]:
    """Tokens per second of each package, one figure a repetition, after one unmeasured round."""
    speeds: dict[str, list[float]] = {kind: [] for kind in packages}
    for repetition in range(repeats + 1):
        seconds = dict.fromkeys(packages, 0.0)
        for start in range(0, len(prompts), batch):
            for kind, package in packages.items():
                seconds[kind] += timed(package, prompts[start : start + batch], new_tokens, drafts)
        for kind in packages if repetition else ():
            speeds[kind].append(len(prompts) * new_tokens / seconds[kind])
    return speeds


def timed(package: LoadedPackage, prompts: Sequence[list[int]], new_tokens: int, drafts: int) -> float:
    """Seconds that an engine of its own takes for these prompts together."""
    engine = Engine(package, EngineOptions(num_blocks=8, max_batch_size=len(prompts), max_draft_tokens=drafts))
    started = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, new_tokens, drafts, stop_token_ids=())
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
