"""Acceptance of drafts, and its counters."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.sampling import greedy, verified
from runtime.telemetry import Stats


@pytest.mark.parametrize(
    ("drafts", "chosen", "expected"),
    [
        ([], [7], [7]),
        ([1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 9]),
        ([1, 2, 3], [1, 2, 8, 9], [1, 2, 8]),
        ([1, 2, 3], [5, 2, 3, 9], [5]),
        ([1, 1], [2, 1, 1], [2]),
    ],
)
def test_verified(drafts: list[int], chosen: list[int], expected: list[int]) -> None:
    assert verified(drafts, chosen) == expected


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    assert greedy(np.array([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]], np.float32)) == [1, 0]


def test_counters_of_rounds() -> None:
    """Two of three; all; none; and one where the first accepted draft was a stop id with two tokens behind it."""
    stats = Stats()
    for proposed, accepted, discarded, stopped in [
        (3, 2, 0, False),
        (3, 3, 0, False),
        (2, 0, 0, False),
        (3, 1, 2, True),
    ]:
        stats.record_round(proposed, accepted, discarded, stopped=stopped)
    assert (stats.rounds, stats.draft_tokens_proposed, stats.draft_tokens_accepted) == (4, 11, 6)
    assert stats.draft_tokens_evaluated == 8
    assert (stats.correction_tokens, stats.bonus_tokens) == (2, 1)
    assert (stats.full_accept_rounds, stats.partial_accept_rounds, stats.zero_accept_rounds) == (1, 2, 1)
    assert stats.accepted_by_position == [3, 2, 1]
    assert stats.evaluated_by_position == [4, 2, 2]
    assert stats.acceptance_length_histogram == [1, 1, 1, 1]
    assert (stats.completed_rounds, stats.tokens_queued, stats.tokens_emitted, stats.tokens_discarded) == (3, 11, 9, 2)
    assert stats.to_json()["acceptance_rate"] == 6 / 8
    assert stats.to_json()["avg_draft_tokens_per_round"] == 11 / 4
