"""Sizing an engine to its requests."""

from __future__ import annotations

import pytest

from runtime import EngineOptions
from runtime.generation import Ask, options_for
from runtime.loading import LoadedPackage


@pytest.mark.parametrize(
    ("batch", "num_blocks"),
    # 100 + 64 - 1 tokens are 11 blocks of 16, 10 + 7 - 1 are one, 17 + 1 - 1 are two.
    [(1, 11), (2, 13), (8, 14)],
)
def test_blocks_are_what_the_largest_requests_of_a_batch_need(
    trained: LoadedPackage, batch: int, num_blocks: int
) -> None:
    asks = [Ask((1,) * 100, 64, 0), Ask((1,) * 10, 7, 2), Ask((1,) * 17, 1, 1)]
    options = options_for(trained, asks, EngineOptions(block_size=16, max_batch_size=batch))
    assert options.num_blocks == num_blocks
    assert options.max_draft_tokens == 2
    assert options.max_batch_size == min(batch, 3)


def test_what_is_given_is_kept(trained: LoadedPackage) -> None:
    options = options_for(trained, [Ask((1,), 4, 0)], EngineOptions(num_blocks=99, max_batch_size=1))
    assert (options.num_blocks, options.max_draft_tokens) == (99, 0)
