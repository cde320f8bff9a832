"""Chains of drafts that stay on a device, here in a CPU's memory addressed as a GPU's, until they are all there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from builder import contract
from builder.errors import DraftsmithError
from runtime import Engine, EngineOptions
from runtime.draft_memory import DraftMemory
from runtime.head import HeadModel
from runtime.loading import LoadedPackage
from runtime.lowering.choosing import SCORED_ROWS
from runtime.place import DeviceArray
from tests.runtime.conftest import ADDRESSED

K_OF_REQUEST = (0, 3, 1, 2, 3, 0, 2, 1)


def speculate(package: LoadedPackage, prompts: list[list[int]], batch: int) -> tuple[Engine, list[Any]]:
    engine = Engine(package, EngineOptions(num_blocks=64, max_batch_size=batch))
    requests = [engine.submit(prompt, 64, k) for prompt, k in zip(prompts, K_OF_REQUEST, strict=True)]
    while engine.has_work:
        engine.step()
    return engine, requests


@pytest.mark.parametrize("batch", [1, 8])
def test_requests_that_draft_less_leave_the_chain(
    addressed: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    batch: int,
) -> None:
    """Every request has the tokens and counts of its own K; a token fed to the wrong row would change the counts."""
    _, requests = speculate(addressed, prompts, batch)
    assert [request.token_ids for request in requests] == greedy_tokens
    for index, (request, k) in enumerate(zip(requests, K_OF_REQUEST, strict=True)):
        expected = tuple(reference[f"accepted_evaluated_k{k}"][index]) if k else (0, 0)
        assert (request.stats.draft_tokens_accepted, request.stats.draft_tokens_evaluated) == expected


def test_nothing_is_read_before_the_last_run_of_a_chain(
    addressed: LoadedPackage, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One copy to the host a step, behind as many runs as the longest chain has; those run from device memory alone."""
    events: list[str] = []
    read, run = DraftMemory.read, HeadModel.run_on_device
    monkeypatch.setattr(DraftMemory, "read", lambda self, counts: events.append("read") or read(self, counts))
    monkeypatch.setattr(HeadModel, "run_on_device", lambda self, *args: events.append(str(args[0])) or run(self, *args))
    engine, _ = speculate(addressed, prompts, 8)
    assert engine.proposer
    steps = "".join(events).split("read")
    assert steps.pop() == ""
    assert "012" in steps
    assert set(steps) <= {"0", "01", "012"}
    later = [run.bound for key, run in engine.proposer.head._runs._kept.items() if key[2] in (1, 2)]
    assert later
    for bound in later:
        assert isinstance(bound.inputs[contract.INPUT_IDS], DeviceArray)
        assert isinstance(bound.inputs[contract.HIDDEN_STATES], DeviceArray)
        assert isinstance(bound.inputs[SCORED_ROWS], np.ndarray)
        assert all(isinstance(array, DeviceArray) for array in bound.outputs.values())


def test_drafts_of_no_number_are_an_error(addressed: LoadedPackage, prompts: list[list[int]]) -> None:
    engine = Engine(addressed, EngineOptions(num_blocks=4, max_batch_size=1))
    request = engine.submit(prompts[0], 8, 3)
    engine.step()
    request.unread_hidden = [np.full_like(rows, np.nan) for rows in request.unread_hidden]
    with pytest.raises(DraftsmithError, match=re.escape("not numbers")):
        engine.step()
    assert len(request.token_ids) == 1


def test_ids_and_logits_come_in_one_piece(addressed: LoadedPackage) -> None:
    assert addressed.package.mtp
    memory = DraftMemory(addressed.package.mtp.io, 2, 3, ADDRESSED)
    block = np.concatenate(
        [np.arange(6, dtype=np.int64).view(np.uint8), np.array([0, 1, np.nan, 3, 4, np.inf], np.float32).view(np.uint8)]
    )
    memory._block.write(block)
    assert memory.read([2, 1]) == [[0, 1], [3]]
    for counts in ([3, 1], [1, 3]):
        with pytest.raises(DraftsmithError, match="not numbers"):
            memory.read(counts)
