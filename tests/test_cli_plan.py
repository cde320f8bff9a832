"""build-model plan, and what export and plan say of heads, ties and folders, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fixtures import TRAINED, writer
from fixtures.writer import Config, Edit, Tensors, Tiny
from tests.builder.test_package import contents, lasting
from tests.conftest import TinyFactory
from tests.test_cli import invoke, refuse, succeed

KEYS = {"source", "graphs", "parameters", "weights", "memory", "skipped_tensors", "warnings"}
MEMORY = {"context_length", "batch_size", "weights", "kv_blocks", "states", "verify_staging", "total"}


def without_head(*kept: str) -> Edit:
    """Drops the head's modules but those."""

    def edit(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.startswith("mtp.") and name not in kept]:
            del tensors[name]

    return edit


# plan


def test_plan_reports_json() -> None:
    found = succeed("plan", TRAINED)
    assert set(found) == KEYS and set(found["memory"]) == MEMORY
    assert found["source"] == str(TRAINED) and found["warnings"] == []
    assert found["graphs"]["target"]["matmuls"] == {"nvfp4": 21, "fp8": 30, "float": 12}
    assert found["graphs"]["target"]["layers"] == {"full_attention": 2, "linear_attention": 6}
    assert found["graphs"]["mtp"]["matmuls"] == {"nvfp4": 0, "fp8": 1, "float": 8}
    assert set(found["weights"]) == {"linkable_bytes", "transformed_bytes", "shared_bytes"}
    assert found["memory"]["context_length"] == 4096 and found["memory"]["batch_size"] == 1


@pytest.mark.parametrize("weights", ["copy", "link"])
def test_plan_and_export_say_the_same(tmp_path: Path, weights: str) -> None:
    planned = succeed("plan", TRAINED, "--weights", weights)
    report = succeed("export", TRAINED, tmp_path / "package", "--weights", weights)
    assert planned["graphs"] == report["graphs"]
    assert planned["skipped_tensors"] == report["skipped_tensors"] and planned["warnings"] == report["warnings"]
    sizes = planned["weights"]
    linked, copied = report["weights"]["linked_bytes"], report["weights"]["copied_bytes"]
    if weights == "copy":
        assert (linked, copied) == (0, sizes["linkable_bytes"] + sizes["transformed_bytes"])
    else:
        assert (linked, copied) == (sizes["linkable_bytes"], sizes["transformed_bytes"])
    assert sizes["shared_bytes"] == report["weights"]["shared_bytes"]


def test_plan_takes_the_options_of_an_export() -> None:
    plain = succeed("plan", TRAINED)
    found = succeed("plan", TRAINED, "--context-length", 1000, "--batch-size", 3, "--mtp", "off", "--block-size", 16)
    assert found["graphs"]["mtp"] is None
    assert found["skipped_tensors"]["mtp"] == 15 and plain["skipped_tensors"]["mtp"] == 0
    assert found["memory"]["context_length"] == 1000 and found["memory"]["batch_size"] == 3
    # A third of the layers are the head's no more, and 63 blocks of 16 tokens instead of 16 of 256.
    assert found["memory"]["kv_blocks"] * 3 * 4096 == plain["memory"]["kv_blocks"] * 2 * 3 * 63 * 16
    off, dense = (succeed("plan", TRAINED, "--checkpoints", kind) for kind in ("off", "dense"))
    assert 100 < off["graphs"]["target"]["nodes"] <= plain["graphs"]["target"]["nodes"]
    # 4 states of 6 layers: 512 channels * 3 in two bytes, 8 heads of 32 x 32 in four.
    more = 4 * 6 * (2 * 512 * 3 + 4 * 8 * 32 * 32)
    assert dense["memory"]["verify_staging"] == plain["memory"]["verify_staging"] + more
    assert dense["weights"] == plain["weights"]


def test_plan_for_people(tiny: TinyFactory) -> None:
    """Tables on stdout; what is not carried as stored below them; warnings on stderr unless silenced."""
    folder = tiny("modelopt", Tiny(gates="fp8"), lambda tensors, config: config.update(tie_word_embeddings=True))
    result = invoke("plan", folder)
    assert result.exit_code == 0
    for words in ("target", "mtp", "nvfp4", "linkable_bytes", "kv_blocks", "total"):
        assert words in result.stdout, words
    found = succeed("plan", folder)
    assert f"{found['memory']['total']:,}" in result.stdout and f"{found['weights']['shared_bytes']:,}" in result.stdout
    assert "model.layers.0.linear_attn.in_proj_a is dequantized to float: the decay" in result.stdout
    assert result.stderr.splitlines() == [f"build-model: warning: {line}" for line in found["warnings"]]
    assert len(found["warnings"]) == 1
    assert invoke("plan", folder, "-q").stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--block-size", "48"], "--block-size: expected a power of two, 16 or more, found 48"),
        (["--context-length", "4097"], "--context-length: expected 1 to 4096"),
        (["--max-draft-tokens", "8"], "--max-draft-tokens: expected 1 to 7, found 8"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_plan_refuses_what_export_does(arguments: list[str], words: str) -> None:
    assert words in refuse(2, "plan", TRAINED, *arguments)


def test_plan_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "no such folder" in refuse(2, "plan", tmp_path / "absent")
    assert "config.json: expected a file" in refuse(2, "plan", tmp_path)
    for size in ("0", "-1", "x"):
        assert invoke("plan", TRAINED, "--batch-size", size).exit_code == 2


@pytest.mark.parametrize("command", ["plan", "export"])
def test_strict_refuses_by_name(tiny: TinyFactory, tmp_path: Path, command: str) -> None:
    """A quantizer's leftover: left out with a warning, or refused."""
    name = "model.layers.0.mlp.up_proj.weight_quantizer._double_scale"
    folder = tiny("modelopt", edit=lambda tensors, config: tensors.update({name: np.ones(3, np.float32)}))
    out = [tmp_path / "out"] if command == "export" else []
    line = refuse(2, command, folder, *out, "--strict")
    assert f"tensor {name}: expected a module that uses it (--strict)" in line
    assert not (tmp_path / "out").exists()
    found = succeed(command, folder, *out)
    assert found["skipped_tensors"]["unclaimed"] == 1
    assert found["warnings"] == [f"1 tensors belong to no module and were left out, the first {name}"]


def test_plan_does_not_mind_damaged_values(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt", edit=lambda tensors, config: tensors["lm_head.weight_scale"].fill(np.nan))
    assert "tensor lm_head.weight_scale at 0" in refuse(2, "export", folder, tmp_path / "out")
    assert succeed("plan", folder)["warnings"] == []


# The head


def test_a_lost_head_is_said_or_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    """Promised and nowhere: exit 0 with a line on stderr, 2 where it is required. Half of it: 2 either way."""
    absent = tiny("modelopt", edit=without_head())
    result = invoke("export", absent, tmp_path / "absent")
    assert result.exit_code == 0
    said = [line for line in result.stderr.splitlines() if "exported without an MTP head" in line]
    assert len(said) == 1 and said[0].startswith("build-model: warning: ")
    assert not (tmp_path / "absent" / "mtp.onnx").exists()
    assert "(--mtp require)" in refuse(2, "export", absent, tmp_path / "required", "--mtp", "require")
    kept = ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight")
    half = tiny("modelopt", edit=without_head(*kept))
    missing = {name for name in writer.float_weights(Tiny()) if name.startswith("mtp.")} - set(kept)
    assert len(missing) == 12
    for arguments in ([], ["--mtp", "require"]):
        line = refuse(2, "export", half, tmp_path / "half", *arguments)
        for name in missing:
            leaf = name.removeprefix("mtp.").removeprefix("layers.0.").removesuffix(".weight")
            assert leaf in line, name
    assert succeed("export", half, tmp_path / "off", "--mtp", "off")["warnings"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["absent", "checkpoints", "off"]


# Ties and folders


def test_sharing_cannot_be_forced(tiny: TinyFactory, tmp_path: Path) -> None:
    """No option of that name, so an untied model is never tied by hand: exit 2, and nothing is written."""
    result = invoke("export", tiny("modelopt"), tmp_path / "out", "--shared-embeddings")
    assert result.exit_code == 2 and "--shared-embeddings" in result.stderr
    assert not (tmp_path / "out").exists()


def test_two_working_directories_give_one_package(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them holds files of a package's names, the other's output folder holds a stale one."""
    checkpoint = tiny("modelopt")
    for name in ("one", "two", "two/sub"):
        (tmp_path / name).mkdir()
    for name in ("weights.data", "model.onnx", "model.onnx.data", "genai_config.json"):
        (tmp_path / "one" / name).write_text("somebody else's")
    (tmp_path / "two" / "sub" / "model.onnx.data").write_text("stale")
    monkeypatch.chdir(tmp_path / "one")
    assert invoke("export", checkpoint, "sub", "-q").exit_code == 0
    monkeypatch.chdir(tmp_path / "two")
    assert "pass --force" in refuse(2, "export", checkpoint, "sub")
    assert "not a package" in refuse(2, "export", checkpoint, "sub", "--force")
    assert contents(tmp_path / "two") == {"sub/model.onnx.data": b"stale"}
    (tmp_path / "two" / "sub" / "model.onnx.data").unlink()
    assert invoke("export", checkpoint, "sub", "--force", "-q").exit_code == 0
    assert lasting(tmp_path / "one" / "sub") == lasting(tmp_path / "two" / "sub")
    assert (tmp_path / "one" / "weights.data").read_text() == "somebody else's"
    assert [path.name for path in (tmp_path / "two").iterdir()] == ["sub"]


def test_paths_with_spaces_and_other_letters(tiny: TinyFactory, tmp_path: Path) -> None:
    source = tiny("modelopt").rename(tmp_path / "mé x")
    out = tmp_path / "päckchen 日本"
    assert succeed("export", source, out)["package"] == str(out)
    assert succeed("plan", source)["source"] == str(source)
    assert succeed("inspect", out)["kind"] == "package"
    assert succeed("run", out, "--token-ids", "1,2,3", "--max-new-tokens", 2)["requests"][0]["text"] is None
    text = (out / "genai_config.json").read_text("utf-8")
    assert "\\\\" not in text and "päckchen" not in text
    names = [value for key, value in pairs(json.loads(text)) if key in ("filename", "data_file")]
    assert names and not any("/" in name for name in names)


def pairs(value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [*value.items(), *(pair for inner in value.values() for pair in pairs(inner))]
    return [pair for inner in value for pair in pairs(inner)] if isinstance(value, list) else []
