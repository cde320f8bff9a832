"""Block ownership under random schedules (case A48)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from runtime.blocks import BlockPool, BlockTable


@given(st.integers(1, 8), st.integers(1, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), max_size=60))
def test_no_block_is_lost_or_owned_twice(block_size: int, num_blocks: int, moves: list[tuple[int, int]]) -> None:
    """Moves: open a table of a size, grow one, shrink one, close one. Whatever was promised can always be had."""
    pool = BlockPool(num_blocks, block_size)
    tables: list[tuple[BlockTable, int]] = []
    for move, size in moves:
        if move == 0:
            promised = sum(pool.blocks_for(limit) for _, limit in tables)
            table = pool.open_table(size)
            assert (table is None) == (promised + pool.blocks_for(size) > num_blocks)
            if table:
                tables.append((table, size))
        elif tables:
            table, limit = tables[size % len(tables)]
            if move == 1:
                table.grow(min(size, limit))
            elif move == 2:
                table.shrink(min(len(table.blocks), size // 8))
            else:
                table.close()
                tables.remove((table, limit))
        owned = [block for table, _ in tables for block in table.blocks]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(num_blocks))
        assert pool.num_free == num_blocks - len(owned)
    for table, limit in tables:
        table.grow(limit)
        assert len(table.blocks) == -(-limit // block_size)
    for table, _ in tables:
        table.close()
    assert pool.num_free == num_blocks
    assert pool.open_table(num_blocks * block_size) is not None
