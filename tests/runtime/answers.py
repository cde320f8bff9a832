"""Prompts run to their end, and what transformers' oracle says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime import Engine
from runtime.request import Request


def run_to_the_end(engine: Engine, prompts: Sequence[Sequence[int]], drafts: int = 3) -> list[Request]:
    """64 tokens of each prompt."""
    requests = [engine.submit(prompt, 64, drafts) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return requests


def counts_of(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Accepted and evaluated drafts of each."""
    return [(request.stats.draft_tokens_accepted, request.stats.draft_tokens_evaluated) for request in requests]


def oracle_counts(reference: Mapping[str, Any], drafts: int = 3) -> list[tuple[int, int]]:
    """The same by the oracle, of the eight prompts of a reference."""
    return [tuple(row) for row in reference[f"accepted_evaluated_k{drafts}"].tolist()]
