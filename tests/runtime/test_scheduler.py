"""Plans from request states, without a model."""

from __future__ import annotations

import pytest

from runtime.request import Request
from runtime.scheduler import plan_step


def request(prompt: int, cached: int, generated: int = 0, *, drafts: int = 0, limit: int = 64) -> Request:
    return Request((1,) * prompt, limit, drafts, token_ids=[2] * generated, num_cached=cached)


def shapes(requests: list[Request], tokens: int, drafts: int = 7) -> list[tuple[int, int, bool]]:
    return [(row.num_tokens, row.num_drafts, row.samples) for row in plan_step(requests, tokens, drafts)]


def test_decodes_come_before_prompts() -> None:
    waiting, running = request(10, 0), request(5, 5, 1)
    assert [row.request for row in plan_step([waiting, running], 100, 0)] == [running, waiting]


@pytest.mark.parametrize(
    ("cached", "budget", "expected"),
    [(0, 100, (10, 0, True)), (0, 4, (4, 0, False)), (8, 4, (2, 0, True)), (9, 4, (1, 0, True)), (4, 1, (1, 0, False))],
)
def test_chunks_of_a_prompt(cached: int, budget: int, expected: tuple[int, int, bool]) -> None:
    """Only the chunk that ends the prompt chooses a token; it may be one token long and is a prompt row still."""
    row = plan_step([request(10, cached, drafts=3)], budget, 7)[0]
    assert (row.num_tokens, row.num_drafts, row.samples) == expected
    assert row.is_prefill


def test_any_prompt_row_defers_all_drafts() -> None:
    rows = shapes([request(5, 5, 1, drafts=3), request(5, 5, 1, drafts=2), request(10, 9)], 100)
    assert rows == [(1, 0, True), (1, 0, True), (1, 0, True)]


def test_a_prompt_that_does_not_fit_the_budget_defers_nothing() -> None:
    """What counts is the selected plan, not who is waiting."""
    assert shapes([request(5, 5, 1, drafts=3), request(10, 0)], 1) == [(1, 0, True)]
    assert shapes([request(5, 5, 1, drafts=3)], 3) == [(1, 2, True)]


@pytest.mark.parametrize(
    ("generated", "limit", "expected"), [(1, 64, 3), (61, 64, 2), (62, 64, 1), (63, 64, 0), (1, 2, 0), (1, 3, 1)]
)
def test_drafts_are_clamped_to_the_tokens_left(generated: int, limit: int, expected: int) -> None:
    """D = min(K, tokens left - 1): one token of the step is the target's own."""
    row = shapes([request(5, 4 + generated, generated, drafts=3, limit=limit)], 100)[0]
    assert row[1] == expected


def test_drafts_are_clamped_to_the_engines_limit_and_the_budget() -> None:
    requests = [request(5, 5, 1, drafts=3) for _ in range(3)]
    assert [row[1] for row in shapes(requests, 100, 2)] == [2, 2, 2]
    assert [row[1] for row in shapes(requests, 7)] == [3, 1, 0], "every request has its own token first"
    assert shapes(requests, 2) == [(1, 0, True), (1, 0, True)]


def test_a_proposal_says_how_many_drafts() -> None:
    proposing = request(5, 5, 1, drafts=3)
    proposing.propose([4])
    empty = request(5, 5, 1, drafts=3)
    empty.propose([])
    assert [row[1] for row in shapes([proposing, empty], 100)] == [1, 0]
