"""Packages on a GPU; skipped, and counted so, where there is none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

import builder
import runtime
from fixtures import LAYERS, TRACED
from runtime import Engine, EngineOptions, FailAt, InjectedFailure, VerifyOptions, packing, verify
from runtime.bound_run import BoundRun
from runtime.loading import LoadedPackage
from runtime.place import GPU
from runtime.recording import dump
from runtime.session import bare_session, missing_for_gpu
from tests.runtime.gpu import OTHERS, TRAINED_ONES, acceptance, run, texts, unexplained

pytestmark = pytest.mark.skipif(missing_for_gpu() is not None, reason=str(missing_for_gpu()))

FLOAT16 = 1e-2
"""Largest relative error (by norm) of a few layers in float16: twenty roundings of 2^-11."""
ROUNDING = 3
"""bfloat16 rounds eight times as coarsely, so what is off by rounding alone is off by several times as much there; a
wrong formula would be off by as much in either.
"""
ACCEPTANCE = 0.01
"""By how much half precision may change the share of accepted drafts."""


@pytest.fixture(scope="module", params=[False, True], ids=["launched", "recorded"])
def loaded(request: pytest.FixtureRequest, model_package: Path) -> Iterator[LoadedPackage]:
    loaded = runtime.load(model_package, "cuda", cuda_graph=request.param)
    yield loaded
    # A head runs three times a step, and every engine records anew: its session cannot keep them all.
    assert loaded.target.unrecorded == 0, "or what is called recorded was launched"


def test_plain_tokens_are_transformers_but_for_ties(
    loaded: LoadedPackage, model_answers: Mapping[str, NDArray[Any]]
) -> None:
    """margin_I: by how much transformers' own token leads in float32."""
    requests, _ = run(loaded, texts(model_answers, "prompt"), 0, 1)
    tokens = [request.token_ids for request in requests]
    assert not unexplained(tokens, texts(model_answers, "greedy"), model_answers, loaded)


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("drafts", [1, 3])
def test_drafts_change_no_token_but_at_ties(
    loaded: LoadedPackage, model_answers: Mapping[str, NDArray[Any]], drafts: int, batch: int
) -> None:
    prompts = texts(model_answers, "prompt") * (2 if batch > 8 else 1)
    plain, _ = run(loaded, prompts, 0, batch)
    drafted, engine = run(loaded, prompts, drafts, batch)
    assert not unexplained([r.token_ids for r in drafted], [r.token_ids for r in plain], model_answers, loaded)
    accepted, oracle = acceptance(drafted, model_answers, drafts)
    assert accepted > oracle - ACCEPTANCE
    assert engine.stats.draft_tokens_evaluated >= sum(request.stats.draft_tokens_evaluated for request in drafted)


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_requests_that_come_and_go_and_steps_that_fail(
    model_package: Path, model_answers: Mapping[str, NDArray[Any]], recorded: bool
) -> None:
    """Slots and hidden states move, tables of many blocks grow, each request drafts as many tokens as it likes."""
    loaded = runtime.load(model_package, "cuda", cuda_graph=recorded)
    options = EngineOptions(num_blocks=40, block_size=16, max_batch_size=3, max_scheduled_tokens=100)
    engine = Engine(loaded, options)
    requests = [engine.submit(prompt, 64, i % 4, ()) for i, prompt in enumerate(texts(model_answers, "prompt"))]
    boundaries = ("plan", "reserve", "draft", "run", "accept", "follow", "prepare")
    step = 0
    while engine.has_work:
        engine._watch = FailAt(boundaries[step // 3 % len(boundaries)], step) if step % 3 == 0 else None
        if step in (20, 50):
            engine.preempt(engine._running[-1])
        with contextlib.suppress(InjectedFailure):
            engine.step()
        step += 1
    assert engine.stats.aborted_steps > 20 and engine.stats.preemptions >= 2
    tokens = [request.token_ids for request in requests]
    assert not unexplained(tokens, texts(model_answers, "greedy"), model_answers, loaded)
    stats = engine.stats
    assert stats.draft_tokens_accepted > 0.6 * stats.draft_tokens_evaluated > 0, "a row that is fed another's has none"


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_rows_attended_one_by_one_change_no_token_but_at_ties(
    model_package: Path, model_answers: Mapping[str, NDArray[Any]], recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As drafts behind long texts are verified; here from the first token on."""
    loaded = runtime.load(model_package, "cuda", cuda_graph=recorded)
    prompts = texts(model_answers, "prompt")
    together, _ = run(loaded, prompts, 3, 8)
    monkeypatch.setattr(packing, "SPREAD_CONTEXT", 0)
    apart, engine = run(loaded, prompts, 3, 8)
    assert any(key[0].num_sequences > key[0].batch_size for key in engine.target._runs._kept)  # type: ignore[attr-defined]
    assert not unexplained([r.token_ids for r in apart], [r.token_ids for r in together], model_answers, loaded)
    accepted, oracle = acceptance(apart, model_answers, 3)
    assert accepted > oracle - ACCEPTANCE


@pytest.mark.parametrize("recorded", [False, True], ids=["launched", "recorded"])
def test_unpacked_weights_change_no_token_but_at_ties(
    model_package: Path, model_answers: Mapping[str, NDArray[Any]], recorded: bool
) -> None:
    """Prompts and steps of more than sixteen rows run over them; sixteen requests draft three tokens each."""
    packed, unpacked = (
        runtime.load(model_package, "cuda", cuda_graph=recorded, unpacked_weights=unpacked)
        for unpacked in (False, True)
    )
    prompts = texts(model_answers, "prompt") * 2
    (theirs, _), (ours, engine) = (run(loaded, prompts, 3, 16) for loaded in (packed, unpacked))
    assert unpacked.unpacked
    runs = [prepared.bound for prepared in engine.target._runs._kept.values()]
    over_unpacked = [bound for bound in runs if bound._session is unpacked.unpacked._session]
    assert any(bound.graph_id > 0 for bound in over_unpacked) == recorded and 0 < len(over_unpacked) < len(runs)
    assert unpacked.unpacked.unrecorded == 0
    assert not unexplained([r.token_ids for r in ours], [r.token_ids for r in theirs], model_answers, packed)
    accepted, oracle = acceptance(ours, model_answers, 3)
    assert accepted > oracle - ACCEPTANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_a_recorded_step_computes_is_what_a_launched_one_does(
    model_checkpoint: Path, model_answers: Mapping[str, NDArray[Any]], tmp_path: Path, dtype: Any
) -> None:
    """But for ties: a mixture's kernels add up in an order of their own at every run."""
    builder.export(model_checkpoint, tmp_path / "package", builder.ExportOptions(dtype=dtype))
    prompts = texts(model_answers, "prompt")
    packages = [runtime.load(tmp_path / "package", "cuda", cuda_graph=graph) for graph in (False, True)]
    launched, recorded = ([request.token_ids for request in run(loaded, prompts, 3, 1)[0]] for loaded in packages)
    assert packages[0].package.target.mixture or recorded == launched
    assert not unexplained(recorded, launched, model_answers, packages[0])


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


@pytest.mark.parametrize("checkpoint", OTHERS, ids=lambda folder: folder.name)
def test_logits_hidden_states_and_head_agree_with_transformers(checkpoint: Path, tmp_path: Path) -> None:
    half = relative_errors(tmp_path / "half", checkpoint, "float16")
    brain = relative_errors(tmp_path / "brain", checkpoint, "bfloat16")
    for key, error in half.items():
        assert error < FLOAT16, key
        assert error < brain[key] / ROUNDING, key


@pytest.mark.parametrize(("dtype", "name"), [(np.float16, "float16"), (np.float32, "float")])
def test_the_lowest_id_of_a_tie_is_chosen(dtype: Any, name: str) -> None:
    """As NumPy and transformers choose, over rows that several threads look through."""
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["": 21]>
        best ({name}[R, V] x) => (int64[R] y) {{ y = ArgMax <axis = -1, keepdims = 0> (x) }}"""
    )
    rows = np.zeros((3, 100_000), dtype)
    rows[1, [70_000, 90_000]] = 1
    rows[2, 5:] = -np.inf
    found = np.zeros(3, np.int64)
    session = bare_session(ir.to_proto(model).SerializeToString(), GPU)
    BoundRun(session, GPU, {"x": rows}, {"y": found}).run()
    assert found.tolist() == rows.argmax(axis=-1).tolist() == [0, 70_000, 0]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("checkpoint", [*OTHERS, *TRAINED_ONES], ids=lambda folder: folder.name)
def test_verify_judges_by_the_rounding_of_the_type(checkpoint: Path, dtype: Any, tmp_path: Path) -> None:
    builder.export(checkpoint, tmp_path / "p", builder.ExportOptions(dtype=dtype))
    found = verify(tmp_path / "p", VerifyOptions(ep="cuda", reference=checkpoint / "reference.npz"))
    compared = [check for check in found.checks if check.name.startswith("reference")]
    assert compared and all(check.ok for check in compared), [check.detail for check in compared]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_residual_stream_is_transformers_within_rounding(dtype: Any, tmp_path: Path) -> None:
    builder.export(TRACED, tmp_path / "p", builder.ExportOptions(dtype=dtype))
    np.savez(tmp_path / "r.npz", **np.load(TRACED / "reference.npz"), **np.load(LAYERS))
    found = verify(tmp_path / "p", VerifyOptions(ep="cuda", reference=tmp_path / "r.npz", trace=True))
    assert len(found.trace) == 4 and all(point.ok for point in found.trace), found.trace


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_residual_stream_is_that_of_float32_within_rounding(
    model_checkpoint: Path, dtype: Any, tmp_path: Path
) -> None:
    builder.export(model_checkpoint, tmp_path / "p", builder.ExportOptions(dtype=dtype))
    found = verify(tmp_path / "p", VerifyOptions(ep="cuda", trace=True))
    assert len(found.trace) == 16 and all(point.ok for point in found.trace), found.trace
