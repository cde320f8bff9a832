"""The engine on the trained mixtures of experts, in both dialects, against transformers and the oracle's counts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import builder
import runtime
from fixtures import CHECKPOINTS
from runtime import EngineOptions
from runtime.loading import LoadedPackage
from runtime.recording import dump
from tests.runtime.answers import oracle_counts
from tests.runtime.test_engine import run_all
from tests.runtime.test_parity import check_against

NAMES = ("trained_ct_moe_text", "trained_mo_moe_text")
Reference = Mapping[str, NDArray[Any]]
Mixture = tuple[LoadedPackage, Reference]


@pytest.fixture(scope="module", params=NAMES)
def mixture(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[LoadedPackage, Reference]:
    """A loaded package and transformers' answers for its checkpoint."""
    out = tmp_path_factory.mktemp("mixture") / "package"
    builder.export(CHECKPOINTS / request.param, out)
    return runtime.load(out), dict(np.load(CHECKPOINTS / request.param / "reference.npz"))


def prompts_of(reference: Reference) -> list[list[int]]:
    return [reference[f"prompt_{i}"].tolist() for i in range(8)]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_tokens_and_draft_counts(mixture: Mixture, drafts: int, batch: int) -> None:
    """64 greedy tokens of 8 prompts; accepted and evaluated drafts prompt by prompt."""
    package, reference = mixture
    requests, _ = run_all(package, prompts_of(reference), drafts, batch)
    assert [request.token_ids for request in requests] == [reference[f"greedy_{i}"].tolist() for i in range(8)]
    if drafts:
        counts = [(request.stats.draft_tokens_accepted, request.stats.draft_tokens_evaluated) for request in requests]
        assert counts == oracle_counts(reference, drafts)
        assert sum(accepted for accepted, _ in counts) > 0.6 * sum(evaluated for _, evaluated in counts)


def test_logits_hidden_states_and_drafts(mixture: Mixture) -> None:
    package, reference = mixture
    prompt = prompts_of(reference)[1]
    found = dump(package, prompt, 3, EngineOptions(num_blocks=4, block_size=16, max_scheduled_tokens=7))
    renamed = {
        "logits": reference["logits_1"],
        "last_hidden_state": reference["hidden_1"],
        "mtp_logits": reference["mtp_logits_1"].reshape(1, len(prompt), -1),
        "mtp_draft_logits": reference["mtp_draft_logits_1"],
        "mtp_draft_tokens": reference["mtp_draft_tokens_1"],
    }
    check_against(found, renamed)


@pytest.mark.parametrize("name", NAMES)
def test_experts_are_carried_to_the_bit(name: str, tmp_path: Path) -> None:
    report = builder.export(CHECKPOINTS / name, tmp_path / "p").to_json()
    assert report["graphs"]["target"]["experts"] == {"nvfp4": 64} and report["graphs"]["mtp"]["experts"] == {"float": 8}
    assert report["graphs"]["target"]["dequantized"] == {} and report["warnings"] == []
