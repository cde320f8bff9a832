"""A package on a GPU: our runtime and onnxruntime-genai's Engine on the same package in one run, beside the floor.

Medians over repeats: milliseconds of a plain step and of a round of K drafts at several batch sizes, and tokens/s of a
prompt. The floor of a plain step is the bytes of the target's weights at the measured bandwidth of a copy. Without
--package a look-alike of 27B with random weights is made and exported (22.5 GB). It accepts next to no draft, so that
every round rolls back; how many tokens a round is worth is taken from the trained checkpoint's oracle: tokens a second
of rounds are that combination, and no measurement.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import numpy as np
import onnx

import builder
import runtime
from benchmarks.bandwidth import copy_bandwidth
from fixtures import TRAINED, lookalike

T = TypeVar("T")
PLAIN = json.dumps({"model": {"mtp": {"enabled": False}}})


@click.command()
@click.option("--package", type=click.Path(path_type=Path), help="A package; a look-alike of 27B without.")
@click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--steps", default=24, show_default=True, help="Steps timed in each repeat.")
@click.option("--draft-tokens", default=3, show_default=True)
@click.option("--batches", default="1,4,16", show_default=True)
@click.option("--prefill", default="2048,8192", show_default=True)
@click.option("--engine/--no-engine", default=True, show_default=True, help="Time onnxruntime-genai's Engine too.")
def main(
    package: Path | None,
    dtype: Literal["float16", "bfloat16"],
    repeats: int,
    steps: int,
    draft_tokens: int,
    batches: str,
    prefill: str,
    engine: bool,
) -> None:
    """Print medians and ratios."""
    with tempfile.TemporaryDirectory() as folder:
        path = package or make(Path(folder), dtype)
        sizes = [int(size) for size in batches.split(",")]
        prompts = [int(size) for size in prefill.split(",") if size]
        floor = weight_bytes(path) / alone(copy_bandwidth)
        click.echo(f"floor of a plain step: {1e3 * floor:.2f} ms")
        figures: dict[str, list[float]] = {}
        for recorded, unpacked in ((False, False), (True, False), (True, True)):
            figures |= alone(ours, path, repeats, steps, draft_tokens, sizes, prompts, recorded, unpacked)
        for drafts in (0, draft_tokens) if engine else ():
            figures |= alone(peer, path, repeats, steps, drafts, sizes, prompts)
        report(figures, floor, tokens_a_round(draft_tokens))


def alone(function: Callable[..., T], *arguments: object) -> T:
    """What it returns in a process of its own: every contender finds the GPU's memory free, and leaves it so."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def make(folder: Path, dtype: Literal["float16", "bfloat16"] = "float16") -> Path:
    lookalike.write(folder / "checkpoint", lookalike.Geometry(), dense=True)
    builder.export(folder / "checkpoint", folder / "package", builder.ExportOptions(weights="link", dtype=dtype))
    return folder / "package"


def weight_bytes(package: Path) -> int:
    """Bytes of every weight that the target reads in a step."""
    from builder import reader

    target = reader.read(package).target
    graph = onnx.load(target.path, load_external_data=False).graph
    looked_up = {node.input[0] for node in graph.node if node.op_type == "Gather"}  # the embedding: a row a token
    read = {(place.file, place.end): place.length for place in target.data if place.tensor not in looked_up}
    return sum(read.values())


def ours(
    path: Path,
    repeats: int,
    steps: int,
    drafts: int,
    sizes: list[int],
    prompts: list[int],
    recorded: bool,
    unpacked: bool,
) -> dict[str, list[float]]:
    """Seconds a step, by case."""
    found: dict[str, list[float]] = {}
    name = "ours" + (", CUDA graphs" if recorded else "") + (", unpacked" if unpacked else "")
    started = time.perf_counter()
    loaded = runtime.load(path, "cuda", cuda_graph=recorded, unpacked_weights=unpacked)
    click.echo(f"{name}: loaded in {time.perf_counter() - started:.1f} s", err=True)
    for size in sizes:
        for k in (0, drafts):
            case = f"{name}: {'plain step' if k == 0 else f'round of K={k}'}, batch {size}"
            found[case] = [our_step(loaded, k, size, steps) for _ in range(repeats)]
            show(case, found[case])
    sessions = [loaded.target, *([loaded.unpacked] if loaded.unpacked else []), *([loaded.mtp()] if drafts else [])]
    unrecorded = sum(session.unrecorded for session in sessions)
    if unrecorded:
        click.echo(f"{unrecorded} runs were not recorded: fewer repeats, please", err=True)
    for length in () if recorded and not unpacked else prompts:
        found[f"{name}: prompt of {length}"] = [our_prompt(loaded, length) for _ in range(repeats)]
    return found


def our_step(loaded: runtime.LoadedPackage, drafts: int, batch: int, steps: int) -> float:
    """Median seconds of a step after the prompts and a few steps to warm up."""
    return timed(ready(loaded, drafts, batch, steps + 8).step, steps, warm_up=6)


def ready(loaded: runtime.LoadedPackage, drafts: int, batch: int, steps: int) -> runtime.Engine:
    """An engine behind its prompts, with `batch` requests that go on for `steps` steps."""
    blocks = -(-(128 + steps * (1 + drafts)) // loaded.package.block_size)
    options = runtime.EngineOptions(num_blocks=blocks * batch, max_batch_size=batch, max_draft_tokens=drafts)
    engine = runtime.Engine(loaded, options)
    requests = [engine.submit([1 + i] * 128, steps * (1 + drafts), drafts, ()) for i in range(batch)]
    while any(request.is_prefill for request in requests):
        engine.step()
    return engine


def our_prompt(loaded: runtime.LoadedPackage, length: int) -> float:
    blocks = -(-(length + 2) // loaded.package.block_size)
    engine = runtime.Engine(
        loaded,
        runtime.EngineOptions(num_blocks=blocks, max_batch_size=1, max_draft_tokens=0, max_scheduled_tokens=2048),
    )
    request = engine.submit([1] * length, 2, 0, ())
    started = time.perf_counter()
    while request.is_prefill:
        engine.step()
    return time.perf_counter() - started


def timed(step: Callable[[], object], steps: int, warm_up: int) -> float:
    for _ in range(warm_up):
        step()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def peer(
    path: Path, repeats: int, steps: int, drafts: int, sizes: list[int], prompts: list[int]
) -> dict[str, list[float]]:
    """The same of onnxruntime-genai's Engine, which drafts none, or as many tokens as the package says."""
    import onnxruntime_genai as og

    found: dict[str, list[float]] = {}
    config = og.Config(str(path))
    config.clear_providers()
    config.append_provider("cuda")
    config.overlay(json.dumps({"engine": {"dynamic_batching": {"max_batch_size": max(sizes)}}}))
    if not drafts:
        config.overlay(PLAIN)
    engine = og.Engine(og.Model(config))
    for size in sizes:
        case = f"Engine: {f'round of K={drafts}' if drafts else 'plain step'}, batch {size}"
        found[case] = [peer_step(og, engine, size, steps, drafts) for _ in range(repeats)]
        show(case, found[case])
    for length in () if drafts else prompts:
        found[f"Engine: prompt of {length}"] = [peer_prompt(og, engine, length) for _ in range(repeats)]
    return found


def begin(og: Any, engine: Any, length: int, first: int, new_tokens: int) -> Any:
    request = engine.create_request()
    options = og.TurnOptions(request)
    options.set_max_generated_tokens(new_tokens)
    options.set_do_sample(False)
    request.begin_turn(np.full(length, first, np.int32), options)
    return request


def peer_step(og: Any, engine: Any, batch: int, steps: int, drafts: int) -> float:
    warm_up = 6 + batch  # the Engine may take a request a step
    new_tokens = (steps + warm_up + 2) * (1 + drafts)
    requests = [begin(og, engine, 128, 1 + i, new_tokens) for i in range(batch)]
    events = engine.create_event_buffer(batch * (1 + drafts) + 8)
    seconds = timed(lambda: list(engine.run(events)), steps, warm_up)
    finish(engine, events, requests)
    return seconds


def peer_prompt(og: Any, engine: Any, length: int) -> float:
    request = begin(og, engine, length, 1, 2)
    events = engine.create_event_buffer(8)
    started = time.perf_counter()
    while not any(int(event.flags) & int(og.EngineEventFlags.TOKEN) for event in engine.run(events)):
        pass
    seconds = time.perf_counter() - started
    finish(engine, events, [request])
    return seconds


def finish(engine: Any, events: Any, requests: list[Any]) -> None:
    """Cancels what goes on, and lets the engine forget it."""
    for request in requests:
        request.close()
    while engine.has_pending_requests():
        list(engine.run(events))


def show(case: str, seconds: list[float]) -> None:
    """As soon as it is measured: a long run may end early."""
    click.echo(f"{case}: {1e3 * statistics.median(seconds):.2f} ms", err=True)


def tokens_a_round(drafts: int) -> float:
    """Tokens that a round of K drafts gives the trained checkpoint, by its oracle: the accepted ones and one more."""
    answers = np.load(TRAINED / "reference.npz")
    accepted = int(answers[f"accepted_evaluated_k{drafts}"][:, 0].sum())
    generated = sum(len(answers[name]) - 1 for name in answers.files if name.startswith("greedy_"))
    return generated / (generated - accepted)


def rate(what: str, seconds: float, per_round: float) -> str:
    """Tokens a second of a step or a round, by the words of its case."""
    if "batch" not in what:
        return f"{int(what.rsplit(maxsplit=1)[-1]) / seconds:.0f} tokens/s"
    tokens = int(what.rsplit(maxsplit=1)[-1]) * (1.0 if "plain" in what else per_round)
    return f"{tokens / seconds:.0f} tokens/s" + ("" if "plain" in what else f" at {per_round:.2f} a round")


def report(figures: dict[str, list[float]], floor: float, per_round: float) -> None:
    medians = {case: statistics.median(values) for case, values in figures.items()}
    for case, values in figures.items():
        spread = f"from {1e3 * min(values):.2f} to {1e3 * max(values):.2f}"
        name, _, what = case.partition(": ")
        beside = f"{medians[case] / floor:.1f} floors" if "plain step" in what else ""
        peer = medians.get(f"Engine: {what}")
        ratio = f"the Engine takes {peer / medians[case]:.2f}x" if peer and name != "Engine" else ""
        tokens = rate(what, medians[case], per_round)
        click.echo(f"{case:>54}: {1e3 * medians[case]:8.2f} ms ({spread})  {tokens}  {beside}  {ratio}")


if __name__ == "__main__":
    main()
