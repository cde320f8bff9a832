"""A package against another implementation's answers in an .npz file.

Two layouts are known. One prompt: `input_ids` [1, T] with `logits` [1, T, vocab], and where they are there
`last_hidden_state` [1, T, hidden], `mtp_logits`, `mtp_draft_tokens` [K] and `mtp_draft_logits` [K, vocab]; for a trace
`layer_hidden_states` [L, T, hidden] or [L, 1, T, hidden], the residual stream behind each decoder layer. Many
prompts: `prompt_I` [T] with `greedy_I` [N], the greedy continuation, and `margin_I` [N], the reference's own lead of
each token's logit over the next best. read() refuses whatever is not of these types and shapes; how long and how wide
arrays have to be, only the package can tell, and what does not fit it is a failed check.

transformers' `output_hidden_states` gives the embedding first, then the stream behind each layer, but the last one only
after the final norm. So keep `hidden_states[1:-1]`, which is L - 1 layers, or record the output of every decoder layer
with a forward hook.

A run in float32 is judged by its largest absolute difference. One in half precision, as on a GPU, is judged by what the
roundings of its type may amount to (runtime/rounding.py, runtime/agreement.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.checks import Check, judged
from builder.errors import MachineError, Refused
from runtime import agreement
from runtime.generation import Ask, generate, options_for
from runtime.limits import EngineOptions, check_request, draft_limit
from runtime.loading import LoadedPackage
from runtime.recording import dump
from runtime.rounding import Rounding

Arrays = Mapping[str, NDArray[Any]]
TOLERANCE = 2e-3
"""Largest absolute difference of float32 logits and hidden states whose sums were taken in another order."""
NEAR_TIE = 4e-3
"""Logits closer than twice the tolerance may change places; behind such a token both go their own way."""
PAIRS = {"logits": "logits", "hidden_states": "last_hidden_state", "mtp_logits": "mtp_logits"}
"""Arrays of a dump to arrays of a reference."""
LAYERS = "layer_hidden_states"


def read(path: Path) -> Arrays:
    """Raises Refused for what is no .npz of one of the layouts or not there, MachineError where it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise Refused(path, expected="an .npz file", found=error.strerror, remedy="check --reference") from None
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}; it cannot be read") from error
    except Exception as error:  # zipfile and NumPy raise many kinds for damaged files
        raise Refused(path, expected="an .npz file", found=error, remedy="check --reference") from None
    if {"input_ids", "logits"} <= arrays.keys():
        _check_one_prompt(path, arrays)
        _check_layers(path, arrays)
    elif LAYERS in arrays:
        raise _refused(f"{path} {LAYERS}", "input_ids and logits beside it", ", ".join(arrays))
    elif {"prompt_0", "greedy_0"} <= arrays.keys():
        _check_many_prompts(path, arrays)
    else:
        raise _refused(path, "input_ids and logits, or prompt_I and greedy_I", ", ".join(arrays) or "nothing")
    return arrays


def _refused(subject: object, expected: object, found: object) -> Refused:
    return Refused(subject, expected=expected, found=found, remedy="mend it, or leave --reference out")


def _check_one_prompt(path: Path, arrays: Arrays) -> None:
    tokens, logits = _tokens(path, arrays, "input_ids"), _numbers(path, arrays, "logits")
    if not tokens.size:
        raise _refused(f"{path} input_ids", "at least one token", "none")
    for name in ("logits", "last_hidden_state", "mtp_logits"):
        if name in arrays and (rows := _numbers(path, arrays, name).shape[:-1]) not in (
            (1, tokens.size),
            (tokens.size,),
        ):
            raise _refused(f"{path} {name}", f"[1, {tokens.size}, ...], a row for each of input_ids", f"{rows} rows")
    if "mtp_draft_tokens" in arrays or "mtp_draft_logits" in arrays:
        drafts, chained = _tokens(path, arrays, "mtp_draft_tokens"), _numbers(path, arrays, "mtp_draft_logits")
        due = drafts.size, logits.shape[-1]
        if drafts.ndim != 1 or chained.shape != due:
            raise _refused(f"{path} mtp_draft_logits", f"{due}, as mtp_draft_tokens and logits have it", chained.shape)


def _check_layers(path: Path, arrays: Arrays) -> None:
    """[L, T, hidden] or [L, 1, T, hidden], before the final norm."""
    if LAYERS not in arrays:
        return
    found = _numbers(path, arrays, LAYERS, (3, 4))
    rows = (arrays["input_ids"].size,) if found.ndim == 3 else (1, arrays["input_ids"].size)
    if not len(found) or found.shape[1:-1] != rows:
        raise _refused(f"{path} {LAYERS}", f"layers of {list(rows)} rows, one for each of input_ids", list(found.shape))
    last = arrays.get("last_hidden_state", found[:0])
    if last.size == found[-1].size and np.array_equal(last.ravel(), found[-1].ravel()):
        raise _refused(
            f"{path} {LAYERS}",
            "every layer before the final norm (leave the last one out, or record it with a forward hook)",
            "last_hidden_state as the last",
        )


def _check_many_prompts(path: Path, arrays: Arrays) -> None:
    count = sum(name.startswith("prompt_") for name in arrays)
    for name in arrays:
        kind, _, index = name.partition("_")
        if kind in ("prompt", "greedy", "margin") and index not in map(str, range(count)):
            raise _refused(f"{path} {name}", f"prompts 0 to {count - 1}, without a gap", f"{name} of {count} prompts")
    for index in map(str, range(count)):
        greedy = _tokens(path, arrays, f"greedy_{index}")
        for name, tokens in (
            (f"prompt_{index}", _tokens(path, arrays, f"prompt_{index}")),
            (f"greedy_{index}", greedy),
        ):
            if tokens.ndim != 1 or not tokens.size:
                raise _refused(f"{path} {name}", "[T], at least one token", list(tokens.shape))
        if (margin := f"margin_{index}") in arrays and _numbers(path, arrays, margin, (1,)).shape != greedy.shape:
            raise _refused(f"{path} {margin}", list(greedy.shape), list(arrays[margin].shape))


def _tokens(path: Path, arrays: Arrays, name: str) -> NDArray[Any]:
    """Integers, [T] or [1, T]."""
    found = _present(path, arrays, name)
    if found.dtype.kind not in "iu":
        raise _refused(f"{path} {name}", "integers", found.dtype)
    if found.ndim != 1 and not (found.ndim == 2 and found.shape[0] == 1):
        raise _refused(f"{path} {name}", "[T] or [1, T]", list(found.shape))
    return found


def _numbers(path: Path, arrays: Arrays, name: str, ranks: Sequence[int] = (2, 3)) -> NDArray[Any]:
    """Floating-point numbers, [T, N] or [1, T, N] if no other ranks are given."""
    found = _present(path, arrays, name)
    if found.dtype.kind != "f":
        raise _refused(f"{path} {name}", "floating-point numbers", found.dtype)
    if found.ndim not in ranks:
        raise _refused(f"{path} {name}", f"{' or '.join(map(str, ranks))} dimensions", list(found.shape))
    return found


def _present(path: Path, arrays: Arrays, name: str) -> NDArray[Any]:
    if name not in arrays:
        raise _refused(path, name, f"none, but {', '.join(arrays)}")
    return arrays[name]


def layers(reference: Arrays) -> NDArray[Any] | None:
    """The residual stream behind each decoder layer, [L, T, hidden], where the file holds it."""
    found = reference.get(LAYERS)
    return None if found is None else found.reshape(len(found), -1, found.shape[-1])


def prompt(reference: Arrays) -> list[int] | None:
    """input_ids as a list, or None of a file of many prompts."""
    return [int(token) for token in reference["input_ids"].reshape(-1)] if "input_ids" in reference else None


def compare(package: LoadedPackage, reference: Arrays) -> Iterator[Check]:
    """One check an array, or one a prompt. Raises MachineError where the package cannot run."""
    if token_ids := prompt(reference):
        yield from _one_prompt(package, reference, token_ids)
    else:
        yield from _many_prompts(package, reference)


def _one_prompt(package: LoadedPackage, reference: Arrays, token_ids: list[int]) -> Iterator[Check]:
    """As many drafts are chained as both have."""
    given = len(reference.get("mtp_draft_tokens", ())) if package.package.mtp else 0
    drafts = min(given, draft_limit(package.package, None))
    dumped: list[Arrays] = []

    def judge() -> str:
        check_request(token_ids, drafts + 2, package.package)
        if len(token_ids) + drafts + 2 > package.package.context_length:
            raise Refused(
                "input_ids",
                expected=f"at most {package.package.context_length - drafts - 2} tokens, to go on behind them",
                found=len(token_ids),
                remedy="use this package's reference",
            )
        options = options_for(package, [Ask(tuple(token_ids), drafts + 2, drafts)], EngineOptions())
        dumped.append(dump(package, token_ids, drafts, options))
        return f"{len(token_ids)} tokens" + (f" and {drafts} of {given} drafts" if given else "")

    yield judged("reference prompt", judge)
    if not dumped:
        return
    rounding = Rounding.of(package)
    if rounding.is_half:
        yield from agreement.checks(dumped[0], reference, drafts, rounding)
        return
    for name, theirs in PAIRS.items():
        if theirs in reference and name in dumped[0]:
            yield judged(f"reference {name}", _bind(_close, name, dumped[0][name], reference[theirs]))
    if drafts:
        yield judged("reference drafts", _bind(_drafts, dumped[0], reference, drafts))


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


def _drafts(arrays: Arrays, reference: Arrays, drafts: int) -> str:
    """The first chained drafts; behind a near-tie the chains may fork."""
    logits, tokens = reference["mtp_draft_logits"][:drafts], reference["mtp_draft_tokens"][:drafts]
    top = np.sort(logits, axis=-1)[:, -2:]
    ties = np.flatnonzero(top[:, 1] - top[:, 0] <= NEAR_TIE)
    first = int(ties[0]) if ties.size else len(tokens)
    ours = arrays["mtp_draft_tokens"]
    if not np.array_equal(ours[:first], tokens[:first]):
        raise Refused("drafts", expected=tokens.tolist(), found=ours.tolist(), remedy="compare the head's inputs")
    rows = min(first + 1, len(tokens))
    seen = _close("mtp_draft_logits", arrays["mtp_draft_logits"][:rows], logits[:rows])
    given = len(reference["mtp_draft_tokens"])
    return seen if drafts == given else f"{seen}; {drafts} of {given} drafts, the package's limit"


def _many_prompts(package: LoadedPackage, reference: Arrays) -> Iterator[Check]:
    """Prompts that the package cannot serve fail by themselves, and the others are compared all the same."""
    rounding = Rounding.of(package)
    near_tie = rounding.near_tie if rounding.is_half else NEAR_TIE
    asks: dict[int, Ask] = {}
    refused: list[Check] = []
    for index in range(sum(name.startswith("prompt_") for name in reference)):
        prompt = tuple(int(token) for token in reference[f"prompt_{index}"])
        ask = Ask(prompt, len(reference[f"greedy_{index}"]), 0)
        try:
            check_request(ask.token_ids, ask.max_new_tokens, package.package)
        except Refused as refusal:
            refused.append(Check(f"reference prompt {index}", False, str(refusal.within(f"prompt_{index}:"))))
        else:
            asks[index] = ask
    yield from refused
    served = list(asks.values())
    done = generate(package, served, options_for(package, served, EngineOptions())).requests if served else ()
    for index, request in zip(asks, done, strict=True):
        theirs = reference[f"greedy_{index}"]
        margins = reference.get(f"margin_{index}", np.full(len(theirs), np.inf))
        judge = _bind(_same_tokens, f"prompt {index}", request.token_ids, theirs.tolist(), margins, near_tie)
        yield judged(f"reference prompt {index}", judge)


def _same_tokens(name: str, ours: Sequence[int], theirs: Sequence[int], margins: NDArray[Any], near_tie: float) -> str:
    """Up to where one of them stops, or up to a token that the reference itself was not sure of."""
    length = min(len(ours), len(theirs))
    fork = next((i for i in range(length) if ours[i] != theirs[i]), None)
    if fork is None:
        return f"{length} tokens equal"
    if not margins[fork] <= near_tie:  # NaN is no tie
        raise Refused(
            f"{name} token {fork}",
            expected=theirs[fork],
            found=f"{ours[fork]}, by {margins[fork]:.3f} in the reference's logits",
            remedy="compare logits with --reference of one prompt",
        )
    return f"{fork} tokens equal, then a near-tie of {margins[fork]:.1e}"
