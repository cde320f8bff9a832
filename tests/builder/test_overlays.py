"""Overlays: what lies in a package, what each changes of its configuration, and what it does in a run."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnxruntime_genai import Config

import builder
import runtime
from builder import overlays, reader
from builder.errors import Refused
from builder.exporter import ExportOptions
from fixtures.writer import Tiny
from tests.conftest import TinyFactory

LATENCY = {"engine": {"dynamic_batching": {"max_batch_size": 1}}, "speculative": {"max_draft_tokens": 3}}
PLAIN = {"model": {"mtp": {"enabled": False}}}


def written(folder: Path) -> Mapping[str, Any]:
    return {path.stem: json.loads(path.read_text("utf-8")) for path in (folder / "overlays").iterdir()}


# Contents


@pytest.mark.parametrize(
    ("tiny_options", "options", "expected"),
    [
        (Tiny(), ExportOptions(), {"latency": LATENCY, "plain": PLAIN}),
        (
            Tiny(),
            ExportOptions(max_draft_tokens=7),
            {"latency": LATENCY | {"speculative": {"max_draft_tokens": 7}}, "plain": PLAIN},
        ),
        (Tiny(), ExportOptions(checkpoints="off"), {"latency": {"engine": LATENCY["engine"]}, "plain": PLAIN}),
        (Tiny(), ExportOptions(mtp="off"), {"latency": {"engine": LATENCY["engine"]}}),
        (Tiny(mtp=False), ExportOptions(), {"latency": {"engine": LATENCY["engine"]}}),
    ],
    ids=["default", "seven drafts", "no capture", "head left out", "headless"],
)
def test_a_package_has_the_overlays_that_it_can_use(
    tiny: TinyFactory, tmp_path: Path, tiny_options: Tiny, options: ExportOptions, expected: Mapping[str, Any]
) -> None:
    builder.export(tiny("modelopt", tiny_options), tmp_path / "out", options)
    assert written(tmp_path / "out") == expected
    for name, content in expected.items():
        assert overlays.read(tmp_path / "out", name) == content


def test_every_key_of_an_overlay_is_one_of_the_configuration(package_folder: Path) -> None:
    """Or the engine would not know it; `enabled` is the head's own switch, which is on where it is not written."""
    config = json.loads((package_folder / "genai_config.json").read_text("utf-8"))

    def check(overlay: Mapping[str, Any], own: Mapping[str, Any]) -> None:
        for key, value in overlay.items():
            if isinstance(value, dict):
                check(value, own[key])
            else:
                assert key == "enabled" or type(own[key]) is type(value)

    for overlay in written(package_folder).values():
        check(overlay, config)


def test_an_overlay_is_plain_json_for_any_reader(package_folder: Path) -> None:
    for path in (package_folder / "overlays").iterdir():
        data = path.read_bytes()
        assert data.isascii() and data.endswith(b"}\n") and path.suffix == ".json"
        Config(str(package_folder)).overlay(data.decode())


# Reading and merging


@pytest.mark.parametrize("name", ["", "fast", "Plain", "plain.json", "../genai_config", "../overlays/plain", "*", "\0"])
def test_an_unknown_name_is_refused_with_those_there_are(packages: Mapping[str, Path], name: str) -> None:
    with pytest.raises(Refused, match="--overlay: expected latency or plain, found "):
        overlays.read(packages["tiny"], name)
    with pytest.raises(Refused, match="--overlay: expected latency, found "):
        overlays.read(packages["headless"], name)


def test_a_package_may_have_none(packages: Mapping[str, Path], tmp_path: Path) -> None:
    shutil.copytree(packages["tiny"], tmp_path / "package")
    shutil.rmtree(tmp_path / "package" / "overlays")
    with pytest.raises(Refused, match="--overlay: expected none, found plain"):
        overlays.read(tmp_path / "package", "plain")
    assert reader.read(tmp_path / "package").mtp is not None


def test_ones_own_overlay_is_read_like_ours(packages: Mapping[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(packages["tiny"], folder)
    (folder / "overlays" / "small.json").write_text('{"model": {"context_length": 64}}')
    assert reader.read(folder, "small").context_length == 64 and reader.read(folder).context_length == 512
    (folder / "overlays" / "broken.json").write_text('{"model": ')
    with pytest.raises(Refused, match=r"broken\.json: expected JSON"):
        reader.read(folder, "broken")
    (folder / "overlays" / "wrong.json").write_text('{"model": {"context_length": 513}}')
    with pytest.raises(Refused, match="context_length: expected at most 512"):
        reader.read(folder, "wrong")


@pytest.mark.parametrize(
    ("config", "overlay", "expected"),
    [
        ({}, {}, {}),
        ({"a": 1}, {}, {"a": 1}),
        ({"a": 1}, {"a": 2, "b": 3}, {"a": 2, "b": 3}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}, {"a": {"b": 1, "c": 3}}),
        ({"a": {"b": {"c": 1, "d": 2}}}, {"a": {"b": {"c": 9}}}, {"a": {"b": {"c": 9, "d": 2}}}),
        ({"a": [1, 2, 3]}, {"a": [4]}, {"a": [4]}),
        ({"a": {"b": 1}}, {"a": None}, {"a": None}),
        ({"a": {"b": 1}}, {"a": [1]}, {"a": [1]}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": 1}}),
        ({"a": False}, {"a": 0}, {"a": 0}),
    ],
)
def test_objects_are_merged_and_everything_else_is_replaced(config: Any, overlay: Any, expected: Any) -> None:
    """As JSON merge patch (RFC 7396) has it, except that null stays null. Neither argument changes."""
    before = copy.deepcopy((config, overlay))
    found = overlays.merged(config, overlay)
    assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)
    assert (config, overlay) == before


# In a run


def test_what_each_does_to_a_package(packages: Mapping[str, Path]) -> None:
    for name in ("tiny", "linked"):
        whole = reader.read(packages[name])
        plain, latency = (reader.read(packages[name], overlay) for overlay in ("plain", "latency"))
        assert whole.mtp is not None and plain.mtp is None and latency.mtp == whole.mtp
        assert (whole.max_batch_size, plain.max_batch_size, latency.max_batch_size) == (100, 100, 1)
        assert whole.target == plain.target == latency.target


def test_plain_decoding_drafts_nothing(trained_package: Path, trained_checkpoint: Path) -> None:
    reference = np.load(trained_checkpoint / "reference.npz")
    engine = runtime.Engine(runtime.load(trained_package, overlay="plain"), runtime.EngineOptions(num_blocks=4))
    request = engine.submit(reference["prompt_0"].tolist(), max_new_tokens=8)
    while engine.has_work:
        engine.step()
    assert list(request.token_ids)[-8:] == reference["greedy_0"].tolist()[:8]
    with pytest.raises(Refused):
        engine.submit(reference["prompt_0"].tolist(), max_new_tokens=8, draft_tokens=3)
