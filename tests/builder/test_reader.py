"""reader.read() takes nothing on trust: configuration and graphs must say the same."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest

from builder import reader
from builder.errors import Refused
from tests.builder.test_genai_config import at, objects

Document = dict[str, Any]


@pytest.fixture
def package(packages: Mapping[str, Path], tmp_path: Path) -> Path:
    """A copy of the tiny package."""
    folder = tmp_path / "package"
    shutil.copytree(packages["tiny"], folder)
    return folder


def rewrite(folder: Path, document: Document) -> None:
    (folder / "genai_config.json").write_text(json.dumps(document))


def config_of(folder: Path) -> Document:
    document: Document = json.loads((folder / "genai_config.json").read_text("utf-8"))
    return document


def test_a_package_reads_as_it_was_exported(packages: Mapping[str, Path]) -> None:
    package = reader.read(packages["tiny"])
    assert package.full_layers == (3,) and package.linear_layers == (0, 1, 2)
    assert (package.capacity, package.max_draft_tokens, package.linear_num_key_heads) == (4, 3, 2)
    assert (package.vocab_size, package.context_length, package.block_size, package.max_batch_size) == (
        96,
        512,
        256,
        100,
    )
    assert package.eos_token_ids == (89,) and package.checkpoints == 0
    assert package.target.io.input("past.2.conv").shape == ("batch_size", 128, 3)
    assert package.target.io.output("logits").dtype == "float16"
    assert package.mtp is not None and package.mtp.io.output("hidden_states_out").shape == ("num_tokens", 64)


def test_options_survive(packages: Mapping[str, Path]) -> None:
    assert reader.read(packages["headless"]).mtp is None
    assert reader.read(packages["headless"]).context_length == 100
    bare = reader.read(packages["no capture"])
    assert (bare.capacity, bare.max_draft_tokens, bare.linear_num_key_heads) == (0, 0, 0)
    assert reader.read(packages["dense"]).checkpoints == 4 and reader.read(packages["dense bfloat16"]).checkpoints == 2
    assert reader.read(packages["bfloat16"]).target.io.output("logits").dtype == "float32"


@pytest.mark.parametrize("file", ["model.onnx", "mtp.onnx"])
@pytest.mark.parametrize("side", ["input", "output"])
def test_a_renamed_graph_tensor_is_refused_by_name(package: Path, file: str, side: str) -> None:
    """Every input and output of both graphs, one at a time."""
    original = onnx.load(package / file, load_external_data=False)
    for index, value in enumerate(getattr(original.graph, side)):
        model = onnx.ModelProto.FromString(original.SerializeToString())
        getattr(model.graph, side)[index].name = "renamed"
        onnx.save(model, package / file)
        with pytest.raises(Refused) as caught:
            reader.read(package)
        assert f"{file} {side}s " in str(caught.value), value.name
        assert f" {value.name}: " in str(caught.value) or " renamed: " in str(caught.value)
    onnx.save(original, package / file)
    reader.read(package)


def test_a_name_that_only_the_configuration_has_is_refused(package: Path) -> None:
    document = config_of(package)
    document["model"]["decoder"]["inputs"]["attention_mask"] = "attention_mask"
    rewrite(package, document)
    with pytest.raises(Refused, match=r"model\.onnx inputs attention_mask: .*only in the configuration"):
        reader.read(package)


def test_a_layer_that_the_graph_does_not_have_is_refused(package: Path) -> None:
    document = config_of(package)
    document["model"]["decoder"]["state_groups"][0]["layer_ids"] = [2, 3]
    rewrite(package, document)
    with pytest.raises(Refused, match=r"model\.onnx inputs past_key_values\.2\.key: "):
        reader.read(package)


@pytest.mark.parametrize("name", ["model.onnx", "mtp.onnx", "genai_config.json"])
def test_a_missing_file_is_refused(package: Path, name: str) -> None:
    (package / name).unlink()
    with pytest.raises(Refused, match=name.replace(".", r"\.")):
        reader.read(package)


@pytest.mark.parametrize("content", [b"", b"\x00garbage", b"\xff" * 100])
def test_a_file_that_is_no_model_is_refused(package: Path, content: bytes) -> None:
    (package / "model.onnx").write_bytes(content)
    with pytest.raises(Refused, match=r"model\.onnx"):
        reader.read(package)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000, b'"text"'])
def test_a_broken_configuration_is_refused(package: Path, content: bytes) -> None:
    (package / "genai_config.json").write_bytes(content)
    with pytest.raises(Refused, match=r"genai_config\.json"):
        reader.read(package)


def test_a_graph_outside_the_package_is_refused(package: Path) -> None:
    outside = package.parent / "outside.onnx"
    shutil.copy(package / "model.onnx", outside)
    for name in ("../outside.onnx", str(outside), "sub/../model.onnx", "", ".", "..", None, 7):
        document = config_of(package)
        document["model"]["decoder"]["filename"] = name
        rewrite(package, document)
        with pytest.raises(Refused):
            reader.read(package)


def test_what_an_overlay_breaks_is_blamed_on_the_overlay(package: Path) -> None:
    path = package / "overlays" / "mine.json"
    for content, words in (
        ({"model": 5}, "with --overlay mine: "),
        ({"model": {"vocab_size": "x"}}, "with --overlay mine: genai_config.json vocab_size"),
    ):
        path.write_text(json.dumps(content))
        with pytest.raises(Refused) as caught:
            reader.read(package, "mine")
        assert str(caught.value).startswith(words)
    document = config_of(package)
    document["model"]["context_length"] = "x"
    rewrite(package, document)
    with pytest.raises(Refused, match=r"^genai_config\.json context_length"):
        reader.read(package, "mine")


def test_a_read_package_knows_its_overlay(package: Path) -> None:
    assert reader.read(package).overlay is None
    plain = reader.read(package, "plain")
    assert plain.overlay == "plain" and plain.mtp is None


def test_outputs_that_configuration_and_graph_rename_alike_are_refused_by_name(package: Path) -> None:
    """The names agree, and are none that a runtime knows."""
    document = config_of(package)
    document["model"]["decoder"]["outputs"]["hidden_states"] = "states"
    rewrite(package, document)
    model = onnx.load(package / "model.onnx", load_external_data=False)
    next(value for value in model.graph.output if value.name == "hidden_states").name = "states"
    onnx.save(model, package / "model.onnx")
    with pytest.raises(Refused, match=r"model\.onnx output hidden_states: .*found no such tensor"):
        reader.read(package)


def test_any_missing_or_mistyped_key_is_read_or_refused(package: Path) -> None:
    """Never another exception; and what the runtime relies on is refused."""
    original = config_of(package)
    refused = set()
    for path, section in objects(original):
        for key in section:
            for value in (..., None, "text", 7, [], {}, [[]], {"kind": {}}):
                document = copy.deepcopy(original)
                target = at(document, path)
                if value is ...:
                    del target[key]
                else:
                    target[key] = value
                rewrite(package, document)
                try:
                    reader.read(package)
                except Refused:
                    refused.add(".".join((*path, key)))
    needed = {
        "model",
        "engine",
        "model.decoder",
        "model.vocab_size",
        "model.context_length",
        "model.decoder.filename",
        "model.decoder.inputs",
        "model.decoder.state_groups",
        "model.decoder.state_update_capacity",
        "model.mtp.outputs",
        "engine.dynamic_batching.block_size",
    }
    assert needed <= refused
