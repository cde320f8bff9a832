"""Distributions against transformers' own logits processors."""

from __future__ import annotations

import numpy as np
import pytest

from runtime.sampling import SamplingOptions, _penalized, choose, probabilities

pytestmark = pytest.mark.reference

VOCAB = 300


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(1.0),
        SamplingOptions(0.6),
        SamplingOptions(1.7, top_k=20),
        SamplingOptions(0.8, top_p=0.9),
        SamplingOptions(1.2, top_k=40, top_p=0.5),
        SamplingOptions(1.0, top_p=0.01),
        SamplingOptions(0.9, repetition_penalty=1.3),
        SamplingOptions(0.9, repetition_penalty=0.7, min_new_tokens=5),
    ],
    ids=str,
)
def test_probabilities_are_those_of_transformers(options: SamplingOptions, seed: int) -> None:
    import torch
    from transformers import generation as hf

    random = np.random.default_rng(seed)
    logits = (4 * random.standard_normal(VOCAB)).astype(np.float32)
    known, stops, generated = random.integers(0, VOCAB, 30).tolist(), [3, 7], 4
    chain = hf.LogitsProcessorList()
    if options.repetition_penalty != 1:
        chain.append(hf.RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if options.min_new_tokens:
        chain.append(
            hf.MinNewTokensLengthLogitsProcessor(len(known) - generated, options.min_new_tokens, stops, device="cpu")
        )
    chain.append(hf.TemperatureLogitsWarper(options.temperature))
    if options.top_k:
        chain.append(hf.TopKLogitsWarper(options.top_k))
    if options.top_p < 1:
        chain.append(hf.TopPLogitsWarper(options.top_p))
    scores = chain(torch.tensor([known]), torch.tensor(logits[None], dtype=torch.float64))
    expected = torch.softmax(scores, -1)[0].numpy()
    found = probabilities(_penalized(logits.astype(np.float64), options, known, generated, stops), options)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert found[choose(logits, options, known, generated, stops)] > 0


def test_penalized_greedy_is_transformers() -> None:
    import torch
    from transformers import generation as hf

    options = SamplingOptions(repetition_penalty=3.0)
    random = np.random.default_rng(0)
    for _ in range(20):
        logits = random.standard_normal(VOCAB).astype(np.float32)
        known = [int(logits.argmax()), *random.integers(0, VOCAB, 5).tolist()]
        processed = hf.RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([known]), torch.tensor(logits[None]))
        assert choose(logits, options, known, 0, []) == int(processed.argmax())
