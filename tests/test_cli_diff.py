"""build-model diff as a user meets it: exit codes, JSON keys, short output, one-line refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from tests.conftest import TinyFactory
from tests.test_cli import invoke, refuse

KEYS = {"equal", "content_equal", "files", "config", "graphs", "initializers", "tokenizer", "layout", "provenance"}


@pytest.fixture
def pair(tiny: TinyFactory, tmp_path: Path) -> tuple[Path, Path]:
    """A package and a copy of it."""
    a, b = tmp_path / "a", tmp_path / "b"
    assert invoke("export", tiny(), a, "--weights", "copy", "-q").exit_code == 0
    shutil.copytree(a, b)
    return a, b


def differ(*arguments: object) -> Any:
    """The JSON of packages that are not equal."""
    result = invoke("diff", *arguments, "--json")
    assert result.exit_code == 1 and result.stderr == "", result.output
    return json.loads(result.stdout)


def test_equal_packages(pair: tuple[Path, Path]) -> None:
    result = invoke("diff", *pair)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "equal\n", "")
    result = invoke("diff", *pair, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and set(found) == KEYS and found["equal"] and found["content_equal"]
    assert found["files"] == found["tokenizer"] == found["provenance"] == {"added": {}, "removed": {}, "changed": {}}


def test_layout_alone_is_a_difference_with_equal_content(tiny: TinyFactory, tmp_path: Path) -> None:
    checkpoint = tiny()
    for weights in ("link", "copy"):
        assert invoke("export", checkpoint, tmp_path / weights, "--weights", weights, "-q").exit_code == 0
    found = differ(tmp_path / "link", tmp_path / "copy")
    assert found["content_equal"] is True and found["equal"] is False
    assert set(found["layout"]["data_files"]["removed"]) == {"model.safetensors", "transformed.data"}
    result = invoke("diff", tmp_path / "link", tmp_path / "copy")
    assert result.exit_code == 1
    verdict = "different only in layout; weights, configuration and what the graphs compute are equal"
    assert result.stdout.splitlines()[0] == verdict


def test_what_differs_is_told_as_json_and_as_text(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "genai_config.json"
    config = json.loads(path.read_text())
    config["search"]["top_k"] = 7
    path.write_text(json.dumps(config))
    found = differ(*pair)
    changed = {"search.top_k": {"a": 50, "b": 7}}
    assert found["config"]["genai_config.json"] == {"added": {}, "removed": {}, "changed": changed}
    assert found["content_equal"] is False
    result = invoke("diff", *pair)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == "different: genai_config.json"
    assert lines[-2:] == ["genai_config.json, changed: 1", "  search.top_k: 50 -> 7"]


def test_long_lists_are_cut_short_and_counted(pair: tuple[Path, Path]) -> None:
    """Every node of another name and with another input, so that no renaming explains it."""
    model = onnx.load(pair[1] / "model.onnx", load_external_data=False)
    for node in model.graph.node:
        node.name = f"other {node.name}"
    gather = next(node for node in model.graph.node if node.op_type == "Gather")
    gather.attribute.append(onnx.helper.make_attribute("axis", 0))
    (pair[1] / "model.onnx").write_bytes(model.SerializeToString())
    count = len(model.graph.node)
    assert len(differ(*pair)["graphs"]["model.onnx"]["nodes"]["removed"]) == count
    lines = invoke("diff", *pair).stdout.splitlines()
    start = lines.index(f"model.onnx nodes by name, only in A: {count}")
    assert lines[start + 11] == f"  ... and {count - 10} more"
    assert all(line.startswith("  ") for line in lines[start + 1 : start + 12])
    assert lines[start + 12] == f"model.onnx nodes by name, only in B: {count}"


def test_what_is_no_package_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    line = refuse(2, "diff", pair[0], tmp_path / "nothing")
    assert line == (
        f"build-model: {tmp_path / 'nothing'}: expected a package folder with genai_config.json and model.onnx, "
        "found no folder; check the path"
    )
    (pair[0] / "model.onnx").unlink()
    assert "found no model.onnx" in refuse(2, "diff", pair[1], pair[0])
    assert invoke("diff", pair[0]).exit_code == 2


def test_a_file_that_cannot_be_read_is_the_machines_fault(pair: tuple[Path, Path]) -> None:
    """Linux answers a read of this file's start with an input/output error, to root also."""
    source = Path("/proc/self/mem")
    if not source.is_file():
        pytest.skip("no /proc")
    (pair[0] / "vocab.json").write_bytes(b"")
    (pair[1] / "vocab.json").symlink_to(source)
    line = refuse(3, "diff", *pair)
    assert line == f"build-model: {pair[1] / 'vocab.json'}: Input/output error; it cannot be read"


def test_names_cannot_steer_the_terminal(pair: tuple[Path, Path]) -> None:
    (pair[1] / "\x1b[2J\nequal").write_text("")
    result = invoke("diff", *pair)
    assert result.exit_code == 1 and "\x1b" not in result.stdout
    assert "  \\x1b[2J\\nequal: bytes 0" in result.stdout.splitlines()
