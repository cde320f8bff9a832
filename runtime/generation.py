"""generate(): a list of asked-for generations through one engine, each joining at its own step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builder.errors import Refused
from builder.progress import Progress, silent
from runtime.engine import Engine
from runtime.limits import EngineOptions, draft_limit
from runtime.loading import LoadedPackage
from runtime.request import Request
from runtime.sampling import GREEDY, SamplingOptions
from runtime.telemetry import Stats

Encode = Callable[[str], list[int]]


class Line(BaseModel):
    """One line of a requests file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    token_ids: list[int] | None = None
    prompt: str | None = None
    max_new_tokens: int | None = None
    draft_tokens: int | None = None
    arrive_at_step: int = Field(0, ge=0)
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    min_new_tokens: int | None = None


@dataclass(frozen=True)
class Ask:
    """A generation that is wanted: prompt tokens, limits, the engine step at which it joins, where it was asked, and
    how its tokens are chosen.
    """

    token_ids: tuple[int, ...]
    max_new_tokens: int
    draft_tokens: int
    arrive_at_step: int = 0
    place: str = ""
    sampling: SamplingOptions = GREEDY


@dataclass(frozen=True)
class Generation:
    """All requests, finished, in the order asked; seconds from the first step to the last."""

    requests: tuple[Request, ...]
    stats: Stats
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(request.token_ids) for request in self.requests)


def read_asks(path: Path, defaults: Ask, encode: Encode, option: str = "--requests") -> list[Ask]:
    """Reads JSON lines; what a line says wins over the defaults. Raises Refused naming the line, or the option."""
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # splitlines() would also split inside a JSON string
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(path, expected="JSON lines in UTF-8", found=str(error), remedy=f"check {option}") from None
    asks = [
        _ask(f"{path} line {number}", line, defaults, encode) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not asks:
        raise Refused(path, expected="at least one request", found="none", remedy=f"check {option}")
    return asks


def _ask(where: str, text: str, defaults: Ask, encode: Encode) -> Ask:
    try:
        line = Line.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        expected = first["msg"].removeprefix("Input should be ").partition(":")[0]
        if first["type"] == "extra_forbidden":
            expected = f"one of {', '.join(Line.model_fields)}"
        found = text if first["type"] == "json_invalid" else first["input"]
        raise Refused(
            f"{where} {key}".strip(), expected=expected, found=ascii(found)[:80], remedy="mend the line"
        ) from None
    if (line.token_ids is None) == (line.prompt is None):
        raise Refused(where, expected="either token_ids or prompt", found="both or neither", remedy="mend the line")
    ids = line.token_ids if line.token_ids is not None else encode(line.prompt or "")
    own = line.model_dump(exclude_none=True, exclude={"token_ids", "prompt"})
    sampling = {name: own.pop(name) for name in vars(defaults.sampling) if name in own}
    return replace(defaults, token_ids=tuple(ids), place=where, sampling=replace(defaults.sampling, **sampling), **own)


def options_for(package: LoadedPackage, asks: Sequence[Ask], options: EngineOptions) -> EngineOptions:
    """Options with what was left open sized to the requests: drafts, and blocks for as many as may run at once."""
    for ask in asks:
        try:
            draft_limit(package.package, ask.draft_tokens, options.proposer)
        except Refused as refusal:
            raise (refusal.within(f"{ask.place}:") if ask.place else refusal) from None
    batch = min(options.max_batch_size, len(asks))
    block_size = package.package.block_size if options.block_size is None else options.block_size
    num_blocks = options.num_blocks
    if num_blocks is None and block_size > 0:
        context = package.package.context_length
        lengths = sorted((min(len(ask.token_ids) + ask.max_new_tokens - 1, context) for ask in asks), reverse=True)
        num_blocks = max(1, sum(-(-length // block_size) for length in lengths[:batch]))
    drafts = max(ask.draft_tokens for ask in asks)
    return replace(options, max_draft_tokens=drafts, max_batch_size=batch, num_blocks=num_blocks)


def generate(
    package: LoadedPackage, asks: Sequence[Ask], options: EngineOptions, progress: Progress = silent
) -> Generation:
    """Runs every request to its end. Raises Refused before the first step for one that can never be served."""
    engine = Engine(package, options)
    for ask in asks:
        try:
            engine.check(ask.token_ids, ask.max_new_tokens, ask.draft_tokens, ask.sampling)
        except Refused as refusal:
            raise (refusal.within(f"{ask.place}:") if ask.place else refusal) from None
    pending = sorted(range(len(asks)), key=lambda index: asks[index].arrive_at_step)
    requests: dict[int, Request] = {}
    total = sum(ask.max_new_tokens for ask in asks)
    started = time.perf_counter()
    step = 0
    while pending or engine.has_work:
        if not engine.has_work:
            step = max(step, asks[pending[0]].arrive_at_step)  # nobody is there: the steps until then are empty
        while pending and asks[pending[0]].arrive_at_step <= step:
            index = pending.pop(0)
            ask = asks[index]
            requests[index] = engine.submit(ask.token_ids, ask.max_new_tokens, ask.draft_tokens, sampling=ask.sampling)
        engine.step()
        step += 1
        progress("generating", sum(len(request.token_ids) for request in requests.values()), total)
    seconds = time.perf_counter() - started
    return Generation(tuple(requests[index] for index in range(len(asks))), engine.stats, seconds)


def to_json(generation: Generation, texts: Sequence[str | None]) -> dict[str, Any]:
    """The result object of `build-model run --json`."""
    return {
        "requests": [
            {
                "token_ids": request.token_ids,
                "text": text,
                "finish_reason": request.finish_reason,
                "drafts_proposed": request.stats.draft_tokens_proposed,
                "drafts_evaluated": request.stats.draft_tokens_evaluated,
                "drafts_accepted": request.stats.draft_tokens_accepted,
                "drafting_off": request.drafting_off,
                "stats": request.stats.to_json(),
            }
            for request, text in zip(generation.requests, texts, strict=True)
        ],
        "stats": generation.stats.to_json(),
        "seconds": generation.seconds,
        "tokens_per_second": generation.num_tokens / generation.seconds if generation.seconds else 0.0,
    }
