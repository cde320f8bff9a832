"""Half precision against a reference: sound arrays pass when they are rounded, and faults do not, in either type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import builder
import runtime
from builder.errors import Refused
from fixtures import CHECKPOINTS, TRACED, TRAINED
from runtime import EngineOptions, VerifyOptions, verify
from runtime import reference as reference_module
from runtime.agreement import check_best, check_close, check_drafts, check_scores, checks
from runtime.recording import dump
from runtime.rounding import Rounding
from tests.damage import Damage, damaged, doubled_norm

Arrays = Mapping[str, NDArray[Any]]
TYPES: Mapping[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
MIXTURE = CHECKPOINTS / "trained_mo_moe_text"
NAMES = ["logits", "last_hidden_state", "mtp_logits", "mtp_draft_tokens", "mtp_draft_logits"]


def reference_of(checkpoint: Path) -> dict[str, NDArray[Any]]:
    """transformers' answers to one prompt, also of the checkpoints that have them for many."""
    found = dict(np.load(checkpoint / "reference.npz"))
    if "input_ids" in found:
        return {name: found[name] for name in ["input_ids", *NAMES]}
    renamed = {"last_hidden_state": "hidden"}
    return {"input_ids": found["prompt_1"]} | {name: found[f"{renamed.get(name, name)}_1"] for name in NAMES}


def answers(checkpoint: Path, folder: Path, prompt: NDArray[Any]) -> Arrays:
    builder.export(checkpoint, folder)
    return dump(runtime.load(folder), prompt.ravel().tolist(), 3, EngineOptions(num_blocks=1, max_batch_size=1))


def rounded(arrays: Arrays, dtype: str) -> dict[str, NDArray[Any]]:
    """As a run in half precision would give them at best."""
    return {
        name: array.astype(TYPES[dtype]).astype(np.float32) if array.dtype == np.float32 else array
        for name, array in arrays.items()
    }


def rounding_of(checkpoint: Path, dtype: str) -> Rounding:
    return Rounding(dtype, 4 if checkpoint == TRACED else 8, mixture=checkpoint == MIXTURE)


def failed(arrays: Arrays, reference: Arrays, rounding: Rounding) -> dict[str, str]:
    return {check.name: check.detail for check in checks(arrays, reference, 3, rounding) if not check.ok}


@pytest.fixture(scope="module", params=[TRACED, TRAINED, MIXTURE], ids=lambda folder: folder.name)
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Arrays]]:
    prompt = reference_of(request.param)["input_ids"]
    yield request.param, answers(request.param, tmp_path_factory.mktemp("sound") / "p", prompt)


@pytest.mark.parametrize("dtype", TYPES)
def test_a_sound_run_agrees(sound: tuple[Path, Arrays], dtype: str) -> None:
    checkpoint, arrays = sound
    rounding = rounding_of(checkpoint, dtype)
    found = list(checks(rounded(arrays, dtype), reference_of(checkpoint), 3, rounding))
    assert [check.name.removeprefix("reference ") for check in found] == [
        "logits",
        "hidden_states",
        "mtp_logits",
        "drafts",
    ]
    assert all(check.ok for check in found), [check.detail for check in found]
    limit = rounding.limit_by_experts if rounding.mixture else rounding.limit
    assert f" of at most {limit:.1e}" in found[0].detail and "the same best token in " in found[0].detail
    assert ("relative error of the median row" in found[0].detail) == rounding.mixture


FAULTS: Mapping[str, Damage] = {
    "norm before GatedDeltaNet": doubled_norm("model.layers.1.input_layernorm.weight"),
    "norm before attention": doubled_norm("model.layers.3.input_layernorm.weight"),
    "norm before an MLP": doubled_norm("model.layers.2.post_attention_layernorm.weight"),
    "final norm": doubled_norm("model.norm.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("checkpoint", [TRACED, MIXTURE], ids=lambda folder: folder.name)
def test_a_doubled_norm_fails_in_either_type(checkpoint: Path, fault: str, tmp_path: Path) -> None:
    reference = reference_of(checkpoint)
    wrong = damaged(checkpoint, tmp_path / "checkpoint", FAULTS[fault])
    arrays = answers(wrong, tmp_path / "package", reference["input_ids"])
    for dtype in TYPES:
        found = failed(rounded(arrays, dtype), reference, rounding_of(checkpoint, dtype))
        assert {"reference logits", "reference hidden_states"} <= found.keys(), dtype
        assert "expected a relative error of" in found["reference logits"], dtype


# Arrays made by hand


@pytest.fixture
def scores() -> NDArray[np.float32]:
    """Logits of 16 rows whose best token leads by 1."""
    logits = np.random.default_rng(0).standard_normal((16, 512)).astype(np.float32)
    logits[np.arange(16), np.arange(16)] = logits.max(-1) + 1
    return logits


DENSE, ROUTED = (Rounding("float16", 4, mixture=mixture) for mixture in (False, True))


def with_lead(scores: NDArray[np.float32], row: int, lead: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Ours and theirs: the reference's best token of `row` leads token 300 by `lead`, and ours has turned it over."""
    theirs = scores.copy()
    theirs[row, 300] = theirs[row, row] - lead
    ours = theirs.copy()
    ours[row, 300] = theirs[row, row] + 1e-3
    return ours, theirs


def test_a_near_tie_is_listed_and_a_clear_lead_fails(scores: NDArray[np.float32]) -> None:
    """Rounding turns over 2 * 8 * 2^-11 * 2 of a row's root mean square, which is about 1."""
    seen = check_scores("logits", *with_lead(scores, 5, 0.01), DENSE)
    assert "the same best token in 15 of 16 rows; near-ties: rows 5 (0.010 of 0.0" in seen
    with pytest.raises(Refused, match=r"logits row 5: expected token 5, found 300, a lead of 0\.050 where rounding"):
        check_scores("logits", *with_lead(scores, 5, 0.05), DENSE)


def test_the_lead_is_over_the_token_that_was_chosen(scores: NDArray[np.float32]) -> None:
    """Two tokens may be tied, and a third one was chosen."""
    ours, theirs = with_lead(scores, 5, 0.05)
    for side in (ours, theirs):
        side[5, 301] = theirs[5, 5] - 1e-4
    with pytest.raises(Refused, match=r"row 5: .* found 300"):
        check_scores("logits", ours, theirs, DENSE)


def test_a_token_that_is_not_the_references_own_best_is_no_tie(scores: NDArray[np.float32]) -> None:
    tokens = scores.argmax(-1)
    claimed = tokens.copy()
    claimed[3] = 400
    with pytest.raises(Refused, match="row 3: expected token 400, found 3"):
        check_best("mtp_draft_logits", (scores, scores), (tokens, claimed), DENSE)


def test_a_few_rows_with_other_experts_pass_in_a_mixture_and_many_do_not(scores: NDArray[np.float32]) -> None:
    for rows, passes in ((1, True), (9, False)):
        ours = scores.copy()
        ours[:rows] += 0.05 * scores[-1] + 0.05 * scores[-2]
        with pytest.raises(Refused, match=r"logits: expected a relative error of at most 7\.8e-03"):
            check_close("logits", ours, scores, DENSE)
        if passes:
            assert "relative error of the median row 0.0e+00" in check_close("logits", ours, scores, ROUTED)
        else:
            with pytest.raises(Refused, match="a relative error of the median row of at most"):
                check_close("logits", ours, scores, ROUTED)


def test_nothing_but_experts_explains_a_mixture_that_is_far_off(scores: NDArray[np.float32]) -> None:
    ours = scores.copy()
    ours[:3] *= -1
    with pytest.raises(Refused, match=r"expected a relative error of at most 1\.2e-01"):
        check_close("logits", ours, scores, ROUTED)


@pytest.mark.parametrize("rounding", [DENSE, ROUTED])
def test_nan_is_no_agreement(scores: NDArray[np.float32], rounding: Rounding) -> None:
    ours = scores.copy()
    ours[2, 2] = np.nan
    with pytest.raises(Refused, match="found nan"):
        check_close("logits", ours, scores, rounding)


def test_another_shape_is_named(scores: NDArray[np.float32]) -> None:
    with pytest.raises(Refused, match=r"logits: expected shape \(16, 511\), found \(16, 512\)"):
        check_scores("logits", scores, scores[:, :511], DENSE)
    found = failed(
        {"logits": scores, "mtp_logits": scores, "mtp_draft_tokens": np.arange(3), "mtp_draft_logits": scores[:3]},
        {"logits": scores[None, :, :511], "mtp_logits": scores[None, :, :511], "mtp_draft_tokens": np.arange(3)},
        DENSE,
    )
    assert found.keys() == {"reference logits", "reference mtp_logits"}


def chains(scores: NDArray[np.float32], lead: float) -> tuple[dict[str, NDArray[Any]], dict[str, NDArray[Any]]]:
    """Three drafts; the second differs, behind `lead`, and the third has nothing to do with the reference's."""
    ours, theirs = with_lead(scores[:3], 1, lead)
    ours[2] = -theirs[2]
    both = [{"mtp_draft_logits": logits, "mtp_draft_tokens": logits.argmax(-1)} for logits in (ours, theirs)]
    return both[0], both[1]


def test_chains_may_part_behind_a_near_tie_alone(scores: NDArray[np.float32]) -> None:
    seen = check_drafts(*chains(scores, 0.01), 3, DENSE)
    assert "the same best token in 1 of 2 rows; near-ties: rows 1 (0.010 of 0.0" in seen
    with pytest.raises(Refused, match="mtp_draft_logits row 1: expected token 1, found 300"):
        check_drafts(*chains(scores, 0.1), 3, DENSE)


def test_fewer_drafts_than_the_reference_has_are_said(scores: NDArray[np.float32]) -> None:
    drafts = {"mtp_draft_logits": scores[:3], "mtp_draft_tokens": scores[:3].argmax(-1)}
    assert check_drafts(drafts, drafts, 2, DENSE).endswith("; 2 of 3 drafts, the package's limit")


def test_what_follows_from_another_first_token_is_not_compared(scores: NDArray[np.float32]) -> None:
    """A near-tie of the prompt's last row: the head's last row and its drafts saw another token."""
    logits, theirs = with_lead(scores, 15, 0.01)
    head = scores.copy()
    head[-1] *= -1
    drafts = {"mtp_draft_logits": -scores[:3], "mtp_draft_tokens": np.zeros(3, np.int64)}
    ours = {"logits": logits, "mtp_logits": head, **drafts}
    reference = {"logits": theirs[None], "mtp_logits": scores[None], "mtp_draft_logits": scores[:3]}
    reference["mtp_draft_tokens"] = scores[:3].argmax(-1)
    found = {check.name: check.detail for check in checks(ours, reference, 3, DENSE)}
    assert not failed(ours, reference, DENSE)
    assert "in 15 of 15 rows; the last row left out" in found["reference mtp_logits"]
    assert found["reference drafts"].startswith("not compared: the first generated token is another one")
    single = {name: array[-1:] for name, array in ours.items() if array.shape[-1] == 512}
    alone = {name: array.reshape(-1, 512)[-1:] for name, array in reference.items() if array.shape[-1] == 512}
    assert not failed({**single, **drafts}, {**alone, **drafts}, DENSE)


# In verify


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Runs count as runs in that type, and their arrays are rounded to it."""
    dtype = str(request.param)

    def of(loaded: Any) -> Rounding:
        package = loaded.package
        return Rounding(dtype, len(package.full_layers) + len(package.linear_layers), package.target.mixture)

    monkeypatch.setattr(Rounding, "of", of)
    monkeypatch.setattr(reference_module, "dump", lambda *arguments: rounded(dump(*arguments), dtype))
    return dtype


@pytest.mark.parametrize("half", TYPES, indirect=True)
def test_verify_judges_a_run_in_half_precision_by_its_rounding(half: str, tmp_path: Path) -> None:
    """Rounded logits differ from the reference's by more than the 2e-3 of a run in float32."""
    builder.export(TRACED, tmp_path / "p")
    found = verify(tmp_path / "p", VerifyOptions(reference=TRACED / "reference.npz"))
    assert found.ok, [check.detail for check in found.checks if not check.ok]
    details = {check.name: check.detail for check in found.checks}
    assert details["reference logits"].startswith("relative error ")
    arrays = dict(np.load(TRACED / "reference.npz"))
    assert np.abs(rounded(arrays, half)["logits"] - arrays["logits"]).max() > reference_module.TOLERANCE
    arrays["logits"] *= 1.1
    np.savez(tmp_path / "r.npz", **arrays)
    found = verify(tmp_path / "p", VerifyOptions(reference=tmp_path / "r.npz"))
    assert [check.name for check in found.checks if not check.ok] == ["reference logits"]


def test_verify_knows_the_type_of_a_run_by_where_it_runs(trained_folder: Path) -> None:
    loaded = runtime.load(trained_folder, "cpu")
    assert Rounding.of(loaded) == Rounding("float32", 8, mixture=False)
    loaded.target.place = runtime.place.Place("cuda", widened=False, is_host=False)
    assert Rounding.of(loaded) == Rounding("float16", 8, mixture=False)


@pytest.mark.parametrize("half", TYPES, indirect=True)
@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (1.1, False)])
def test_a_near_tie_of_many_prompts_is_that_of_the_type(
    half: str, share: float, passes: bool, trained_folder: Path, tmp_path: Path
) -> None:
    """Far beyond what float32 turns over."""
    many = dict(np.load(TRAINED / "reference.npz"))
    lead = share * Rounding(half, 8, mixture=False).near_tie
    many["greedy_2"][5] += 1
    many["margin_2"][5] = lead
    np.savez(tmp_path / "many.npz", **many)
    found = verify(trained_folder, VerifyOptions(reference=tmp_path / "many.npz"))
    details = {check.name: check for check in found.checks}
    assert details["reference prompt 2"].ok == passes and lead > 2 * reference_module.NEAR_TIE
    assert details["reference prompt 7"].ok


def test_a_mixture_is_known_by_its_graph(trained_folder: Path, tmp_path: Path) -> None:
    builder.export(MIXTURE, tmp_path / "p")
    for folder, mixture in ((tmp_path / "p", True), (trained_folder, False)):
        package = runtime.load(folder).package
        assert package.mtp and package.target.mixture == package.mtp.mixture == mixture


@pytest.mark.parametrize("token", [-1, 8])
def test_a_references_token_that_is_none_is_its_fault(token: int) -> None:
    logits = np.eye(8, dtype=np.float32)[:2]
    with pytest.raises(Refused, match=r"logits tokens: expected token ids from 0 to 7, .*; mend the reference"):
        check_best("logits", (logits, logits), (np.array([0, 1]), np.array([0, token])), Rounding("float16", 4, False))
