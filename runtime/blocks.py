"""Paged cache memory: which blocks are free, and which a request owns.

Admission promises a request every block its whole life can need, and blocks are handed out as it grows. So a running
request never waits for another one's blocks, and a batch cannot lock itself up.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class BlockPool:
    """num_blocks blocks of block_size tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._promised = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def open_table(self, max_tokens: int) -> BlockTable | None:
        """A table that may grow to max_tokens, or None while that many blocks are promised to others."""
        needed = self.blocks_for(max_tokens)
        if self._promised + needed > self.num_blocks:
            return None
        self._promised += needed
        return BlockTable(self, needed)

    def take(self) -> int:
        return self._free.pop()

    def give_back(self, blocks: list[int], promised: int = 0) -> None:
        self._free.extend(reversed(blocks))
        self._promised -= promised


@dataclass
class BlockTable:
    """One request's blocks in order: token t lies in block t // block_size."""

    pool: BlockPool
    promised: int
    blocks: list[int] = field(default_factory=list)

    def grow(self, tokens: int) -> int:
        """Makes room for `tokens` tokens in all; returns the number of blocks before, for `shrink`."""
        before = len(self.blocks)
        needed = self.pool.blocks_for(tokens)
        if needed > self.promised:
            raise AssertionError(f"{needed} blocks asked for, {self.promised} promised")
        while len(self.blocks) < needed:
            self.blocks.append(self.pool.take())
        return before

    def shrink(self, num_blocks: int) -> None:
        """Returns every block beyond the first num_blocks."""
        self.pool.give_back(self.blocks[num_blocks:])
        del self.blocks[num_blocks:]

    def close(self) -> None:
        self.pool.give_back(self.blocks, self.promised)
        self.blocks, self.promised = [], 0
