"""Block ownership under random schedules (case A48)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.blocks import BlockPool, BlockTable


@given(st.integers(1, 8), st.integers(1, 12), st.lists(st.tuples(st.integers(0, 2), st.integers(1, 40)), max_size=60))
def test_no_block_is_lost_or_owned_twice(block_size: int, num_blocks: int, moves: list[tuple[int, int]]) -> None:
    """Moves: grow a table as far as blocks are free, return part of one, return all of one."""
    pool = BlockPool(num_blocks, block_size)
    tables = [BlockTable(pool) for _ in range(3)]
    for move, size in moves:
        table = tables[size % 3]
        if move == 0:
            table.grow(min(size, (len(table.blocks) + pool.num_free) * block_size))
            assert len(table.blocks) * block_size >= min(size, num_blocks * block_size) or pool.num_free == 0
        else:
            table.shrink(min(len(table.blocks), size // 8) if move == 1 else 0)
        owned = [block for table in tables for block in table.blocks]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(num_blocks))
        assert pool.num_free == num_blocks - len(owned)
    for table in tables:
        table.shrink(0)
    assert pool.num_free == num_blocks


def test_returned_blocks_are_handed_out_again_in_the_same_order() -> None:
    """A step that is rolled back and repeated writes to the same blocks."""
    pool = BlockPool(5, 4)
    table = BlockTable(pool)
    table.grow(9)
    taken = list(table.blocks)
    table.shrink(1)
    table.grow(9)
    assert table.blocks == taken == [0, 1, 2]


def test_more_blocks_than_are_free_take_none() -> None:
    pool = BlockPool(2, 4)
    table = BlockTable(pool)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        table.grow(9)
    assert (table.blocks, pool.num_free) == ([], 2)
