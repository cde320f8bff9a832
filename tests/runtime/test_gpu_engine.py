"""Packages as they are in onnxruntime-genai's Engine on a GPU, beside our runtime and transformers' answers.

Skipped, and counted so, where there is no GPU or no Engine that can use one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import builder
import runtime
from runtime import EngineOptions
from runtime.recording import Row, rows_of
from runtime.rounding import Rounding
from runtime.session import missing_for_gpu
from tests.runtime.gpu import OTHERS, run, texts, unexplained

pytestmark = pytest.mark.skipif(missing_for_gpu() is not None, reason=str(missing_for_gpu()))

PLAIN = json.dumps({"model": {"mtp": {"enabled": False}}})


@dataclass(frozen=True)
class Client:
    """What the Engine made of some prompts."""

    texts: list[list[int]]
    accepted: int
    evaluated: int


def engine(package: Path, prompts: list[list[int]], new_tokens: int, *, drafts: bool, batch: int) -> Client:
    """All prompts at once, `batch` of them in a step, greedily; drafts: as many as the package says."""
    og = pytest.importorskip("onnxruntime_genai")
    config = og.Config(str(package))
    config.clear_providers()
    config.append_provider("cuda")
    config.overlay(json.dumps({"engine": {"dynamic_batching": {"max_batch_size": batch}}}))
    if not drafts:
        config.overlay(PLAIN)
    client = og.Engine(og.Model(config))
    events = client.create_event_buffer(64 * batch)
    requests = []
    for prompt in prompts:
        request = client.create_request()
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(new_tokens)
        options.set_do_sample(False)
        request.begin_turn(np.array(prompt, np.int32), options)
        requests.append(request)
    found: list[list[int]] = [[] for _ in prompts]
    idle = 0
    while client.has_pending_requests():
        seen = list(client.run(events))
        idle = 0 if seen else idle + 1
        assert idle < 1000, f"the Engine does nothing more after {found}"
        for event in seen:
            index = next(index for index, request in enumerate(requests) if request is event.request)
            flags = int(event.flags)
            assert not flags & int(og.EngineEventFlags.FAILED), event.error_code
            if flags & int(og.EngineEventFlags.TOKEN):
                found[index].append(int(event.token))
            if flags & int(og.EngineEventFlags.TURN_FINISHED):
                requests[index].close()  # or it keeps its seat for another turn
    stats = client.get_speculative_stats() if drafts else {"draft_tokens_accepted": 0, "draft_tokens_evaluated": 0}
    return Client(found, stats["draft_tokens_accepted"], stats["draft_tokens_evaluated"])


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("drafts", [0, 3])
def test_the_engine_gives_our_tokens_but_at_ties(
    model_package: Path, model_answers: Mapping[str, NDArray[Any]], drafts: int, batch: int
) -> None:
    """And we transformers' at least as often, and no fewer accepted drafts than it."""
    prompts, greedy = texts(model_answers, "prompt"), texts(model_answers, "greedy")
    prompts, greedy = (prompts * 2, greedy * 2) if batch > 8 else (prompts, greedy)
    loaded = runtime.load(model_package, "cuda")
    requests, ours = run(loaded, prompts, drafts, batch)
    tokens = [request.token_ids for request in requests]
    theirs = engine(model_package, prompts, 64, drafts=drafts > 0, batch=batch)
    assert not unexplained(theirs.texts, tokens, model_answers, loaded)
    as_transformers = [sum(a == b for a, b in zip(side, greedy, strict=True)) for side in (tokens, theirs.texts)]
    print(f"as transformers: {as_transformers[0]} and {as_transformers[1]} of {len(prompts)}")
    if not drafts:
        assert as_transformers[0] >= as_transformers[1]
        return
    stats = ours.stats
    print(
        f"accepted: {stats.draft_tokens_accepted}/{stats.draft_tokens_evaluated}, {theirs.accepted}/{theirs.evaluated}"
    )
    rate = stats.draft_tokens_accepted / stats.draft_tokens_evaluated
    assert rate > theirs.accepted / theirs.evaluated - 0.01


@pytest.mark.parametrize("checkpoint", OTHERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize(("weights", "drafts"), [("link", 0), ("copy", 3)])
def test_every_kind_of_package_runs_in_the_engine(checkpoint: Path, weights: Any, drafts: int, tmp_path: Path) -> None:
    """Linked and copied, every format and both spellings of the names; random weights, so drafts are mostly wrong.

    Where a text parts from transformers', its lead there is one that rounding turns over: by the logits of that very
    run in ours. A mixture's token may have had other experts there; in the Engine nobody can look.
    """
    builder.export(checkpoint, tmp_path / "package", builder.ExportOptions(weights=weights))
    reference = np.load(checkpoint / "reference.npz")
    prompt, expected = reference["input_ids"][0].tolist(), reference["greedy_tokens"].tolist()
    best = np.sort(reference["greedy_step_logits"], axis=-1)
    leads = best[:, -1] - best[:, -2]
    loaded = runtime.load(tmp_path / "package", "cuda")
    drafting = min(drafts, loaded.package.max_draft_tokens)
    ours = runtime.Engine(loaded, EngineOptions(num_blocks=4, max_batch_size=1, max_draft_tokens=drafting))
    request = ours.submit(prompt, len(expected), drafting, ())
    seen: dict[int, Row] = {}
    ours.target.on_run = lambda segments, outputs: seen.update(
        (row.position, row) for row in rows_of(segments[0], outputs)
    )
    while ours.has_work:
        ours.step()
    theirs = engine(tmp_path / "package", [prompt], len(expected), drafts=drafting > 0, batch=1)
    rounding, logits = Rounding.of(loaded), reference["greedy_step_logits"]
    fork = parts(request.token_ids, expected)
    if fork is not None:
        allowed = rounding.turned_over(seen[len(prompt) - 1 + fork].logits[None], logits[fork : fork + 1])[0]
        assert leads[fork] < max(allowed, rounding.near_tie), (fork, leads[fork])
    fork = parts(theirs.texts[0], expected)
    if fork is not None:
        allowed = 2 * rounding.limit_by_experts * np.sqrt(np.mean(np.square(logits[fork]))) if rounding.mixture else 0
        assert leads[fork] < max(allowed, rounding.near_tie), (fork, leads[fork])


def parts(tokens: list[int], expected: list[int]) -> int | None:
    """The place of the first token that is another one."""
    return next((i for i, pair in enumerate(zip(tokens, expected, strict=True)) if pair[0] != pair[1]), None)
