"""Faults put in on purpose. Nothing crashes with any of them, so each must show in the figure that watches it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from builder import contract
from runtime import Engine, EngineOptions, Request, load
from runtime.loading import LoadedPackage
from runtime.lowering import Edit
from runtime.proposer import HeadWork, MtpProposer
from runtime.recording import dump
from runtime.session import Session

Reference = Mapping[str, NDArray[Any]]


def with_edits(folder: Path, *, target: Edit | None = None, mtp: Edit | None = None) -> LoadedPackage:
    package = load(folder)
    assert package.package.mtp is not None
    package.target = Session(package.package.target, edit=target)
    package._mtp = Session(package.package.mtp, edit=mtp)
    return package


def acceptance(package: LoadedPackage, prompts: list[list[int]]) -> float:
    engine = Engine(package, EngineOptions(num_blocks=8, max_batch_size=8))
    for prompt in prompts:
        engine.submit(prompt, 64, 3)
    while engine.has_work:
        engine.step()
    return engine.stats.draft_tokens_accepted / engine.stats.draft_tokens_evaluated


def head_errors(package: LoadedPackage, prompts: list[list[int]], reference: Reference) -> tuple[float, float]:
    """Largest error of the head's logits on prompt 1, and of its first draft's."""
    found = dump(package, prompts[1], 3, EngineOptions(num_blocks=1, max_batch_size=1))
    rows = np.abs(found["mtp_logits"] - reference["mtp_logits_1"].reshape(found["mtp_logits"].shape))
    first = np.abs(found["mtp_draft_logits"][0] - reference["mtp_draft_logits_1"][0])
    return float(rows.max()), float(first.max())


def reverse_concat(model: ir.Model) -> None:
    """[hidden, embedding] instead of [embedding, hidden]."""
    joined = next(node for node in model.graph if node.op_type == "Concat")
    embedding, hidden = joined.inputs
    joined.replace_input_with(0, hidden)
    joined.replace_input_with(1, embedding)


def tap_before_final_norm(model: ir.Model) -> None:
    """hidden_states becomes the sum that the final norm normalizes."""
    index, output = next((i, o) for i, o in enumerate(model.graph.outputs) if o.name == contract.HIDDEN_STATES)
    norm = output.producer()
    assert norm is not None
    raw = ir.Value(name="before_norm", type=output.type, shape=output.shape)
    model.graph.insert_before(norm, ir.node("Add", [norm.inputs[0], norm.inputs[1]], outputs=[raw]))
    output.name, raw.name = "after_norm", contract.HIDDEN_STATES
    model.graph.outputs[index] = raw


def never_follow(self: MtpProposer, requests: Sequence[Request]) -> HeadWork:
    """Counts the prompt's rows as fed without feeding them."""
    for request in requests:
        request.mark_read(min(len(request.unread()), len(request.prompt) - 1 - request.head_length))
    return HeadWork({}, ())


def test_without_a_fault(trained: LoadedPackage, prompts: list[list[int]], reference: Reference) -> None:
    rows, first = head_errors(trained, prompts, reference)
    assert rows < 2e-3
    assert first < 2e-3
    assert acceptance(trained, prompts) == pytest.approx(331 / 408)


def test_reversed_concat(trained_folder: Path, prompts: list[list[int]], reference: Reference) -> None:
    package = with_edits(trained_folder, mtp=reverse_concat)
    assert acceptance(package, prompts) < 0.05


def test_hidden_before_the_final_norm(trained_folder: Path, prompts: list[list[int]], reference: Reference) -> None:
    package = with_edits(trained_folder, target=tap_before_final_norm)
    rows, _ = head_errors(package, prompts, reference)
    assert rows > 0.1
    assert acceptance(package, prompts) > 0.75, "acceptance does not see this fault, so it may not be relied on"


def test_head_not_primed_on_the_prompt(
    trained: LoadedPackage, prompts: list[list[int]], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dump of an unprimed head fails for want of rows, so the first draft's logits are taken from the engine."""
    monkeypatch.setattr(MtpProposer, "follow", never_follow)
    engine = Engine(trained, EngineOptions(num_blocks=1, max_batch_size=1))
    assert engine.proposer is not None
    logits: list[NDArray[Any]] = []
    engine.proposer.head.on_run = lambda segments, outputs: logits.append(outputs[0][-1].copy())
    engine.submit(prompts[1], 8, 3)
    while not logits:
        engine.step()
    assert np.abs(logits[0] - reference["mtp_draft_logits_1"][0]).max() > 1
    assert acceptance(trained, prompts) > 0.7, "acceptance hardly sees this fault"


def test_a_primed_head_passes_the_same_measure(
    trained: LoadedPackage, prompts: list[list[int]], reference: Reference
) -> None:
    engine = Engine(trained, EngineOptions(num_blocks=1, max_batch_size=1))
    assert engine.proposer is not None
    logits: list[NDArray[Any]] = []
    engine.proposer.head.on_run = lambda segments, outputs: logits.append(outputs[0][-1].copy())
    request = engine.submit(prompts[1], 8, 3)
    while len(request.token_ids) < 2:
        engine.step()
    assert np.abs(logits[1] - reference["mtp_draft_logits_1"][0]).max() < 2e-3
