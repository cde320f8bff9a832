"""build-model verify as a user and a continuous-integration service meet it."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cli import main
from fixtures import LAYERS, TRACED, TRAINED


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "package"
    assert invoke("export", TRAINED, folder, "--weights", "copy", "-q").exit_code == 0
    return folder


def cases(path: Path) -> dict[str, ElementTree.Element]:
    root = ElementTree.parse(path).getroot()
    assert root.tag == "testsuites" and root[0].tag == "testsuite"
    found = {case.attrib["name"]: case for case in root[0]}
    assert int(root.attrib["tests"]) == int(root[0].attrib["tests"]) == len(found)
    failures = sum(case.find("failure") is not None for case in found.values())
    assert int(root.attrib["failures"]) == failures
    return found


def test_a_sound_package_exits_0_with_a_table_json_and_junit(package: Path, tmp_path: Path) -> None:
    shown = invoke("verify", package, "--deep", "--junit", tmp_path / "v.xml")
    assert shown.exit_code == 0 and "speculative equals plain" in " ".join(shown.stdout.split())
    result = invoke("verify", package, "--deep", "--json")
    document: Any = json.loads(result.stdout)
    assert document["ok"] is True and all(check.keys() == {"name", "ok", "detail"} for check in document["checks"])
    assert cases(tmp_path / "v.xml").keys() == {check["name"] for check in document["checks"]}


def test_a_damaged_package_exits_1_and_names_what_is_wrong(package: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(package, tmp_path / "package"))
    data = bytearray((folder / "weights.data").read_bytes())
    data[0] ^= 1
    (folder / "weights.data").write_bytes(data)
    result = invoke("verify", folder, "--json", "--junit", tmp_path / "v.xml")
    assert result.exit_code == 1
    wrong = [check["name"] for check in json.loads(result.stdout)["checks"] if not check["ok"]]
    assert wrong == ["file weights.data"]
    failure = cases(tmp_path / "v.xml")["file weights.data"].find("failure")
    assert failure is not None and "expected xxh3_128:" in failure.attrib["message"]


def test_unchecked_content_of_links_is_listed_and_fails_deep(tmp_path: Path) -> None:
    folder = tmp_path / "package"
    assert invoke("export", TRAINED, folder, "--weights", "link", "-q").exit_code == 0
    shallow = invoke("verify", folder, "--json")
    assert shallow.exit_code == 0 and "content not checked" in shallow.stdout
    deep = invoke("verify", folder, "--deep", "--json")
    assert deep.exit_code == 1
    wrong = [check for check in json.loads(deep.stdout)["checks"] if not check["ok"]]
    assert {check["name"] for check in wrong} == {f"file {path.name}" for path in TRAINED.glob("*.safetensors")}


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traced") / "package"
    assert invoke("export", TRACED, folder, "-q").exit_code == 0
    return folder


def with_layers(path: Path, factor: float) -> Path:
    """transformers' answers, the layers from the second on times `factor`."""
    arrays = {**np.load(TRACED / "reference.npz"), **np.load(LAYERS)}
    arrays["layer_hidden_states"][1:] *= factor
    np.savez(path, **arrays)
    return path


def test_a_trace_is_a_table_and_a_list(traced: Path, tmp_path: Path) -> None:
    arguments = ["verify", traced, "--ep", "cpu", "--trace", "--reference", with_layers(tmp_path / "r.npz", 1.0)]
    shown = invoke(*arguments)
    assert shown.exit_code == 0 and "residual stream" in shown.stdout and "!" not in shown.stdout
    rows = re.findall(r"│ (\d) +│ (\w+)_attention +│ \d\.\de-\d\d │ \d\.\de-\d\d +│", shown.stdout)
    assert rows == [("0", "linear"), ("1", "linear"), ("2", "linear"), ("3", "full")]
    document: Any = json.loads(invoke(*arguments, "--json").stdout)
    assert [point.keys() for point in document["trace"]] == [{"layer", "kind", "part", "error", "limit"}] * 4
    assert [point["layer"] for point in document["trace"]] == [0, 1, 2, 3]
    assert all(0 < point["error"] < point["limit"] for point in document["trace"])
    assert document["checks"][-1]["name"] == "trace"


def test_a_trace_that_names_a_layer_exits_1(traced: Path, tmp_path: Path) -> None:
    arguments = ["verify", traced, "--ep", "cpu", "--trace", "--reference", with_layers(tmp_path / "r.npz", 1.001)]
    result = invoke(*arguments, "--json", "--junit", tmp_path / "v.xml")
    assert result.exit_code == 1
    (wrong,) = [check for check in json.loads(result.stdout)["checks"] if not check["ok"]]
    assert wrong["name"] == "trace" and wrong["detail"].startswith("layer 1 (linear_attention): expected a relative")
    assert cases(tmp_path / "v.xml")["trace"].find("failure") is not None
    assert invoke(*arguments).stdout.count("e-03 !") == 3


def test_a_trace_with_nothing_to_compare_with_exits_2(traced: Path) -> None:
    for more in ([], ["--reference", TRACED / "reference.npz"]):
        result = invoke("verify", traced, "--ep", "cpu", "--trace", *more)
        assert result.exit_code == 2 and result.stdout == ""
        assert "--trace: expected a --reference with layer_hidden_states" in result.stderr


def test_without_a_trace_the_list_is_empty(package: Path) -> None:
    assert json.loads(invoke("verify", package, "--json").stdout)["trace"] == []


def test_what_is_no_package_and_bad_options_exit_2(package: Path, tmp_path: Path) -> None:
    for arguments in (
        [TRAINED],
        [tmp_path / "nowhere"],
        [package, "--draft-tokens", 9],
        [package, "--min-acceptance", 2],
    ):
        result = invoke("verify", *arguments)
        assert result.exit_code == 2 and result.stdout == "", arguments


def test_a_report_that_cannot_be_written_exits_3(package: Path, tmp_path: Path) -> None:
    """The result is shown all the same: it took minutes."""
    result = invoke("verify", package, "--json", "--junit", tmp_path / "no" / "v.xml")
    assert result.exit_code == 3 and "could not be written" in result.stderr
    assert json.loads(result.stdout)["ok"] is True


def test_a_floor_that_is_no_number_is_refused(package: Path) -> None:
    result = invoke("verify", package, "--min-acceptance", "nan")
    assert result.exit_code == 2 and result.stdout == "" and "--min-acceptance" in result.stderr


def test_the_overlay_that_leaves_the_head_off_is_named(package: Path) -> None:
    result = invoke("run", package, "--token-ids", "1", "--overlay", "plain", "--draft-tokens", 2)
    assert result.exit_code == 2 and "ask for fewer, or leave --overlay plain out" in result.stderr
    result = invoke("run", package, "--token-ids", "1", "--draft-tokens", 7)
    assert result.exit_code == 2 and "export with a larger --max-draft-tokens" in result.stderr


# What the operating system refuses

LONG = "n" * 300


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["export", LONG, "out"], 2),
        (["export", TRAINED, LONG], 2),
        (["plan", LONG], 2),
        (["verify", LONG], 2),
        (["run", LONG, "--token-ids", "1"], 2),
        (["run", LONG, "--prompt", "x"], 3),
        (["inspect", LONG], 3),
        (["diff", LONG, LONG], 2),
    ],
)
def test_a_name_too_long_is_one_line(
    arguments: list[Any], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.startswith("build-model: ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments", [["verify", "p"], ["run", "p", "--token-ids", "1"], ["export", "p", "out"], ["inspect", "p"]]
)
def test_a_folder_that_may_not_be_looked_at_is_one_line(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As below a folder of mode 000, which root enters all the same."""
    monkeypatch.chdir(tmp_path)
    stat = os.stat

    def denied(path: Any, *others: Any, **options: Any) -> os.stat_result:
        if str(path).split("/")[0] == "p":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, *others, **options)

    monkeypatch.setattr(os, "stat", denied)
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.count("\n") == 1 and "Permission denied" in result.stderr
