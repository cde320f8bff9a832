"""Seconds and memory of an export: linked and copied, beside `cp` of the same bytes in the same run.

The look-alike of 27B is sparse for the linked export, and eight layers with every byte stored (6.9 GB) for the copy.
cp and copy take turns, each flushed (`sync`) so that neither leaves its writing to the other; medians of the repeats.
RELEASED is what the released builder of onnxruntime-genai 0.18 took for the same 6.9 GB, once, on a machine of this
kind; it is recorded, not measured here.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fixtures.lookalike import Geometry, write

RELEASED = {"seconds": 54.0, "peak_gb": 11.4}


@click.command()
@click.option("--repeats", default=3, show_default=True)
@click.option("--layers", default=8, show_default=True, help="Of the copied checkpoint; 8 are 6.9 GB.")
@click.option("--folder", type=click.Path(path_type=Path), help="Where to write; a temporary folder if not given.")
def main(repeats: int, layers: int, folder: Path | None) -> None:
    """Print seconds, memory and ratios."""
    with tempfile.TemporaryDirectory(dir=folder) as home:
        linked(Path(home), repeats)
        copied(Path(home), repeats, layers)


def linked(home: Path, repeats: int) -> None:
    write(home / "sparse", Geometry())
    runs = [export(home / "sparse", home / "linked", "link") for _ in range(repeats)]
    weights = runs[0]["weights"]
    share = weights["linked_bytes"] / (weights["linked_bytes"] + weights["copied_bytes"])
    seconds, peak = median(runs, "wall"), median(runs, "peak_rss_bytes") / 1e6
    click.echo(f"link, 64 layers: {seconds:.1f} s, {peak:.0f} MB, {share:.2%} of the bytes linked")


def copied(home: Path, repeats: int, layers: int) -> None:
    size = write(home / "dense", Geometry(layers=layers, fp8_mlps=1), dense=True)
    runs, peers = [], []
    for _ in range(repeats):
        peers.append(timed(home / "cp", lambda: copy(home / "dense", home / "cp")))
        runs.append(export(home / "dense", home / "copied", "copy"))
    seconds, peer, peak = median(runs, "wall"), statistics.median(peers), median(runs, "peak_rss_bytes") / 1e9
    click.echo(
        f"copy, {size / 1e9:.1f} GB: {seconds:.1f} s, {peak:.2f} GB; cp {peer:.1f} s; ratio {seconds / peer:.2f}"
    )
    each = ", ".join(f"{run['wall'] / peer:.2f}" for run, peer in zip(runs, peers, strict=True))
    click.echo(f"ratios of the {repeats} rounds: {each}")
    click.echo(f"released builder, 6.9 GB (recorded): {RELEASED['seconds']:.0f} s, {RELEASED['peak_gb']:.1f} GB")


def export(source: Path, out: Path, weights: str) -> dict[str, Any]:
    """The command's own report, and its wall-clock seconds from start to exit."""
    reports: list[dict[str, Any]] = []

    def run() -> None:
        command = ["build-model", "export", str(source), str(out), "--weights", weights, "--json", "-q"]
        reports.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))

    seconds = timed(out, run)
    return {**reports[0], "wall": seconds}


def copy(source: Path, out: Path) -> None:
    out.mkdir()
    shards = sorted(map(str, source.glob("*.safetensors")))
    subprocess.run(["cp", *shards, str(out)], check=True)
    subprocess.run(["sync", *(str(out / Path(shard).name) for shard in shards)], check=True)


def timed(out: Path, action: Callable[[], None]) -> float:
    """Seconds of one action that writes `out`, which is then deleted; nothing is left to be written before it."""
    subprocess.run(["sync"], check=True)
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds


def median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


if __name__ == "__main__":
    main()
