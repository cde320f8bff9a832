"""The exported graphs as files: interfaces, types, shapes, wiring and versions. No weight is read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

import builder
from builder import contract
from builder.checkpoint import Checkpoint
from builder.config import parse_config
from builder.graph import Graph, element_type
from builder.weights import Stored
from fixtures.writer import CONFIG
from tests.builder import oracle

SYMBOLS = {
    "num_tokens",
    "batch_size",
    "batch_size + 1",
    "max_num_blocks",
    "num_blocks",
    "block_size",
    "num_checkpoint_rows",
}
GEMM_OPS = {
    "nvfp4": "MatMulBlockQuantizedFp4Weight",
    "fp8": "MatMulBlockQuantizedFp8Weight",
    "float": "Gemm",
}


def files(package: Path) -> list[str]:
    return sorted(path.name for path in package.glob("*.onnx"))


def interface(values: Any) -> dict[str, tuple[str, list[int | str | None]]]:
    names = {number: name for name, number in onnx.TensorProto.DataType.items()}
    return {value.name: (names[value.type.tensor_type.elem_type], oracle.dims(value)) for value in values}


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}


def nodes(graph: onnx.GraphProto, op_type: str) -> list[onnx.NodeProto]:
    return [node for node in graph.node if node.op_type == op_type]


def producers(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    return {name: node for node in graph.node for name in node.output if name}


# Interfaces, written out by hand from the layout of onnxruntime-genai 0.18's paged engine


def packed_inputs() -> dict[str, tuple[str, list[int | str]]]:
    return {
        "input_ids": ("INT64", ["num_tokens"]),
        "position_ids": ("INT64", [3, "num_tokens"]),
        "block_table": ("INT32", ["batch_size", "max_num_blocks"]),
        "cumulative_sequence_lengths": ("INT32", ["batch_size + 1"]),
        "past_sequence_lengths": ("INT32", ["batch_size"]),
        "attention_metadata": ("INT32", [3]),
    }


def states(side: str, dtype: str) -> dict[str, tuple[str, list[int | str]]]:
    """Convolution channels 2 * 2 * 16 + 4 * 16, of which 3 earlier rows are kept; states are value-major."""
    found: dict[str, tuple[str, list[int | str]]] = {}
    for layer in range(3):
        found[f"{side}.{layer}.conv"] = (dtype, ["batch_size", 128, 3])
        found[f"{side}.{layer}.recurrent"] = ("FLOAT", ["batch_size", 4, 16, 16])
    return found


def updates(dtype: str, capacity: int) -> dict[str, tuple[str, list[int | str]]]:
    """A capsule holds decays (4), keys (2 * 16) and deltas (4 * 16) of every captured token."""
    found: dict[str, tuple[str, list[int | str]]] = {}
    for layer in range(3):
        found[f"state_update.{layer}.conv_value"] = (dtype, ["batch_size", capacity, 128])
        found[f"state_update.{layer}.recurrent_capsule"] = ("FLOAT", ["batch_size", capacity * (4 + 32 + 64)])
    return found


CAPTURE = {"state_update_capture_count": ("INT32", ["batch_size"]), "state_update_active": ("INT32", [1])}
CACHE = ["num_blocks", "block_size", 1, 32]


@pytest.mark.parametrize(
    ("name", "dtype", "logits", "capacity"),
    [
        ("tiny", "FLOAT16", "FLOAT16", 4),
        ("bfloat16", "BFLOAT16", "FLOAT", 8),  # bfloat16 logits would lose the order of close tokens
        ("headless", "FLOAT16", "FLOAT16", 4),
        ("no capture", "FLOAT16", "FLOAT16", 0),
    ],
)
def test_the_targets_interface(packages: Mapping[str, Path], name: str, dtype: str, logits: str, capacity: int) -> None:
    graph = oracle.graph(packages[name])
    cache = {f"past_key_values.3.{part}": (dtype, CACHE) for part in ("key", "value")}
    new_cache = {f"present.3.{part}": (dtype, CACHE) for part in ("key", "value")}
    rows = {"logits": (logits, ["num_tokens", 96]), "hidden_states": (dtype, ["num_tokens", 64])}
    captured = updates(dtype, capacity) if capacity else {}
    assert interface(graph.input) == packed_inputs() | states("past", dtype) | cache | (CAPTURE if capacity else {})
    assert interface(graph.output) == rows | states("present", dtype) | new_cache | captured


@pytest.mark.parametrize(("name", "dtype", "count"), [("dense", "FLOAT16", 4), ("dense bfloat16", "BFLOAT16", 2)])
def test_dense_checkpoints_are_two_outputs_more_of_each_layer(
    packages: Mapping[str, Path], name: str, dtype: str, count: int
) -> None:
    graph = oracle.graph(packages[name])
    shapes = {"conv": (dtype, [128, 3]), "recurrent": ("FLOAT", [4, 16, 16])}
    more = {
        f"present_checkpoints.{layer}.{kind}": (kind_of, ["num_checkpoint_rows", count, *shape])
        for layer in range(3)
        for kind, (kind_of, shape) in shapes.items()
    }
    outputs = interface(graph.output)
    assert {key: outputs.pop(key) for key in list(outputs) if key in more} == more
    assert outputs.items() >= (states("present", dtype) | updates(dtype, count)).items()
    assert not any("checkpoints" in key for key in outputs)


def test_dense_checkpoints_change_nothing_else(packages: Mapping[str, Path]) -> None:
    """Inputs, nodes, their order, and the configuration are those of the compact package, with two nodes more."""
    compact, dense = (oracle.graph(packages[name]) for name in ("tiny", "dense"))
    assert list(dense.input) == list(compact.input)
    assert list(dense.output)[: len(compact.output)] == list(compact.output)
    added = [node for node in dense.node if node.op_type == "If" or node.output[0] in nodes(dense, "If")[0].input]
    assert [node.op_type for node in added] == ["Cast", "If"] and added[0].input == ["state_update_active"]
    rest = [(node.op_type, len(node.input), len(node.output)) for node in dense.node if node not in added]
    assert rest == [(node.op_type, len(node.input), len(node.output)) for node in compact.node]
    for file in ("genai_config.json", "mtp.onnx", "weights.data", "overlays/plain.json"):
        assert (packages["dense"] / file).read_bytes() == (packages["tiny"] / file).read_bytes(), file


def test_every_value_of_a_branch_has_a_type(packages: Mapping[str, Path]) -> None:
    for name in ("dense", "dense bfloat16"):
        (node,) = nodes(oracle.graph(packages[name]), "If")
        for attribute in node.attribute:
            branch = attribute.g
            typed = {value.name for value in (*branch.value_info, *branch.output) if value.type.tensor_type.elem_type}
            assert {output for inner in branch.node for output in inner.output} <= typed, attribute.name
            assert {inner.domain for inner in branch.node} == {""}, "kernels of every provider"


@pytest.mark.parametrize(
    ("name", "dtype", "logits"), [("tiny", "FLOAT16", "FLOAT16"), ("bfloat16", "BFLOAT16", "FLOAT")]
)
def test_the_heads_interface(packages: Mapping[str, Path], name: str, dtype: str, logits: str) -> None:
    graph = oracle.graph(packages[name], "mtp.onnx")
    hidden = (dtype, ["num_tokens", 64])
    cache = {f"past_key_values.0.{part}": (dtype, CACHE) for part in ("key", "value")}
    new_cache = {f"present.0.{part}": (dtype, CACHE) for part in ("key", "value")}
    assert interface(graph.input) == packed_inputs() | {"hidden_states": hidden} | cache
    assert interface(graph.output) == {"logits": (logits, ["num_tokens", 96]), "hidden_states_out": hidden} | new_cache


def test_the_contract_declares_what_the_files_hold(packages: Mapping[str, Path]) -> None:
    """The runtime and the configuration rely on contract.py; the files were compared with the layout above."""
    names = {"float16": "FLOAT16", "float32": "FLOAT", "bfloat16": "BFLOAT16", "int32": "INT32", "int64": "INT64"}
    specs = {"model.onnx": contract.target_io, "mtp.onnx": contract.mtp_io}
    for file, spec_of in specs.items():
        graph = oracle.graph(packages["tiny"], file)
        arguments = (4,) if file == "model.onnx" else ()
        spec = spec_of(parse_config(CONFIG), "float16", *arguments)  # type: ignore[operator]
        for side, values in ((spec.inputs, graph.input), (spec.outputs, graph.output)):
            declared = {tensor.name: (names[tensor.dtype], list(tensor.shape)) for tensor in side}
            assert declared == interface(values) and list(declared) == [value.name for value in values]


# Every value


def test_every_value_has_a_type_a_rank_and_known_dimensions(package_folder: Path) -> None:
    for file in files(package_folder):
        graph = oracle.graph(package_folder, file)
        values = {value.name: value for value in [*graph.value_info, *graph.input, *graph.output]}
        for node in graph.node:
            for name in filter(None, node.output):
                assert name in values, f"{file}: nothing is known of {name} of {node.op_type}"
                tensor = values[name].type.tensor_type
                assert tensor.elem_type and tensor.HasField("shape"), name
                for dim in oracle.dims(values[name]):
                    assert (isinstance(dim, int) and dim > 0) or dim in SYMBOLS, f"{file}: {name} has {dim}"


def follow(graph: onnx.GraphProto, known: list[str], used: set[str]) -> None:
    """Adds what nodes make and read, in the order of execution; branches know what is made outside before them."""
    for node in graph.node:
        for name in filter(None, node.input):
            assert name in known, f"{node.name} reads {name} before anything makes it"
            used.add(name)
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                assert not attribute.g.input and not attribute.g.initializer
                used |= {value.name for value in attribute.g.output}
                follow(attribute.g, known, used)
        known += filter(None, node.output)


def test_no_name_dangles_and_nothing_is_left_over(package_folder: Path) -> None:
    for file in files(package_folder):
        graph = oracle.graph(package_folder, file)
        known = [value.name for value in graph.input] + [tensor.name for tensor in graph.initializer]
        used: set[str] = {value.name for value in graph.output}
        follow(graph, known, used)
        assert len(known) == len(set(known)), "a name is made twice"
        paged_only = {"attention_metadata", "block_table"} if not nodes(graph, "PagedAttention") else set()
        unread = {name for name in known if name not in used} - paged_only
        assert not unread, f"{file}: nobody reads {sorted(unread)[:3]}"
        names = [node.name for node in oracle.nodes(graph)]
        assert all(names) and len(names) == len(set(names))


def without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with external initializers as inputs, and ONNX Runtime's own op of the standard domain in another.

    onnx.checker wants to open data files itself, and does not know SimplifiedLayerNormalization.
    """
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    external = [tensor for tensor in copy.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    for tensor in external:
        value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        copy.graph.input.append(value)
        copy.graph.initializer.remove(tensor)
    for node in nodes(copy.graph, "SimplifiedLayerNormalization"):
        node.domain = "private"
    copy.opset_import.append(onnx.helper.make_opsetid("private", 1))
    return copy


def without_foreign_ops(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of standard ops alone: what the others make comes in from outside, typed as the graph declares it.

    With one op it does not know in a graph, onnx's shape inference keeps every error to itself.
    """
    graph = model.graph
    values = {value.name: value for value in [*graph.value_info, *graph.output]}
    foreign = [node for node in graph.node if node.domain]
    graph.input.extend(values[name] for node in foreign for name in node.output if name)
    for node in foreign:
        graph.node.remove(node)
    return model


def checked(model: onnx.ModelProto) -> None:
    whole = without_weights(model)
    onnx.checker.check_model(whole, full_check=True)
    onnx.checker.check_model(without_foreign_ops(whole), full_check=True)


def test_onnx_checker_passes_with_shape_inference(package_folder: Path) -> None:
    for file in files(package_folder):
        checked(onnx.load(package_folder / file, load_external_data=False))


def test_onnx_checker_would_object(packages: Mapping[str, Path]) -> None:
    """The copies that are checked are not so far from the graph that nothing could fail."""

    def narrowed_twice(graph: onnx.GraphProto) -> None:
        cast = producers(graph)[nodes(graph, "Gemm")[0].input[1]]
        cast.attribute[0].i = onnx.TensorProto.FLOAT  # a product of float16 and float32

    def untransposed(graph: onnx.GraphProto) -> None:
        del nodes(graph, "Gemm")[0].attribute[:]

    def wrongly_split(graph: onnx.GraphProto) -> None:
        split = nodes(graph, "Split")[0]
        split.input[1] = nodes(graph, "Split")[-1].input[1]

    def wrongly_declared(graph: onnx.GraphProto) -> None:
        dims = next(value for value in graph.value_info if value.name == nodes(graph, "Gemm")[0].output[0])
        dims.type.tensor_type.shape.dim[1].dim_value += 1

    def unknown_attribute(graph: onnx.GraphProto) -> None:
        nodes(graph, "Gemm")[0].attribute.append(onnx.helper.make_attribute("transC", 1))

    def wrongly_branched(graph: onnx.GraphProto) -> None:
        (node,) = nodes(graph, "If")
        branch = next(attribute.g for attribute in node.attribute if attribute.name == "then_branch")
        next(inner for inner in branch.node if inner.op_type == "Unsqueeze").input[0] = "past.0.conv"

    model = onnx.load(packages["dense"] / "model.onnx", load_external_data=False)
    checked(model)
    wrongly_branched(model.graph)
    with pytest.raises((onnx.shape_inference.InferenceError, onnx.checker.ValidationError)):
        checked(model)

    for fault in (narrowed_twice, untransposed, wrongly_split, wrongly_declared, unknown_attribute):
        model = onnx.load(packages["tiny"] / "model.onnx", load_external_data=False)
        fault(model.graph)
        with pytest.raises((onnx.shape_inference.InferenceError, onnx.checker.ValidationError)):
            checked(model)


def session_error(model: str | bytes) -> Exception:
    """What ONNX Runtime says when it makes a session on the CPU."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for per_session in (True, False):  # other tests may have given this process a global thread pool
        options.use_per_session_threads = per_session
        try:
            ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        except Exception as error:
            if "use_per_session_threads" not in str(error):
                return error
    raise AssertionError("the session was made")


def test_the_runtime_lacks_kernels_and_nothing_else(package_folder: Path) -> None:
    """As written, the half-precision graphs pass ONNX Runtime's own checks of types, attributes and shapes."""
    for file in files(package_folder):
        error = session_error(str(package_folder / file))
        assert isinstance(error, ort_state.NotImplemented), f"{file}: {error}"
        assert "NOT_IMPLEMENTED" in str(error) and "implementation for" in str(error)


def test_the_runtime_tells_an_invalid_graph_apart(packages: Mapping[str, Path], tmp_path: Path) -> None:
    for fault in ("attribute", "input", "type"):
        model = onnx.load(packages["tiny"] / "model.onnx", load_external_data=False)
        node = nodes(model.graph, "VarlenCausalConvWithState")[0]
        if fault == "attribute":
            node.attribute.append(onnx.helper.make_attribute("max_checkpoints", 4))
        elif fault == "input":
            node.input[0] = "nobody"
        else:
            node.input[0], node.input[2] = node.input[2], node.input[0]
        for path in packages["tiny"].glob("weights.data"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        onnx.save(model, tmp_path / "model.onnx")
        assert not isinstance(session_error(str(tmp_path / "model.onnx")), ort_state.NotImplemented), fault


def test_versions_are_pinned(package_folder: Path) -> None:
    """Whatever onnx is installed; ONNX Runtime 1.30 reads these."""
    for file in files(package_folder):
        model = onnx.load(package_folder / file, load_external_data=False)
        assert model.ir_version == 10
        assert {opset.domain: opset.version for opset in model.opset_import} == {"": 21, "com.microsoft": 1}
        assert not model.functions and not model.metadata_props
        assert {node.domain for node in model.graph.node} == {"", "com.microsoft"}
        assert not any(
            node.metadata_props for node in oracle.nodes(model.graph)
        )  # paths and line numbers of the exporter


def test_graph_files_are_small_and_weights_external(package_folder: Path) -> None:
    for file in files(package_folder):
        assert (package_folder / file).stat().st_size < 1 << 20
        for tensor in oracle.graph(package_folder, file).initializer:
            external = tensor.data_location == onnx.TensorProto.EXTERNAL
            assert external != tensor.name.startswith("const_"), tensor.name
            assert external or len(tensor.raw_data) <= 64


# Wiring


def test_the_trained_checkpoints_census(trained_package: Path) -> None:
    """NVFP4: 7 MLPs. FP8: 6 * 3 + 2 * 4 in mixers, the last MLP, the LM head. Float: 6 * 2 gates, and 8 in the head."""
    counts = {
        file: Counter(node.op_type for node in oracle.graph(trained_package, file).node)
        for file in files(trained_package)
    }
    matmuls = {file: {kind: count[op] for kind, op in GEMM_OPS.items()} for file, count in counts.items()}
    assert matmuls == {
        "model.onnx": {"nvfp4": 21, "fp8": 30, "float": 12},
        "mtp.onnx": {"nvfp4": 0, "fp8": 1, "float": 8},
    }
    mixers = ("PagedAttention", "GatedDeltaNet", "VarlenCausalConvWithState", "GatedRMSNorm")
    assert [counts["model.onnx"][op] for op in mixers] == [2, 6, 6, 6]
    assert [counts["mtp.onnx"][op] for op in mixers] == [1, 0, 0, 0]


def test_the_report_counts_what_the_files_hold(trained_checkpoint: Path, tmp_path: Path) -> None:
    report = builder.export(trained_checkpoint, tmp_path / "out").to_json()
    for name, file in (("target", "model.onnx"), ("mtp", "mtp.onnx")):
        graph = oracle.graph(tmp_path / "out", file)
        counts = Counter(node.op_type for node in graph.node)
        assert report["graphs"][name] == {
            "file": file,
            "nodes": len(graph.node),
            "matmuls": {kind: counts[op] for kind, op in GEMM_OPS.items()},
            "layers": {"full_attention": counts["PagedAttention"], "linear_attention": counts["GatedDeltaNet"]},
            "dequantized": {},
            "experts": {},
        }


def test_attributes_of_the_tiny_model(packages: Mapping[str, Path]) -> None:
    graph = oracle.graph(packages["tiny"])
    (attention,) = nodes(graph, "PagedAttention")
    assert attributes(attention) == {
        "num_heads": 2,
        "kv_num_heads": 1,
        "scale": pytest.approx(32**-0.5, rel=1e-7),
        "do_rotary": 0,
        "local_window_size": -1,
    }
    for node, heads in zip(nodes(graph, "MRotaryEmbedding"), (2, 1), strict=True):
        assert attributes(node) == {
            "num_heads": heads,
            "rotary_embedding_dim": 8,
            "interleaved": 0,
            "mrope_section": [2, 1, 1],
            "mrope_layout": 1,
            "is_packed_batching": 1,
        }
    for node in nodes(graph, "GatedDeltaNet"):
        assert attributes(node) == {
            "update_rule": b"gated_delta",
            "scale": 0.0,
            "gate_activation": b"qwen",
            "beta_activation": b"sigmoid",
            "qk_l2_norm": 1,
            "chunk_size": 64,
            "state_update_capacity": 4,
        }
    for node in nodes(graph, "VarlenCausalConvWithState"):
        assert attributes(node) == {"activation": b"silu", "state_update_capacity": 4}
    for node in nodes(graph, "GatedRMSNorm"):
        assert attributes(node) == {"epsilon": pytest.approx(1e-6), "activation": b"silu"}


def test_block_sizes_follow_the_weights(packages: Mapping[str, Path]) -> None:
    """FP8 has one scale over a whole row; NVFP4 one for 16 columns, two of them in a byte."""
    for name in ("trained", "tiny"):
        graph = oracle.graph(packages[name])
        shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
        for node in nodes(graph, GEMM_OPS["fp8"]):
            (rows, columns), scale = shapes[node.input[1]], shapes[node.input[2]]
            assert attributes(node) == {"block_size": columns} and scale == [rows, 1] and len(node.input) == 3
        for node in nodes(graph, GEMM_OPS["nvfp4"]):
            (rows, packed), scale = shapes[node.input[1]], shapes[node.input[2]]
            assert attributes(node) == {"block_size": 16} and scale == [rows, packed / 8]
            assert shapes[node.input[3]] == [1] and len(node.input) == 4


def test_capture_is_wired_only_where_it_was_asked_for(packages: Mapping[str, Path]) -> None:
    for name, capacity in (("tiny", 4), ("no capture", 0)):
        graph = oracle.graph(packages[name])
        for layer, (conv, delta) in enumerate(
            zip(nodes(graph, "VarlenCausalConvWithState"), nodes(graph, "GatedDeltaNet"), strict=True)
        ):
            states_out = [f"present.{layer}.conv", f"present.{layer}.recurrent"]
            assert [conv.output[1], delta.output[1]] == states_out
            assert [conv.input[4], delta.input[6]] == [f"past.{layer}.conv", f"past.{layer}.recurrent"]
            assert conv.input[2] == delta.input[3] == "cumulative_sequence_lengths"
            if capacity:
                assert conv.input[5] == "state_update_capture_count"
                assert list(delta.input[9:]) == ["state_update_capture_count", "state_update_active"]
                assert conv.output[2] == f"state_update.{layer}.conv_value"
                assert delta.output[2] == f"state_update.{layer}.recurrent_capsule"
            else:
                assert len(conv.input) == 5 and len(delta.input) == 9
                assert len(conv.output) == len(delta.output) == 2


def test_activations_of_a_recurrence_stay_in_float32(packages: Mapping[str, Path]) -> None:
    """The decay is exponentiated: gates, A_log, dt_bias and states are float32 in a float16 graph."""
    graph = oracle.graph(packages["tiny"])
    types = oracle.element_types(graph)
    for node in nodes(graph, "GatedDeltaNet"):
        assert [types[name] for name in node.input[4:9]] == ["tensor(float)"] * 5
        assert [name.rpartition(".")[2] for name in node.input[7:9]] == ["A_log", "dt_bias"]


def test_hidden_states_leave_after_the_final_norm(packages: Mapping[str, Path]) -> None:
    """Fed with a tap before the norm the head drafts worse and nothing else shows."""
    for file, output, norm in (
        ("model.onnx", "hidden_states", "model.norm.weight"),
        ("mtp.onnx", "hidden_states_out", "mtp.norm.weight"),
    ):
        graph = oracle.graph(packages["tiny"], file)
        made_by = producers(graph)
        last = made_by[output]
        assert last.op_type == "SkipSimplifiedLayerNormalization"
        assert made_by[last.input[2]].input[0] == norm
        assert made_by["logits"].input[0] == output


def test_the_head_concatenates_embedding_then_hidden(packages: Mapping[str, Path]) -> None:
    graph = oracle.graph(packages["tiny"], "mtp.onnx")
    made_by = producers(graph)
    (concat,) = nodes(graph, "Concat")
    norms = [made_by[name] for name in concat.input]
    assert [made_by[norm.input[1]].input[0] for norm in norms] == [
        "mtp.pre_fc_norm_embedding.weight",
        "mtp.pre_fc_norm_hidden.weight",
    ]
    embedded = made_by[made_by[norms[0].input[0]].input[0]]
    assert embedded.op_type == "Gather" and list(embedded.input) == ["model.embed_tokens.weight", "input_ids"]
    assert norms[1].input[0] == "hidden_states"
    assert attributes(concat)["axis"] == -1


def test_attention_metadata_and_paging_reach_the_op(package_folder: Path) -> None:
    for file in files(package_folder):
        for node in nodes(oracle.graph(package_folder, file), "PagedAttention"):
            assert list(node.input[5:8]) == ["cumulative_sequence_lengths", "past_sequence_lengths", "block_table"]
            assert list(node.input[8:16]) == [""] * 8 and node.input[16] == "attention_metadata"
            caches = [re.fullmatch(r"past_key_values\.(\d+)\.(key|value)", name) for name in node.input[3:5]]
            assert all(caches)
            layers = {match[1] for match in caches if match}
            assert list(node.output[1:]) == [f"present.{layer}.{part}" for layer in layers for part in ("key", "value")]


def test_initializers_bear_their_modules_names(packages: Mapping[str, Path]) -> None:
    """The checkpoint's name, and after it the format's suffix where the weight is quantized."""
    names = {tensor.name for tensor in oracle.graph(packages["tiny"]).initializer}
    expected = {
        "model.embed_tokens.weight",
        "model.layers.0.linear_attn.A_log",
        "model.layers.0.linear_attn.in_proj_qkv.fp8_weight",
        "model.layers.0.linear_attn.in_proj_qkv.fp8_weight_scale",
        "model.layers.3.mlp.down_proj.nvfp4_weight",
        "model.layers.3.mlp.down_proj.nvfp4_weight_scale",
        "model.layers.3.mlp.down_proj.nvfp4_weight_scale_2",
        "lm_head.fp8_weight",
    }
    assert expected <= names


# Graph itself


def small_graph() -> Graph:
    io = contract.IoSpec(
        (contract.TensorSpec("x", "float16", ("num_tokens", 8)),),
        (contract.TensorSpec("y", "float16", ("num_tokens", 8)),),
    )
    return Graph("test", io, element_type("float16"))


def test_an_output_of_another_type_is_a_bug() -> None:
    graph = small_graph()
    with pytest.raises(AssertionError, match="output y"):
        graph.set_output("y", graph.op.Cast(graph.input("x"), to=1))


def test_an_initializer_is_filled_once(trained_checkpoint: Path) -> None:
    checkpoint = Checkpoint(trained_checkpoint)
    first, second = (checkpoint[f"model.layers.{i}.input_layernorm.weight"] for i in (0, 1))
    graph = small_graph()
    value = graph.weight("w", Stored(first, element_type("bfloat16"), first.shape))
    assert graph.weight("w", Stored(first, element_type("bfloat16"), first.shape)) is value
    with pytest.raises(AssertionError, match="initializer w is filled twice"):
        graph.weight("w", Stored(second, element_type("bfloat16"), second.shape))
