"""propose(): drafts from the text itself, for text that repeats itself; no head is needed.

The tokens that followed the latest earlier occurrence of the text's last few tokens. Source: "prompt lookup decoding"
(Saxena, 2023), as transformers and others have it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LONGEST = 3
"""Last tokens that are looked up; fewer where so many do not occur again."""


def propose(token_ids: Sequence[int], count: int) -> list[int]:
    """At most `count` tokens that may come next; none where the last token occurs nowhere else."""
    text = np.asarray(token_ids)
    for length in range(min(LONGEST, len(text) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], length)
        found = np.flatnonzero((windows == text[-length:]).all(axis=1))
        if len(found):
            start = int(found[-1]) + length
            return [int(token) for token in text[start : start + count]]
    return []
