"""Requests that sit steps out, as one does that finds no block: plans are made without them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import runtime.engine as engine_module
from runtime.request import Request
from runtime.scheduler import StepPlan


def let_sit_out(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The places, among the running requests, of those that sit the next step out; the caller fills it."""
    idle: set[int] = set()
    plan_step = engine_module.plan_step

    def without_idlers(running: list[Request], *arguments: Any) -> StepPlan:
        plan = plan_step(running, *arguments)
        decoding = [row for row in plan.rows if not row.admitted and not row.is_prefill]
        dropped = [row for row in decoding if running.index(row.request) in idle]
        return dataclasses.replace(plan, rows=tuple(row for row in plan.rows if row not in dropped))

    monkeypatch.setattr(engine_module, "plan_step", without_idlers)
    return idle
