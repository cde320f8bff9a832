"""audit(): whatever is changed in a package, some check names it, and an untouched package passes all of them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors import deserialize

import builder
from builder import digests
from builder.audit import audit
from builder.checks import Check
from builder.errors import Refused
from builder.exporter import ExportOptions
from fixtures.writer import Tiny
from tests.conftest import TinyFactory

Damage = Callable[[Path], None]


def failed(folder: Path, *, deep: bool = False) -> dict[str, str]:
    return {check.name: check.detail for check in audit(folder, deep=deep) if not check.ok}


@pytest.fixture
def package(packages: Mapping[str, Path], tmp_path: Path) -> Path:
    """A copied package of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(packages["tiny"], tmp_path / "package"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def forge(folder: Path) -> None:
    """Records the present files' digests and sizes, as somebody would who hides a change: only meaning can tell."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    for name, record in manifest["files"].items():
        file = folder / name
        record |= {"size": file.stat().st_size, "digest": digests.of_file(file, record["digest"].partition(":")[0])}
    for name, record in manifest["graphs"].items():
        record["digest"] = manifest["files"][name]["digest"]
    path.write_text(json.dumps(manifest), "utf-8")
    (folder / "build.json").unlink()


def edit_graph(name: str, edit: Callable[[onnx.GraphProto], None]) -> Damage:
    def damage(folder: Path) -> None:
        model = onnx.load(folder / name, load_external_data=False)
        edit(model.graph)
        (folder / name).write_bytes(model.SerializeToString())

    return damage


def edit_json(name: str, *keys: str | int, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        document = json.loads((folder / name).read_text("utf-8"))
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        (folder / name).write_text(json.dumps(document), "utf-8")

    return damage


def places(document: Any, depth: int) -> Iterator[tuple[str | int, ...]]:
    """Keys to every value down to a depth, lists by their first entry."""
    inner = document.items() if isinstance(document, dict) else list(enumerate(document))[:1]
    for key, value in inner:
        yield (key,)
        if depth > 1 and isinstance(value, dict | list):
            yield from ((key, *rest) for rest in places(value, depth - 1))


def test_an_untouched_package_passes(package_folder: Path) -> None:
    checks = audit(package_folder, deep=True)
    assert [check for check in checks if not check.ok and "content not checked" not in check.detail] == []
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    graphs = sorted(path.name for path in package_folder.glob("*.onnx"))
    for kind in ("interface", "operators", "aliasing", "initializers", "file"):
        assert [name for name in names if name.split()[0] == kind and name.endswith(".onnx")] == [
            f"{kind} {graph}" for graph in graphs
        ]


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a package folder"):
        audit(tmp_path)


def test_one_flipped_byte_is_named_in_every_file(package: Path) -> None:
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.name != "build.json")
    assert len(files) >= 8
    for path in files:
        name = path.relative_to(package).as_posix()
        for position in (0, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, position)
            wrong = failed(package, deep=True)
            assert ("manifest" if name == "manifest.json" else f"file {name}") in wrong, (name, position, wrong)
            flip(path, position)
    assert failed(package, deep=True) == {}


@pytest.mark.parametrize("name", ["weights.data", "model.onnx", "genai_config.json", "overlays/plain.json"])
def test_a_truncated_missing_or_linked_file_is_named(package: Path, name: str) -> None:
    content = (package / name).read_bytes()
    os.truncate(package / name, len(content) - 1)
    assert f"expected {len(content):,} bytes, found {len(content) - 1:,}" in failed(package)[f"file {name}"]
    (package / name).unlink()
    if name != "genai_config.json":
        assert f"expected a file of {len(content):,} bytes, found none" in failed(package)[f"file {name}"]
    (package.parent / "elsewhere").write_bytes(content)
    (package / name).symlink_to(package.parent / "elsewhere")
    assert "found a symbolic link" in failed(package)[f"file {name}"]


def test_what_somebody_put_beside_the_files_is_listed(package: Path) -> None:
    (package / "overlays" / "mine.json").write_text("{}")
    (package / "hook.py").write_text("raise SystemExit")
    (package / "w").symlink_to("/etc")
    (package / "gone").symlink_to("nowhere")
    (check,) = (check for check in audit(package) if check.name == "other files")
    found = "gone (a symbolic link), hook.py, overlays/mine.json, w (a symbolic link)"
    assert check == Check("other files", True, f"not the package's: {found}")


def test_a_folder_that_lies_elsewhere_is_named(package: Path, tmp_path: Path) -> None:
    """Its files are there to the byte, but not in the package: who copies it leaves them behind."""
    (package / "overlays").rename(tmp_path / "elsewhere")
    (package / "overlays").symlink_to(tmp_path / "elsewhere")
    wrong = failed(package)
    assert wrong.keys() == {"file overlays/plain.json", "file overlays/latency.json"}
    assert all("found a symbolic link" in detail for detail in wrong.values())


def test_a_package_may_be_reached_by_a_link(package: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(package)
    assert failed(tmp_path / "link", deep=True) == {}


# Linked shards


def shard(tensors: Mapping[str, Any]) -> bytes:
    """A safetensors file of what the library read from another one."""
    header, end = {}, 0
    for name, entry in tensors.items():
        offsets = [end, end + len(entry["data"])]
        header[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(bytes(entry["data"]) for entry in tensors.values())


def two_shards(folder: Path) -> Path:
    """The checkpoint's tensors in two shards of equal size in bytes."""
    stored = dict(deserialize((folder / "model.safetensors").read_bytes()))
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, own in parts.items():
        (folder / part).write_bytes(shard({name: stored[name] for name in own}))
    longest = max((folder / part).stat().st_size for part in parts)
    for part in parts:
        os.truncate(folder / part, longest)
    index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def linked(tiny: TinyFactory, out: Path, *, hash: bool = False) -> Path:
    """A linked package whose shards are its own all the same, so that a test may damage them."""
    checkpoint = two_shards(tiny("modelopt"))
    builder.export(checkpoint, out / "linked", ExportOptions(weights="link", hash=hash))
    return Path(shutil.copytree(out / "linked", out / "package"))


def test_a_linked_shard_without_a_digest_is_listed_and_fails_when_asked_for(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = linked(tiny, tmp_path)
    shallow = {check.name: check for check in audit(folder)}
    assert all(check.ok for check in shallow.values())
    assert "content not checked" in shallow["file a.safetensors"].detail
    assert failed(folder, deep=True).keys() == {"file a.safetensors", "file b.safetensors"}
    assert all("content not checked" in detail for detail in failed(folder, deep=True).values())


def test_a_hashed_linked_shard_is_checked_to_the_byte(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = linked(tiny, tmp_path, hash=True)
    assert failed(folder, deep=True) == {}
    flip(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 1)
    assert failed(folder, deep=True).keys() == {"file b.safetensors"}


def origin_of(folder: Path, origin: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> dict[str, str]:
    """Failed checks where the origin of one linked initializer was replaced."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    entry = next(own for own in manifest["initializers"]["model.onnx"].values() if own["file"] == "a.safetensors")
    entry["origin"] = origin(entry["origin"][0])
    path.write_text(json.dumps(manifest))
    (folder / "build.json").unlink(missing_ok=True)
    return failed(folder)


def halves(origin: dict[str, Any], gap: int = 0) -> list[dict[str, Any]]:
    half = origin["length"] // 2
    rest = {"offset": origin["offset"] + half + gap, "length": origin["length"] - half}
    return [origin | {"length": half}, origin | rest]


def test_a_linked_initializer_comes_from_where_it_lies(tiny: TinyFactory, tmp_path: Path) -> None:
    """A run of slices that follow each other may stand for one initializer."""
    folder = linked(tiny, tmp_path)
    assert origin_of(folder, halves) == {}
    wrong = origin_of(folder, lambda half: halves(half | {"length": 2 * half["length"]}, 8))
    assert "found a gap between them" in wrong.pop("manifest origins") and not wrong


@pytest.mark.parametrize("change", [{"shard": "b.safetensors"}, {"offset": 0}])
def test_a_linked_initializer_from_elsewhere_is_named(
    tiny: TinyFactory, tmp_path: Path, change: dict[str, Any]
) -> None:
    wrong = origin_of(linked(tiny, tmp_path), lambda origin: [origin | change])
    assert wrong.keys() == {"manifest origins"} and "where it lies" in wrong["manifest origins"]


def test_a_damaged_length_field_of_a_shard_is_a_failed_check(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = linked(tiny, tmp_path)
    flip(folder / "a.safetensors", 7)
    assert "found a length of" in failed(folder)["file a.safetensors"]


def test_swapped_shards_are_named_by_their_headers(tiny: TinyFactory, tmp_path: Path) -> None:
    """Sizes are equal and nothing was hashed: the header alone tells, without --deep."""
    folder = linked(tiny, tmp_path)
    os.rename(folder / "a.safetensors", folder / "x")
    os.rename(folder / "b.safetensors", folder / "a.safetensors")
    os.rename(folder / "x", folder / "b.safetensors")
    wrong = failed(folder)
    assert wrong.keys() == {"file a.safetensors", "file b.safetensors"}
    assert all("header: expected sha256:" in detail for detail in wrong.values())


def test_a_digest_known_from_the_hubs_cache_is_checked(tiny: TinyFactory, tmp_path: Path) -> None:
    """The cache's blob is named by its SHA-256; an export takes its word, and deep verification does not."""
    checkpoint = tiny("modelopt")
    blobs = checkpoint.parent.parent / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    digest = digests.of_file(checkpoint / "model.safetensors", "sha256").partition(":")[2]
    for name, blob in (("right", digest), ("wrong", "f" * 64)):
        shutil.copy(checkpoint / "model.safetensors", blobs / blob)
        folder = tmp_path / "snapshots" / name
        shutil.copytree(checkpoint, folder)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(blobs / blob)
        builder.export(folder, tmp_path / name, ExportOptions(weights="link"))
    assert failed(tmp_path / "right", deep=True) == {}
    wrong = failed(tmp_path / "wrong", deep=True)
    assert f"expected sha256:{'f' * 64}, found sha256:{digest}" in wrong["file model.safetensors"]


# Meaning, where digests were forged


def rename_input(graph: onnx.GraphProto) -> None:
    value = next(value for value in graph.input if value.name == "past.0.conv")
    value.name = "past.0.convolution"
    for node in graph.node:
        node.input[:] = ["past.0.convolution" if name == "past.0.conv" else name for name in node.input]


def retype_input(graph: onnx.GraphProto) -> None:
    value = next(value for value in graph.input if value.name == "past.1.recurrent")
    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def reshape_output(graph: onnx.GraphProto) -> None:
    value = next(value for value in graph.output if value.name == "state_update.1.conv_value")
    value.type.tensor_type.shape.dim.add().dim_value = 1


def swap_outputs(first: str, second: str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        names = {first: second, second: first}
        for node in graph.node:
            node.output[:] = [names.get(name, name) for name in node.output]

    return edit


def swap_inputs(first: str, second: str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        names = {first: second, second: first}
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    return edit


def unknown_attribute(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "GatedDeltaNet")
    node.attribute.append(onnx.helper.make_attribute("state_checkpoints", 4))


def retired_op(graph: onnx.GraphProto) -> None:
    next(node for node in graph.node if node.op_type == "GatedDeltaNet").op_type = "LinearAttention"


def extra_op(graph: onnx.GraphProto) -> None:
    graph.node.append(onnx.helper.make_node("Identity", ["logits"], ["unused"]))


def move(name: str, key: str, by: int) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
        entry = next(entry for entry in tensor.external_data if entry.key == key)
        entry.value = str(int(entry.value) + by)

    return edit


def append(folder: Path) -> None:
    """Bytes that no graph refers to, as an old package's leftovers would be."""
    with (folder / "weights.data").open("ab") as file:
        file.write(bytes(512))


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
FORGERIES: Mapping[str, tuple[Damage, str, str]] = {
    "renamed input": (edit_graph("model.onnx", rename_input), "configuration", "past.0.conv"),
    "retyped input": (
        edit_graph("model.onnx", retype_input),
        "interface model.onnx",
        "input past.1.recurrent: expected float32 [batch_size, 4, 16, 16], found float16",
    ),
    "reshaped output": (
        edit_graph("model.onnx", reshape_output),
        "interface model.onnx",
        "conv_value: expected float16 [batch_size, 4, 128], found float16 [batch_size, 4, 128, 1]",
    ),
    "states of two layers exchanged": (
        edit_graph("model.onnx", swap_outputs("present.0.recurrent", "present.1.recurrent")),
        "aliasing model.onnx",
        "present.0.recurrent",
    ),
    "key for value": (
        edit_graph("mtp.onnx", swap_inputs("past_key_values.0.key", "past_key_values.0.value")),
        "aliasing mtp.onnx",
        "present.0.key",
    ),
    "an attribute of an unreleased op": (
        edit_graph("model.onnx", unknown_attribute),
        "operators model.onnx",
        "state_checkpoints",
    ),
    "a retired op": (edit_graph("model.onnx", retired_op), "operators model.onnx", "found LinearAttention"),
    "an op the manifest does not name": (edit_graph("mtp.onnx", extra_op), "operators mtp.onnx", "Identity"),
    "a weight elsewhere": (edit_graph("model.onnx", move(NORM, "offset", 256)), "initializers model.onnx", NORM),
    "a weight cut short": (edit_graph("model.onnx", move(NORM, "length", -4)), "data", NORM),
    "orphaned bytes": (append, "data", "bytes that no graph uses"),
    "context": (
        edit_json("genai_config.json", "model", "context_length", value=64),
        "options",
        "context_length: expected 512 (manifest.json), found 64",
    ),
    "drafts": (
        edit_json("genai_config.json", "speculative", "max_draft_tokens", value=2),
        "options",
        "max_draft_tokens: expected 3 (manifest.json), found 2",
    ),
    "heads": (
        edit_json("genai_config.json", "model", "decoder", "num_key_value_heads", value=2),
        "interface model.onnx",
        "past_key_values.3.key: expected float16 [num_blocks, block_size, 2, 32]",
    ),
    "hidden size": (
        edit_json("genai_config.json", "model", "decoder", "hidden_size", value=128),
        "interface model.onnx",
        "hidden_states",
    ),
    "shared": (
        edit_json("genai_config.json", "model", "mtp", "shared_initializers", 0, "offset", value="512"),
        "shared initializers",
        "model.embed_tokens.weight",
    ),
    "no hidden size": (
        edit_json("genai_config.json", "model", "decoder", "hidden_size", value=None),
        "geometry",
        "genai_config.json model.decoder.hidden_size: expected an integer from 1",
    ),
    "no head size": (
        edit_json("genai_config.json", "model", "decoder", "head_size", value="32"),
        "geometry",
        "model.decoder.head_size",
    ),
    "layers as text": (
        edit_json("genai_config.json", "model", "decoder", "num_hidden_layers", value="4"),
        "geometry",
        "model.decoder.num_hidden_layers",
    ),
    "more layers than memory": (
        edit_json("genai_config.json", "model", "decoder", "num_hidden_layers", value=(1 << 31) - 1),
        "geometry",
        "model.decoder.num_hidden_layers: expected as many as the layers of state_groups, [0, 1, 2, 3]",
    ),
    "another activation type": (
        edit_json("manifest.json", "options", "dtype", value="bfloat16"),
        "manifest graphs",
        "options dtype: expected float16, as model.onnx has it, found bfloat16",
    ),
    "an older runtime": (
        edit_json("manifest.json", "graphs", "mtp.onnx", "minimum_onnxruntime", value="1.20"),
        "manifest graphs",
        "graphs mtp.onnx minimum_onnxruntime: expected 1.30, found 1.20",
    ),
    "another opset": (
        edit_json("manifest.json", "graphs", "model.onnx", "opsets", value={"ai.onnx": 20, "com.microsoft": 1}),
        "manifest graphs",
        "graphs model.onnx opsets",
    ),
    "a shorter origin": (
        edit_json("manifest.json", "initializers", "model.onnx", EMBEDDING, "origin", 0, "length", value=7),
        "manifest origins",
        f"model.onnx {EMBEDDING} origin: expected 12288 bytes, found 7",
    ),
    "no origin": (
        edit_json("manifest.json", "initializers", "model.onnx", EMBEDDING, "origin", value=[]),
        "manifest origins",
        "expected 12288 bytes, found 0",
    ),
    "a census of nothing": (
        edit_json("manifest.json", "census", value={"graphs": 5}),
        "census model.onnx",
        "AttributeError",
    ),
    "another contract": (
        edit_json("manifest.json", "contract_version", value=2),
        "configuration",
        "contract_version: expected 1, found 2",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_change_is_named_although_all_digests_agree(package: Path, name: str) -> None:
    damage, check, words = FORGERIES[name]
    damage(package)
    forge(package)
    wrong = failed(package, deep=True)
    assert not any(name.startswith("file ") for name in wrong), wrong
    assert check in wrong and words in wrong[check], wrong


SHARED = ("model", "mtp", "shared_initializers")


@pytest.mark.parametrize(
    ("keys", "value", "words"),
    [
        ((), "abc", "shared_initializers: expected a list, found abc"),
        ((), None, "shared_initializers: expected a list, found None"),
        ((0,), 7, "shared_initializers[0]: expected an object, found 7"),
        ((0,), {}, "shared_initializers[0] name: expected text, found None"),
        ((0, "data_file"), None, "shared_initializers[0] data_file: expected text"),
        ((0, "offset"), "x", f"shared_initializers[0] {EMBEDDING} offset: expected a number of bytes, found x"),
        ((0, "length"), -1, f"shared_initializers[0] {EMBEDDING} length: expected a number of bytes, found -1"),
        ((0, "offset"), "9" * 5000, f"shared_initializers[0] {EMBEDDING} offset: expected a number of bytes"),
        ((0, "shape"), [96, "64"], f"shared_initializers[0] {EMBEDDING} shape: expected an integer, found 64"),
    ],
)
def test_a_shared_initializer_of_another_type_is_named(package: Path, keys: Any, value: Any, words: str) -> None:
    edit_json("genai_config.json", *SHARED, *keys, value=value)(package)
    forge(package)
    wrong = failed(package)
    assert wrong.keys() == {"shared initializers"} and f"model.mtp.{words}" in wrong["shared initializers"]


def entry_of(key: str, value: str | None) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        tensor = next(tensor for tensor in graph.initializer if tensor.name == NORM)
        entry = next(entry for entry in tensor.external_data if entry.key == key)
        if value is None:
            tensor.external_data.remove(entry)
        else:
            entry.value = value

    return edit


def data_type(number: int) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        next(tensor for tensor in graph.initializer if tensor.name == NORM).data_type = number

    return edit


def dimension(name: str, index: int) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        value = next(value for value in (*graph.input, *graph.output) if value.name == name)
        value.type.tensor_type.shape.dim[index].dim_param = "wide"

    return edit


def rank(name: str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        value = next(value for value in (*graph.input, *graph.output) if value.name == name)
        value.type.tensor_type.shape.dim.pop()

    return edit


def element(graph: onnx.GraphProto) -> None:
    next(value for value in graph.input if value.name == "past.1.conv").type.tensor_type.elem_type = 77


def hidden_outputs(graph: onnx.GraphProto) -> None:
    """An op without the outputs whose places are looked at."""
    node = next(node for node in graph.node if "present.1.recurrent" in node.output)
    node.output[:] = ["present.1.recurrent"]


def data_in_a_node(graph: onnx.GraphProto) -> None:
    tensor = onnx.TensorProto(name="secret", data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    graph.node.append(onnx.helper.make_node("Constant", [], ["unused"], value=tensor))


@pytest.mark.parametrize(
    ("edit", "check", "words"),
    [
        (data_type(99), "configuration", f"model.onnx initializer {NORM} data_type: expected numbers, found 99"),
        (data_type(onnx.TensorProto.STRING), "configuration", f"initializer {NORM} data_type"),
        (entry_of("length", None), "configuration", f"model.onnx initializer {NORM} length"),
        (entry_of("length", "x"), "configuration", f"initializer {NORM} length: expected a number of bytes, found x"),
        (entry_of("offset", "-4"), "configuration", f"initializer {NORM} offset"),
        (entry_of("location", None), "configuration", f"initializer {NORM} location"),
        (dimension("past.0.conv", 1), "configuration", "model.onnx input past.0.conv: expected 3 dimensions"),
        (dimension("past.0.recurrent", 2), "configuration", "model.onnx input past.0.recurrent: expected 4"),
        (rank("past.0.recurrent"), "configuration", "model.onnx input past.0.recurrent: expected 4"),
        (rank("hidden_states"), "configuration", "model.onnx output hidden_states: expected 2"),
        (dimension("past.1.conv", 1), "interface model.onnx", "input past.1.conv"),
        (element, "configuration", "model.onnx input past.1.conv: expected a tensor, found type 77"),
        (hidden_outputs, "aliasing model.onnx", "output present.1.recurrent: expected output 1 of a GatedDeltaNet"),
        (data_in_a_node, "configuration", "model.onnx tensor secret: expected external data of the graph's initial"),
    ],
)
def test_damage_of_a_graph_is_the_graphs(
    package: Path, edit: Callable[[onnx.GraphProto], None], check: str, words: str
) -> None:
    edit_graph("model.onnx", edit)(package)
    forge(package)
    wrong = failed(package)
    assert check in wrong and words in wrong[check] and "genai_config" not in wrong[check], wrong


@pytest.mark.parametrize("section", ["files", "graphs", "initializers"])
def test_a_graph_that_the_manifest_leaves_out_is_named(package: Path, section: str) -> None:
    path = package / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    del manifest[section]["mtp.onnx"]
    path.write_text(json.dumps(manifest))
    (package / "build.json").unlink()
    assert f"manifest.json {section}: expected mtp.onnx, found no entry" in failed(package)["manifest contents"]


@pytest.mark.parametrize("name", ["weights.data", "genai_config.json"])
def test_a_file_without_a_digest_is_named(package: Path, name: str) -> None:
    path = package / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    del manifest["files"][name]
    path.write_text(json.dumps(manifest))
    (package / "build.json").unlink()
    assert f"files: expected {name}, found no entry" in failed(package)["manifest contents"]


def test_only_linked_shards_may_have_no_digest(package: Path) -> None:
    edit_json("manifest.json", "files", "weights.data", "digest", value=None)(package)
    (package / "build.json").unlink()
    assert "files weights.data: expected a digest, found none" in failed(package)["manifest contents"]


def test_whatever_is_changed_is_a_check_and_never_another_error(package: Path) -> None:
    """Every key of the configuration, and of the manifest down to its second level."""
    for file in ("genai_config.json", "manifest.json"):
        original = (package / file).read_bytes()
        for keys in places(json.loads(original), 5 if file == "genai_config.json" else 2):
            for value in (None, "x", [[]], 1 << 70):
                edit_json(file, *keys, value=value)(package)
                assert {f"file {file}", "manifest"} & failed(package).keys(), (keys, value)
                (package / file).write_bytes(original)


def test_a_graph_has_one_digest(package: Path) -> None:
    edit_json("manifest.json", "graphs", "model.onnx", "digest", value="sha256:00")(package)
    (package / "build.json").unlink()
    assert "graphs model.onnx digest" in failed(package)["manifest graphs"]


def test_overlapping_weights_are_named(package: Path) -> None:
    """Two initializers that share some bytes, but not all, cannot both be right."""
    data = [entry for entry in audit(package) if entry.name == "data"]
    assert data[0].ok
    model = onnx.load(package / "model.onnx", load_external_data=False)
    sized = {tensor.name: tensor for tensor in model.graph.initializer if int(np.prod(tensor.dims)) == 64}
    first = min(sized.values(), key=lambda tensor: int(tensor.external_data[1].value))
    next(entry for entry in first.external_data if entry.key == "offset").value = str(
        int(next(entry.value for entry in first.external_data if entry.key == "offset")) + 128
    )
    (package / "model.onnx").write_bytes(model.SerializeToString())
    assert {"data", "initializers model.onnx"} <= failed(package).keys()


def test_every_check_is_made_behind_a_failed_one(package: Path) -> None:
    before = [check.name for check in audit(package)]
    flip(package / "tokenizer.json" if (package / "tokenizer.json").exists() else package / "README.md", 0)
    assert [check.name for check in audit(package)] == before


def test_a_package_without_a_manifest_says_so_and_is_judged_by_its_graphs(package: Path) -> None:
    (package / "manifest.json").unlink()
    wrong = failed(package)
    assert wrong.keys() == {"manifest"} and "expected a manifest, found none" in wrong["manifest"]


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b'{"a":' * 500 + b"1" + b"}" * 500)])
def test_a_configuration_lost_or_too_deep_is_a_failed_check(package: Path, damage: Callable[[Path], None]) -> None:
    damage(package / "genai_config.json")
    assert {"file genai_config.json", "configuration"} == failed(package).keys()


def test_a_name_no_file_can_have_is_a_file_that_is_not_there(package: Path) -> None:
    edit_json("manifest.json", "files", "n" * 300, value={"size": 1, "digest": None, "header": None})(package)
    (package / "build.json").unlink()
    assert "found none" in failed(package)[f"file {'n' * 300}"]


@pytest.mark.parametrize("name", ["manifest.json", "build.json"])
def test_what_may_not_be_read_is_the_machines_fault(package: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of mode 000, which root reads all the same."""
    read_bytes = Path.read_bytes

    def forbidden(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    wrong = [check for check in audit(package) if not check.ok]
    assert all(check.machine and f"{name}: Permission denied" in check.detail for check in wrong)
    assert wrong[0].name == "manifest"


def test_a_path_that_leaves_the_package_is_never_opened(package: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    manifest = json.loads((package / "manifest.json").read_text("utf-8"))
    manifest["files"]["../secret"] = {"size": 1, "digest": digests.of_bytes(b"x"), "header": None}
    (package / "manifest.json").write_text(json.dumps(manifest))
    (package / "build.json").unlink()
    assert "found none" in failed(package)["file ../secret"]


def test_a_headless_package_has_no_head_to_check(tiny: TinyFactory, tmp_path: Path) -> None:
    builder.export(tiny("modelopt", Tiny(mtp=False)), tmp_path / "out", ExportOptions(weights="copy"))
    names = [check.name for check in audit(tmp_path / "out", deep=True)]
    assert "shared initializers" not in names and not any("mtp" in name for name in names)


# Dense checkpoints


def without(*names: str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        kept = [value for value in graph.output if value.name not in names]
        del graph.output[:]
        graph.output.extend(kept)

    return edit


def always_taken(graph: onnx.GraphProto) -> None:
    """Not where a step captures, but wherever the batch is not empty."""
    node = next(node for node in graph.node if node.op_type == "If")
    next(other for other in graph.node if node.input[0] in other.output).input[0] = "past_sequence_lengths"


def longer(graph: onnx.GraphProto) -> None:
    for value in graph.output:
        if value.name.startswith("present_checkpoints."):
            value.type.tensor_type.shape.dim[1].dim_value = 5


CHECKPOINTS = [f"present_checkpoints.{layer}.{kind}" for layer in range(3) for kind in ("conv", "recurrent")]
GROUPS = ("manifest.json", "state_groups")
DENSE_FORGERIES: Mapping[str, tuple[Damage, str, str]] = {
    "another count": (
        edit_json(*GROUPS, 0, "checkpoint_count", value=3),
        "manifest state groups",
        "state_groups[0] checkpoint_count: expected 4, as model.onnx has it, found 3",
    ),
    "another alignment": (
        edit_json(*GROUPS, 1, "checkpoint_alignment", value="left"),
        "manifest state groups",
        "state_groups[1] checkpoint_alignment: expected right, as model.onnx has it, found left",
    ),
    "no alignment": (
        edit_json(*GROUPS, 0, "checkpoint_alignment", value="middle"),
        "manifest",
        "state_groups.0.checkpoint_alignment",
    ),
    "other layers": (
        edit_json(*GROUPS, 0, "layer_ids", value=[0, 1]),
        "manifest state groups",
        "state_groups[0] layer_ids: expected [0, 1, 2], as model.onnx has it, found [0, 1]",
    ),
    "no groups": (
        edit_json(*GROUPS, value=[]),
        "manifest state groups",
        "state_groups: expected 2 groups with checkpoints, as model.onnx has them, found 0",
    ),
    "another option": (
        edit_json("manifest.json", "options", "checkpoints", value="compact"),
        "manifest state groups",
        "options checkpoints: expected dense, as model.onnx has it, found compact",
    ),
    "a missing output": (
        edit_graph("model.onnx", without("present_checkpoints.1.recurrent")),
        "configuration",
        "outputs present_checkpoints.1.recurrent: expected checkpoints of all linear-attention layers or of none",
    ),
    "no outputs": (
        edit_graph("model.onnx", without(*CHECKPOINTS)),
        "manifest state groups",
        "state_groups: expected 0 groups with checkpoints, as model.onnx has them, found 2",
    ),
    "more of them than updates": (
        edit_graph("model.onnx", longer),
        "configuration",
        "model.onnx output present_checkpoints.0.conv: expected 4, found 5",
    ),
    "those of two layers exchanged": (
        edit_graph("model.onnx", swap_outputs("present_checkpoints.0.recurrent", "present_checkpoints.1.recurrent")),
        "checkpoints model.onnx",
        "output present_checkpoints.0.recurrent: expected made of past.0.recurrent, found past.1.recurrent",
    ),
    "always made": (
        edit_graph("model.onnx", always_taken),
        "checkpoints model.onnx",
        "output present_checkpoints.0.conv: expected an If on state_update_active",
    ),
}


@pytest.mark.parametrize("name", DENSE_FORGERIES)
def test_a_change_of_checkpoints_is_named(packages: Mapping[str, Path], tmp_path: Path, name: str) -> None:
    folder = Path(shutil.copytree(packages["dense"], tmp_path / "package"))
    damage, check, words = DENSE_FORGERIES[name]
    damage(folder)
    forge(folder)
    wrong = failed(folder, deep=True)
    assert not any(name.startswith("file ") for name in wrong), wrong
    assert check in wrong and words in wrong[check], wrong


def test_a_manifest_that_promises_checkpoints_to_a_graph_without_is_named(package: Path) -> None:
    edit_json("manifest.json", "options", "checkpoints", value="dense")(package)
    forge(package)
    assert "options checkpoints: expected compact" in failed(package)["manifest state groups"]


def test_a_manifest_from_before_there_were_checkpoints_is_whole(package: Path) -> None:
    path = package / "manifest.json"
    document = json.loads(path.read_text("utf-8"))
    del document["state_groups"]
    path.write_text(json.dumps(document), "utf-8")
    (package / "build.json").unlink()
    assert failed(package) == {}
