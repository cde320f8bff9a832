"""builder.diff() finds what differs and nothing else, counted apart from it with onnx, numpy and json alone."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

import builder
from builder import graph_comparison, initializers
from builder.changes import Changes, between
from builder.comparison import PackageDiff
from builder.differences_display import lines
from builder.errors import MachineError, Refused
from builder.options import ExportOptions
from builder.structure import StructureDiff
from fixtures import writer

NOTHING = Changes()
UNLIKE: Mapping[str, ExportOptions] = {
    "copied": ExportOptions(weights="copy"),
    "copied again": ExportOptions(weights="copy"),
    "linked": ExportOptions(weights="link"),
    "bfloat16": ExportOptions(weights="link", dtype="bfloat16"),
    "seven drafts": ExportOptions(weights="link", max_draft_tokens=7),
    "small blocks": ExportOptions(weights="link", block_size=16),
    "headless": ExportOptions(weights="link", mtp="off"),
    "dense": ExportOptions(weights="link", checkpoints="dense"),
}
TEXTS = {"tokenizer.json": '{"model": {}}', "chat_template.jinja": "{{ messages }}"}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One checkpoint exported with each of UNLIKE; nobody may change them, the linked ones least of all."""
    home = tmp_path_factory.mktemp("unlike")
    checkpoint = writer.write(home / "checkpoint", "modelopt")
    for name, text in TEXTS.items():
        (checkpoint / name).write_text(text)
    for name, options in UNLIKE.items():
        builder.export(checkpoint, home / name, options)
    return {name: home / name for name in UNLIKE}


@pytest.fixture
def copied(exports: Mapping[str, Path]) -> Path:
    return exports["copied"]


@pytest.fixture
def changed(copied: Path, tmp_path: Path) -> Path:
    """A copy to be changed, of a package whose weights are copies, too."""
    shutil.copytree(copied, tmp_path / "changed")
    return tmp_path / "changed"


def model_of(folder: Path, file: str = "model.onnx") -> Any:
    return onnx.load(folder / file, load_external_data=False)


def edit(folder: Path, change: Callable[[Any], object], file: str = "model.onnx") -> None:
    model = model_of(folder, file)
    change(model.graph)
    (folder / file).write_bytes(model.SerializeToString())


def edit_json(path: Path, change: Callable[[Any], object]) -> None:
    document = json.loads(path.read_text("utf-8"))
    change(document)
    path.write_text(json.dumps(document), "utf-8")


def external(folder: Path, file: str = "model.onnx") -> dict[str, tuple[str, int, int]]:
    """Data file, offset and length by initializer."""
    found = {}
    for tensor in model_of(folder, file).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        if entries:
            found[tensor.name] = entries["location"], int(entries["offset"]), int(entries["length"])
    return found


def rename(graph: Any, nodes: str = "renamed ", values: str = "renamed ") -> None:
    """Every node, and every value between nodes."""
    kept = {entry.name for entry in (*graph.input, *graph.output, *graph.initializer)} | {""}
    for node in graph.node:
        node.name = nodes + node.name
        for names in (node.input, node.output):
            names[:] = [name if name in kept else values + name for name in names]
    for entry in graph.value_info:
        entry.name = entry.name if entry.name in kept else values + entry.name


def count(structure: StructureDiff) -> tuple[int, int]:
    """Nodes removed and added."""
    removed, added = (sum(group.count for group in groups) for groups in (structure.removed, structure.added))
    return removed, added


def progress_of(a: Path, b: Path) -> tuple[PackageDiff, int]:
    """The differences, and how many bytes of weights were read for them."""
    seen = [0]
    found = builder.diff(a, b, lambda task, done, total: seen.append(done))
    return found, seen[-1]


# Packages


@pytest.mark.parametrize("name", UNLIKE)
def test_a_package_equals_itself_unread(exports: Mapping[str, Path], name: str) -> None:
    found, read = progress_of(exports[name], exports[name])
    assert found.equal and found.content_equal and read == 0
    assert list(lines(found)) == ["equal"]


def test_two_exports_are_equal_and_every_byte_of_weights_is_read_once(exports: Mapping[str, Path]) -> None:
    a, b = exports["copied"], exports["copied again"]
    found, read = progress_of(a, b)
    distinct = set(external(a).values()) | set(external(a, "mtp.onnx").values())
    assert found.equal and found.content_equal
    assert read == 2 * sum(length for _, _, length in distinct)


def test_linked_and_copied_weights_differ_by_layout_alone(exports: Mapping[str, Path]) -> None:
    found, read = progress_of(exports["linked"], exports["copied"])
    assert not found.equal and found.content_equal and read > 0
    assert set(found.files.removed) == {"model.safetensors", "transformed.data"}
    assert set(found.files.added) == {"weights.data"}
    assert found.layout.data_files.added == found.files.added
    assert not any(found.config.values()) and not any(found.graphs.values()) and not any(found.initializers.values())
    for file, counts in found.layout.initializers.items():
        places = [location for location, _, _ in external(exports["linked"], file).values()]
        assert counts == {(location, "weights.data"): many for location, many in Counter(places).items()}
    assert next(lines(found)).startswith("different only in layout;")


def test_linked_packages_share_what_needs_no_reading(exports: Mapping[str, Path]) -> None:
    """Only what export transformed has bytes of its own."""
    found, read = progress_of(exports["linked"], exports["small blocks"])
    own = {place for file in ("model.onnx", "mtp.onnx") for place in external(exports["linked"], file).values()}
    assert read == 2 * sum(length for location, _, length in own if location == "transformed.data")
    assert {name: changes for name, changes in found.config.items() if changes} == {
        "genai_config.json": Changes(changed={"engine.dynamic_batching.block_size": (256, 16)})
    }
    assert found.provenance == Changes(changed={"options.block_size": (256, 16)})
    assert not found.equal and not found.content_equal and not found.layout
    assert not any(found.graphs.values()) and not any(found.initializers.values())


def test_more_drafts_are_an_attribute_and_the_shapes_that_follow(exports: Mapping[str, Path]) -> None:
    found = builder.diff(exports["linked"], exports["seven drafts"])
    nodes = model_of(exports["linked"]).graph.node
    capturing = [node.name for node in nodes if any(entry.name == "state_update_capacity" for entry in node.attribute)]
    graph = found.graphs["model.onnx"]
    change = ({"attribute state_update_capacity": 4}, {"attribute state_update_capacity": 8})
    assert graph.nodes == Changes(changed=dict.fromkeys(capturing, change))
    assert count(graph.structure) == (len(capturing), len(capturing))
    assert [group.count for group in graph.structure.removed] == [3, 3]
    outputs = {entry.name for entry in model_of(exports["linked"]).graph.output if "state_update" in entry.name}
    assert set(graph.outputs.changed) == outputs and not graph.outputs.added and not graph.inputs
    assert graph.outputs.changed["state_update.0.conv_value"] == (
        {"shape": ["batch_size", 4, 128]},
        {"shape": ["batch_size", 8, 128]},
    )
    assert not found.graphs["mtp.onnx"]
    assert found.config["overlays/latency.json"].changed == {"speculative.max_draft_tokens": (3, 7)}


def test_dense_checkpoints_are_outputs_a_branch_and_what_the_manifest_says_of_them(exports: Mapping[str, Path]) -> None:
    found = builder.diff(exports["linked"], exports["dense"])
    graph = found.graphs["model.onnx"]
    names = {f"present_checkpoints.{layer}.{kind}" for layer in range(3) for kind in ("conv", "recurrent")}
    assert set(graph.outputs.added) == names and not graph.outputs.removed and not graph.outputs.changed
    assert not graph.inputs and not found.graphs["mtp.onnx"] and not found.config["genai_config.json"]
    assert count(graph.structure) == (0, 2)
    assert sorted(str(group.b).split("(")[0].split(" -> ")[-1] for group in graph.structure.added) == ["Cast", "If"]
    changes = found.provenance
    assert changes.changed == {"options.checkpoints": ("compact", "dense")} and changes.removed == {"state_groups": []}
    assert changes.added["state_groups[1].checkpoint_alignment"] == "right"
    assert changes.added["state_groups[0].checkpoint_count"] == 4


def test_a_package_without_the_head_lacks_its_files(exports: Mapping[str, Path]) -> None:
    found = builder.diff(exports["linked"], exports["headless"])
    assert set(found.files.removed) == {"mtp.onnx", "overlays/plain.json"} and not found.files.added
    assert set(found.graphs) == set(found.initializers) == {"model.onnx"}
    assert not any(found.graphs.values()) and not any(found.initializers.values())
    assert found.config["genai_config.json"].removed["model.mtp.filename"] == "mtp.onnx"
    assert not found.content_equal


def test_another_type_names_every_node_that_differs(exports: Mapping[str, Path]) -> None:
    """The nodes without a like are those by which op, attributes and kinds of inputs differ, counted apart."""
    a, b = exports["linked"], exports["bfloat16"]
    graph = builder.diff(a, b).graphs["model.onnx"]
    keys = [Counter(own_keys(model_of(folder).graph)) for folder in (a, b)]
    assert count(graph.structure) == ((keys[0] - keys[1]).total(), (keys[1] - keys[0]).total())
    assert any("Cast(to=10)" in str(group.a) and group.count == 8 for group in graph.structure.removed)
    assert graph.inputs.changed["past.0.conv"] == ({"dtype": "float16"}, {"dtype": "bfloat16"})


def own_keys(graph: Any) -> Iterator[tuple[Any, ...]]:
    """A node by itself, without names."""
    tensors = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in graph.initializer}
    inputs, outputs = ({entry.name for entry in side} for side in (graph.input, graph.output))
    for node in graph.node:
        kinds = [tensors.get(name, "input" if name in inputs else bool(name)) for name in node.input]
        attributes = sorted(str(entry) for entry in node.attribute)
        made = [(bool(name), name in outputs) for name in node.output]
        yield node.domain, node.op_type, tuple(attributes), tuple(kinds), tuple(made)


@pytest.mark.parametrize(("a", "b"), [("linked", name) for name in UNLIKE if name != "linked"])
def test_the_other_way_round_is_the_mirror_image(exports: Mapping[str, Path], a: str, b: str) -> None:
    there, back = (
        json.loads(json.dumps(builder.diff(exports[one], exports[other]).to_json())) for one, other in ((a, b), (b, a))
    )
    assert mirrored(there) == mirrored(mirrored(back))


def mirrored(value: Any) -> Any:
    """A and B exchanged. Groups lose their examples and their order, which one side decides."""
    if isinstance(value, list):
        return sorted(map(mirrored, value), key=str)
    if not isinstance(value, dict):
        return value
    other = {"added": "removed", "removed": "added", "a": "b", "b": "a"}
    facts = {other.get(key, key): mirrored(inner) for key, inner in value.items() if key != "example"}
    return dict(sorted(facts.items()))


# Files


def test_text_files_are_told_by_their_bytes(copied: Path, changed: Path) -> None:
    """Of the same size, with a manifest that still has the old digest."""
    (changed / "tokenizer.json").write_text('{"model": []}')
    (changed / "chat_template.jinja").unlink()
    (changed / "vocab.json").write_text("{}")
    found = builder.diff(copied, changed)
    assert set(found.tokenizer.changed) == set(found.files.changed) == {"tokenizer.json"}
    assert found.tokenizer.removed == found.files.removed == {"chat_template.jinja": {"bytes": 14}}
    assert found.tokenizer.added == {"vocab.json": {"bytes": 2}}
    assert not found.content_equal


def test_what_belongs_to_a_run_is_ignored(copied: Path, changed: Path) -> None:
    (changed / "build.json").write_text("no JSON")
    (changed / ".cache").mkdir()
    (changed / ".cache" / "download").write_text("metadata")
    edit_json(changed / "manifest.json", lambda manifest: manifest["files"].clear())
    assert builder.diff(copied, changed).equal


def test_the_manifest_is_compared_by_key_and_is_no_content(copied: Path, changed: Path) -> None:
    edit_json(changed / "manifest.json", lambda manifest: manifest["producer"].update(numpy="0.0", torch="1"))
    found = builder.diff(copied, changed)
    assert set(found.provenance.changed) == {"producer.numpy"} and found.provenance.added == {"producer.torch": "1"}
    assert found.files == NOTHING and found.content_equal and not found.equal
    (changed / "manifest.json").unlink()
    found = builder.diff(copied, changed)
    assert set(found.files.removed) == {"manifest.json"} and found.content_equal and not found.equal
    assert "source.name" in found.provenance.removed and not found.provenance.added


def test_the_card_is_no_content_and_an_unknown_file_is(copied: Path, changed: Path) -> None:
    (changed / "README.md").write_text("other words")
    assert builder.diff(copied, changed).content_equal
    (changed / "preprocessor_config.json").write_text("{}")
    assert not builder.diff(copied, changed).content_equal


# Configuration


def test_configuration_is_compared_by_value(copied: Path, changed: Path) -> None:
    """Spaces and the order of keys are how it is written, not what it says."""
    path = changed / "genai_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True))
    found = builder.diff(copied, changed)
    assert set(found.files.changed) == {"genai_config.json"} and found.content_equal and not found.equal
    assert next(lines(found)).startswith("different only in how files are written;")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"x.y": 1}, {"x": {"y": 1}}),
        ({"x": [{"y": 1}]}, {"x[0]": {"y": 1}}),
        ({"x": 1}, {"x": True}),
        ({"x": 1}, {"x": 1.0}),
        ({"x": {}}, {"x": []}),
        ({"x": {}}, {}),
        ({"x": None}, {}),
        ({"x": [1, 2]}, {"x": [2, 1]}),
        ({"x": [[1], []]}, {"x": [[], [1]]}),
    ],
)
def test_no_two_configurations_look_alike(copied: Path, changed: Path, before: Any, after: Any) -> None:
    other = changed.with_name("other")
    shutil.copytree(changed, other)
    for folder, part in ((changed, before), (other, after)):
        edit_json(folder / "genai_config.json", set_search(part))
    assert not builder.diff(changed, other).content_equal
    assert builder.diff(changed, changed).equal


def set_search(part: Any) -> Callable[[Any], object]:
    return lambda config: config.update(search=part)


def test_not_a_number_equals_itself() -> None:
    assert between({"x": math.nan}, {"x": math.nan}) == NOTHING


def test_a_shared_initializers_place_is_content_where_its_bytes_are_not_equal(copied: Path, changed: Path) -> None:
    """The configuration of B points at zeros that align the next tensor, not at the scales."""
    shared = {"name": "lm_head.fp8_weight_scale"}

    def move(config: Any) -> None:
        entries = config["model"]["decoder"]["shared_initializers"]
        shared.update(next(entry for entry in entries if entry["name"] == shared["name"]))
        next(entry for entry in entries if entry["name"] == shared["name"])["offset"] = "0"

    edit_json(changed / "genai_config.json", move)
    found = builder.diff(copied, changed)
    path = 'model.decoder.shared_initializers."lm_head.fp8_weight_scale".offset'
    assert found.config["genai_config.json"] == Changes(changed={path: (shared["offset"], "0")})
    assert not found.content_equal and not found.layout


# Graphs


def test_a_renaming_is_one_and_nothing_else(copied: Path, changed: Path) -> None:
    edit(changed, rename)
    found = builder.diff(copied, changed)
    graph, nodes = found.graphs["model.onnx"], model_of(copied).graph.node
    assert graph.renamed.nodes == {node.name: f"renamed {node.name}" for node in nodes}
    outputs = {entry.name for entry in model_of(copied).graph.output} | {""}
    assert graph.renamed.values == sum(name not in outputs for node in nodes for name in node.output)
    assert graph.nodes == graph.values == NOTHING and not graph.structure and graph.first == (None, None)
    assert found.content_equal and not found.equal
    text = "\n".join(lines(found))
    assert f"model.onnx renamed, same structure: {len(nodes)} nodes" in text and "by name" not in text


def test_renamed_values_alone_are_a_renaming(copied: Path, changed: Path) -> None:
    edit(changed, lambda graph: rename(graph, nodes=""))
    renamed = builder.diff(copied, changed).graphs["model.onnx"].renamed
    assert renamed.nodes == {} and renamed.values > 0


def swap_states(graph: Any) -> None:
    """The first two layers take each other's convolution state: alike from near by, and another model."""
    for node in graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = {"past.0.conv": "past.1.conv", "past.1.conv": "past.0.conv"}.get(name, name)


@pytest.mark.parametrize("renamed", [False, True])
def test_distant_wiring_is_no_renaming(copied: Path, changed: Path, renamed: bool) -> None:
    edit(changed, swap_states)
    if renamed:
        edit(changed, rename)
    found = builder.diff(copied, changed)
    graph = found.graphs["model.onnx"]
    prefix = "renamed " if renamed else ""
    first = "layers.0/mixer/VarlenCausalConvWithState_node_8"
    assert not graph.renamed and not graph.structure and not found.content_equal
    assert graph.first == (first, prefix + first)
    assert len(graph.nodes.changed) == (0 if renamed else 2)
    assert "model.onnx structure: the same parts, named or wired otherwise" in list(lines(found))


def test_swapped_outputs_are_no_renaming(copied: Path, changed: Path) -> None:
    def swap(graph: Any) -> None:
        other = {"present.0.conv": "present.1.conv", "present.1.conv": "present.0.conv"}
        for node in graph.node:
            node.output[:] = [other.get(name, name) for name in node.output]

    edit(changed, swap)
    edit(changed, rename)
    found = builder.diff(copied, changed)
    assert not found.graphs["model.onnx"].renamed and not found.content_equal


def test_one_attribute(copied: Path, changed: Path) -> None:
    def alter(graph: Any) -> None:
        node = next(node for node in graph.node if node.op_type == "GatedRMSNorm")
        next(entry for entry in node.attribute if entry.name == "epsilon").f = 0.5

    edit(changed, alter)
    graph = builder.diff(copied, changed).graphs["model.onnx"]
    name = next(node.name for node in model_of(copied).graph.node if node.op_type == "GatedRMSNorm")
    before = float(np.float32(1e-6))
    assert graph.nodes == Changes(changed={name: ({"attribute epsilon": before}, {"attribute epsilon": 0.5})})
    assert [group.example for group in (*graph.structure.removed, *graph.structure.added)] == [name, name]
    assert graph.first == (name, name)


def insert_before_gemms(graph: Any) -> None:
    """An Identity before every Gemm, every node numbered anew, as an exporter does that learned to emit it."""
    nodes = []
    for node in graph.node:
        if node.op_type == "Gemm":
            nodes.append(helper.make_node("Identity", [node.input[0]], [f"same {node.output[0]}"]))
            node.input[0] = nodes[-1].output[0]
        nodes.append(node)
    for i, node in enumerate(nodes):
        node.name = f"{node.op_type}_{i}"
    del graph.node[:]
    graph.node.extend(nodes)


def test_a_repeated_change_is_one_line(copied: Path, changed: Path) -> None:
    """Two Gemms of each of three layers take what the norm before them makes, in two kinds of layer."""
    edit(changed, insert_before_gemms)
    found = builder.diff(copied, changed)
    structure = found.graphs["model.onnx"].structure
    assert structure.removed == ()
    assert [(group.count, group.b) for group in structure.added] == [
        (4, "SkipSimplifiedLayerNormalization -> Identity -> Gemm"),
        (2, "SimplifiedLayerNormalization -> Identity -> Gemm"),
    ]
    assert (
        model_of(changed).graph.node[next(iter(positions(changed, structure.added[0].example)))].op_type == "Identity"
    )
    line = next(line for line in lines(found) if "4 x" in line)
    assert line.startswith("  4 x SkipSimplifiedLayerNormalization -> Identity -> Gemm, e.g. Identity_")


def positions(folder: Path, name: str) -> Iterator[int]:
    return (i for i, node in enumerate(model_of(folder).graph.node) if node.name == name)


def test_nodes_in_another_order_compute_the_same(copied: Path, changed: Path) -> None:
    """The second node depends on nothing the first one makes."""

    def swap(graph: Any) -> None:
        first, second = graph.node[0], graph.node[1]
        assert not set(first.output) & set(second.input)
        both = [second.SerializeToString(), first.SerializeToString()]
        for node, data in zip((first, second), both, strict=True):
            node.ParseFromString(data)

    edit(changed, swap)
    found = builder.diff(copied, changed)
    assert found.content_equal and not found.graphs["model.onnx"] and not found.equal


def noted(model: Any, name: str) -> Any:
    """The type that the graph notes for an initializer or for what a node makes."""
    return next(entry for entry in model.graph.value_info if entry.name == name).type.tensor_type


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda model: setattr(model, "ir_version", 9), "model"),
        (lambda model: setattr(model.graph, "doc_string", "words"), "model"),
        (lambda model: model.functions.add(name="f", domain="d"), "model"),
        (lambda model: model.opset_import.add(domain="d", version=1), "opsets"),
        (lambda model: setattr(model.opset_import[0], "version", 22), "opsets"),
        (
            lambda model: setattr(noted(model, "sin_cache"), "elem_type", 1 + noted(model, "sin_cache").elem_type),
            "values",
        ),
        (lambda model: noted(model, "v_Gather_1").shape.dim.add(dim_value=1), "values"),
        (lambda model: noted(model, "v_Gather_1").ClearField("elem_type"), "values"),
        (lambda model: model.graph.input[0].type.tensor_type.ClearField("shape"), "inputs"),
        (lambda model: model.graph.output[0].type.tensor_type.shape.dim[0].Clear(), "outputs"),
    ],
)
def test_every_part_of_a_model_counts(copied: Path, changed: Path, change: Callable[[Any], object], part: str) -> None:
    model = model_of(changed)
    change(model)
    (changed / "model.onnx").write_bytes(model.SerializeToString())
    found = builder.diff(copied, changed)
    graph = found.graphs["model.onnx"]
    parts = ("inputs", "outputs", "opsets", "model", "values", "nodes", "renamed", "structure")
    assert [name for name in parts if getattr(graph, name)] == [part]
    assert not found.content_equal


def test_nodes_without_names_or_with_the_same_are_told_apart(copied: Path, changed: Path) -> None:
    def clear(graph: Any) -> None:
        for i, node in enumerate(graph.node):
            node.name = "" if i % 2 else "same"

    edit(changed, clear)
    found = builder.diff(copied, changed)
    graph = found.graphs["model.onnx"]
    assert len(set(graph.renamed.nodes.values())) == len(graph.renamed.nodes) == len(model_of(copied).graph.node)
    assert "same #2" in graph.renamed.nodes.values() and found.content_equal


def chain(ops: list[int], names: str = "", rows: int = 1) -> Any:
    """Unary nodes, each of the one before or of one further back, as `ops` tell: op is ops % 3, distance ops // 3."""
    kinds = ("Relu", "Abs", "Neg")
    nodes = []
    for i, choice in enumerate(ops):
        source = i - 1 - choice // 3
        taken = f"{names}v{source}" if source >= 0 else "x"
        nodes.append(helper.make_node(kinds[choice % 3], [taken], [f"{names}v{i}"], name=f"{names}n{i}"))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [rows])
    return helper.make_model(helper.make_graph(nodes, "g", [x], []))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 8), max_size=12), st.lists(st.integers(0, 8), max_size=12))
def test_counts_are_those_of_the_nodes_alone_and_symmetric(first: list[int], second: list[int]) -> None:
    a, b = chain(first), chain(second, "other ")
    there, back = graph_comparison.compare(a, b), graph_comparison.compare(b, a)
    alone = [Counter((node.op_type, node.input[0] == "x") for node in model.graph.node) for model in (a, b)]
    assert count(there.structure) == ((alone[0] - alone[1]).total(), (alone[1] - alone[0]).total())
    assert count(back.structure) == count(there.structure)[::-1]
    assert back.structure.nearby == there.structure.nearby
    assert Counter(group.count for group in back.structure.rewired) == Counter(
        group.count for group in there.structure.rewired
    )
    same = expressions(a) == expressions(b) and not there.structure
    assert there.content_equal == back.content_equal == same


def expressions(model: Any) -> Counter[str]:
    """Every node's value written out in full, down to the input."""
    text = {"x": "x"}
    for node in model.graph.node:
        text[node.output[0]] = f"{node.op_type}({text[node.input[0]]})"
    return Counter(text[node.output[0]] for node in model.graph.node)


def graph_of(text: str, **attributes: dict[str, Any]) -> Any:
    """A model of lines `name: outputs = op inputs`, its nodes' attributes by name. A - stands for what is left out.

    Inputs x and y, outputs p and q, initializers v and w of one type.
    """
    nodes = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, outputs, op, *inputs = line.replace(":", "").replace("=", "").split()
        left_out = [["" if one == "-" else one for one in names] for names in (inputs, outputs.split(","))]
        nodes.append(helper.make_node(op, *left_out, name=name, **attributes.get(name, {})))
    interface = [
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in names] for names in ("xy", "pq")
    ]
    weights = [helper.make_tensor(name, TensorProto.FLOAT, [1], [1]) for name in "vw"]
    return helper.make_model(helper.make_graph(nodes, "g", *interface, weights))


TWINS = """
    a: a,b = Split x
    b: c = Mul a v
    c: d = Mul b w
    d: e = Add c y
    e: p = Neg e
    f: q = Neg d
"""
"""Two branches that are alike but for their weights and what becomes of them."""


@pytest.mark.parametrize(
    ("before", "after", "first"),
    [
        ("Mul a v", "Mul a w", "b"),  # another weight of the same type
        ("Mul a v", "Mul b v", "b"),  # another output of the same node
        ("Mul a v", "Mul v a", "b"),  # another order
        ("Mul a v", "Div a v", "b"),
        ("Add c y", "Add c x", "d"),  # another input of the graph
        ("Add c y", "Add c -", "d"),
        ("Add c y", "Add c", "d"),
        ("a,b = Split", "a,b,- = Split", "a"),
    ],
)
def test_what_is_no_renaming_names_the_first_node_that_differs(before: str, after: str, first: str) -> None:
    a, b = graph_of(TWINS), graph_of(TWINS.replace(before, after))
    rename(b.graph)
    found = graph_comparison.compare(a, b)
    assert not found.renamed and not found.content_equal
    assert found.first == (first, f"renamed {first}")


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: setattr(graph.node[1], "domain", "com.microsoft"),
        lambda graph: setattr(graph.node[1], "overload", "other"),
        lambda graph: graph.node[1].attribute.append(helper.make_attribute("axis", 1)),
        lambda graph: setattr(graph.initializer[0], "data_type", TensorProto.INT32),
        lambda graph: graph.initializer[0].dims.append(1),
    ],
)
def test_nor_is_another_node_or_weight(change: Callable[[Any], object]) -> None:
    a, b = graph_of(TWINS), graph_of(TWINS)
    change(b.graph)
    rename(b.graph)
    found = graph_comparison.compare(a, b)
    assert not found.renamed and not found.content_equal and found.first == ("b", "renamed b")
    assert count(found.structure) == (1, 1) and found.structure.removed[0].example == "b"


def test_the_structure_knows_which_output_is_used() -> None:
    """Names aside, what differs is which half of x is negated."""
    a, b = (graph_of(f"a: {halves} = Split x\nb: p = Neg a\nc: q = Exp b") for halves in ("a,b", "b,a"))
    rename(b.graph)
    assert graph_comparison.compare(a, b).structure


def test_nodes_out_of_order_are_never_called_a_renaming() -> None:
    """ONNX wants producers first. Where they are not, no proof is tried, and names count."""
    lines_of = "\n".join(reversed(TWINS.strip().splitlines()))
    a, b = graph_of(lines_of), graph_of(lines_of)
    assert not graph_comparison.compare(a, b)
    rename(b.graph)
    found = graph_comparison.compare(a, b)
    assert not found.renamed and not found.content_equal and not found.structure


def branching(*inner: str, outer: str = "a: c = Neg x\nb: d = Exp x") -> Any:
    """A model whose If takes values of the graph around it by their names alone."""
    branches = {}
    for name, line in zip(("then_branch", "else_branch"), inner, strict=True):
        op, taken = line.split()
        made = helper.make_tensor_value_info(f"{name} made", TensorProto.FLOAT, [4])
        node = helper.make_node(op, [taken], [made.name], name=f"{name} inner")
        branches[name] = helper.make_graph([node], name, [], [made])
    return graph_of(f"{outer}\nc: p = If y\nd: q = Add c d", c=branches)


def test_what_a_branch_takes_by_name_is_an_input_like_any_other() -> None:
    """Two values exchanged outside of the branch: no text of it differs, and it computes something else."""
    a = branching("Abs c", "Abs d")
    b = branching("Abs c", "Abs d", outer="a: d = Neg x\nb: c = Exp x")
    next(node for node in b.graph.node if node.op_type == "Add").input[:] = ["d", "c"]
    found = graph_comparison.compare(a, b)
    assert not found.content_equal and not found.renamed and found.structure
    assert not graph_comparison.compare(a, branching("Abs c", "Abs d"))
    renamed = branching("Abs c", "Abs d")
    for node in renamed.graph.node:
        node.name = f"other {node.name}"
    found = graph_comparison.compare(a, renamed)
    assert found.renamed and found.content_equal


@pytest.mark.parametrize("inner", [("Abs d", "Abs d"), ("Neg c", "Abs d"), ("Abs x", "Abs d")])
def test_another_branch_is_another_node(inner: tuple[str, str]) -> None:
    found = graph_comparison.compare(branching("Abs c", "Abs d"), branching(*inner))
    assert not found.content_equal and found.first == ("c", "c") and set(found.nodes.changed) == {"c"}


def test_another_spelling_of_onnx_own_domain_is_no_change() -> None:
    a, b = graph_of(TWINS), graph_of(TWINS)
    for node in b.graph.node:
        node.domain = "ai.onnx"
    assert not graph_comparison.compare(a, b)


def test_a_change_is_told_apart_from_what_lies_around_it() -> None:
    """One node of eleven alike becomes another: it, its neighbours, and theirs, as far as radius 2 sees."""
    a, b = chain([0] * 11), chain([0] * 5 + [1] + [0] * 5)
    found = graph_comparison.compare(a, b).structure
    groups = [
        [(group.count, group.a, group.b, group.example) for group in part] for part in (found.removed, found.added)
    ]
    assert groups == [[(1, "Relu -> Relu -> Relu", None, "n5")], [(1, None, "Relu -> Abs -> Relu", "n5")]]
    rewired = {(group.a, group.b, group.example) for group in found.rewired}
    assert rewired == {
        ("Relu -> Relu -> Relu", "Relu -> Relu -> Abs", "n4"),
        ("Relu -> Relu -> Relu", "Abs -> Relu -> Relu", "n6"),
    }
    assert found.nearby == 2


@pytest.mark.parametrize(
    ("before", "after", "added"),
    [
        ("Relu Abs Exp Neg", "Relu Exp Abs Exp Relu Neg", {"Relu -> Exp -> Abs", "Exp -> Relu -> Neg"}),
        (
            "Relu Exp Abs",
            "Relu Tanh Exp Neg Exp Abs",
            {"Relu -> Tanh -> Exp", "Tanh -> Exp -> Neg", "Exp -> Neg -> Exp"},
        ),
    ],
)
def test_a_node_that_kept_one_neighbour_is_not_taken_for_a_new_one(before: str, after: str, added: set[str]) -> None:
    """The new Exp comes first in the file; the old one still has its producer, or its user."""
    models = []
    for i, ops in enumerate((before.split(), after.split())):
        steps = zip(ops, ["x", *(f"{i}{j}" for j in range(len(ops)))], strict=False)
        models.append(graph_of("\n".join(f"{i}n{j}: {i}{j} = {op} {taken}" for j, (op, taken) in enumerate(steps))))
    found = graph_comparison.compare(*models).structure
    assert {group.b for group in found.added} == added and not found.removed


def test_equal_nodes_used_otherwise_are_no_renaming() -> None:
    """Two nodes make the same value; B's users share one of them. Both compute the same, in different structures."""
    a, b = chain([0, 3, 5, 5]), chain([0, 3, 5, 8], "other ")
    found = graph_comparison.compare(a, b)
    assert expressions(a) == expressions(b) and found.first == (None, None)
    assert found.structure and not found.renamed and len(found.nodes.removed) == 4 and not found.content_equal


def test_thousands_of_nodes_take_no_time() -> None:
    """Comparing every node with every other one would take minutes."""
    a, b = chain([i % 7 for i in range(6000)]), chain([1, *(i % 7 for i in range(6000))], "other ")
    started = time.perf_counter()
    assert not graph_comparison.compare(a, b).content_equal
    assert time.perf_counter() - started < 5


# Initializers


def flip(folder: Path, name: str) -> None:
    """One bit in the middle of an initializer's bytes."""
    file, offset, length = external(folder)[name]
    assert (folder / file).stat().st_nlink == 1, "a linked file is the checkpoint's own"
    with (folder / file).open("r+b") as data:
        data.seek(offset + length // 2)
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("model.layers.0.mlp.gate_proj.nvfp4_weight", ["model.onnx"]),
        ("model.embed_tokens.weight", ["model.onnx", "mtp.onnx"]),
    ],
)
def test_one_flipped_bit_is_found_by_name(copied: Path, changed: Path, name: str, graphs: list[str]) -> None:
    """The manifest still has the digest of the file as it was. An embedding is both graphs'."""
    flip(changed, name)
    found = builder.diff(copied, changed)
    altered = {file: set(changes.changed) for file, changes in found.initializers.items() if changes}
    assert altered == {file: {name} for file in graphs}
    before, after = found.initializers["model.onnx"].changed[name]
    assert before["digest"] != after["digest"] and before["digest"].startswith("xxh3_128:")
    assert not found.content_equal and not found.layout and found.files == NOTHING
    assert not any(found.config.values()) and not any(found.graphs.values())


def test_another_checkpoint_differs_in_what_numpy_finds_different(copied: Path, tmp_path: Path) -> None:
    checkpoint = writer.write(tmp_path / "checkpoint", "modelopt", writer.Tiny(seed=1))
    builder.export(checkpoint, tmp_path / "package", ExportOptions(weights="copy", mtp="off"))
    found = builder.diff(copied, tmp_path / "package")
    for file, changes in found.initializers.items():
        sides = [
            {tensor.name: tensor.raw_data for tensor in onnx.load(folder / file).graph.initializer}
            for folder in (copied, tmp_path / "package")
        ]
        assert set(changes.changed) == {name for name, data in sides[0].items() if data != sides[1][name]}
        assert "cos_cache" in sides[0] and "cos_cache" not in changes.changed


def test_one_file_is_not_one_place(copied: Path, changed: Path) -> None:
    """Two weights of one type exchange their offsets, in a file that both packages share."""
    (changed / "weights.data").unlink()
    (changed / "weights.data").hardlink_to(copied / "weights.data")
    names = [f"model.layers.0.mlp.{part}_proj.nvfp4_weight" for part in ("gate", "up")]

    def swap(graph: Any) -> None:
        one, other = (next(t for t in graph.initializer if t.name == name) for name in names)
        one.name, other.name = other.name, one.name

    edit(changed, swap)
    found, read = progress_of(copied, changed)
    assert set(found.initializers["model.onnx"].changed) == set(names)
    assert read == sum(external(copied)[name][2] for name in names)


def test_types_shapes_and_names(copied: Path, changed: Path) -> None:
    """sin_cache is read as integers, cos_cache is flat, one constant is gone and one new."""

    def alter(graph: Any) -> None:
        tensors = {tensor.name: tensor for tensor in graph.initializer}
        tensors["sin_cache"].data_type = TensorProto.INT32
        tensors["cos_cache"].dims[:] = [512 * 4]
        tensors["const_1d_0"].name = "new"

    edit(changed, alter)
    changes = builder.diff(copied, changed).initializers["model.onnx"]
    assert changes == Changes(
        added={"new": {"dtype": "int64", "shape": [1], "bytes": 8}},
        removed={"const_1d_0": {"dtype": "int64", "shape": [1], "bytes": 8}},
        changed={
            "sin_cache": ({"dtype": "float32"}, {"dtype": "int32"}),
            "cos_cache": ({"shape": [512, 4]}, {"shape": [2048]}),
        },
    )


def test_inline_and_external_bytes_are_the_same_bytes(copied: Path, changed: Path) -> None:
    whole = onnx.load(changed / "model.onnx")
    (changed / "model.onnx").write_bytes(whole.SerializeToString())
    found = builder.diff(copied, changed)
    assert found.content_equal and not found.equal
    moved = found.layout.initializers["model.onnx"]
    assert moved == {("weights.data", "model.onnx"): len(external(copied))}


ARRAYS = [
    np.array([1.5, -2, 3], dtype)
    for dtype in ("f4", "f8", "f2", "c8", "c16", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
]
ARRAYS += [np.array([1, 0, 100], dtype) for dtype in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")]
ARRAYS += [np.array([-1, -2, -100], dtype) for dtype in ("i1", "i2", "i4", "i8")]
ARRAYS += [np.array([2**64 - 1], "u8"), np.array([2**32 - 1], "u4"), np.array([2**16 - 1], "u2"), np.zeros(0, "f4")]
ARRAYS += [np.array([1, -2, 7], ml_dtypes.int4), np.array([1, 15, 7], ml_dtypes.uint4)]
ARRAYS += [np.array([0.5, -6, 3], ml_dtypes.float4_e2m1fn)]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype} {array.size} {array.flat[:1]}")
def test_typed_fields_have_the_bytes_of_raw_data(array: np.ndarray[Any, Any]) -> None:
    """As onnx itself writes one and the other."""
    raw = numpy_helper.from_array(array, "t")
    values = array.tolist() if array.dtype.kind in "?iufc" else array.astype(np.float32).tolist()
    typed = helper.make_tensor("t", raw.data_type, array.shape, values)
    assert raw.HasField("raw_data") and not typed.HasField("raw_data")
    assert initializers.inline_bytes(typed) == initializers.inline_bytes(raw) == raw.raw_data


def test_texts_are_told_apart_by_their_boundaries() -> None:
    one, other = (helper.make_tensor("t", TensorProto.STRING, [2], texts) for texts in ([b"ab", b"c"], [b"a", b"bc"]))
    assert initializers.inline_bytes(one) != initializers.inline_bytes(other)


# Refusals


def point(graph: Any, key: str, value: str) -> None:
    tensor = next(tensor for tensor in graph.initializer if tensor.name == "sin_cache")
    entries = {entry.key: entry.value for entry in tensor.external_data} | {key: value}
    del tensor.external_data[:]
    for name, text in entries.items():
        tensor.external_data.add(key=name, value=text)


@pytest.mark.parametrize(
    "location",
    ["../changed/weights.data", "{}/weights.data", "overlays/plain.json", ".", "..", "", "weights.data\0", "x" * 300],
)
def test_data_outside_the_package_is_refused_by_name(copied: Path, changed: Path, location: str) -> None:
    """Files that are there, too: a package is what its folder holds."""
    edit(changed, lambda graph: point(graph, "location", location.format(changed)))
    with pytest.raises(Refused, match=r"^model\.onnx tensor sin_cache: expected a file of the package, by plain name"):
        builder.diff(copied, changed)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("offset", "-1"),
        ("offset", "250000"),
        ("offset", "much"),
        ("length", "99999999999999999999"),
        ("length", "-4"),
        ("length", "9" * 5000),
    ],
)
def test_data_outside_its_file_is_refused_by_name(copied: Path, changed: Path, key: str, value: str) -> None:
    edit(changed, lambda graph: point(graph, key, value))
    with pytest.raises(Refused, match=r"^model\.onnx tensor sin_cache: expected .*, found .*; export"):
        builder.diff(copied, changed)


@pytest.mark.parametrize("value", ["../changed/weights.data", None, 7, ["weights.data"], "\ud800"])
def test_shared_data_outside_the_package_is_refused_by_name(copied: Path, changed: Path, value: Any) -> None:
    def alter(config: Any) -> None:
        config["model"]["mtp"]["shared_initializers"][0]["data_file"] = value

    edit_json(changed / "genai_config.json", alter)
    with pytest.raises(Refused, match=r"mtp shared initializer model\.embed_tokens\.weight"):
        builder.diff(copied, changed)


def test_data_hidden_in_a_node_is_refused(copied: Path, changed: Path) -> None:
    def hide(graph: Any) -> None:
        inner = helper.make_graph([], "inner", [], [], [TensorProto(name="hidden", data_type=1, dims=[1])])
        inner.initializer[0].data_location = TensorProto.EXTERNAL
        graph.node[0].attribute.append(helper.make_attribute("body", inner))

    edit(changed, hide)
    with pytest.raises(Refused, match="tensor hidden"):
        builder.diff(copied, changed)


@pytest.mark.parametrize(
    "file", ["genai_config.json", "model.onnx", "mtp.onnx", "manifest.json", "overlays/plain.json"]
)
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe\x00damaged"])
def test_damaged_files_are_refused_by_name(copied: Path, changed: Path, file: str, content: bytes) -> None:
    (changed / file).write_bytes(content)
    for pair in ((copied, changed), (changed, copied)):
        with pytest.raises(Refused, match=file):
            builder.diff(*pair)


@pytest.mark.parametrize("name", ["nothing", "checkpoint", "file", "x" * 300])
def test_only_packages_are_compared(copied: Path, tmp_path: Path, name: str) -> None:
    writer.write(tmp_path / "checkpoint", "modelopt")
    (tmp_path / "file").write_text("{}")
    for pair in ((copied, tmp_path / name), (tmp_path / name, copied)):
        with pytest.raises(Refused, match=r"expected a package folder with genai_config\.json and model\.onnx"):
            builder.diff(*pair)


def test_a_file_that_shrinks_meanwhile_is_the_machines_fault(copied: Path, changed: Path) -> None:
    def shrink(task: str, done: int, total: int) -> None:
        os.truncate(changed / "weights.data", 0)

    with pytest.raises(MachineError, match=r"weights\.data: it became shorter"):
        builder.diff(changed, copied, shrink)


def test_names_cannot_steer_the_terminal(copied: Path, changed: Path) -> None:
    evil = "\x1b[2J\r\n\u202e"

    def alter(graph: Any) -> None:
        graph.node[0].name = evil
        graph.node[1].attribute.append(helper.make_attribute(evil, evil))
        graph.initializer[0].name = graph.node[0].input[1] = evil

    edit(changed, alter)
    (changed / f"{evil}.txt").write_text("")
    edit_json(changed / "genai_config.json", lambda config: config.update({evil: [{evil: evil}]}))
    found = builder.diff(copied, changed)
    assert evil in found.initializers["model.onnx"].added
    text = list(lines(found))
    assert len(text) > 10 and all(line.isprintable() for line in text)
    json.dumps(found.to_json())
