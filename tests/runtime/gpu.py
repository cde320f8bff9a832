"""What the tests on a GPU share: the trained packages' texts, and where two of them may part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fixtures import CHECKPOINTS, TRAINED
from runtime import Engine, EngineOptions, Request
from runtime.loading import LoadedPackage
from runtime.rounding import Rounding
from tests.runtime.answers import counts_of

TRAINED_ONES = [TRAINED, CHECKPOINTS / "trained_ct_moe_text", CHECKPOINTS / "trained_mo_moe_text"]
OTHERS = sorted(folder for folder in CHECKPOINTS.iterdir() if not folder.name.startswith("trained"))


def texts(answers: Mapping[str, NDArray[Any]], name: str) -> list[list[int]]:
    return [answers[f"{name}_{i}"].tolist() for i in range(8)]


def run(loaded: LoadedPackage, prompts: list[list[int]], drafts: int, batch: int) -> tuple[list[Request], Engine]:
    engine = Engine(loaded, EngineOptions(num_blocks=2 * batch, max_batch_size=batch, max_draft_tokens=drafts))
    requests = [engine.submit(prompt, 64, drafts, ()) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return requests, engine


def acceptance(requests: list[Request], answers: Mapping[str, NDArray[Any]], drafts: int) -> tuple[float, float]:
    """Shares of accepted drafts, the requests' and the oracle's, of texts that are transformers'.

    The oracle counts along those; at least half of the texts must be such.
    """
    greedy, counts = texts(answers, "greedy"), counts_of(requests)
    same = [index for index, request in enumerate(requests) if request.token_ids == greedy[index % 8]]
    assert len(same) >= len(requests) / 2
    expected = answers[f"accepted_evaluated_k{drafts}"]
    (accepted, evaluated), oracle = (
        tuple(map(sum, zip(*pairs, strict=True)))
        for pairs in ([counts[i] for i in same], [expected[i % 8].tolist() for i in same])
    )
    return accepted / evaluated, oracle[0] / oracle[1]


def unexplained(
    ours: list[list[int]], theirs: list[list[int]], answers: Mapping[str, NDArray[Any]], loaded: LoadedPackage
) -> list[tuple[int, int]]:
    """Where two lists of texts part although transformers' own token leads by more than rounding turns over.

    margin_I tells the lead in float32 along transformers' text, so a place behind which one of the two has left that
    text already is judged by where it left. What parted at ties is printed.
    """
    greedy, tie = texts(answers, "greedy"), Rounding.of(loaded).near_tie
    clear = []
    for text, place in forks(ours, theirs):
        left = [fork for side in (ours, theirs) for index, fork in forks([side[text]], [greedy[text % 8]])]
        lead = float(answers[f"margin_{text % 8}"][min([place, *left])])
        print(f"text {text} parts at token {place}, where the lead is {lead:.3f} of {tie:.3f}")
        if lead >= tie:
            clear.append((text, place))
    return clear


def forks(ours: list[list[int]], theirs: list[list[int]]) -> list[tuple[int, int]]:
    """Text and place where two lists of texts part."""
    return [
        (text, next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]))
        for text, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]
