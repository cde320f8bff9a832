"""verify(): everything that can be said of a package without its checkpoint, by looking and by running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from builder.audit import audit
from builder.checks import Check, judged
from builder.errors import DraftsmithError, MachineError, Refused
from builder.progress import Progress, silent
from runtime import reference
from runtime.generation import Ask, Generation, generate, options_for, read_asks
from runtime.limits import EngineOptions, draft_limit
from runtime.loading import LoadedPackage, load
from runtime.recording import dump
from runtime.session import ExecutionProvider
from runtime.text import Tokenizer

PROMPTS = ("def main(argv=None):\n", "The capital of France is", "Once upon a time", "1, 2, 3, 4, 5,")
NEW_TOKENS = 32
SYNTHETIC_LENGTHS = (5, 12, 19, 33)
"""Tokens of the prompts of a package without a tokenizer."""
RUN = "run"
ROUNDING = 1e-4
"""Float32 logits of the same row, computed among more or fewer rows, differ by less; closer ones may change places."""


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `build-model verify`, by the same names. draft_tokens: None is the package's limit."""

    reference: Path | None = None
    prompts: Path | None = None
    draft_tokens: int | None = None
    min_acceptance: float | None = None
    ep: ExecutionProvider = "auto"
    deep: bool = False


@dataclass(frozen=True)
class Verification:
    """checks in the order made. acceptance: drafts accepted and evaluated, by position. unable: why nothing was run."""

    package: str
    checks: list[Check]
    acceptance: dict[str, Any] = field(default_factory=dict)
    unable: str | None = None

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """As of the command line: 3 where only this machine is at fault."""
        wrong = [check for check in self.checks if not check.ok and check.name != RUN]
        return 0 if self.ok else 1 if wrong or not self.unable else MachineError.exit_code

    def to_json(self) -> dict[str, Any]:
        checks = [vars(check) for check in self.checks]
        return {"ok": self.ok, "package": self.package, "checks": checks, "acceptance": self.acceptance}


def verify(path: str | Path, options: VerifyOptions | None = None, progress: Progress = silent) -> Verification:
    """Raises Refused for what is no package and for options it cannot serve; what is wrong inside is a failed check."""
    options, folder = options or VerifyOptions(), Path(path)
    answers = reference.read(options.reference) if options.reference else None
    checks = audit(folder, progress, deep=options.deep)
    if not all(check.ok for check in checks if check.name.split()[0] not in ("file", "manifest", "options")):
        return Verification(str(path), [*checks, Check(RUN, False, "not run: the package contradicts itself")])
    try:
        loaded = load(folder, options.ep)
        checks.append(_kernels(loaded))
        run = _run(loaded, options, progress)
        checks += run.checks
        if answers is not None:
            checks += reference.compare(loaded, answers)
    except Refused:
        raise
    except DraftsmithError as error:
        unable = str(error) if isinstance(error, MachineError) else None
        return Verification(str(path), [*checks, Check(RUN, False, str(error))], unable=unable)
    return Verification(str(path), checks, run.acceptance)


def _kernels(loaded: LoadedPackage) -> Check:
    """The sessions exist, so every op has a kernel, or a reference function that stood in for one."""
    graphs = [loaded.package.target.path.name]
    if loaded.package.mtp:
        loaded.mtp()
        graphs.append(loaded.package.mtp.path.name)
    return Check("kernels", True, f"{' and '.join(graphs)} load in ONNX Runtime {ort.__version__}")


@dataclass(frozen=True)
class _Run:
    checks: list[Check]
    acceptance: dict[str, Any]


def _run(loaded: LoadedPackage, options: VerifyOptions, progress: Progress) -> _Run:
    """Plain and speculative generation of the same prompts, side by side."""
    drafts = draft_limit(loaded.package, options.draft_tokens)
    asks = _asks(loaded, options.prompts)
    plain = _generate(loaded, asks, 0, progress)
    checks = [judged("finite logits", lambda: _finite(loaded, asks[0]))]
    if not drafts:
        unmet = options.min_acceptance is not None
        remedy = "nothing was drafted: there is no head, or it cannot be rolled back"
        return _Run([*checks, Check("speculation", not unmet, remedy)], {})
    speculative = _generate(loaded, asks, drafts, progress)
    for index, ask in enumerate(asks):
        pair = plain.requests[index].token_ids, speculative.requests[index].token_ids
        checks.append(_equal(loaded, index, ask, pair, drafts))
    accepted = _acceptance(speculative)
    return _Run([*checks, _floor(accepted, options.min_acceptance)], accepted)


def _asks(loaded: LoadedPackage, prompts: Path | None) -> list[Ask]:
    """Given prompts, or built-in ones: texts, or random tokens where there is no tokenizer."""
    package = loaded.package
    tokenizer = Tokenizer(package.folder) if (package.folder / "tokenizer.json").is_file() else None
    if prompts is not None:

        def encode(text: str) -> list[int]:
            return (tokenizer or Tokenizer(package.folder)).encode(text)

        return [Ask(ask.token_ids, ask.max_new_tokens, 0) for ask in read_asks(prompts, NEW_TOKENS, 0, encode)]
    room = max(1, package.context_length // 2)
    if tokenizer:
        texts = [tokenizer.encode(prompt)[:room] for prompt in PROMPTS]
    else:
        rng = np.random.default_rng(0)
        texts = [rng.integers(0, package.vocab_size, min(n, room)).tolist() for n in SYNTHETIC_LENGTHS]
    return [Ask(tuple(ids), NEW_TOKENS, 0) for ids in texts if ids]


def _generate(loaded: LoadedPackage, asks: Sequence[Ask], drafts: int, progress: Progress) -> Generation:
    drafting = [Ask(ask.token_ids, ask.max_new_tokens, drafts) for ask in asks]
    return generate(loaded, drafting, options_for(loaded, drafting, EngineOptions()), progress)


def _finite(loaded: LoadedPackage, ask: Ask) -> str:
    options = options_for(loaded, [Ask(ask.token_ids, 2, 0)], EngineOptions())
    arrays = dump(loaded, ask.token_ids, 0, options)
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            raise Refused(name, expected="finite numbers", found="NaN or infinity", remedy="inspect the checkpoint")
    return f"{', '.join(arrays)} of {len(ask.token_ids)} tokens"


def _equal(
    loaded: LoadedPackage, index: int, ask: Ask, pair: tuple[Sequence[int], Sequence[int]], drafts: int
) -> Check:
    """Speculation may change nothing but the time; a tie within rounding is shown and passes."""

    def judge() -> str:
        plain, speculative = pair
        fork = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
        if fork is None and len(plain) == len(speculative):
            return f"{len(plain)} tokens equal with {drafts} drafts a step"
        at = min(len(plain), len(speculative)) if fork is None else fork
        lead = _lead(loaded, [*ask.token_ids, *plain[:at]])
        if lead > ROUNDING:
            raise Refused(
                f"prompt {index} token {at}",
                expected=f"{list(plain[at : at + 1])}, by {lead:.2e} in the plain logits",
                found=list(speculative[at : at + 1]),
                remedy="do not deploy it: a state or cache is rolled back wrongly",
            )
        return f"{at} tokens equal, then a tie: {lead:.1e} between the two best"

    return judged(f"speculative equals plain, prompt {index}", judge)


def _lead(loaded: LoadedPackage, token_ids: Sequence[int]) -> float:
    """How much the best next token's logit is above the second best one's."""
    options = options_for(loaded, [Ask(tuple(token_ids), 2, 0)], EngineOptions())
    best = np.sort(dump(loaded, token_ids, 0, options)["logits"][-1])
    return float(best[-1] - best[-2])


def _acceptance(done: Generation) -> dict[str, Any]:
    stats = done.stats
    return {
        "accepted": stats.draft_tokens_accepted,
        "evaluated": stats.draft_tokens_evaluated,
        "accepted_by_position": list(stats.accepted_by_position),
        "evaluated_by_position": list(stats.evaluated_by_position),
    }


def _floor(found: dict[str, Any], floor: float | None) -> Check:
    """Random weights accept nothing, so without a floor any acceptance passes."""
    rate = found["accepted"] / max(1, found["evaluated"])
    positions = zip(found["accepted_by_position"], found["evaluated_by_position"], strict=True)
    shown = ", ".join(f"{accepted}/{evaluated}" for accepted, evaluated in positions)
    detail = f"{rate:.3f} ({found['accepted']} of {found['evaluated']} drafts; by position {shown})"
    if floor is not None and rate < floor:
        return Check("acceptance", False, f"expected at least {floor}, found {detail}; check the head's inputs")
    return Check("acceptance", True, detail)
