"""Choices: decisions read off a byte string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Decisions read off a byte string; once it is used up every decision is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes, padded with zeros."""
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece.ljust(count, b"\0")

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        width = max(1, (limit.bit_length() + 7) // 8)
        return int.from_bytes(self.take(width), "little") % limit if limit > 1 else 0

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def one_in(self, count: int) -> bool:
        """True once in `count` times, never when the bytes are used up."""
        return self.below(count) == count - 1
