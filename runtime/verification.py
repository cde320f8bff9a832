"""verify(): everything that can be said of a package without its checkpoint, by looking and by running."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from runtime.limits import EngineOptions, check_request, draft_limit
from runtime.loading import LoadedPackage, load
from runtime.recording import dump
from runtime.rounding import Rounding
from runtime.session import ExecutionProvider
from runtime.text import Tokenizer
from runtime.trace import Point, describe, trace

PROMPTS = ("def main(argv=None):\n", "The capital of France is", "Once upon a time", "1, 2, 3, 4, 5,")
NEW_TOKENS = 32
SYNTHETIC_LENGTHS = (5, 12, 19, 33)
"""Tokens of the prompts of a package without a tokenizer."""
DUMPED_TOKENS = 2
"""Tokens that a dump generates behind a prompt."""
TOKENIZER_FILE = "tokenizer.json"
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
    trace: bool = False


@dataclass(frozen=True)
class Verification:
    """checks in the order made. acceptance: drafts accepted and evaluated, by position. trace: where it was asked for,
    the residual stream part by part.
    """

    package: str
    checks: list[Check]
    acceptance: dict[str, Any] = field(default_factory=dict)
    trace: tuple[Point, ...] = ()

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def exit_code(self) -> int:
        """As of the command line: 3 where only this machine is at fault."""
        wrong = [check for check in self.checks if not check.ok and not check.machine]
        return 0 if self.ok else 1 if wrong else MachineError.exit_code

    def to_json(self) -> dict[str, Any]:
        checks = [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in self.checks]
        return {
            "ok": self.ok,
            "package": self.package,
            "checks": checks,
            "acceptance": self.acceptance,
            "trace": [point.to_json() for point in self.trace],
        }


def verify(path: str | Path, options: VerifyOptions | None = None, progress: Progress = silent) -> Verification:
    """Raises Refused for what is no package and for options it cannot serve; what is wrong inside is a failed check."""
    options, folder = options or VerifyOptions(), Path(path)
    _check_options(options)
    answers = reference.read(options.reference) if options.reference else None
    checks = audit(folder, progress, deep=options.deep)
    wrong = [check for check in checks if not check.ok and check.name.split()[0] not in ("file", "manifest", "options")]
    if wrong:
        machine = all(check.machine for check in wrong)
        reason = "the package cannot be read" if machine else "the package contradicts itself"
        return Verification(str(path), [*checks, Check(RUN, False, f"not run: {reason}", machine=machine)])
    accepted: dict[str, Any] = {}
    points: list[Point] = []
    try:
        loaded = load(folder, options.ep)
        _check_trace(loaded, options, answers or {})
        checks.append(_kernels(loaded))
        plan = _plan(loaded, options, checks)
        accepted = _run(loaded, plan, options, checks, progress)
        if answers is not None:
            checks += reference.compare(loaded, answers)
        if options.trace:
            checks.append(_trace(loaded, plan, answers or {}, points))
    except UsageError:
        raise
    except DraftsmithError as error:
        checks.append(Check(RUN, False, str(error), machine=isinstance(error, MachineError)))
    return Verification(str(path), checks, accepted, tuple(points))


class UsageError(Refused):
    """What was asked for cannot be served, so that nothing was verified; every other refusal is a failed check."""


@contextmanager
def _usage() -> Iterator[None]:
    try:
        yield
    except Refused as refusal:
        raise UsageError(
            refusal.subject, expected=refusal.expected, found=refusal.found, remedy=refusal.remedy
        ) from None


def _check_options(options: VerifyOptions) -> None:
    floor = options.min_acceptance
    if floor is not None and not 0 <= floor <= 1:  # NaN is neither
        raise UsageError("--min-acceptance", expected="a share from 0 to 1", found=floor, remedy="choose another")


def _check_trace(loaded: LoadedPackage, options: VerifyOptions, answers: reference.Arrays) -> None:
    """Raises UsageError where there is nothing to compare the stream with: on a CPU it is that of float32 already."""
    if options.trace and loaded.target.place.is_host and reference.layers(answers) is None:
        raise UsageError(
            "--trace",
            expected=f"a --reference with {reference.LAYERS}, or a GPU to compare with float32",
            found="neither",
            remedy="record every decoder layer's output for a prompt in another implementation, or use --ep cuda",
        )


def _trace(loaded: LoadedPackage, plan: _Plan, answers: reference.Arrays, points: list[Point]) -> Check:
    """Adds what was found to `points`, sound or not.

    Of the plan's prompts the longest is traced: the few rows of a short one have no median to speak of.
    """
    layers = reference.layers(answers)
    token_ids = reference.prompt(answers) or max((ask.token_ids for ask in plan.asks), key=len)

    def judge() -> str:
        found, against = trace(loaded, token_ids, layers)
        points.extend(found)
        return describe(found, against)

    return judged("trace", judge)


def _kernels(loaded: LoadedPackage) -> Check:
    """The sessions exist, so every op has a kernel, or a reference function that stood in for one."""
    graphs = [loaded.package.target.path.name]
    if loaded.package.mtp:
        loaded.mtp()
        graphs.append(loaded.package.mtp.path.name)
    return Check("kernels", True, f"{' and '.join(graphs)} load in ONNX Runtime {ort.__version__}")


@dataclass(frozen=True)
class _Plan:
    """Prompts, each with no drafts, and how many drafts a step to compare with."""

    asks: list[Ask]
    drafts: int


def _plan(loaded: LoadedPackage, options: VerifyOptions, checks: list[Check]) -> _Plan:
    """Raises UsageError for options that this package cannot serve. Adds a check of its tokenizer, if it has one."""
    with _usage():
        drafts = draft_limit(loaded.package, options.draft_tokens)
    tokenizer, texts = _tokenizer(loaded, checks)
    if options.prompts is not None:
        return _Plan(_given(loaded, options.prompts, tokenizer), drafts)
    return _Plan([Ask(tuple(ids), NEW_TOKENS, 0) for ids in texts or _synthetic(loaded)], drafts)


def _tokenizer(loaded: LoadedPackage, checks: list[Check]) -> tuple[Tokenizer | None, list[list[int]]]:
    """A tokenizer that can be used, and the built-in prompts in its tokens; neither where there is none."""
    package = loaded.package
    if not (package.folder / TOKENIZER_FILE).is_file():
        return None, []
    usable: list[Tokenizer] = []
    texts: list[list[int]] = []

    def judge() -> str:
        tokenizer = Tokenizer(package.folder)
        texts.extend(ids for prompt in PROMPTS if (ids := _encoded(loaded, tokenizer, prompt)))
        usable.append(tokenizer)
        return f"{sum(map(len, texts))} tokens of {len(PROMPTS)} texts"

    checks.append(judged("tokenizer", judge))
    return (usable[0], texts) if usable else (None, [])


def _encoded(loaded: LoadedPackage, tokenizer: Tokenizer, text: str) -> list[int]:
    """As many tokens as leave room to go on. Raises Refused where they are none of the model's."""
    package = loaded.package
    subject = package.folder / TOKENIZER_FILE
    try:
        ids = tokenizer.encode(text)
    except Refused:
        raise
    except Exception as error:  # whatever a damaged file makes of the tokenizer library
        raise Refused(subject, expected=f"tokens of {text!r}", found=error, remedy="bring the file again") from None
    if odd := [token for token in ids if not 0 <= token < package.vocab_size]:
        raise Refused(
            subject,
            expected=f"token ids below {package.vocab_size}",
            found=odd[0],
            remedy="bring the model's tokenizer",
        )
    return ids[: max(1, package.context_length // 2)]


def _synthetic(loaded: LoadedPackage) -> list[list[int]]:
    """Random tokens."""
    rng, room = np.random.default_rng(0), max(1, loaded.package.context_length // 2)
    return [rng.integers(0, loaded.package.vocab_size, min(n, room)).tolist() for n in SYNTHETIC_LENGTHS]


class _NoTokenizer(DraftsmithError):
    """Texts were given, and the package's tokenizer is damaged: its fault, not the usage's."""


def _given(loaded: LoadedPackage, prompts: Path, tokenizer: Tokenizer | None) -> list[Ask]:
    package = loaded.package

    def encode(text: str) -> list[int]:
        if tokenizer is None and (package.folder / TOKENIZER_FILE).is_file():
            raise _NoTokenizer(f"not run: {prompts} holds texts, and the package's tokenizer cannot be used")
        return (tokenizer or Tokenizer(package.folder)).encode(text)

    with _usage():
        asks = read_asks(prompts, Ask((), NEW_TOKENS, 0), encode, "--prompts")
        for ask in asks:
            try:
                check_request(ask.token_ids, ask.max_new_tokens, package)
            except Refused as refusal:
                raise refusal.within(f"{ask.place}:") from None
    return [Ask(ask.token_ids, ask.max_new_tokens, 0) for ask in asks]


def _run(
    loaded: LoadedPackage, plan: _Plan, options: VerifyOptions, checks: list[Check], progress: Progress
) -> dict[str, Any]:
    """Plain and speculative generation of the same prompts, side by side: adds checks, returns what was accepted."""
    plain = _generate(loaded, plan.asks, 0, progress)
    checks.append(judged("finite logits", lambda: _finite(loaded, plan.asks)))
    if not plan.drafts:
        unasked = draft_limit(loaded.package, None) and options.draft_tokens == 0
        reason = "--draft-tokens 0 asks for none" if unasked else "there is no head, or it cannot be rolled back"
        checks.append(Check("speculation", options.min_acceptance is None, f"nothing was drafted: {reason}"))
        return {}
    speculative = _generate(loaded, plan.asks, plan.drafts, progress)
    for index, ask in enumerate(plan.asks):
        pair = plain.requests[index].token_ids, speculative.requests[index].token_ids
        checks.append(_equal(loaded, index, ask, pair, plan.drafts))
    accepted = _acceptance(speculative)
    checks.append(_floor(accepted, options.min_acceptance))
    return accepted


def _generate(loaded: LoadedPackage, asks: Sequence[Ask], drafts: int, progress: Progress) -> Generation:
    drafting = [Ask(ask.token_ids, ask.max_new_tokens, drafts) for ask in asks]
    return generate(loaded, drafting, options_for(loaded, drafting, EngineOptions()), progress)


def _finite(loaded: LoadedPackage, asks: Sequence[Ask]) -> str:
    """Also where a comparison would not see it: the largest of a row of NaN is the same one every time."""
    names: dict[str, None] = {}
    room = max(1, loaded.package.context_length - DUMPED_TOKENS)
    for index, ask in enumerate(asks):
        token_ids = ask.token_ids[:room]
        options = options_for(loaded, [Ask(token_ids, DUMPED_TOKENS, 0)], EngineOptions())
        arrays = dump(loaded, token_ids, 0, options)
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise Refused(
                    f"prompt {index} {name}",
                    expected="finite numbers",
                    found="NaN or infinity",
                    remedy="inspect the checkpoint",
                )
        names |= dict.fromkeys(arrays)
    return f"{', '.join(names)} of {sum(len(ask.token_ids) for ask in asks)} tokens"


def _equal(
    loaded: LoadedPackage, index: int, ask: Ask, pair: tuple[Sequence[int], Sequence[int]], drafts: int
) -> Check:
    """Speculation may change nothing but the time. Where a tie within rounding went the other way, every later token is
    judged by the plain logits after the tokens before it: a state that is rolled back wrongly shows there.
    """

    def judge() -> str:
        plain, speculative = pair
        if plain == speculative:
            return f"{len(plain)} tokens equal with {drafts} drafts a step"
        fork = next((i for i, (a, b) in enumerate(zip(plain, speculative, strict=False)) if a != b), None)
        if fork is None:
            raise _not_the_same(index, min(map(len, pair)), pair, "")
        rounding = Rounding.of(loaded)
        tie = rounding.near_tie if rounding.is_half else ROUNDING
        leads = _leads(loaded, ask.token_ids, speculative)
        wrong = next((i for i, lead in enumerate(leads) if not lead <= tie), None)  # NaN is no tie
        if wrong is not None:
            raise _not_the_same(index, wrong, pair, f", by {leads[wrong]:.2e} in the plain logits")
        seen = f"{fork} tokens equal, then a tie: {leads[fork]:.1e} between the two"
        return f"{seen}; all later ones within {max(leads):.1e}"

    return judged(f"speculative equals plain, prompt {index}", judge)


def _not_the_same(index: int, at: int, pair: tuple[Sequence[int], Sequence[int]], lead: str) -> Refused:
    plain, speculative = (list(tokens[at : at + 1]) for tokens in pair)
    forked = pair[0][:at] != pair[1][:at]
    return Refused(
        f"prompt {index} token {at}",
        expected=f"{'another one after the tokens before it' if forked else plain}{lead}",
        found=speculative,
        remedy="do not deploy it: a state or cache is rolled back wrongly",
    )


def _leads(loaded: LoadedPackage, prompt: Sequence[int], token_ids: Sequence[int]) -> list[float]:
    """How much the best token's logit is above each of these tokens', after all tokens before it."""
    fed = [*prompt, *token_ids][: loaded.package.context_length - DUMPED_TOKENS]
    options = options_for(loaded, [Ask(tuple(fed), DUMPED_TOKENS, 0)], EngineOptions())
    logits = dump(loaded, fed, 0, options)["logits"][len(prompt) - 1 :]
    return [float(row.max() - row[token]) for row, token in zip(logits, token_ids, strict=False)]


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
