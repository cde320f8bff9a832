"""genai_config.json, judged by the parser of onnxruntime-genai itself and by the graphs."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from onnxruntime_genai import Config

import builder
from builder.exporter import ExportOptions
from fixtures.writer import Tiny
from tests.builder import oracle
from tests.conftest import TinyFactory

Document = dict[str, Any]


def read(folder: Path) -> Document:
    document: Document = json.loads((folder / "genai_config.json").read_text("utf-8"))
    return document


def parsed(tmp_path: Path, document: Document) -> None:
    """Raises RuntimeError where the parser refuses the document."""
    folder = tmp_path / "parsed"
    folder.mkdir(exist_ok=True)
    (folder / "genai_config.json").write_text(json.dumps(document))
    Config(str(folder))


def objects(document: Document, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Document]]:
    """Every object of a document with the keys that lead to it; lists are entered at their first element."""
    yield path, document
    for key, value in document.items():
        inner = value[0] if isinstance(value, list) and value and isinstance(value[0], dict) else value
        if isinstance(inner, dict):
            yield from objects(inner, (*path, key))


def at(document: Document, path: tuple[str, ...]) -> Document:
    for key in path:
        value = document[key]
        document = value[0] if isinstance(value, list) else value
    return document


def test_the_real_parser_accepts_every_package(package_folder: Path, tmp_path: Path) -> None:
    """And would not accept it with a key that it does not know, so it has read all of it."""
    Config(str(package_folder))
    document = json.loads((package_folder / "genai_config.json").read_text("utf-8"))
    for section in (document, document["model"], document["search"], document["engine"]["dynamic_batching"]):
        section["unknown_to_everybody"] = {}
        (tmp_path / "genai_config.json").write_text(json.dumps(document), "utf-8")
        with pytest.raises(Exception, match="unknown_to_everybody"):
            Config(str(tmp_path))
        del section["unknown_to_everybody"]


def test_the_real_parser_knows_every_key(packages: Mapping[str, Path], tmp_path: Path) -> None:
    """Each key misspelt in turn: one that the parser ignores would be one that we invented.

    Only session options are free-form: what is unknown there is handed to ONNX Runtime.
    """
    document = read(packages["trained"])
    renamed = 0
    for path, section in objects(document):
        if "session_options" in path:
            continue
        for key in section:
            mutated = copy.deepcopy(document)
            target = at(mutated, path)
            target[f"{key}x"] = target.pop(key)
            with pytest.raises(RuntimeError):
                parsed(tmp_path, mutated)
            renamed += 1
    assert renamed > 90


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [
        (("model", "decoder"), "state_update_capacity", "4"),
        (("model", "decoder", "state_groups"), "kind", "fixed"),
        (("model", "decoder", "state_groups"), "layer_ids", [3, 3]),
        (("model", "decoder", "state_groups"), "layer_ids", [99]),
        (("model", "decoder", "inputs"), "slot_mapping", "slot_mapping"),
        (("model", "mtp", "inputs"), "block_table", "block_table"),
        (("model",), "bos_token_id", None),
        (("speculative",), "max_draft_tokens", 17),
        (("engine", "dynamic_batching"), "block_size", "256"),
    ],
    ids=str,
)
def test_the_real_parser_judges_values_too(
    packages: Mapping[str, Path], tmp_path: Path, path: tuple[str, ...], key: str, value: object
) -> None:
    document = read(packages["trained"])
    at(document, path)[key] = value
    with pytest.raises(RuntimeError):
        parsed(tmp_path, document)


def expanded(section: Document, layers: Mapping[str, list[int]]) -> set[str]:
    """Names of graph tensors that a section's templates stand for."""
    found: set[str] = set()
    for name in section.values():
        kind = "paged" if ".key" in name or ".value" in name else "fixed"
        found |= {name.replace("%d", str(layer)) for layer in layers[kind]} if "%d" in name else {name}
    return found


def test_every_name_is_in_its_graph_and_every_tensor_is_named(package_folder: Path) -> None:
    model = read(package_folder)["model"]
    groups = {group["kind"]: group["layer_ids"] for group in model["decoder"]["state_groups"]}
    layers = {"paged": groups["paged_kv"], "fixed": groups["fixed_conv"]}
    assert groups["fixed_conv"] == groups["fixed_recurrent"]
    graph = oracle.graph(package_folder)
    decoder = model["decoder"]
    assert expanded(decoder["inputs"], layers) == {value.name for value in graph.input}
    outputs = {value.name for value in graph.output}
    checkpoints = {
        name for name in outputs if name.startswith("present_checkpoints.")
    }  # the parser knows no name for them
    assert len(checkpoints) == (2 * len(layers["fixed"]) if "dense" in package_folder.name else 0)
    assert expanded(decoder["outputs"], layers) == outputs - checkpoints
    assert ("mtp" in model) == (package_folder / "mtp.onnx").is_file()
    if "mtp" in model:
        head, own = oracle.graph(package_folder, "mtp.onnx"), {"paged": [0], "fixed": []}
        # The engine takes the head's paged inputs by the names of the decoder's section; the parser refuses them here.
        paged = {"block_table", "cumulative_sequence_lengths", "past_sequence_lengths", "attention_metadata"}
        assert expanded(model["mtp"]["inputs"], own) | paged == {value.name for value in head.input}
        assert expanded(model["mtp"]["outputs"], own) == {value.name for value in head.output}
        assert model["mtp"]["main_hidden_states"] in {value.name for value in graph.output}


def test_numbers_are_the_checkpoints_and_the_options(tiny: TinyFactory, tmp_path: Path) -> None:
    options = ExportOptions(max_draft_tokens=5, block_size=32, max_batch_size=7, context_length=300)
    builder.export(tiny("modelopt"), tmp_path / "out", options)
    document = read(tmp_path / "out")
    decoder = document["model"]["decoder"]
    assert document["model"]["type"] == "qwen3_5_text"
    assert document["model"]["vocab_size"] == 96 and document["model"]["eos_token_id"] == [89]
    assert {key: decoder[key] for key in ("head_size", "hidden_size", "num_attention_heads", "num_hidden_layers")} == {
        "head_size": 32,
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 4,
    }
    assert decoder["num_key_value_heads"] == document["model"]["mtp"]["num_key_value_heads"] == 1
    # One slot more than drafts: the row that anchors them is captured too.
    assert decoder["state_update_capacity"] == 6 and document["speculative"] == {"max_draft_tokens": 5}
    assert decoder["state_groups"] == [
        {"kind": "paged_kv", "layer_ids": [3]},
        {"kind": "fixed_conv", "layer_ids": [0, 1, 2], "state_update": {"capacity": 6}},
        {"kind": "fixed_recurrent", "layer_ids": [0, 1, 2], "state_update": {"capacity": 6, "key_head_count": 2}},
    ]
    batching = document["engine"]["dynamic_batching"]
    assert (batching["block_size"], batching["max_batch_size"], batching["prefix_caching"]) == (32, 7, False)
    assert document["model"]["context_length"] == 300 >= document["search"]["max_length"]
    assert oracle.initializer(tmp_path / "out", "cos_cache").shape == (300, 4)


def test_the_type_is_the_text_models_for_vision_checkpoints_too(packages: Mapping[str, Path]) -> None:
    assert {read(folder)["model"]["type"] for folder in packages.values()} == {"qwen3_5_text"}


def test_without_a_head_nothing_is_promised(packages: Mapping[str, Path]) -> None:
    document = read(packages["headless"])
    assert "mtp" not in document["model"] and "speculative" not in document
    assert "shared_initializers" not in document["model"]["decoder"]


def test_without_capture_there_are_no_drafts(packages: Mapping[str, Path]) -> None:
    document = read(packages["no capture"])
    assert "mtp" in document["model"] and "speculative" not in document
    assert document["model"]["decoder"]["state_update_capacity"] == 0
    assert not any("state_update" in group for group in document["model"]["decoder"]["state_groups"])


def test_absent_ids_are_left_out(tiny: TinyFactory, tmp_path: Path) -> None:
    """The parser refuses null."""
    builder.export(tiny("modelopt", edit=lambda tensors, config: config.pop("eos_token_id")), tmp_path / "out")
    assert not {"bos_token_id", "eos_token_id", "pad_token_id"} & set(read(tmp_path / "out")["model"])
    Config(str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05},
        ),
        ({"top_k": None, "temperature": 0.7}, {"temperature": 0.7, "top_k": 50, "top_p": 1.0}),
    ],
)
def test_sampling_defaults_are_the_checkpoints(
    tiny: TinyFactory, tmp_path: Path, generation: Document | None, expected: Document
) -> None:
    folder = tiny("modelopt", Tiny(mtp=False))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    builder.export(folder, tmp_path / "out")
    search = read(tmp_path / "out")["search"]
    assert {key: search[key] for key in expected} == expected
    Config(str(tmp_path / "out"))
