"""Check: one thing that was looked at, whether it was right, and what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from builder.errors import DraftsmithError


@dataclass(frozen=True)
class Check:
    """detail: one line; of a failed check, what was expected, what was found and what to do."""

    name: str
    ok: bool
    detail: str


def judged(name: str, judge: Callable[[], str]) -> Check:
    """`judge` returns what it saw, or raises one of this project's errors, which becomes the failed check's detail."""
    try:
        return Check(name, True, judge())
    except DraftsmithError as error:
        return Check(name, False, str(error))
