"""A package against another implementation's answers in an .npz file.

Two layouts are known. One prompt: `input_ids` [1, T] with `logits` [1, T, vocab], and where they are there
`last_hidden_state` [1, T, hidden], `mtp_logits`, `mtp_draft_tokens` [K] and `mtp_draft_logits` [K, vocab]. Many
prompts: `prompt_I` [T] with `greedy_I` [N], the greedy continuation, and `margin_I` [N], the reference's own lead of
each token's logit over the next best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.checks import Check, judged
from builder.errors import MachineError, Refused
from runtime.generation import Ask, generate, options_for
from runtime.limits import EngineOptions
from runtime.loading import LoadedPackage
from runtime.recording import dump

Arrays = Mapping[str, NDArray[Any]]
TOLERANCE = 2e-3
"""Largest absolute difference of float32 logits and hidden states whose sums were taken in another order."""
NEAR_TIE = 4e-3
"""Logits closer than twice the tolerance may change places; behind such a token both go their own way."""
PAIRS = {"logits": "logits", "hidden_states": "last_hidden_state", "mtp_logits": "mtp_logits"}
"""Arrays of a dump to arrays of a reference."""


def read(path: Path) -> Arrays:
    """Raises Refused for what is no .npz of one of the layouts, MachineError where it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}; it cannot be read") from error
    except Exception as error:  # zipfile and NumPy raise many kinds for damaged files
        raise Refused(path, expected="an .npz file", found=error, remedy="check --reference") from None
    if not ({"input_ids", "logits"} <= arrays.keys() or {"prompt_0", "greedy_0"} <= arrays.keys()):
        raise Refused(
            path, expected="input_ids and logits, or prompt_I and greedy_I", found=", ".join(arrays), remedy="mend it"
        )
    return arrays


def compare(package: LoadedPackage, reference: Arrays) -> Iterator[Check]:
    """One check an array, or one a prompt. Raises MachineError where the package cannot run."""
    if "input_ids" in reference:
        yield from _one_prompt(package, reference)
    else:
        yield from _many_prompts(package, reference)


def _one_prompt(package: LoadedPackage, reference: Arrays) -> Iterator[Check]:
    token_ids = [int(token) for token in reference["input_ids"].reshape(-1)]
    drafts = len(reference["mtp_draft_tokens"]) if "mtp_draft_tokens" in reference and package.package.mtp else 0
    options = options_for(package, [Ask(tuple(token_ids), drafts + 2, drafts)], EngineOptions())
    arrays = dump(package, token_ids, drafts, options)
    for name, theirs in PAIRS.items():
        if theirs in reference and name in arrays:
            yield judged(f"reference {name}", _bind(_close, name, arrays[name], reference[theirs]))
    if drafts:
        yield judged("reference drafts", _bind(_drafts, arrays, reference))


def _bind(judge: Callable[..., str], *arguments: Any) -> Callable[[], str]:
    return lambda: judge(*arguments)


def _close(name: str, ours: NDArray[Any], theirs: NDArray[Any]) -> str:
    if ours.size != theirs.size:
        raise Refused(name, expected=f"shape {theirs.shape}", found=ours.shape, remedy="use this package's reference")
    difference = float(np.abs(ours.reshape(-1) - theirs.reshape(-1).astype(np.float32)).max())
    if not difference <= TOLERANCE:
        raise Refused(
            name,
            expected=f"the reference within {TOLERANCE}",
            found=f"a difference of {difference:.2e}",
            remedy="compare layer by layer",
        )
    return f"largest difference {difference:.1e}"


def _drafts(arrays: Arrays, reference: Arrays) -> str:
    """Chained drafts; behind a near-tie the chains may fork."""
    logits, tokens = reference["mtp_draft_logits"], reference["mtp_draft_tokens"]
    top = np.sort(logits, axis=-1)[:, -2:]
    ties = np.flatnonzero(top[:, 1] - top[:, 0] <= NEAR_TIE)
    first = int(ties[0]) if ties.size else len(tokens)
    ours = arrays["mtp_draft_tokens"]
    if not np.array_equal(ours[:first], tokens[:first]):
        raise Refused("drafts", expected=tokens.tolist(), found=ours.tolist(), remedy="compare the head's inputs")
    rows = min(first + 1, len(tokens))
    return _close("mtp_draft_logits", arrays["mtp_draft_logits"][:rows], logits[:rows])


def _many_prompts(package: LoadedPackage, reference: Arrays) -> Iterator[Check]:
    indices = range(sum(name.startswith("prompt_") for name in reference))
    prompts = [tuple(int(token) for token in reference[f"prompt_{i}"]) for i in indices]
    asks = [Ask(prompt, len(reference[f"greedy_{i}"]), 0) for i, prompt in enumerate(prompts)]
    done = generate(package, asks, options_for(package, asks, EngineOptions()))
    for i, request in enumerate(done.requests):
        margins = reference.get(f"margin_{i}", np.full(len(reference[f"greedy_{i}"]), np.inf))
        judge = _bind(_same_tokens, f"prompt {i}", request.token_ids, reference[f"greedy_{i}"].tolist(), margins)
        yield judged(f"reference prompt {i}", judge)


def _same_tokens(name: str, ours: Sequence[int], theirs: Sequence[int], margins: NDArray[Any]) -> str:
    """Up to where one of them stops, or up to a token that the reference itself was not sure of."""
    length = min(len(ours), len(theirs))
    fork = next((i for i in range(length) if ours[i] != theirs[i]), None)
    if fork is None:
        return f"{length} tokens equal"
    if margins[fork] > NEAR_TIE:
        raise Refused(
            f"{name} token {fork}",
            expected=theirs[fork],
            found=f"{ours[fork]}, by {margins[fork]:.3f} in the reference's logits",
            remedy="compare logits with --reference of one prompt",
        )
    return f"{fork} tokens equal, then a near-tie of {margins[fork]:.1e}"
