"""Logits, hidden states, head and drafts against transformers in float32, on checkpoints the real libraries wrote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import builder
from fixtures import CHECKPOINTS
from runtime import EngineOptions, load
from runtime.loading import LoadedPackage
from runtime.recording import dump

TOLERANCE = 2e-3
NEAR_TIE = 2 * TOLERANCE
"""Where the reference's two best logits are closer than this, either is right and the chain may fork."""


def check_against(found: Mapping[str, NDArray[Any]], reference: Mapping[str, NDArray[Any]]) -> None:
    names = {"logits": "logits", "hidden_states": "last_hidden_state", "mtp_logits": "mtp_logits"}
    for ours, theirs in names.items():
        if theirs in reference:
            np.testing.assert_allclose(found[ours], reference[theirs][0], rtol=0, atol=TOLERANCE, err_msg=ours)
    if "mtp_draft_tokens" not in reference:
        return
    logits = reference["mtp_draft_logits"]
    best = np.sort(logits, axis=-1)[:, -2:]
    clear = (best[:, 1] - best[:, 0]) > NEAR_TIE
    fork = int(np.argmin(clear)) if not clear.all() else len(clear)
    assert found["mtp_draft_tokens"][:fork].tolist() == reference["mtp_draft_tokens"][:fork].tolist()
    np.testing.assert_allclose(found["mtp_draft_logits"][: fork + 1], logits[: fork + 1], rtol=0, atol=TOLERANCE)


def check_checkpoint(checkpoint: Path, work: Path, **options: Any) -> None:
    builder.export(checkpoint, work / "package", builder.ExportOptions(**options))
    reference = dict(np.load(checkpoint / "reference.npz"))
    ids = reference["input_ids"][0].tolist()
    found = dump(load(work / "package"), ids, 3, EngineOptions(num_blocks=1, max_batch_size=1))
    check_against(found, reference)


@pytest.mark.parametrize(
    "name",
    sorted(path.name for path in CHECKPOINTS.iterdir() if not path.name.startswith("trained_")),
)
def test_real_checkpoint(name: str, tmp_path: Path) -> None:
    check_checkpoint(CHECKPOINTS / name, tmp_path)


def test_bfloat16_package_means_the_same(tmp_path: Path) -> None:
    check_checkpoint(CHECKPOINTS / "ct_mixed_dense_vl", tmp_path, dtype="bfloat16")


def test_trained_checkpoint(
    trained: LoadedPackage, reference: Mapping[str, NDArray[Any]], prompts: list[list[int]]
) -> None:
    found = dump(trained, prompts[1], 3, EngineOptions(num_blocks=4, block_size=16, max_scheduled_tokens=7))
    renamed = {
        "logits": reference["logits_1"],
        "last_hidden_state": reference["hidden_1"],
        "mtp_logits": reference["mtp_logits_1"].reshape(1, len(prompts[1]), -1),
        "mtp_draft_logits": reference["mtp_draft_logits_1"],
        "mtp_draft_tokens": reference["mtp_draft_tokens_1"],
    }
    check_against(found, renamed)


def every_checkpoint() -> list[Path]:
    folder = Path(os.environ.get("CHECKPOINTS", CHECKPOINTS))
    return sorted(path.parent for path in folder.glob("*/reference.npz"))


@pytest.mark.checkpoints
@pytest.mark.parametrize("checkpoint", every_checkpoint(), ids=lambda path: path.name)
def test_checkpoint_of_folder(checkpoint: Path, tmp_path: Path) -> None:
    if "input_ids" in np.load(checkpoint / "reference.npz").files:
        check_checkpoint(checkpoint, tmp_path)
    else:
        check_trained(checkpoint, tmp_path)


def check_trained(checkpoint: Path, work: Path) -> None:
    """A reference of prompts and greedy tokens instead of one prompt's logits."""
    from runtime import Engine

    builder.export(checkpoint, work / "package")
    reference = dict(np.load(checkpoint / "reference.npz"))
    count = sum(name.startswith("prompt_") for name in reference)
    engine = Engine(load(work / "package"), EngineOptions(num_blocks=count, max_batch_size=count))
    requests = [
        engine.submit(reference[f"prompt_{i}"], len(reference[f"greedy_{i}"]), engine.max_draft_tokens)
        for i in range(count)
    ]
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == [reference[f"greedy_{i}"].tolist() for i in range(count)]
