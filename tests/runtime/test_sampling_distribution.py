"""Sampled tokens follow the target's distribution whatever is drafted (case A52), and a seed gives one text."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from builder.errors import DraftsmithError, Refused
from runtime import Engine, EngineOptions, Request, SamplingOptions
from runtime.sampling import choose, draw, probabilities
from tests.runtime.fakes import VOCAB, FakeHead, after, fake_package, plain

PROMPT = [3, 1, 4, 1, 5]
DRAWS = 2500
SIGNIFICANCE = 1e-3


def chi_square_survival(statistic: float, freedom: int) -> float:
    """P(chi-square >= statistic), for an even number of degrees of freedom: a Poisson sum."""
    assert freedom % 2 == 0
    half = statistic / 2
    return math.exp(-half) * sum(half**i / math.factorial(i) for i in range(freedom // 2))


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    weights = [math.exp((value - max(logits)) / temperature) for value in logits]
    return [weight / sum(weights) for weight in weights]


def p_value(counts: Counter[int], chances: Sequence[float]) -> float:
    total = sum(counts.values())
    return chi_square_survival(
        sum((counts[token] - total * p) ** 2 / (total * p) for token, p in enumerate(chances)), len(chances) - 1
    )


def sampled(drafts: int, temperature: float, tokens: int, texts: Sequence[Sequence[int]] = ()) -> list[Request]:
    """DRAWS requests of the same prompt with a seed each, through one engine.

    texts: what each of them will say. Every second one is then proposed it, but for the last draft, so that drafts of
    every position are verified; the others are drafted by a head that is right more often than not.
    """
    engine = Engine(fake_package(head=FakeHead(5)), EngineOptions(num_blocks=64, max_batch_size=16, max_draft_tokens=4))
    requests = [
        engine.submit(PROMPT, tokens, drafts, sampling=SamplingOptions(temperature, seed=seed)) for seed in range(DRAWS)
    ]
    while engine.has_work:
        for request in engine._running:
            seed, known = request.sampling.seed, len(request.token_ids)
            if texts and seed % 2 and not request.is_prefill:
                request.propose([*texts[seed][known : known + drafts - 1], 0])
        engine.step()
    return requests


def cells(requests: Sequence[Request], position: int, temperature: float) -> Counter[int]:
    """How the tokens at one position fall into 9 equal parts of the target's own distribution there.

    Tokens are laid side by side, the likeliest first, each as wide as its chance given what came before. A place
    drawn evenly within the chosen token's is then even over the whole exactly when tokens follow their chances,
    whatever came before; so requests with different pasts count together.
    """
    random = np.random.default_rng(position)
    counts: Counter[int] = Counter()
    for request in requests:
        chances = softmax(after([*PROMPT, *request.token_ids[:position]]).logits.tolist(), temperature)
        token = request.token_ids[position]
        likelier = sum(chance for chance in chances if chance > chances[token])
        counts[int(9 * (likelier + random.random() * chances[token]))] += 1
    return counts


@pytest.mark.parametrize("temperature", [0.5, 1.3])
@pytest.mark.parametrize("drafts", [1, 2, 3, 4])
def test_each_tokens_distribution_is_the_targets(drafts: int, temperature: float) -> None:
    """Of the first token, which no draft concerns, and of those behind it: accepted drafts of every position, replaced
    ones and bonus tokens. Chances are computed here, in float64, from the model's logits.
    """
    texts = [request.token_ids for request in sampled(0, temperature, drafts + 2)]
    requests = sampled(drafts, temperature, drafts + 2, texts)
    assert [request.token_ids for request in requests] == texts, "drafts change nobody's text"
    reached = [sum(r.stats.evaluated_by_position[j : j + 1] != [] for r in requests) for j in range(drafts)]
    assert min(reached) > DRAWS / 20, "drafts of every position were verified"
    for position in range(drafts + 2):
        counts = cells(requests, position, temperature)
        assert p_value(counts, [1 / 9] * 9) > SIGNIFICANCE, (position, counts)


def test_the_measure_sees_greedy_verification_of_later_drafts() -> None:
    """Tokens of position 3 that are the best ones in every second request."""
    requests = sampled(4, 1.3, 6)
    assert p_value(cells(requests, 3, 1.3), [1 / 9] * 9) > SIGNIFICANCE
    for request in requests[::2]:
        request.token_ids[3] = after([*PROMPT, *request.token_ids[:3]]).next_token
    assert p_value(cells(requests, 3, 1.3), [1 / 9] * 9) < SIGNIFICANCE


def test_the_measure_sees_a_wrong_rule() -> None:
    """Accepting every draft, or always replacing by the most likely token, would fail the same test."""
    chances = softmax(after(PROMPT).logits.tolist(), 1.0)
    random = np.random.default_rng(0)
    right = Counter(random.choice(VOCAB, DRAWS, p=chances).tolist())
    assert p_value(right, chances) > SIGNIFICANCE
    best = int(np.argmax(chances))
    biased = Counter(token if random.random() > 0.1 else best for token in right.elements())
    assert p_value(biased, chances) < SIGNIFICANCE


@pytest.mark.parametrize("drafts", [1, 4])
def test_a_seed_gives_one_text_whatever_is_drafted(drafts: int) -> None:
    """Also alone or in a batch, with failures and preemptions in between."""
    sampling = [SamplingOptions(0.9, seed=seed) for seed in range(6)]
    texts = []
    for limit, batch, num_blocks in ((0, 6, 40), (drafts, 1, 40), (drafts, 6, 40), (drafts, 6, 8)):
        engine = Engine(
            fake_package(),
            EngineOptions(num_blocks=num_blocks, max_batch_size=batch, max_draft_tokens=4, max_scheduled_tokens=16),
        )
        requests = [engine.submit([1, 2, 3], 20, limit, sampling=options) for options in sampling]
        while engine.has_work:
            engine.step()
        texts.append([request.token_ids for request in requests])
        if num_blocks == 8:
            assert engine.stats.preemptions > 0
    assert texts[1:] == texts[:1] * 3
    assert len({tuple(text) for text in texts[0]}) == 6, "seeds differ"


def test_temperature_zero_is_greedy_and_small_ones_come_to_it() -> None:
    logits = after([1, 2]).logits
    best = int(logits.argmax())
    assert choose(logits, SamplingOptions(0.0), [], 0, []) == best
    assert {choose(logits, SamplingOptions(1e-3, seed=seed), [], 0, []) for seed in range(50)} == {best}


def test_top_k_and_top_p_leave_the_best() -> None:
    scores = np.log(np.array([0.1, 0.4, 0.2, 0.25, 0.05]))
    assert probabilities(scores, SamplingOptions(1.0, top_k=2)).tolist() == pytest.approx(
        [0, 0.4 / 0.65, 0, 0.25 / 0.65, 0]
    )
    assert np.flatnonzero(probabilities(scores, SamplingOptions(1.0, top_p=0.6))).tolist() == [1, 3]
    assert np.flatnonzero(probabilities(scores, SamplingOptions(1.0, top_p=1e-9))).tolist() == [1]
    assert np.flatnonzero(probabilities(scores, SamplingOptions(1.0, top_k=3, top_p=0.7))).tolist() == [1, 3]
    assert np.flatnonzero(probabilities(scores, SamplingOptions(1.0, top_k=99))).tolist() == [0, 1, 2, 3, 4]


def test_draws_of_neighbouring_positions_and_seeds_are_independent() -> None:
    """Pairs of draws fill a 4 x 4 table evenly."""
    even = np.full(4, 0.25)
    for step in ((0, 1), (1, 0), (1, 1)):
        counts = Counter(
            4 * draw(even, seed, position) + draw(even, seed + step[0], position + step[1])
            for seed in range(0, 200, 2)
            for position in range(0, 40, 2)
        )
        # 16 cells have 15 degrees of freedom, and p_value wants an even number: the last 8 are joined.
        joined: Counter[int] = Counter()
        for cell, count in counts.items():
            joined[min(cell, 8)] += count
        assert p_value(joined, [1 / 16] * 8 + [0.5]) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (SamplingOptions(-0.1), "--temperature: expected a number from 0 to 1000000.0, found -0.1"),
        (SamplingOptions(math.nan), "--temperature: expected a number from 0"),
        (SamplingOptions(math.inf), "--temperature: expected a number from 0"),
        (SamplingOptions("0.7"), "--temperature: expected a number from 0 to 1000000.0, found 0.7"),  # type: ignore[arg-type]
        (SamplingOptions(1.0, top_k=-1), "--top-k: expected a whole number from 0"),
        (SamplingOptions(1.0, top_k=2.5), "--top-k: expected a whole number from 0 to .* found 2.5"),  # type: ignore[arg-type]
        (SamplingOptions(1.0, top_p=0.0), "--top-p: expected a number from 1e-09 to 1, found 0.0"),
        (SamplingOptions(1.0, top_p=1.1), "--top-p"),
        (SamplingOptions(1.0, seed=-1), "--seed"),
        (SamplingOptions(1.0, seed=None), "--seed: expected a whole number from 0 to .* found None"),  # type: ignore[arg-type]
        (SamplingOptions(repetition_penalty=1e-320), "repetition_penalty: expected a number from 0.01 to 100"),
        (SamplingOptions(min_new_tokens=-1), "min_new_tokens: expected a whole number from 0"),
    ],
)
def test_impossible_options_are_refused_by_name(options: SamplingOptions, message: str) -> None:
    engine = Engine(fake_package(), EngineOptions(num_blocks=8))
    with pytest.raises(Refused, match=message):
        engine.submit([1], 4, 0, sampling=options)


def test_the_tiniest_temperature_is_greedy() -> None:
    """Nothing overflows to a token that is none."""
    logits = after([1, 2]).logits
    assert choose(logits, SamplingOptions(1e-310), [], 0, []) == int(logits.argmax())


def test_a_minimum_length_that_no_token_can_reach_is_refused() -> None:
    engine = Engine(fake_package(), EngineOptions(num_blocks=8))
    with pytest.raises(Refused, match="min_new_tokens: expected a token that is no stop id"):
        engine.submit([1], 4, 0, range(VOCAB), SamplingOptions(min_new_tokens=2))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (SamplingOptions(repetition_penalty=1.2), "repetition_penalty"),
        (SamplingOptions(0.7, min_new_tokens=3), "min_new_tokens"),
    ],
)
def test_penalties_switch_drafting_off_and_say_so(options: SamplingOptions, reason: str) -> None:
    """For that request alone."""
    engine = Engine(fake_package(), EngineOptions(num_blocks=16))
    penalized, other = engine.submit(PROMPT, 12, 4, sampling=options), engine.submit(PROMPT, 12, 4)
    assert (penalized.drafting_off, other.drafting_off) == (reason, None)
    with pytest.raises(Refused, match=f"a request that may draft, found {reason}"):
        penalized.propose([1])
    while engine.has_work:
        engine.step()
    assert penalized.stats.draft_tokens_proposed == 0
    assert other.stats.draft_tokens_proposed > 0
    assert other.token_ids == plain(PROMPT, 12)


def test_the_minimum_length_holds_the_stop_ids_back() -> None:
    tokens = plain(PROMPT, 12)
    engine = Engine(fake_package(), EngineOptions(num_blocks=16))
    request = engine.submit(PROMPT, 12, 0, stop_token_ids=tokens[:2], sampling=SamplingOptions(min_new_tokens=6))
    while engine.has_work:
        engine.step()
    assert len(request.token_ids) >= 7 or request.finish_reason == "length"
    assert not set(request.token_ids[:6]) & set(tokens[:2])


def test_logits_that_are_no_numbers_are_an_error() -> None:
    with pytest.raises(DraftsmithError, match="not numbers"):
        choose(np.array([0.0, np.nan], np.float32), SamplingOptions(1.0), [], 0, [])
    with pytest.raises(DraftsmithError, match="not numbers"):
        choose(np.array([0.0, np.inf], np.float32), SamplingOptions(1.0), [], 0, [])
