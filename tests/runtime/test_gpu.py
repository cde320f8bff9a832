"""Packages on a GPU, in our runtime and in onnxruntime-genai's Engine; skipped, and counted so, where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import builder
import runtime
from fixtures import CHECKPOINTS, LAYERS, TRACED, TRAINED
from runtime import Engine, EngineOptions, Request, VerifyOptions, verify
from runtime.loading import LoadedPackage
from runtime.recording import dump
from runtime.session import has_cpu_kernel, missing_for_gpu

pytestmark = pytest.mark.skipif(missing_for_gpu() is not None, reason=str(missing_for_gpu()))

MIXTURES = [CHECKPOINTS / "trained_ct_moe_text", CHECKPOINTS / "trained_mo_moe_text"]
FLOAT16 = 1e-2
"""Largest relative error (by norm) of a few layers in float16: twenty roundings of 2^-11."""
ROUNDING = 3
"""bfloat16 rounds eight times as coarsely, so what is off by rounding alone is off by several times as much there; a
wrong formula would be off by as much in either.
"""
TIE = 0.04
"""Leads in logits that float16 may turn over: each of the two tokens' is off by up to 0.02."""
ACCEPTANCE = 0.01
"""By how much half precision may change the share of accepted drafts."""


@pytest.fixture(scope="module", params=[TRAINED, *MIXTURES], ids=lambda folder: folder.name)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


@pytest.fixture(scope="module")
def package(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpu") / "package"
    builder.export(checkpoint, folder)
    return folder


@pytest.fixture(scope="module")
def answers(checkpoint: Path) -> Mapping[str, NDArray[Any]]:
    return dict(np.load(checkpoint / "reference.npz"))


@pytest.fixture(scope="module", params=[False, True], ids=["launched", "recorded"])
def loaded(request: pytest.FixtureRequest, package: Path) -> Iterator[LoadedPackage]:
    loaded = runtime.load(package, "cuda", cuda_graph=request.param)
    yield loaded
    assert loaded.target.unrecorded == 0, "or what is called recorded was launched"


def texts(answers: Mapping[str, NDArray[Any]], name: str) -> list[list[int]]:
    return [answers[f"{name}_{i}"].tolist() for i in range(8)]


def run(loaded: LoadedPackage, prompts: list[list[int]], drafts: int, batch: int) -> tuple[list[Request], Engine]:
    engine = Engine(loaded, EngineOptions(num_blocks=2 * batch, max_batch_size=batch, max_draft_tokens=drafts))
    requests = [engine.submit(prompt, 64, drafts, ()) for prompt in prompts]
    while engine.has_work:
        engine.step()
    return requests, engine


def unexplained(
    ours: list[list[int]], theirs: list[list[int]], answers: Mapping[str, NDArray[Any]]
) -> list[tuple[int, int]]:
    """Where two lists of texts part although transformers' own token leads clearly there.

    margin_I tells the lead in float32 along transformers' text, so a place behind which one of the two has left that
    text already is judged by where it left. What parted at ties is printed.
    """
    greedy = texts(answers, "greedy")
    clear = []
    for text, place in forks(ours, theirs):
        left = [fork for side in (ours, theirs) for index, fork in forks([side[text]], [greedy[text % 8]])]
        lead = float(answers[f"margin_{text % 8}"][min([place, *left])])
        print(f"text {text} parts at token {place}, where the lead is {lead:.3f}")
        if lead >= TIE:
            clear.append((text, place))
    return clear


def forks(ours: list[list[int]], theirs: list[list[int]]) -> list[tuple[int, int]]:
    """Text and place where two lists of texts part."""
    return [
        (text, next(i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]))
        for text, (a, b) in enumerate(zip(ours, theirs, strict=True))
        if a != b
    ]


def test_plain_tokens_are_transformers_but_for_ties(loaded: LoadedPackage, answers: Mapping[str, NDArray[Any]]) -> None:
    """margin_I: by how much transformers' own token leads in float32."""
    requests, _ = run(loaded, texts(answers, "prompt"), 0, 1)
    assert not unexplained([request.token_ids for request in requests], texts(answers, "greedy"), answers)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_change_no_token_but_at_ties(
    loaded: LoadedPackage, answers: Mapping[str, NDArray[Any]], drafts: int, batch: int
) -> None:
    prompts = texts(answers, "prompt") * (2 if batch > 8 else 1)
    plain, _ = run(loaded, prompts, 0, batch)
    drafted, engine = run(loaded, prompts, drafts, batch)
    assert not unexplained([r.token_ids for r in drafted], [r.token_ids for r in plain], answers)
    counts = answers[f"accepted_evaluated_k{drafts}"]
    same = [i for i, request in enumerate(drafted) if request.token_ids == texts(answers, "greedy")[i % 8]]
    assert len(same) >= len(drafted) / 2, "the oracle counts along transformers' texts"
    oracle = sum(counts[i % 8] for i in same)
    accepted, evaluated = (
        sum(getattr(drafted[i].stats, name) for i in same)
        for name in ("draft_tokens_accepted", "draft_tokens_evaluated")
    )
    assert accepted / evaluated > oracle[0] / oracle[1] - ACCEPTANCE
    assert engine.stats.draft_tokens_evaluated >= evaluated


def test_what_a_recorded_step_computes_is_what_a_launched_one_does(
    package: Path, answers: Mapping[str, NDArray[Any]]
) -> None:
    prompts = texts(answers, "prompt")
    launched, recorded = (
        [request.token_ids for request in run(runtime.load(package, "cuda", cuda_graph=graph), prompts, 3, 1)[0]]
        for graph in (False, True)
    )
    assert not unexplained(recorded, launched, answers)


def relative_errors(folder: Path, checkpoint: Path, dtype: Any) -> dict[str, float]:
    """Of logits, hidden states and the head's logits over a prompt; its last row saw another token in the reference."""
    builder.export(checkpoint, folder, builder.ExportOptions(dtype=dtype))
    reference = np.load(checkpoint / "reference.npz")
    with_head = "mtp_logits" in reference.files
    loaded = runtime.load(folder, "cuda")
    ids = reference["input_ids"][0].tolist()
    found = dump(loaded, ids, 3 if with_head else 0, EngineOptions(num_blocks=4, max_batch_size=1))
    names = {"logits": "logits", "hidden_states": "last_hidden_state", "mtp_logits": "mtp_logits"}
    errors = {}
    for ours, theirs in names.items():
        if theirs in reference.files:
            expected = reference[theirs][0].astype(np.float64)[:-1]
            errors[ours] = float(np.linalg.norm(found[ours][: len(expected)] - expected) / np.linalg.norm(expected))
    return errors


@pytest.mark.parametrize("name", sorted(p.name for p in CHECKPOINTS.iterdir() if not p.name.startswith("trained")))
def test_logits_hidden_states_and_head_agree_with_transformers(name: str, tmp_path: Path) -> None:
    half = relative_errors(tmp_path / "half", CHECKPOINTS / name, "float16")
    brain = relative_errors(tmp_path / "brain", CHECKPOINTS / name, "bfloat16")
    for key, error in half.items():
        assert error < FLOAT16, (name, key)
        assert error < brain[key] / ROUNDING, (name, key)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", sorted(p.name for p in CHECKPOINTS.iterdir()))
def test_verify_judges_by_the_rounding_of_the_type(name: str, dtype: Any, tmp_path: Path) -> None:
    builder.export(CHECKPOINTS / name, tmp_path / "p", builder.ExportOptions(dtype=dtype))
    found = verify(tmp_path / "p", VerifyOptions(ep="cuda", reference=CHECKPOINTS / name / "reference.npz"))
    compared = [check for check in found.checks if check.name.startswith("reference")]
    assert compared and all(check.ok for check in compared), [check.detail for check in compared]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_residual_stream_is_transformers_within_rounding(dtype: Any, tmp_path: Path) -> None:
    builder.export(TRACED, tmp_path / "p", builder.ExportOptions(dtype=dtype))
    np.savez(tmp_path / "r.npz", **np.load(TRACED / "reference.npz"), **np.load(LAYERS))
    found = verify(tmp_path / "p", VerifyOptions(ep="cuda", reference=tmp_path / "r.npz", trace=True))
    assert len(found.trace) == 4 and all(point.ok for point in found.trace), found.trace


@pytest.mark.skipif(not has_cpu_kernel("com.microsoft", "GatedDeltaNet"), reason="the CPU lacks a kernel")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_residual_stream_is_the_cpus_within_rounding(checkpoint: Path, dtype: Any, tmp_path: Path) -> None:
    builder.export(checkpoint, tmp_path / "p", builder.ExportOptions(dtype=dtype))
    found = verify(tmp_path / "p", VerifyOptions(ep="cuda", trace=True))
    assert len(found.trace) == 16 and all(point.ok for point in found.trace), found.trace


def engine_texts(package: Path, prompts: list[list[int]], overlay: str | None) -> list[list[int]]:
    og = pytest.importorskip("onnxruntime_genai")
    config = og.Config(str(package))
    config.clear_providers()
    config.append_provider("cuda")
    if overlay:
        config.overlay(overlay)
    engine = og.Engine(og.Model(config))
    events = engine.create_event_buffer(64)
    found = []
    for prompt in prompts:
        request = engine.create_request()
        options = og.TurnOptions(request)
        options.set_max_generated_tokens(64)
        options.set_do_sample(False)
        request.begin_turn(np.array(prompt, np.int32), options)
        tokens: list[int] = []
        while engine.has_pending_requests():
            for event in engine.run(events):
                if int(event.flags) & int(og.EngineEventFlags.TOKEN):
                    tokens.append(int(event.token))
        request.close()
        found.append(tokens)
    return found


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_engine_gives_our_tokens_but_at_ties(
    package: Path, answers: Mapping[str, NDArray[Any]], drafts: int
) -> None:
    prompts = texts(answers, "prompt")
    ours = [request.token_ids for request in run(runtime.load(package, "cuda"), prompts, drafts, 1)[0]]
    plain = json.dumps({"model": {"mtp": {"enabled": False}}})
    assert not unexplained(engine_texts(package, prompts, None if drafts else plain), ours, answers)
