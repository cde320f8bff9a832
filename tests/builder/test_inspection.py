"""inspect(): what it says is what the files hold."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

import builder
from builder.errors import Refused
from builder.inspection import role
from cli import main
from fixtures.writer import Config, Tensors, Tiny
from tests.builder import oracle
from tests.conftest import TinyFactory


def test_a_checkpoints_description(real_checkpoint: Path) -> None:
    found = builder.inspect(real_checkpoint)
    tensors = oracle.read_checkpoint(real_checkpoint)
    config = json.loads((real_checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    assert json.loads(json.dumps(found)) == found
    assert found["kind"] == "checkpoint" and found["model_type"] == config["model_type"]
    assert found["tensors"] == len(tensors) and found["mtp"] is True and found["warnings"] == []
    assert found["layers"] == Counter(text["layer_types"])
    for module in found["modules"]:
        assert module["shape"] == list(oracle.weight(tensors, module["module"]).shape)
        parts = (
            "weight",
            "weight_packed",
            "weight_scale",
            "weight_scale_inv",
            "weight_scale_2",
            "weight_global_scale",
        )
        stored = [tensors.get(f"{module['module']}.{part}") for part in parts]
        own = sum(len(raw.data) for raw in stored if raw)
        assert module["bytes"] == (own or 2 * math.prod(module["shape"]))  # a fused expert has no tensor of its own
    assert found["formats"] == Counter(module["format"] for module in found["modules"])


def test_the_trained_checkpoints_formats(trained_checkpoint: Path) -> None:
    """The census of the target and, less the shared LM head, of the MTP head."""
    assert builder.inspect(trained_checkpoint)["formats"] == {"nvfp4": 21, "fp8": 30, "float": 12 + 8}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("lm_head", "lm_head"),
        ("mtp.fc", "mtp.fc"),
        ("model.layers.12.mlp.gate_proj", "mlp.gate_proj"),
        ("model.language_model.layers.0.linear_attn.in_proj_a", "linear_attn.in_proj_a"),
        ("mtp.layers.0.self_attn.q_proj", "mtp.self_attn.q_proj"),
    ],
)
def test_roles(module: str, expected: str) -> None:
    assert role(module) == expected


def test_a_packages_description(packages: Mapping[str, Path]) -> None:
    for name, folder in packages.items():
        found = builder.inspect(folder)
        assert json.loads(json.dumps(found)) == found and found["kind"] == "package"
        for graph, file in (("target", "model.onnx"), ("mtp", "mtp.onnx")):
            if not (folder / file).is_file():
                assert name in ("headless", "dense bfloat16") and found["graphs"][graph] is None
                continue
            proto = oracle.graph(folder, file)
            described = found["graphs"][graph]
            assert described["file"] == file
            assert (described["inputs"], described["outputs"]) == (len(proto.input), len(proto.output))
        assert found["eos_token_ids"] == [0 if name == "trained" else 89]
        assert found["checkpoint_count"] == {"dense": 4, "dense bfloat16": 2}.get(name, 0)
        assert found["layers"]["full_attention"] == (2 if name == "trained" else 1)


def test_a_packages_graphs(package_folder: Path) -> None:
    """Census, versions and byte counts against onnx's own reading."""
    found = builder.inspect(package_folder)
    for described in filter(None, found["graphs"].values()):
        model = onnx.load(package_folder / described["file"], load_external_data=False)
        for op, count in described["ops"].items():
            domain, _, kind = op.rpartition("::")
            assert count == sum((node.domain, node.op_type) == (domain, kind) for node in oracle.nodes(model.graph))
        assert sum(described["ops"].values()) == described["nodes"] == len(list(oracle.nodes(model.graph)))
        assert described["opsets"] == {"ai.onnx": 21, "com.microsoft": 1}
        assert described["ir_version"] == model.ir_version == 10 and described["producer"] == "draftsmith"
        assert described["initializers"] == len(model.graph.initializer)
        external = {
            str(tensor.external_data): oracle.initializer(package_folder, tensor.name, described["file"]).nbytes
            for tensor in model.graph.initializer
            if tensor.external_data  # the rest are shape constants inside the graph
        }
        assert described["bytes"] == sum(external.values())
    assert found["warnings"] == []


def test_a_packages_contract(package_folder: Path) -> None:
    found = builder.inspect(package_folder)
    contract = found["contract"]
    for name in ("target", "mtp"):
        graph = found["graphs"][name]
        if graph is None:
            assert name not in contract
            continue
        proto = oracle.graph(package_folder, graph["file"])
        for side, values in (("inputs", proto.input), ("outputs", proto.output)):
            assert [spec["name"] for spec in contract[name][side]] == [value.name for value in values]
            assert [spec["shape"] for spec in contract[name][side]] == [oracle.dims(value) for value in values]
            assert {spec["dtype"] for spec in contract[name][side]} <= {
                "int64",
                "int32",
                "float16",
                "float32",
                "bfloat16",
            }
    caches = {spec["name"] for spec in contract["target"]["inputs"] if spec["name"].startswith("past_key_values.")}
    assert caches == {f"past_key_values.{i}.{kind}" for i in contract["cache_layers"] for kind in ("key", "value")}
    states = {spec["name"] for spec in contract["target"]["inputs"] if spec["name"].startswith("past.")}
    assert states == {f"past.{i}.{kind}" for i in contract["state_layers"] for kind in ("conv", "recurrent")}


def test_a_packages_provenance(packages: Mapping[str, Path]) -> None:
    folder = packages["trained"]
    provenance = builder.inspect(folder)["provenance"]
    assert provenance["files"] == {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    shared = {entry["name"]: entry["length"] for entry in provenance["shared_initializers"]}
    listed = json.loads((folder / "genai_config.json").read_text())["model"]["decoder"]["shared_initializers"]
    assert {entry["name"]: int(entry["length"]) for entry in listed}.items() <= shared.items()
    assert set(shared) - {entry["name"] for entry in listed} == {"cos_cache", "sin_cache"}
    assert shared["cos_cache"] == oracle.initializer(folder, "cos_cache").nbytes
    use = provenance["data"]["weights.data"]
    assert use["bytes"] == (folder / "weights.data").stat().st_size > use["referenced_bytes"] > sum(shared.values())
    assert builder.inspect(packages["headless"])["provenance"]["shared_initializers"] == []


def test_what_is_odd_about_a_package(trained_package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(trained_package, folder)
    (folder / "notes.txt").write_text("")
    config = json.loads((folder / "genai_config.json").read_text())
    config["model"]["decoder"]["shared_initializers"][0]["offset"] = "1"
    config["model"]["decoder"]["shared_initializers"].append("lm_head")
    del config["model"]["eos_token_id"]
    (folder / "genai_config.json").write_text(json.dumps(config))
    model = onnx.load(folder / "mtp.onnx", load_external_data=False)
    model.producer_name = "else"
    onnx.save(model, folder / "mtp.onnx")
    assert [line.partition(":")[0] for line in builder.inspect(folder)["warnings"]] == [
        "files that no part of the package refers to",
        "no stop id",
        "mtp.onnx was written by else",
        "genai_config.json lists 2 shared initializers that the graphs do not share, the first "
        "model.embed_tokens.weight",
    ]


# --- tokens, tokenizer and files of a checkpoint


def add_files(folder: Path, **documents: object) -> Path:
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def tokenizer(length: int, **added: int) -> dict[str, Any]:
    """The file of a tokenizer of `length` ids, its last ones added tokens."""
    vocab = {f"t{i}": i for i in range(length - len(added))}
    entries = [{"id": id_, "content": f"<{name}>"} for name, id_ in added.items()]
    return {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": entries}


def test_stop_ids_of_every_file(tiny: TinyFactory) -> None:
    """Case A53: the ids of each file as they stand there, and their ordered union."""
    folder = tiny(options=Tiny(vision=True), edit=lambda _, config: config.update(eos_token_id=87))
    add_files(folder, generation_config={"eos_token_id": [86, 89]}, tokenizer=tokenizer(90, end=85))
    add_files(folder, tokenizer_config={"eos_token": {"content": "<end>"}})
    found = builder.inspect(folder)
    assert found["eos_by_file"] == {
        "generation_config.json": [86, 89],
        "config.json": [87],
        "config.json text_config": [89],
        "tokenizer_config.json": [85],
    }
    assert found["eos_token_ids"] == [86, 89, 87, 85]
    (line,) = found["warnings"]
    assert "stop ids differ" in line and "generation_config.json [86, 89]" in line


def test_stop_ids_that_agree_or_are_missing(tiny: TinyFactory) -> None:
    agreeing = add_files(tiny(), generation_config={"eos_token_id": [89]})
    assert builder.inspect(agreeing)["warnings"] == []
    found = builder.inspect(tiny(edit=lambda _, config: config.pop("eos_token_id")))
    assert found["eos_by_file"] == {} and "no file names a stop id" in found["warnings"][0]


@pytest.mark.parametrize(("length", "padding", "odd"), [(90, 6, 0), (96, 0, 0), (97, -1, 1)])
def test_rows_beyond_the_tokenizer(tiny: TinyFactory, length: int, padding: int, odd: int) -> None:
    """Case A66: the difference is said; only ids that the model has no row for are odd."""
    folder = add_files(tiny(), tokenizer=tokenizer(length, a=length - 2, b=length - 1))
    found = builder.inspect(folder)
    assert (found["tokenizer"]["length"], found["tokenizer"]["padding"]) == (length, padding)
    assert found["vocab_size"] == 96 and len(found["warnings"]) == odd


def test_the_tokenizers_class_and_template(tiny: TinyFactory, trained_checkpoint: Path) -> None:
    """Case A54."""
    trained = builder.inspect(trained_checkpoint)["tokenizer"]
    assert trained == {
        "files": ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"],
        "class": "TokenizersBackend",
        "minimum_runtime": "transformers 5",
        "chat_templates": ["chat_template.jinja"],
        "length": 2048,
        "padding": 0,
    }
    folder = add_files(tiny(), tokenizer_config={"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ x }}"})
    (folder / "chat_template.jinja").write_text("{{ y }}")
    found = builder.inspect(folder)
    assert (found["tokenizer"]["class"], found["tokenizer"]["minimum_runtime"]) == ("Qwen2Tokenizer", None)
    assert (found["tokenizer"]["length"], found["tokenizer"]["padding"]) == (None, None)
    assert found["warnings"] == ["more than one chat template: chat_template.jinja, tokenizer_config.json"]


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"model": 3, "added_tokens": None},
        {"model": {"vocab": {"a": "b"}}, "added_tokens": [1, {"id": "x", "content": ""}]},
    ],
)
def test_a_tokenizer_of_any_shape(tiny: TinyFactory, document: object) -> None:
    assert builder.inspect(add_files(tiny(), tokenizer=document))["tokenizer"]["length"] == 0


def test_a_token_without_text_ends_nothing(tiny: TinyFactory) -> None:
    """A tokenizer that names no end, and an added token that has no content, have nothing in common."""
    found = builder.inspect(add_files(tiny(), tokenizer={"added_tokens": [{"id": 5}]}))
    assert found["eos_by_file"] == {"config.json": [89]}


def test_files_that_are_not_read(tiny: TinyFactory) -> None:
    folder = tiny(edit=lambda _, config: config.update(auto_map={"AutoModel": "evil.Model"}))
    names = list(oracle.read_checkpoint(folder))
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "extra.safetensors").write_bytes(b"")
    (folder / "evil.py").write_text("raise SystemExit")
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert [line.partition(":")[0] for line in builder.inspect(folder)["warnings"]] == [
        "the index lists no tensor of extra.safetensors",
        "files beside the shards that are never opened",
        "config.json auto_map names code",
    ]


def test_what_the_configuration_declares(tiny: TinyFactory) -> None:
    found = builder.inspect(tiny("compressed-tensors"))["quantization"]
    assert found == {
        "method": "compressed-tensors",
        "algorithm": "mixed-precision",
        "files": ["config.json"],
        "ignored": ["re:^mtp.*"],
    }
    assert builder.inspect(tiny())["quantization"]["files"] == ["config.json", "hf_quant_config.json"]


# --- what a person reads


def shown(path: Path, *options: str) -> str:
    result = CliRunner().invoke(main, ["inspect", str(path), *options])
    assert result.exit_code == 0 and result.stderr == "", (result.output, result.exception)
    return result.stdout


def test_a_checkpoint_in_words(tiny: TinyFactory) -> None:
    """Short lines, a table by role and format, and what is odd last."""

    def spoil(tensors: Tensors, _: Config) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][:90] = 0

    text = shown(add_files(tiny(edit=spoil), tokenizer=tokenizer(90)))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines if line[:1] in "┏┃┡│└")
    assert "12 nvfp4" in next(line for line in lines if line.startswith("stored"))
    row = next(line for line in lines if line.startswith("│ mlp.up_proj"))
    assert [cell.strip() for cell in row.strip("│").split("│")][:4] == ["mlp.up_proj", "nvfp4", "96x64", "4"]
    assert row.strip("│").split("│")[-1].strip() == "94%"
    assert "90 ids for a vocabulary of 96, 6 rows padding" in text and "convention 1 + w; conv1d C,1,K" in text
    assert lines[-2] == "odd:" and lines[-1].startswith("  - more than half of the rows are all zero, up to 94%")
    assert shown(tiny(), "--quiet").splitlines()[-1] == "odd: nothing"


def test_a_package_in_words(trained_package: Path) -> None:
    """Shapes with symbols stand in brackets, which are no markup; tensors of all layers share a row."""
    text = shown(trained_package)
    assert "[num_tokens]" in text and "past.{}.recurrent" in text and "com.microsoft::GatedDeltaNet" in text
    assert "context 4096, drafts 3, batch 100, vocabulary 2048" in text and "IR 10, ai.onnx 21, com.microsoft 1" in text
    assert "…" not in text and text.splitlines()[-1] == "odd: nothing"


def test_the_same_name_is_not_the_same_bytes(trained_package: Path, tmp_path: Path) -> None:
    """An initializer of both graphs is shared where it lies at one place, not where only its name agrees."""
    folder = tmp_path / "package"
    shutil.copytree(trained_package, folder)
    before = builder.inspect(folder)["provenance"]
    model = onnx.load(folder / "mtp.onnx", load_external_data=False)
    (moved,) = (tensor for tensor in model.graph.initializer if tensor.name == "lm_head.fp8_weight")
    next(entry for entry in moved.external_data if entry.key == "offset").value = "0"
    onnx.save(model, folder / "mtp.onnx")
    found = builder.inspect(folder)
    after = found["provenance"]
    gone = [entry for entry in before["shared_initializers"] if entry not in after["shared_initializers"]]
    assert [entry["name"] for entry in gone] == ["lm_head.fp8_weight"]
    assert before["shared_bytes"] - after["shared_bytes"] == gone[0]["length"] == 2048 * 256
    assert (
        "lists 1 shared initializers that the graphs do not share, the first lm_head.fp8_weight" in found["warnings"][0]
    )


def test_names_from_a_package_cannot_steer_the_terminal(trained_package: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    shutil.copytree(trained_package, folder)
    model = onnx.load(folder / "mtp.onnx", load_external_data=False)
    model.producer_name = "\x1b[31mred"
    model.graph.node[0].domain = "[bold]\x1b[0m"
    onnx.save(model, folder / "mtp.onnx")
    text = shown(folder)
    assert "\x1b" not in text and r"com.microsoft 1; by \x1b[31mred" in text and r"[bold]\x1b[0m::" in text


def test_names_from_a_file_cannot_steer_the_terminal(tiny: TinyFactory) -> None:
    def hostile(_: Tensors, config: Config) -> None:
        config["quantization_config"]["quant_algo"] = "\x1b[31m[bold]red"

    folder = add_files(
        tiny(edit=hostile), tokenizer_config={"tokenizer_class": "\x1b]0;title\x07"}, tokenizer=tokenizer(96)
    )
    text = shown(folder)
    assert "\x1b" not in text and "\x07" not in text and r"\x1b[31m[bold]red" in text


def test_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        builder.inspect(tmp_path)
