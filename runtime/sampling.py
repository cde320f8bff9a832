"""Choosing tokens: greedy, and how many drafts the target agrees with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.errors import DraftsmithError


def greedy(logits: NDArray[Any]) -> list[int]:
    """The best token of each row of logits [rows, vocab]; the lowest id on a tie. Raises DraftsmithError for NaN."""
    best = logits.argmax(axis=-1)
    if np.isnan(logits[np.arange(len(logits)), best]).any():
        raise DraftsmithError("the logits are not numbers: the weights of this package are damaged; export it again")
    chosen: list[int] = best.tolist()
    return chosen


def verified(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The tokens that greedy decoding would have produced: the drafts it agrees with, then its own next token.

    chosen[j] is the target's token after the anchor and the first j drafts, so len(chosen) == len(drafts) + 1.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return list(chosen[: accepted + 1])
