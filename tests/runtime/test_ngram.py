"""Drafts from the text itself."""

from __future__ import annotations

import pytest

from runtime import Engine, EngineOptions
from runtime.ngram import propose
from tests.runtime.fakes import fake_package, plain


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, [4, 1]),
        ([7, 2, 3, 9, 1, 2, 3, 5, 8, 2, 3], 2, [5, 8]),  # two tokens occur twice before: the latest counts
        ([9, 1, 2, 3, 7, 4, 2, 3, 8, 1, 2, 3], 1, [7]),  # three tokens win over a later occurrence of two
        ([5, 5, 5], 4, [5]),  # nothing is known beyond the end
        ([1, 2, 3, 4], 3, []),
        ([1], 3, []),
        ([1, 2, 1], 0, []),
    ],
)
def test_what_followed_the_last_tokens_before(text: list[int], count: int, expected: list[int]) -> None:
    assert propose(text, count) == expected


def test_a_repeating_text_is_drafted_without_a_head() -> None:
    """The fake's text repeats nothing, so the prompt does: it holds what will be generated."""
    prompt = [3, 1, 4]
    future = plain(prompt, 8)
    engine = Engine(fake_package(), EngineOptions(num_blocks=40, proposer="ngram"))
    assert engine.proposer is None
    request = engine.submit([*future, *prompt], 12, 4)
    while engine.has_work:
        engine.step()
    assert request.token_ids == plain([*future, *prompt], 12)
    assert request.stats.draft_tokens_proposed > 0
    assert request.stats.draft_forward_passes == 0
