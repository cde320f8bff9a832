"""The plan of a step: who runs in the next step, on how many tokens, with how many drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.request import Request


@dataclass(frozen=True)
class RowPlan:
    """One request in a step, as it stood when the step was planned.

    num_tokens known tokens are fed, then num_drafts drafts. samples: the row ends with a token to choose, which all
    but the inner chunks of a prompt do.
    """

    request: Request
    num_tokens: int
    is_prefill: bool
    samples: bool
    num_drafts: int = 0

    @classmethod
    def of(cls, request: Request, num_tokens: int) -> RowPlan:
        samples = request.num_cached + num_tokens == request.num_known
        return cls(request, num_tokens, request.is_prefill, samples)

    @property
    def length(self) -> int:
        return self.num_tokens + self.num_drafts


def plan_step(requests: Sequence[Request], max_tokens: int, max_draft_tokens: int) -> list[RowPlan]:
    """Decode rows first, then prompt chunks, within max_tokens packed rows; in the order given within each kind.

    Drafts come out of the same budget after every decode row has its one token, and are dropped altogether in a step
    that holds prompt rows: the recurrent op may then run a chunked kernel that captures no updates to roll back by.
    """
    budget = max_tokens
    decodes: list[RowPlan] = []
    prefills: list[RowPlan] = []
    for request in requests:
        if not request.is_prefill and budget:
            decodes.append(RowPlan.of(request, 1))
            budget -= 1
    for request in requests:
        if request.is_prefill and budget:
            chunk = min(len(request.prompt) - request.num_cached, budget)
            prefills.append(RowPlan.of(request, chunk))
            budget -= chunk
    if prefills:
        return decodes + prefills
    drafting: list[RowPlan] = []
    for row in decodes:
        drafts = max(0, min(_wanted(row.request), max_draft_tokens, row.request.draft_room, budget))
        budget -= drafts
        drafting.append(replace(row, num_drafts=drafts))
    return drafting


def _wanted(request: Request) -> int:
    return len(request.proposed) if request.proposed is not None else request.draft_tokens
