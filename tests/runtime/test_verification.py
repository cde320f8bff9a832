"""verify(): what it passes, what it names, and that the faults which crash nothing show in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import builder
from builder.errors import MachineError, Refused
from fixtures import CHECKPOINTS, TRAINED
from fixtures.writer import Tiny
from runtime import Verification, VerifyOptions, fixed_state, memory, verification, verify
from runtime.fixed_state import FixedStates
from tests.conftest import TinyFactory


def failed(found: Verification) -> dict[str, str]:
    return {check.name: check.detail for check in found.checks if not check.ok}


def details(found: Verification) -> dict[str, str]:
    return {check.name: check.detail for check in found.checks}


@pytest.fixture(scope="module")
def parity_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint with random weights that has transformers' own answers for one prompt."""
    out = tmp_path_factory.mktemp("parity") / "package"
    builder.export(CHECKPOINTS / "mo_mxfp8_dense_text", out)
    return out


@pytest.fixture
def reference_file(tmp_path: Path) -> Path:
    return Path(shutil.copy(CHECKPOINTS / "mo_mxfp8_dense_text" / "reference.npz", tmp_path / "reference.npz"))


def test_a_sound_package_passes(trained_folder: Path) -> None:
    found = verify(trained_folder, VerifyOptions(reference=TRAINED / "reference.npz", min_acceptance=0.6))
    assert failed(found) == {} and found.ok and found.exit_code == 0
    names = [check.name for check in found.checks]
    assert [name for name in names if name.startswith("speculative")] == [
        f"speculative equals plain, prompt {i}" for i in range(len(verification.PROMPTS))
    ]
    assert details(found)["reference prompt 7"] == "64 tokens equal"
    accepted = found.acceptance
    assert 0.6 < accepted["accepted"] / accepted["evaluated"] <= 1
    assert sum(accepted["accepted_by_position"]) == accepted["accepted"]
    assert sum(accepted["evaluated_by_position"]) == accepted["evaluated"]
    assert found.to_json()["ok"] is True


def test_a_reference_of_one_prompt_is_compared_array_by_array(parity_package: Path, reference_file: Path) -> None:
    found = verify(parity_package, VerifyOptions(reference=reference_file))
    assert failed(found) == {}
    assert {"reference logits", "reference hidden_states", "reference mtp_logits", "reference drafts"} <= {
        check.name for check in found.checks
    }


@pytest.mark.parametrize(
    ("array", "check"),
    [
        ("logits", "reference logits"),
        ("last_hidden_state", "reference hidden_states"),
        ("mtp_logits", "reference mtp_logits"),
        ("mtp_draft_logits", "reference drafts"),
    ],
)
def test_one_number_off_in_a_reference_is_named(
    parity_package: Path, reference_file: Path, array: str, check: str
) -> None:
    arrays: dict[str, NDArray[Any]] = dict(np.load(reference_file))
    arrays[array].reshape(-1)[0] += 0.01
    np.savez(reference_file, **arrays)  # type: ignore[arg-type]
    found = verify(parity_package, VerifyOptions(reference=reference_file))
    assert failed(found).keys() == {check} and "a difference of 1.0" in failed(found)[check]
    assert found.exit_code == 1


def test_another_draft_and_another_token_are_named(
    parity_package: Path, reference_file: Path, trained_folder: Path, tmp_path: Path
) -> None:
    arrays = dict(np.load(reference_file))
    arrays["mtp_draft_tokens"][0] += 1
    np.savez(reference_file, **arrays)
    assert failed(verify(parity_package, VerifyOptions(reference=reference_file))).keys() == {"reference drafts"}
    many = dict(np.load(TRAINED / "reference.npz"))
    many["greedy_2"][5] += 1
    many["margin_2"][5] = 0.5
    np.savez(tmp_path / "many.npz", **many)
    wrong = failed(verify(trained_folder, VerifyOptions(reference=tmp_path / "many.npz")))
    assert wrong.keys() == {"reference prompt 2"} and "prompt 2 token 5" in wrong["reference prompt 2"]


def test_a_near_tie_of_the_reference_is_shown_and_passes(trained_folder: Path, tmp_path: Path) -> None:
    many = dict(np.load(TRAINED / "reference.npz"))
    many["greedy_2"][5] += 1
    many["margin_2"][5] = 1e-3
    np.savez(tmp_path / "many.npz", **many)
    found = verify(trained_folder, VerifyOptions(reference=tmp_path / "many.npz"))
    assert found.ok and details(found)["reference prompt 2"] == "5 tokens equal, then a near-tie of 1.0e-03"


def test_nan_in_a_reference_is_no_agreement(parity_package: Path, reference_file: Path) -> None:
    arrays = dict(np.load(reference_file))
    arrays["logits"][:] = np.nan
    np.savez(reference_file, **arrays)
    assert failed(verify(parity_package, VerifyOptions(reference=reference_file))).keys() == {"reference logits"}


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04"])
def test_a_reference_that_is_none_is_refused(trained_folder: Path, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.npz").write_bytes(content)
    with pytest.raises(Refused, match=r"r\.npz: expected an \.npz file"):
        verify(trained_folder, VerifyOptions(reference=tmp_path / "r.npz"))


def test_a_reference_of_another_layout_or_none_is_refused(trained_folder: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "r.npz", tokens=np.zeros(3))
    with pytest.raises(Refused, match=r"expected input_ids and logits, or prompt_I and greedy_I, found tokens"):
        verify(trained_folder, VerifyOptions(reference=tmp_path / "r.npz"))
    with pytest.raises(MachineError, match="No such file"):
        verify(trained_folder, VerifyOptions(reference=tmp_path / "none.npz"))


# Faults that crash nothing


def test_a_state_committed_one_token_late_is_named(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay = FixedStates._replay

    def late(self: FixedStates, stage: fixed_state.Stage, row: int, slot: int, kept: int) -> None:
        replay(self, stage, row, slot, min(kept + 1, self.geometry.capacity))

    monkeypatch.setattr(FixedStates, "_replay", late)
    found = verify(trained_folder)
    wrong = failed(found)
    assert wrong and all(name.startswith("speculative equals plain") for name in wrong)
    assert any("do not deploy it" in detail for detail in wrong.values())
    assert found.exit_code == 1


def test_low_acceptance_is_named_only_where_a_floor_is_given(trained_folder: Path) -> None:
    found = verify(trained_folder, VerifyOptions(min_acceptance=0.99))
    assert failed(found).keys() == {"acceptance"} and "expected at least 0.99" in failed(found)["acceptance"]


def test_weights_that_are_no_numbers_are_named(tiny: TinyFactory, tmp_path: Path) -> None:
    """NaN written behind the export's back, and the digests brought into line."""
    builder.export(tiny("modelopt"), tmp_path / "p", builder.ExportOptions(weights="copy"))
    manifest = json.loads((tmp_path / "p" / "manifest.json").read_text("utf-8"))
    place = manifest["initializers"]["model.onnx"]["model.embed_tokens.weight"]
    data = bytearray((tmp_path / "p" / "weights.data").read_bytes())
    data[place["offset"] : place["offset"] + place["length"]] = b"\xff\xff" * (place["length"] // 2)
    (tmp_path / "p" / "weights.data").write_bytes(data)
    found = verify(tmp_path / "p")
    assert {"file weights.data", "run"} <= failed(found).keys() and found.exit_code == 1


def test_a_package_that_contradicts_itself_is_not_run(trained_folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained_folder, tmp_path / "p"))
    (folder / "mtp.onnx").unlink()
    found = verify(folder)
    assert failed(found)["run"] == "not run: the package contradicts itself"
    assert {"file mtp.onnx", "configuration"} <= failed(found).keys() and found.exit_code == 1


def test_a_machine_that_cannot_run_it_is_not_the_packages_fault(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    found = verify(trained_folder)
    assert failed(found).keys() == {"run"} and "1,000 are available" in failed(found)["run"]
    assert found.exit_code == 3


def test_a_machine_that_cannot_run_a_damaged_package_finds_the_damage(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(trained_folder, tmp_path / "p"))
    (folder / "tokenizer.json").write_text("{}")
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    assert verify(folder).exit_code == 1


# Other packages


@pytest.mark.parametrize("options", [Tiny(mtp=False), Tiny(tied=True), Tiny(vision=True)])
@pytest.mark.parametrize("weights", ["link", "copy"])
def test_packages_without_a_tokenizer_are_run_on_random_tokens(
    tiny: TinyFactory, tmp_path: Path, options: Tiny, weights: Any
) -> None:
    builder.export(tiny("modelopt", options), tmp_path / "p", builder.ExportOptions(weights=weights))
    found = verify(tmp_path / "p")
    assert failed(found) == {}
    assert ("speculation" in details(found)) == (not options.mtp)


def test_what_cannot_draft_has_no_acceptance_to_reach(tiny: TinyFactory, tmp_path: Path) -> None:
    builder.export(tiny("modelopt"), tmp_path / "p", builder.ExportOptions(checkpoints="off"))
    assert verify(tmp_path / "p").ok
    found = verify(tmp_path / "p", VerifyOptions(min_acceptance=0.5))
    assert failed(found) == {"speculation": "nothing was drafted: there is no head, or it cannot be rolled back"}


def test_prompts_and_drafts_may_be_given(trained_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "class A:"}\n{"token_ids": [1, 2, 3], "max_new_tokens": 5}\n')
    found = verify(trained_folder, VerifyOptions(prompts=prompts, draft_tokens=1))
    seen = details(found)
    assert seen["speculative equals plain, prompt 0"] == "32 tokens equal with 1 drafts a step"
    assert seen["speculative equals plain, prompt 1"] == "5 tokens equal with 1 drafts a step"
    assert len(found.acceptance["evaluated_by_position"]) == 1


def test_options_that_cannot_be_served_are_refused(trained_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="--draft-tokens: expected 0 to 3"):
        verify(trained_folder, VerifyOptions(draft_tokens=4))
    (tmp_path / "prompts.jsonl").write_text("{}")
    with pytest.raises(Refused, match=r"prompts\.jsonl line 1"):
        verify(trained_folder, VerifyOptions(prompts=tmp_path / "prompts.jsonl"))
    with pytest.raises(Refused, match="a package folder"):
        verify(TRAINED)


def test_a_tie_within_rounding_is_shown_and_passes(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch, reference: Mapping[str, NDArray[Any]]
) -> None:
    """Another token is a failure where the plain logits were sure of theirs, and a tie where they were not."""
    generate = verification.generate

    def other(package: Any, asks: Any, options: Any, progress: Any = None) -> Any:
        done = generate(package, asks, options)
        if asks[0].draft_tokens:
            done.requests[0].token_ids[4] += 1
        return done

    monkeypatch.setattr(verification, "generate", other)
    name = "speculative equals plain, prompt 0"
    wrong = failed(verify(trained_folder))
    assert wrong.keys() == {name} and "prompt 0 token 4: expected" in wrong[name]
    monkeypatch.setattr(verification, "ROUNDING", 1e9)
    found = verify(trained_folder)
    assert found.ok and details(found)[name].startswith("4 tokens equal, then a tie: ")
