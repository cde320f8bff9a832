"""Our packages against transformers itself, run here and now on prompts that no reference file holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import builder
from fixtures import TRAINED
from runtime import Engine, EngineOptions, load
from runtime.loading import LoadedPackage
from runtime.recording import dump

pytestmark = pytest.mark.reference

PROMPTS = ["class Stack:\n    def push(self, item):\n", "import json\n\n\ndef read(path):\n    with open("]
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The oracle's answers; its prompt 1 is the one whose logits it keeps."""
    import torch

    from fixtures.trained import oracle as source

    torch.set_num_threads(2)
    target, head = source.load(TRAINED)
    return source.make_reference(target, head, encode(PROMPTS))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> LoadedPackage:
    folder = tmp_path_factory.mktemp("reference") / "package"
    builder.export(TRAINED, folder)
    return load(folder)


def encode(texts: list[str]) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in texts]


def test_the_shipped_reference_is_what_the_oracle_says() -> None:
    """reference.npz of the trained checkpoint was not made by hand: the oracle still gives its logits."""
    import torch

    from fixtures.trained import oracle as source

    stored = dict(np.load(TRAINED / "reference.npz"))
    target, head = source.load(TRAINED)
    tokens = torch.tensor([*stored["prompt_1"], stored["greedy_1"][0]])
    with torch.no_grad():
        found = source.detail(target, head, tokens, 1)
    for name in ("logits_1", "hidden_1", "mtp_logits_1", "mtp_draft_logits_1"):
        np.testing.assert_allclose(found[name], stored[name].reshape(found[name].shape), rtol=0, atol=1e-4)


def test_logits_and_drafts(package: LoadedPackage, oracle: dict[str, np.ndarray]) -> None:
    found = dump(package, oracle["prompt_1"].tolist(), 3, EngineOptions(num_blocks=1, max_batch_size=1))
    for ours, theirs in (
        ("logits", "logits_1"),
        ("hidden_states", "hidden_1"),
        ("mtp_logits", "mtp_logits_1"),
        ("mtp_draft_logits", "mtp_draft_logits_1"),
    ):
        np.testing.assert_allclose(found[ours], oracle[theirs].reshape(found[ours].shape), rtol=0, atol=2e-3)
    assert found["mtp_draft_tokens"].tolist() == oracle["mtp_draft_tokens_1"].tolist()


@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_tokens_and_counts(package: LoadedPackage, oracle: dict[str, np.ndarray], drafts: int) -> None:
    engine = Engine(package, EngineOptions(num_blocks=2, max_batch_size=2, max_draft_tokens=drafts))
    requests = [engine.submit(oracle[f"prompt_{i}"], 64, drafts, stop_token_ids=()) for i in range(len(PROMPTS))]
    while engine.has_work:
        engine.step()
    for i, request in enumerate(requests):
        greedy = oracle[f"greedy_{i}"].tolist()
        differs = next(
            (j for j, pair in enumerate(zip(request.token_ids, greedy, strict=True)) if len(set(pair)) > 1), 0
        )
        assert request.token_ids == greedy, f"margin of the first difference: {oracle[f'margin_{i}'][differs]}"
    if drafts:
        counts = [(request.stats.draft_tokens_accepted, request.stats.draft_tokens_evaluated) for request in requests]
        assert counts == [tuple(row) for row in oracle[f"accepted_evaluated_k{drafts}"].tolist()]


def test_transformers_reads_the_packages_tokenizer(tmp_path: Path) -> None:
    from runtime.text import Tokenizer

    builder.export(TRAINED, tmp_path / "package")
    tokenizer = Tokenizer(tmp_path / "package")
    assert [tokenizer.encode(text) for text in PROMPTS] == encode(PROMPTS)
