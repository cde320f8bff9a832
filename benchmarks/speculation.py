"""Tokens per second of the trained checkpoint: transformers, plain decoding here, one request at a time and eight in a
batch, and K = 3 drafts here, in one run.

They take turns on the same prompts, weights (dequantized to float32 for transformers) and threads; the figure of
each is the median over repetitions of all prompts' tokens by their seconds. Ratios are what counts.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

import builder
import runtime
from fixtures import TRAINED
from runtime.generation import Ask, generate, options_for

Contender = Callable[[list[list[int]]], int]
"""Generates for all prompts; returns how many tokens."""


@click.command()
@click.option("--repeats", default=5, show_default=True)
@click.option("--new-tokens", default=64, show_default=True)
@click.option("--draft-tokens", default=3, show_default=True)
@click.option("--peer/--no-peer", default=True, show_default=True, help="Time transformers too (needs torch).")
def main(repeats: int, new_tokens: int, draft_tokens: int, peer: bool) -> None:
    """Print tokens/s and ratios."""
    reference = np.load(TRAINED / "reference.npz")
    prompts = [reference[name].tolist() for name in reference.files if name.startswith("prompt_")]
    with tempfile.TemporaryDirectory() as folder:
        builder.export(TRAINED, Path(folder) / "package")
        package = runtime.load(Path(folder) / "package")
        contenders: dict[str, Contender] = {
            "plain": one_by_one(ours(package, new_tokens, 0)),
            f"K={draft_tokens}": one_by_one(ours(package, new_tokens, draft_tokens)),
            "plain, a batch": lambda prompts: together(package, prompts, new_tokens),
        }
        if peer:
            contenders = {"transformers": one_by_one(transformers_greedy(new_tokens)), **contenders}
        speeds = measure(contenders, prompts, repeats)
    report(speeds, draft_tokens)


def one_by_one(run: Callable[[list[int]], int]) -> Contender:
    return lambda prompts: sum(run(prompt) for prompt in prompts)


def together(package: runtime.LoadedPackage, prompts: list[list[int]], new_tokens: int) -> int:
    """All prompts at once, as requests of one engine."""
    asks = [Ask(tuple(prompt), new_tokens, 0) for prompt in prompts]
    return generate(package, asks, options_for(package, asks, runtime.EngineOptions())).num_tokens


def ours(package: runtime.LoadedPackage, new_tokens: int, draft_tokens: int) -> Callable[[list[int]], int]:
    """One request at a time, each through an engine of its own, as `build-model run` does."""

    def run(prompt: list[int]) -> int:
        asks = [Ask(tuple(prompt), new_tokens, draft_tokens)]
        return generate(package, asks, options_for(package, asks, runtime.EngineOptions())).num_tokens

    return run


def transformers_greedy(new_tokens: int) -> Callable[[list[int]], int]:
    """transformers' own cached greedy decoding in float32."""
    import torch

    from fixtures.trained.oracle import load

    target, _ = load(TRAINED)

    def run(prompt: list[int]) -> int:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=new_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return int(out.shape[1]) - len(prompt)

    return run


def measure(contenders: dict[str, Contender], prompts: list[list[int]], repeats: int) -> dict[str, list[float]]:
    """Tokens per second of each contender, one figure a repetition, after one unmeasured round."""
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repeats + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            tokens = run(prompts)
            if repetition:
                speeds[name].append(tokens / (time.perf_counter() - started))
    return speeds


def report(speeds: dict[str, list[float]], draft_tokens: int) -> None:
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    for name, values in speeds.items():
        click.echo(f"{name:>14}: {medians[name]:7.1f} tokens/s (from {min(values):.1f} to {max(values):.1f})")
    if "transformers" in medians:
        click.echo(f"plain is {medians['plain'] / medians['transformers']:.2f}x transformers")
    click.echo(f"K={draft_tokens} is {medians[f'K={draft_tokens}'] / medians['plain']:.2f}x plain")
    click.echo(f"a plain batch is {medians['plain, a batch'] / medians['plain']:.2f}x one request at a time")


if __name__ == "__main__":
    main()
