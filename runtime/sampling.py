"""Choosing tokens: greedily, or by temperature, top-k and top-p, and how many drafts the target agrees with.

Drafts are verified by choosing the target's own token at every position and comparing. For drafts that were not drawn
by chance, as a head's best token or a repetition of the text are not, that is rejection sampling: draft d is accepted
with the target's probability p(d), and a token that replaces it follows p without d, renormalised. Source: Leviathan
et al., "Fast Inference from Transformers via Speculative Decoding" (2211.17192), with a proposal that is certain of d.

What chance decides at a position depends on the request's seed and the position alone, so a seed gives one text,
whatever drafts, batches, failed steps or preemptions came between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.errors import DraftsmithError, Refused

Floats = NDArray[np.float64]
MAX_SEED = (1 << 64) - 1
SMALLEST = 1e-9
"""Of top_p: less would be no share at all."""


@dataclass(frozen=True)
class SamplingOptions:
    """How a request's tokens are chosen; temperature 0 is greedy, top_k 0 and top_p 1 leave every token in.

    repetition_penalty and min_new_tokens change the distribution with every token, so a request that asks for one of
    them is decoded without drafts. Names and meanings are those of transformers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0

    def check(self) -> None:
        """Raises Refused for a value outside what is possible."""
        for name, found, least, most, kind in (
            ("--temperature", self.temperature, 0, 1e6, Real),
            ("--top-k", self.top_k, 0, 1 << 31, Integral),
            ("--top-p", self.top_p, SMALLEST, 1, Real),
            ("--seed", self.seed, 0, MAX_SEED, Integral),
            ("repetition_penalty", self.repetition_penalty, 0.01, 100, Real),
            ("min_new_tokens", self.min_new_tokens, 0, 1 << 31, Integral),
        ):
            if isinstance(found, bool) or not isinstance(found, kind) or not least <= found <= most:
                number = "a number" if kind is Real else "a whole number"
                raise Refused(name, expected=f"{number} from {least} to {most}", found=found, remedy="choose another")

    def plain(self) -> SamplingOptions:
        """The same in Python's own numbers, whose arithmetic does not wrap."""
        return SamplingOptions(
            float(self.temperature),
            int(self.top_k),
            float(self.top_p),
            int(self.seed),
            float(self.repetition_penalty),
            int(self.min_new_tokens),
        )

    @property
    def is_greedy(self) -> bool:
        """The best token of the logits as they are."""
        return not self.temperature and self.drafting_off is None

    @property
    def drafting_off(self) -> str | None:
        """Why a request with these options is decoded without drafts, or None."""
        if self.repetition_penalty != 1:
            return "repetition_penalty"
        return "min_new_tokens" if self.min_new_tokens else None


GREEDY = SamplingOptions()


def greedy(logits: NDArray[Any]) -> list[int]:
    """The best token of each row of logits [rows, vocab]; the lowest id on a tie.

    Raises DraftsmithError for a row whose best value is NaN or infinite.
    """
    best = logits.argmax(axis=-1)
    chosen: list[int] = best.tolist()
    refuse_unnumbered(logits[row, token] for row, token in enumerate(chosen))
    return chosen


def choose(
    logits: NDArray[Any], options: SamplingOptions, known: Sequence[int], generated: int, stop_ids: Sequence[int]
) -> int:
    """The next token by one row of logits [vocab], after the `known` tokens, the last `generated` of them ours."""
    refuse_unnumbered([logits.max()])
    scores = _penalized(logits.astype(np.float64), options, known, generated, stop_ids)
    if not options.temperature:
        return int(scores.argmax())
    return draw(probabilities(scores, options), options.seed, generated)


def refuse_unnumbered(values: Iterable[Any]) -> None:
    """Raises DraftsmithError for best logits that are NaN or infinite."""
    if not all(map(math.isfinite, values)):
        raise DraftsmithError("the logits are not numbers: the weights of this package are damaged; export it again")


def _penalized(
    scores: Floats, options: SamplingOptions, known: Sequence[int], generated: int, stop_ids: Sequence[int]
) -> Floats:
    """scores [vocab], changed in place: known tokens weakened, stop ids impossible before the minimum length."""
    if options.repetition_penalty != 1:
        seen = np.unique(np.asarray(known))
        values = scores[seen]
        scores[seen] = np.where(values < 0, values * options.repetition_penalty, values / options.repetition_penalty)
    if generated < options.min_new_tokens:
        scores[list(stop_ids)] = -np.inf
    return scores


def probabilities(scores: Floats, options: SamplingOptions) -> Floats:
    """[vocab]: softmax of scores / temperature over the top_k best tokens, then over the fewest that hold top_p."""
    with np.errstate(over="ignore"):  # in this order a tiny temperature gives -inf, never NaN
        scores = (scores - scores.max()) / options.temperature
    if 0 < options.top_k < len(scores):
        least = np.partition(scores, -options.top_k)[-options.top_k]
        scores = np.where(scores < least, -np.inf, scores)
    chances: Floats = np.exp(scores)
    chances /= chances.sum()
    if options.top_p < 1:
        order = np.argsort(chances, kind="stable")
        unlikely = np.cumsum(chances[order]) <= 1 - options.top_p
        unlikely[-1] = False
        chances[order[unlikely]] = 0
        chances /= chances.sum()
    return chances


def draw(chances: Floats, seed: int, position: int) -> int:
    """A token with these probabilities [vocab]: a function of seed and position, with no state between calls."""
    uniform = np.random.Generator(np.random.Philox(key=seed, counter=[0, position, 0, 0])).random()
    bounds = np.cumsum(chances)
    return int(np.searchsorted(bounds, uniform * bounds[-1], side="right"))


def verified(drafts: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The tokens that decoding without drafts would have produced: the drafts it agrees with, then its own next token.

    chosen[j] is the target's token after the anchor and the first j drafts, so len(chosen) == len(drafts) + 1.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == chosen[accepted]:
        accepted += 1
    return list(chosen[: accepted + 1])
