"""Counters of speculative decoding, cumulative, per engine and per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class DraftCounts:
    """Drafts of one request. evaluated counts a round's drafts up to and including the first rejected one."""

    proposed: int = 0
    evaluated: int = 0
    accepted: int = 0


@dataclass
class Stats:
    """Whole-engine counters; a round is one request verifying at least one draft. Names follow onnxruntime-genai."""

    rounds: int = 0
    draft_tokens_proposed: int = 0
    draft_tokens_evaluated: int = 0
    draft_tokens_accepted: int = 0
    correction_tokens: int = 0
    bonus_tokens: int = 0
    draft_forward_passes: int = 0
    target_forward_passes: int = 0
    full_accept_rounds: int = 0
    partial_accept_rounds: int = 0
    zero_accept_rounds: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    evaluated_by_position: list[int] = field(default_factory=list)

    def record_round(self, proposed: int, accepted: int, *, stopped: bool) -> int:
        """Counts one round and returns the drafts evaluated. stopped: an accepted draft ended the request."""
        rejected = accepted < proposed and not stopped
        evaluated = accepted + 1 if rejected else accepted
        self.rounds += 1
        self.draft_tokens_proposed += proposed
        self.draft_tokens_evaluated += evaluated
        self.draft_tokens_accepted += accepted
        self.correction_tokens += rejected
        self.bonus_tokens += accepted == proposed and not stopped
        self.full_accept_rounds += accepted == proposed
        self.partial_accept_rounds += 0 < accepted < proposed
        self.zero_accept_rounds += accepted == 0
        missing = evaluated - len(self.evaluated_by_position)
        self.accepted_by_position += [0] * missing
        self.evaluated_by_position += [0] * missing
        for position in range(evaluated):
            self.evaluated_by_position[position] += 1
            self.accepted_by_position[position] += position < accepted
        return evaluated

    def to_json(self) -> dict[str, Any]:
        evaluated = self.draft_tokens_evaluated
        return {**vars(self), "acceptance_rate": self.draft_tokens_accepted / evaluated if evaluated else None}
