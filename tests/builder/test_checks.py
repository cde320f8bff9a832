"""judged(): what becomes a failed check, and what stays an error of this program."""

from __future__ import annotations

import json

import pytest

from builder.checks import Check, judged
from builder.errors import MachineError, Refused


def raising(error: BaseException) -> str:
    raise error


def test_what_was_seen_is_the_detail() -> None:
    assert judged("x", lambda: "seen") == Check("x", True, "seen")


def test_a_refusal_is_the_packages_and_a_machine_error_the_machines() -> None:
    refusal = Refused("s", expected=1, found=2, remedy="r")
    assert judged("x", lambda: raising(refusal)) == Check("x", False, str(refusal))
    assert judged("x", lambda: raising(MachineError("full"))) == Check("x", False, "full", machine=True)
    denied = judged("x", lambda: raising(PermissionError(13, "Permission denied", "f")))
    assert denied == Check("x", False, "f: Permission denied; it cannot be read", machine=True)


@pytest.mark.parametrize(
    "error",
    [KeyError("k"), TypeError("t"), ValueError("v\n"), IndexError("i"), AttributeError("a"), OverflowError("o")],
)
def test_what_nobody_foresaw_fails_the_check_and_says_which(error: Exception) -> None:
    check = judged("data", lambda: raising(error))
    assert not check.ok and not check.machine
    assert check.detail.startswith(f"data: expected what an export writes, found {type(error).__name__} ")
    assert "\n" not in check.detail


def test_a_damaged_document_is_such_a_case() -> None:
    assert not judged("x", lambda: str(json.loads("{}")["key"])).ok


@pytest.mark.parametrize("error", [AssertionError("a"), KeyboardInterrupt()])
def test_a_fault_of_this_program_is_none(error: BaseException) -> None:
    with pytest.raises(type(error)):
        judged("x", lambda: raising(error))
