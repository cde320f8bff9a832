"""Request: one sequence being generated, from submission to its finish reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from builder.errors import Refused
from runtime.blocks import BlockTable
from runtime.limits import check_tokens, whole
from runtime.sampling import GREEDY, SamplingOptions
from runtime.telemetry import Stats

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(eq=False)
class Request:
    """token_ids are the generated ones. num_cached tokens are committed to cache and states; between decode steps that
    is every known token but the newest. head_length rows are committed to the MTP head's cache.

    Tokens before prefill_end are fed as prompt: the prompt, or all that was known when the request lost its blocks.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    draft_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    sampling: SamplingOptions = GREEDY
    vocab_size: int = 1 << 31
    max_draft_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stats: Stats = field(default_factory=Stats)
    num_cached: int = 0
    prefill_end: int = 0
    table: BlockTable | None = None
    slot: int | None = None
    head_length: int = 0
    unread_hidden: list[NDArray[Any]] = field(default_factory=list)
    proposed: tuple[int, ...] | None = None
    proposed_at: int = 0

    def __post_init__(self) -> None:
        self.prefill_end = self.prefill_end or len(self.prompt)

    @property
    def drafting_off(self) -> str | None:
        """The option that keeps this request from drafting, or None."""
        return self.sampling.drafting_off

    def set_draft_tokens(self, draft_tokens: int) -> None:
        """Drafts per step from the next step on. Raises Refused beyond the engine's limit."""
        check_drafts(draft_tokens, self.max_draft_tokens)
        self.draft_tokens = int(draft_tokens)

    def propose(self, token_ids: Sequence[int]) -> None:
        """Drafts of the caller's own for the next step, instead of the engine's: what may follow the newest token.

        They are dropped when that step has no room for them, or when another token has become known first, as at the
        end of a prompt. Raises Refused for non-tokens, for more than the engine verifies, and for a request that has
        finished or that its sampling options keep from drafting.
        """
        if self.finish_reason:
            raise Refused(
                "proposal", expected="a request that goes on", found=self.finish_reason, remedy="submit another"
            )
        if self.drafting_off:
            raise Refused(
                "proposal", expected="a request that may draft", found=self.drafting_off, remedy="leave the option out"
            )
        if len(token_ids) > self.max_draft_tokens:
            raise Refused(
                "proposal",
                expected=f"at most {self.max_draft_tokens} tokens, the limit of package and engine",
                found=len(token_ids),
                remedy="propose fewer, or make the engine with max_draft_tokens or another proposer",
            )
        check_tokens("proposal", token_ids, self.vocab_size)
        self.proposed = tuple(int(token) for token in token_ids)
        self.proposed_at = self.num_known

    @property
    def proposal(self) -> tuple[int, ...] | None:
        """The caller's drafts where they still stand behind the newest known token."""
        return self.proposed if self.proposed_at == self.num_known else None

    def cancel(self) -> None:
        """Ends the request at the next step."""
        self.finish_reason = self.finish_reason or "cancelled"

    def forget_cached(self) -> None:
        """Its blocks and slot are gone: everything known is to be fed anew, as a prompt."""
        self.table, self.slot = None, None
        self.num_cached, self.head_length, self.unread_hidden = 0, 0, []
        self.prefill_end = self.num_known

    @property
    def is_prefill(self) -> bool:
        """From state, never from a row's length: the last chunk of a prompt may be one token long."""
        return self.num_cached < self.prefill_end

    @property
    def num_known(self) -> int:
        return len(self.prompt) + len(self.token_ids)

    @property
    def max_cached(self) -> int:
        """Cache entries of a whole life: the last generated token never enters the cache."""
        return len(self.prompt) + self.max_new_tokens - 1

    @property
    def draft_room(self) -> int:
        """Drafts that may be of use: one token of a step is the target's own."""
        return self.max_new_tokens - len(self.token_ids) - 1

    def known(self, start: int, end: int) -> list[int]:
        """Known tokens [start, end) of prompt and generation together."""
        split = len(self.prompt)
        if start >= split:
            return self.token_ids[start - split : end - split]
        return [*self.prompt[start : min(end, split)], *self.token_ids[: max(0, end - split)]]

    def unread(self) -> NDArray[Any]:
        """Target hidden rows [n, hidden] that the head has not seen, in order; on a device their numbers [n] there."""
        if len(self.unread_hidden) > 1:
            self.unread_hidden = [np.concatenate(self.unread_hidden)]
        return self.unread_hidden[0]

    def mark_read(self, count: int) -> None:
        """The head has taken the first `count` unread rows into its cache."""
        rest = self.unread()[count:]
        self.unread_hidden = [rest] if len(rest) else []
        self.head_length += count


def check_drafts(draft_tokens: int, limit: int) -> None:
    """Raises Refused for a number of drafts that an engine with this limit does not verify."""
    if not 0 <= (-1 if whole(draft_tokens) is None else int(draft_tokens)) <= limit:
        raise Refused(
            "--draft-tokens",
            expected=f"0 to {limit}, the limit of package and engine",
            found=draft_tokens,
            remedy="ask for fewer",
        )


def table_of(request: Request) -> BlockTable:
    """The block table of an admitted request."""
    if request.table is None:
        raise AssertionError("the request is not admitted")
    return request.table


def slot_of(request: Request) -> int:
    """The state slot of an admitted request."""
    if request.slot is None:
        raise AssertionError("the request is not admitted")
    return request.slot
