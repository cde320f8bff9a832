"""verify(): what it passes, what it names, and that the faults which crash nothing show in it."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable, Mapping
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
from runtime import reference as reference_module
from runtime.fixed_state import FixedStates
from runtime.rounding import Rounding
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
    for path, found in (("none.npz", "No such file"), ("r.npz/none.npz", "Not a directory"), (".", "Is a directory")):
        with pytest.raises(Refused, match=f"expected an .npz file, found {found}.*; check --reference"):
            verify(trained_folder, VerifyOptions(reference=tmp_path / path))


def test_a_reference_that_the_machine_does_not_give_is_its_fault(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(reference_module.np, "load", refuse)
    with pytest.raises(MachineError, match=r"r\.npz: Permission denied; it cannot be read"):
        verify(trained_folder, VerifyOptions(reference=tmp_path / "r.npz"))


Edit = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda a: a.pop("mtp_draft_logits"), "expected mtp_draft_logits, found none"),
        (lambda a: a.update(mtp_draft_logits=a["mtp_draft_logits"][0]), "mtp_draft_logits: expected 2 or 3 dimensions"),
        (lambda a: a.update(mtp_draft_logits=a["mtp_draft_logits"][:2]), "mtp_draft_logits: expected (3, 512)"),
        (lambda a: a.update(mtp_draft_tokens=np.int64(3)), r"mtp_draft_tokens: expected [T] or [1, T], found []"),
        (lambda a: a.update(mtp_draft_tokens=np.array(["a", "b", "c"])), "mtp_draft_tokens: expected integers"),
        (lambda a: a.update(input_ids=a["input_ids"] + 0.5), "input_ids: expected integers, found float64"),
        (lambda a: a.update(input_ids=a["input_ids"][:, :0]), "input_ids: expected at least one token"),
        (lambda a: a.update(logits=np.array("x")), "logits: expected floating-point numbers"),
        (lambda a: a.update(logits=np.float32(1)), "logits: expected 2 or 3 dimensions"),
        (lambda a: a.update(mtp_logits=a["mtp_logits"][:, :5]), "mtp_logits: expected [1, 24, ...]"),
        (lambda a: a.update(last_hidden_state=a["logits"][0, 0]), "last_hidden_state: expected 2 or 3 dimensions"),
    ],
)
def test_a_reference_of_another_shape_or_type_is_refused_by_array(reference_file: Path, edit: Edit, words: str) -> None:
    arrays: dict[str, Any] = dict(np.load(reference_file))
    edit(arrays)
    np.savez(reference_file, **arrays)
    with pytest.raises(Refused) as caught:
        reference_module.read(reference_file)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda a: a.pop("greedy_1"), "expected greedy_1, found none"),
        (lambda a: a.update(prompt_x=a["prompt_0"]), "prompts 0 to 8, without a gap"),
        (lambda a: a.pop("prompt_3"), "prompt_7: expected prompts 0 to 6, without a gap"),
        (lambda a: a.update(greedy_2=a["greedy_2"][None]), "greedy_2: expected [T], at least one token, found [1, 64]"),
        (lambda a: a.update(prompt_2=a["prompt_2"] * 1.0), "prompt_2: expected integers"),
        (lambda a: a.update(margin_2=a["margin_2"][:5]), "margin_2: expected [64], found [5]"),
        (lambda a: a.update(margin_2=a["greedy_2"]), "margin_2: expected floating-point numbers"),
    ],
)
def test_a_reference_of_many_prompts_is_read_as_strictly(tmp_path: Path, edit: Edit, words: str) -> None:
    arrays: dict[str, Any] = dict(np.load(TRAINED / "reference.npz"))
    edit(arrays)
    np.savez(tmp_path / "many.npz", **arrays)
    with pytest.raises(Refused) as caught:
        reference_module.read(tmp_path / "many.npz")
    assert words in str(caught.value)


def test_more_drafts_than_the_package_makes_are_compared_as_far_as_it_goes(
    parity_package: Path, reference_file: Path
) -> None:
    arrays = dict(np.load(reference_file))
    for name in ("mtp_draft_tokens", "mtp_draft_logits"):
        arrays[name] = np.concatenate([arrays[name]] * 4)[:10]
    np.savez(reference_file, **arrays)
    found = verify(parity_package, VerifyOptions(reference=reference_file))
    assert found.ok and details(found)["reference drafts"].endswith("; 3 of 10 drafts, the package's limit")
    assert details(found)["reference prompt"] == "24 tokens and 3 of 10 drafts"


def test_tokens_that_the_package_does_not_have_are_a_failed_check(
    parity_package: Path, reference_file: Path, trained_folder: Path, tmp_path: Path
) -> None:
    """What was found before is kept, and prompts that can be compared are."""
    arrays = dict(np.load(reference_file))
    arrays["input_ids"][0, 0] = 512
    np.savez(reference_file, **arrays)
    wrong = failed(verify(parity_package, VerifyOptions(reference=reference_file)))
    assert wrong.keys() == {"reference prompt"} and "token ids below 512, found 512" in wrong["reference prompt"]
    many = dict(np.load(TRAINED / "reference.npz"))
    many["prompt_2"][0] = -1
    np.savez(tmp_path / "many.npz", **many)
    found = verify(trained_folder, VerifyOptions(reference=tmp_path / "many.npz"))
    assert failed(found).keys() == {"reference prompt 2"} and found.exit_code == 1
    assert details(found)["reference prompt 7"] == "64 tokens equal"


def test_a_margin_that_is_no_number_is_no_tie(trained_folder: Path, tmp_path: Path) -> None:
    many = dict(np.load(TRAINED / "reference.npz"))
    many["greedy_2"][5] += 1
    many["margin_2"][5] = np.nan
    np.savez(tmp_path / "many.npz", **many)
    assert failed(verify(trained_folder, VerifyOptions(reference=tmp_path / "many.npz"))).keys() == {
        "reference prompt 2"
    }


# A damaged package is a result, not an error


TOKENIZER_DAMAGE: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "not a tokenizer": ("tokenizer.json", lambda path: path.write_text("{}")),
    "not JSON": ("tokenizer_config.json", lambda path: path.write_text("{")),
    "another model's": (
        "tokenizer.json",
        lambda path: path.write_text(re.sub(r'": (\d+)', lambda m: f'": {int(m[1]) + 9000}', path.read_text("utf-8"))),
    ),
}


@pytest.mark.parametrize("name", TOKENIZER_DAMAGE)
def test_a_damaged_tokenizer_is_a_failed_check_among_the_others(
    trained_folder: Path, tmp_path: Path, name: str
) -> None:
    file, damage = TOKENIZER_DAMAGE[name]
    folder = Path(shutil.copytree(trained_folder, tmp_path / "p"))
    damage(folder / file)
    found = verify(folder)
    assert failed(found).keys() == {"tokenizer", f"file {file}"} and found.exit_code == 1
    assert "speculative equals plain, prompt 0" in details(found)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"token_ids": [1, 2, 3], "max_new_tokens": 5}\n')
    assert failed(verify(folder, VerifyOptions(prompts=prompts))).keys() == {"tokenizer", f"file {file}"}
    prompts.write_text('{"prompt": "class A:"}\n')
    wrong = failed(verify(folder, VerifyOptions(prompts=prompts)))
    assert wrong.keys() == {"tokenizer", f"file {file}", "run"} and "cannot be used" in wrong["run"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("[" * 100_000)])
def test_a_lost_or_broken_configuration_is_a_failed_check(
    trained_folder: Path, tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    folder = Path(shutil.copytree(trained_folder, tmp_path / "p"))
    damage(folder / "genai_config.json")
    found = verify(folder)
    assert failed(found).keys() == {"file genai_config.json", "configuration", "run"} and found.exit_code == 1


def test_a_manifest_that_may_not_be_read_is_the_machines_fault(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of mode 000, which root reads all the same."""
    read_bytes = Path.read_bytes

    def forbidden(path: Path) -> bytes:
        if path.name == "manifest.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    found = verify(trained_folder)
    assert failed(found)["run"] == "not run: the package cannot be read" and found.exit_code == 3


# Faults that crash nothing


def test_logits_that_are_no_numbers_are_named_in_every_prompt(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both generations choose the same token of a row of NaN."""
    plain = verification.dump

    def damaged(package: Any, token_ids: Any, *others: Any) -> Any:
        arrays = plain(package, token_ids, *others)
        seen.append(len(seen))
        if len(seen) == 3:
            arrays["logits"][-1] = np.nan
        return arrays

    seen: list[int] = []
    monkeypatch.setattr(verification, "dump", damaged)
    assert failed(verify(trained_folder)) == {
        "finite logits": "prompt 2 logits: expected finite numbers, found NaN or infinity; inspect the checkpoint"
    }


def speculate_otherwise(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[int]], None]) -> None:
    """Changes the tokens [32] of the first request wherever it drafts."""
    generate = verification.generate

    def changed(package: Any, asks: Any, options: Any, progress: Any = None) -> Any:
        done = generate(package, asks, options)
        if asks[0].draft_tokens:
            change(done.requests[0].token_ids)
        return done

    monkeypatch.setattr(verification, "generate", changed)


def another_token(token_ids: list[int]) -> None:
    token_ids[4] += 1


def test_nan_between_two_tokens_is_no_tie(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speculate_otherwise(monkeypatch, another_token)
    monkeypatch.setattr(verification, "_leads", lambda *arguments: [float("nan")] * 32)
    assert failed(verify(trained_folder)).keys() == {"speculative equals plain, prompt 0"}


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


def test_a_prompt_as_long_as_the_context_leaves_room_to_look(tiny: TinyFactory, tmp_path: Path) -> None:
    builder.export(tiny("modelopt"), tmp_path / "p", builder.ExportOptions(context_length=20))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"token_ids": [1] * 19}))
    assert failed(verify(tmp_path / "p", VerifyOptions(prompts=prompts))) == {}


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
    for content, words in (
        ('{"token_ids": [1, 99999]}', r"prompts\.jsonl line 1: prompt: expected token ids below"),
        ("", r"at least one request, found none; check --prompts"),
    ):
        (tmp_path / "prompts.jsonl").write_text(content)
        with pytest.raises(Refused, match=words):
            verify(trained_folder, VerifyOptions(prompts=tmp_path / "prompts.jsonl"))
    (tmp_path / "prompts.jsonl").write_bytes(b"\xff")
    with pytest.raises(Refused, match=r"JSON lines in UTF-8, .*; check --prompts"):
        verify(trained_folder, VerifyOptions(prompts=tmp_path / "prompts.jsonl"))
    for floor in (float("nan"), -0.1, 1.1):
        with pytest.raises(Refused, match="--min-acceptance: expected a share from 0 to 1"):
            verify(trained_folder, VerifyOptions(min_acceptance=floor))
    with pytest.raises(Refused, match="a package folder"):
        verify(TRAINED)


def test_no_drafts_asked_for_is_not_no_head(trained_folder: Path) -> None:
    asked = "nothing was drafted: --draft-tokens 0 asks for none"
    found = verify(trained_folder, VerifyOptions(draft_tokens=0))
    assert found.ok and details(found)["speculation"] == asked
    assert failed(verify(trained_folder, VerifyOptions(draft_tokens=0, min_acceptance=0.1))) == {"speculation": asked}


def test_a_tie_within_rounding_is_shown_and_passes(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch, reference: Mapping[str, NDArray[Any]]
) -> None:
    """Another token is a failure where the plain logits were sure of theirs, and a tie where they were not."""
    speculate_otherwise(monkeypatch, another_token)
    name = "speculative equals plain, prompt 0"
    wrong = failed(verify(trained_folder))
    assert wrong.keys() == {name} and "prompt 0 token 4: expected" in wrong[name]
    monkeypatch.setattr(verification, "ROUNDING", 1e9)
    found = verify(trained_folder)
    assert found.ok and details(found)[name].startswith("4 tokens equal, then a tie: ")


@pytest.mark.parametrize(("dtype", "ok"), [("float32", False), ("float16", False), ("bfloat16", True)])
def test_a_tie_is_as_wide_as_the_rounding_of_the_type(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, ok: bool
) -> None:
    speculate_otherwise(monkeypatch, another_token)
    monkeypatch.setattr(verification, "_leads", lambda loaded, prompt, token_ids: [0.0] * 4 + [0.2] * 28)
    monkeypatch.setattr(verification.Rounding, "of", lambda loaded: Rounding(dtype, 8, mixture=False))
    assert verify(trained_folder).ok == ok


@pytest.mark.parametrize("behind", [1, 10])
def test_behind_a_tie_every_token_is_judged(trained_folder: Path, monkeypatch: pytest.MonkeyPatch, behind: int) -> None:
    """A state that is rolled back wrongly where a tie was is no tie: its tokens are not those of its text."""

    def lost(token_ids: list[int]) -> None:
        another_token(token_ids)
        token_ids[4 + behind :] = [7] * (28 - behind)

    speculate_otherwise(monkeypatch, lost)
    leads = verification._leads

    def tied(loaded: Any, prompt: Any, token_ids: Any) -> list[float]:
        found = leads(loaded, prompt, token_ids)
        return [0.0 if 4 <= place < 4 + behind else lead for place, lead in enumerate(found)]

    monkeypatch.setattr(verification, "_leads", tied)
    wrong = failed(verify(trained_folder))["speculative equals plain, prompt 0"]
    assert f"prompt 0 token {4 + behind}: expected another one after the tokens before it" in wrong


def test_a_text_that_ends_early_is_no_tie(trained_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(token_ids: list[int]) -> None:
        del token_ids[9:]

    speculate_otherwise(monkeypatch, cut)
    monkeypatch.setattr(verification, "ROUNDING", 1e9)
    assert "prompt 0 token 9" in failed(verify(trained_folder))["speculative equals plain, prompt 0"]
