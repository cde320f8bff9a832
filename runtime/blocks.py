"""Paged cache memory: which blocks are free, and which a request owns."""

from __future__ import annotations

from dataclasses import dataclass, field


class BlockPool:
    """num_blocks blocks of block_size tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def take(self) -> int:
        """A free block. There must be one: the plan of a step counts blocks before any is taken."""
        return self._free.pop()

    def give_back(self, blocks: list[int]) -> None:
        """Blocks in the order they were taken; they are handed out again in that order."""
        self._free.extend(reversed(blocks))


@dataclass
class BlockTable:
    """One request's blocks in order: token t lies in block t // block_size."""

    pool: BlockPool
    blocks: list[int] = field(default_factory=list)

    def grow(self, tokens: int) -> None:
        """Makes room for `tokens` tokens in all; a table never shrinks by growing."""
        needed = self.pool.blocks_for(tokens) - len(self.blocks)
        if needed > self.pool.num_free:
            raise AssertionError(f"{needed} blocks asked for, {self.pool.num_free} free")
        self.blocks += [self.pool.take() for _ in range(needed)]

    def shrink(self, num_blocks: int) -> None:
        """Returns every block beyond the first num_blocks."""
        self.pool.give_back(self.blocks[num_blocks:])
        del self.blocks[num_blocks:]
