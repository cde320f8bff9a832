"""What requests accepted of what was drafted for them, as the oracle counts it."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.request import Request


def counts_of(requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Accepted and evaluated drafts of each."""
    return [(request.stats.draft_tokens_accepted, request.stats.draft_tokens_evaluated) for request in requests]
