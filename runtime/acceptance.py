"""accept(): what each row of a step gains, decided from logits alone; nothing is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from runtime.packing import Array
from runtime.prepared import Prepared
from runtime.request import FinishReason, Request
from runtime.sampling import choose, verified
from runtime.scheduler import RowPlan


@dataclass(frozen=True)
class Verdict:
    """drafts were verified; tokens are delivered; kept tokens of the row stay in cache and states.

    discarded tokens were agreed on too, but lie behind a stop id. `accepted` of the drafts are among the tokens.
    """

    drafts: tuple[int, ...]
    tokens: tuple[int, ...]
    kept: int
    discarded: int
    finish_reason: FinishReason | None

    @property
    def accepted(self) -> int:
        return sum(1 for draft, token in zip(self.drafts, self.tokens, strict=False) if draft == token)


def accept(
    rows: Sequence[RowPlan], wanted: Sequence[range], drafts: Mapping[Request, Sequence[int]], run: Prepared
) -> list[Verdict]:
    """wanted: scored_rows() of the rows. run: what the target gave for the packed rows."""
    best = _greedily(rows, wanted, run)
    verdicts = []
    for row, indices in zip(rows, wanted, strict=True):
        proposed = tuple(drafts.get(row.request, ()))
        if not row.samples:
            verdicts.append(Verdict(proposed, (), row.num_tokens, 0, None))
            continue
        chosen = best.get(row.request) or _by_options(row.request, proposed, run.scores(indices))
        verdicts.append(_verdict(row, proposed, verified(proposed, chosen)))
    return verdicts


def scored_rows(rows: Sequence[RowPlan]) -> list[range]:
    """Packed rows of each request that choose a token: the last of its known tokens and every draft."""
    ends = accumulate(row.length for row in rows)
    return [
        range(end - 1 - row.num_drafts, end) if row.samples else range(0) for row, end in zip(rows, ends, strict=True)
    ]


def _greedily(rows: Sequence[RowPlan], wanted: Sequence[range], run: Prepared) -> dict[Request, list[int]]:
    """The best tokens of every row that is decoded greedily, in one pass."""
    pairs = [(row, indices) for row, indices in zip(rows, wanted, strict=True) if row.request.sampling.is_greedy]
    needed = [index for _, indices in pairs for index in indices]
    chosen = iter(run.best(needed))
    return {row.request: [next(chosen) for _ in indices] for row, indices in pairs if indices}


def _by_options(request: Request, drafts: Sequence[int], logits: Array) -> list[int]:
    """The target's token after the known tokens and each prefix of the drafts; logits [1 + D, vocab].

    Only a repetition penalty looks at the tokens themselves, and then there are no drafts.
    """
    generated, stops = len(request.token_ids), sorted(request.stop_token_ids)
    known = request.known(0, request.num_known) if request.sampling.repetition_penalty != 1 else []
    return [choose(row, request.sampling, known, generated + j, stops) for j, row in enumerate(logits)]


def _verdict(row: RowPlan, drafts: tuple[int, ...], tokens: Sequence[int]) -> Verdict:
    """Cuts the tokens after the first stop id. The newest token is not fed yet, so one less than they are is kept."""
    request = row.request
    stop = next((i for i, token in enumerate(tokens) if token in request.stop_token_ids), None)
    delivered = tuple(tokens if stop is None else tokens[: stop + 1])
    reason: FinishReason | None = None
    if stop is not None:
        reason = "stop"
    elif len(request.token_ids) + len(delivered) >= request.max_new_tokens:
        reason = "length"
    kept = row.num_tokens + len(delivered) - 1
    return Verdict(drafts, delivered, kept, len(tokens) - len(delivered), reason)
