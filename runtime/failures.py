"""Failures on demand: a tool for tests of this runtime and of programs built on it.

An engine made with `watch=FailAt("run", step=3)` raises InjectedFailure in its fourth step, after the target has run
and before anything is committed. The step can then be repeated, as after any other failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

from builder.errors import MachineError, Refused

Boundary = Literal["plan", "reserve", "draft", "run", "accept", "follow", "prepare", "rollback"]
"""In the order of a step. plan: nothing is held yet. reserve: reached once a row, its blocks and slot in hand.
draft: proposals are there. run: the target has run. accept: tokens are chosen. follow: the head has seen what it may
see already. prepare: the states to come are in the inactive banks; after it nothing can fail. rollback: about to give
back what the step held; a failure here leaves an engine that only `reset` mends.
"""
Watch = Callable[[Boundary, int], None]
"""Called with the boundary that is reached and the number of the step, from 0; failed steps count."""


class InjectedFailure(MachineError):
    """Raised by FailAt."""


@dataclass
class FailAt:
    """Raises when `boundary` is reached for the `occurrence`-th time (from 1) in step `step`; `failed` says it did."""

    boundary: Boundary
    step: int
    occurrence: int = 1
    failed: bool = field(default=False, init=False)
    _seen: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.boundary not in get_args(Boundary):
            raise Refused(
                "boundary", expected=" or ".join(get_args(Boundary)), found=self.boundary, remedy="name one of them"
            )

    def __call__(self, boundary: Boundary, step: int) -> None:
        if (boundary, step) != (self.boundary, self.step):
            return
        self._seen += 1
        if self._seen == self.occurrence:
            self.failed = True
            raise InjectedFailure(f"injected at {boundary} of step {step}")
