"""Check: one thing that was looked at, whether it was right, and what was seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from builder.errors import DraftsmithError, MachineError, one_line

UNFORESEEN = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What damaged input raises where nobody foresaw the damage; everything else is a fault of this program."""


@dataclass(frozen=True)
class Check:
    """detail: one line; of a failed check, what was expected, what was found and what to do.

    machine: this machine failed, and nothing is known to be wrong with what was looked at.
    """

    name: str
    ok: bool
    detail: str
    machine: bool = False


def judged(name: str, judge: Callable[[], str]) -> Check:
    """`judge` returns what it saw, or raises one of this project's errors, which becomes the failed check's detail.

    As a last resort, so do those of the operating system and of UNFORESEEN: one damaged entry may not hide what the
    other checks found.
    """
    try:
        return Check(name, True, judge())
    except DraftsmithError as error:
        return Check(name, False, str(error), machine=isinstance(error, MachineError))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return Check(name, False, f"{where}{error.strerror or error}; it cannot be read", machine=True)
    except UNFORESEEN as error:
        seen = f"{type(error).__name__} {one_line(error)}"
        return Check(name, False, f"{name}: expected what an export writes, found {seen}; export the package again")
