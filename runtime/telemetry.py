"""Counters of speculative decoding, cumulative, of an engine and of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stats:
    """A round is one request verifying at least one draft in a committed step. Names follow onnxruntime-genai.

    evaluated drafts go up to and including the first rejected one. A round queues the drafts that were accepted and
    the target's own token; what lies behind a stop id is discarded, and a round without discarded tokens is completed.
    Lists are by position in the draft, or by the number of drafts accepted (acceptance_length_histogram).
    preemptions: times that blocks were given up; aborted_steps: steps that failed and were rolled back.
    """

    rounds: int = 0
    completed_rounds: int = 0
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
    tokens_queued: int = 0
    tokens_emitted: int = 0
    tokens_discarded: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    evaluated_by_position: list[int] = field(default_factory=list)
    acceptance_length_histogram: list[int] = field(default_factory=list)
    total_draft_ms: float = 0.0
    preemptions: int = 0
    aborted_steps: int = 0

    def record_round(self, proposed: int, accepted: int, discarded: int, *, stopped: bool) -> None:
        """stopped: an accepted draft ended the request, so the target's own token after it was not needed."""
        rejected = accepted < proposed and not stopped
        evaluated = accepted + 1 if rejected else accepted
        own = not stopped
        self.rounds += 1
        self.completed_rounds += not discarded
        self.draft_tokens_proposed += proposed
        self.draft_tokens_evaluated += evaluated
        self.draft_tokens_accepted += accepted
        self.correction_tokens += rejected
        self.bonus_tokens += accepted == proposed and own
        self.full_accept_rounds += accepted == proposed
        self.partial_accept_rounds += 0 < accepted < proposed
        self.zero_accept_rounds += accepted == 0
        self.tokens_queued += accepted + own + discarded
        self.tokens_emitted += accepted + own
        self.tokens_discarded += discarded
        _count(self.acceptance_length_histogram, accepted)
        for position in range(evaluated):
            _count(self.evaluated_by_position, position)
            _count(self.accepted_by_position, position, position < accepted)

    def to_json(self) -> dict[str, Any]:
        """Every counter, and the ratios of them that people ask for; a ratio without a denominator is null."""
        return {
            **vars(self),
            "acceptance_rate": _ratio(self.draft_tokens_accepted, self.draft_tokens_evaluated),
            "avg_draft_tokens_per_round": _ratio(self.draft_tokens_proposed, self.rounds),
            "avg_draft_ms_per_token": _ratio(self.total_draft_ms, self.draft_tokens_proposed),
        }


def _count(counters: list[int], index: int, amount: int = 1) -> None:
    """Adds to counters[index], which is made when it is first counted."""
    counters += [0] * (index + 1 - len(counters))
    counters[index] += amount


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
