"""Agreement of a run in half precision with a reference in float32: within rounding, and with the same best tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.checks import Check, judged
from builder.errors import Refused
from runtime.rounding import Rounding, relative_error, row_errors

Array = NDArray[Any]
MAJORITY_ROWS = 8
"""Fewer rows have no majority to speak of: a single token of a mixture may have other experts."""
ANOTHER_TOKEN = "the first generated token is another one, and they follow from it"


def checks(
    arrays: Mapping[str, Array], reference: Mapping[str, Array], drafts: int, rounding: Rounding
) -> Iterator[Check]:
    """One check an array of a dump that the reference has, too, as runtime/reference.py names them.

    rounding: of the target's last layer. The head is one layer more, each draft chained through it another.
    """
    logits = arrays["logits"], reference["logits"]
    yield judged("reference logits", partial(check_scores, "logits", *logits, rounding))
    if "last_hidden_state" in reference:
        hidden = arrays["hidden_states"], reference["last_hidden_state"]
        yield judged("reference hidden_states", partial(check_close, "hidden_states", *hidden, rounding))
    same = logits[0].size == logits[1].size and bool(
        logits[0][-1].argmax() == logits[1].reshape(logits[0].shape)[-1].argmax()
    )
    if "mtp_logits" in reference and "mtp_logits" in arrays:
        head = partial(_check_head, arrays["mtp_logits"], reference["mtp_logits"], same, rounding)
        yield judged("reference mtp_logits", head)
    if drafts and same:
        yield judged("reference drafts", partial(check_drafts, arrays, reference, drafts, rounding))
    elif drafts:
        yield Check("reference drafts", True, f"not compared: {ANOTHER_TOKEN}")


def check_close(name: str, ours: Array, theirs: Array, rounding: Rounding) -> str:
    """What was seen of two arrays [T, N] (or of as many numbers): their relative error by norm.

    Dense: it is within rounding.limit. A mixture's is within limit_by_experts, and that of its median row within
    rounding.limit, because more than half of the rows have the same experts. Raises Refused beyond.
    """
    ours, theirs = _alike(name, ours, theirs)
    error = relative_error(ours, theirs)
    if not rounding.turns_experts:
        return _within(name, "relative error", error, rounding.limit)
    seen = _within(name, "relative error", error, rounding.limit_by_experts)
    if len(theirs) < MAJORITY_ROWS:
        return seen
    median = float(np.median(row_errors(ours, theirs)))
    return f"{seen}; {_within(name, 'relative error of the median row', median, rounding.limit)}"


def check_scores(name: str, ours: Array, theirs: Array, rounding: Rounding) -> str:
    """check_close of logits [T, vocab], and check_best of the tokens that are best in each row."""
    ours, theirs = _alike(name, ours, theirs)
    seen = check_close(name, ours, theirs, rounding)
    return f"{seen}; {check_best(name, (ours, theirs), (ours.argmax(-1), theirs.argmax(-1)), rounding)}"


def check_best(name: str, logits: tuple[Array, Array], tokens: tuple[Array, Array], rounding: Rounding) -> str:
    """The share of rows with the same token in both, and the rows without, each with its lead.

    logits: ours and theirs [T, vocab]; tokens: ours and theirs [T]. A row's lead is that of the reference's token over
    ours, in the reference's logits. Raises Refused where rounding.turned_over of it is less: nothing but a fault turns
    over a clear lead.
    """
    theirs, rows = logits[1], np.arange(len(logits[1]))
    if not ((tokens[1] >= 0) & (tokens[1] < theirs.shape[-1])).all():
        raise Refused(
            f"{name} tokens",
            expected=f"token ids from 0 to {theirs.shape[-1] - 1}",
            found=tokens[1].tolist(),
            remedy="mend the reference",
        )
    leads = theirs[rows, tokens[1]].astype(np.float64) - theirs[rows, tokens[0]]
    bounds = rounding.turned_over(*logits)
    differing = np.flatnonzero(tokens[0] != tokens[1])
    for row in differing:
        if not 0 <= leads[row] <= bounds[row]:  # below 0: the token is not the best of the reference's own logits
            raise Refused(
                f"{name} row {row}",
                expected=f"token {tokens[1][row]}",
                found=f"{tokens[0][row]}, a lead of {leads[row]:.3f} where rounding turns over {bounds[row]:.3f}",
                remedy="compare layer by layer with --trace",
            )
    shown = f"the same best token in {len(rows) - len(differing)} of {len(rows)} rows"
    ties = ", ".join(f"{row} ({leads[row]:.3f} of {bounds[row]:.3f})" for row in differing)
    return f"{shown}; near-ties: rows {ties}" if ties else shown


def check_drafts(arrays: Mapping[str, Array], reference: Mapping[str, Array], drafts: int, rounding: Rounding) -> str:
    """The first `drafts` chained drafts, up to and with the first one that differs: behind it the chains part."""
    rounding, given = rounding.after(rounding.layers + drafts), len(reference["mtp_draft_tokens"])
    tokens = arrays["mtp_draft_tokens"][:drafts], reference["mtp_draft_tokens"][:drafts]
    apart = np.flatnonzero(tokens[0] != tokens[1])
    rows = int(apart[0]) + 1 if apart.size else drafts
    logits = arrays["mtp_draft_logits"][:rows], reference["mtp_draft_logits"][:rows]
    name = "mtp_draft_logits"
    seen = check_close(name, *logits, rounding)
    seen = f"{seen}; {check_best(name, logits, (tokens[0][:rows], tokens[1][:rows]), rounding)}"
    return seen if drafts == given else f"{seen}; {drafts} of {given} drafts, the package's limit"


def _check_head(ours: Array, theirs: Array, same: bool, rounding: Rounding) -> str:
    """same: whether both were fed the same token behind the prompt; else their last rows say nothing."""
    ours, theirs = _alike("mtp_logits", ours, theirs)
    rows = len(ours) if same else len(ours) - 1
    if not rows:
        return f"not compared: {ANOTHER_TOKEN}"
    seen = check_scores("mtp_logits", ours[:rows], theirs[:rows], rounding.after(rounding.layers + 1))
    return seen if same else f"{seen}; the last row left out: {ANOTHER_TOKEN}"


def _alike(name: str, ours: Array, theirs: Array) -> tuple[Array, Array]:
    """Both [T, N]."""
    if ours.size != theirs.size:
        raise Refused(name, expected=f"shape {theirs.shape}", found=ours.shape, remedy="use this package's reference")
    return ours, theirs.reshape(ours.shape)


def _within(name: str, what: str, error: float, limit: float) -> str:
    if not error <= limit:  # NaN is no agreement
        raise Refused(
            name,
            expected=f"a {what} of at most {limit:.1e}",
            found=f"{error:.1e}",
            remedy="compare layer by layer with --trace",
        )
    return f"{what} {error:.1e} of at most {limit:.1e}"
