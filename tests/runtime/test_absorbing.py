"""What kernels do themselves on a GPU: the nodes in front of them go, and all they said is said to the op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from runtime.lowering.absorbing import _rotation, absorb_rotations
from runtime.place import GPU, HOST
from runtime.session import _edits
from tests.runtime.conftest import ADDRESSED

Array = NDArray[Any]


def counts(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def feeding(proto: Any, name: str) -> list[str]:
    """Op types that `name` is made by, back to a product or an initializer."""
    makers = {output: node for node in proto.graph.node for output in node.output}
    found = []
    while name in makers and "MatMul" not in makers[name].op_type and makers[name].op_type != "Gemm":
        found.append(makers[name].op_type)
        name = makers[name].input[0]
    return found


@pytest.mark.parametrize("graph", ["model.onnx", "mtp.onnx"])
def test_attention_normalizes_and_rotates(trained_folder: Path, graph: str) -> None:
    plain = onnx.load(trained_folder / graph, load_external_data=False)
    model = ir.load(trained_folder / graph)
    absorb_rotations(model)
    proto = ir.to_proto(model)
    kinds = Counter(node.op_type for node in proto.graph.node)
    assert kinds["MRotaryEmbedding"] == 0
    layers = [node for node in proto.graph.node if node.op_type == "PagedAttention"]
    originals = {node.name: node for node in plain.graph.node if node.op_type == "PagedAttention"}
    makers = {output: node for node in plain.graph.node for output in node.output}
    for node in layers:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        original = originals[node.name]
        for index, weight in ((0, 12), (1, 13)):
            chain = []
            maker = makers[original.input[index]]
            while maker.op_type != "SimplifiedLayerNormalization":
                chain.append(maker)
                maker = makers[maker.input[0]]
            rotary = next(node for node in chain if node.op_type == "MRotaryEmbedding")
            assert node.input[weight] == maker.input[1]
            epsilon = next(a.f for a in maker.attribute if a.name == "epsilon")
            assert attributes["qk_norm_epsilon"] == epsilon
            for table, source in zip((8, 9), rotary.input[2:4], strict=True):
                narrowed = next(n for n in proto.graph.node if n.output[0] == node.input[table])
                assert (narrowed.op_type, narrowed.input[0]) == ("Cast", source)
            assert feeding(proto, node.input[index])[:2] == ["Squeeze", "Reshape"]
        assert attributes["do_rotary"] == 1
        assert node.input[2:8] == original.input[2:8]
        assert node.input[16] == original.input[16]
    assert layers


def _rotary(node: ir.Node, index: int) -> ir.Node:
    """What rotates this input of an attention."""
    maker = node.inputs[index].producer()  # type: ignore[union-attr]
    while maker is not None and maker.op_type != "MRotaryEmbedding":
        maker = maker.inputs[0].producer()  # type: ignore[union-attr]
    assert maker is not None
    return maker


def _norm(node: ir.Node, index: int) -> ir.Node:
    maker = _rotary(node, index)
    while maker.op_type != "SimplifiedLayerNormalization":
        maker = maker.inputs[0].producer()  # type: ignore[union-attr,assignment]
    return maker


ODD: dict[str, Callable[[ir.Node], None]] = {
    "another epsilon": lambda node: _norm(node, 1).attributes.add(ir.AttrFloat32("epsilon", 0.5)),
    "pairs in place of halves": lambda node: _rotary(node, 0).attributes.add(ir.AttrInt64("interleaved", 1)),
    "a scale": lambda node: _rotary(node, 0).attributes.add(ir.AttrFloat32("scale", 2.0)),
    "another table": lambda node: _rotary(node, 0).replace_input_with(2, _rotary(node, 0).inputs[3]),
    "other positions": lambda node: _rotary(node, 0).replace_input_with(1, _rotary(node, 0).inputs[2]),
    "a rotation of its own": lambda node: node.attributes.add(ir.AttrInt64("do_rotary", 1)),
    "a norm of its own": lambda node: (node.resize_inputs(14), node.replace_input_with(12, node.inputs[2]))[0],
}


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_what_attention_does_not_do_the_same_way_stays(trained_folder: Path, odd: str) -> None:
    model = ir.load(trained_folder / "model.onnx")
    nodes = [node for node in model.graph if node.op_type == "PagedAttention"]
    ODD[odd](nodes[0])
    absorb_rotations(model)
    assert counts(model)["MRotaryEmbedding"] == 2
    assert len(nodes) > 1


def test_only_half_precision_on_a_device_is_changed() -> None:
    assert absorb_rotations in _edits(GPU)
    assert absorb_rotations not in _edits(ADDRESSED)
    assert absorb_rotations not in _edits(replace(GPU, widened=True)), "attention is spelled out there"
    assert _edits(HOST) == []


def test_a_rotation_with_another_user_stays(trained_folder: Path) -> None:
    model = ir.load(trained_folder / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "PagedAttention")
    model.graph.insert_before(node, ir.node("Identity", [node.inputs[0]], name="another user"))
    before = counts(model)["MRotaryEmbedding"]
    absorb_rotations(model)
    assert counts(model)["MRotaryEmbedding"] == 2
    assert before > 2


def fused(x: Array, weight: Array, tables: tuple[Array, Array], epsilon: float, past: int) -> Array:
    """What PagedAttention documents of its norm and rotation, in float64: x [T, heads, D] at positions from `past` on.

    The first half of the rotated channels is turned against the second one; channels beyond are only normalized.
    """
    normed = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * weight
    cos, sin = (table[past : past + len(x), None] for table in tables)
    half = cos.shape[-1]
    first, second, rest = normed[..., :half], normed[..., half : 2 * half], normed[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


@pytest.mark.parametrize("index", [0, 1], ids=["query", "key"])
def test_the_nodes_mean_what_attention_does_in_their_place(trained_folder: Path, index: int) -> None:
    """The chain's own nodes, run by themselves, against the formula of the fused op."""
    model = ir.load(trained_folder / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "PagedAttention")
    chain = _rotation(node.inputs[index])
    assert chain
    rng, past, tokens = np.random.default_rng(index), 7, 5
    dim = chain.norm.inputs[1].shape[0]  # type: ignore[index,union-attr]
    heads = node.attributes["kv_num_heads" if index else "num_heads"].as_int()
    half = chain.rotary.inputs[2].shape[1]  # type: ignore[index,union-attr]
    given = {
        chain.norm.inputs[0]: rng.standard_normal((tokens, heads, dim)).astype(np.float16),
        chain.norm.inputs[1]: rng.uniform(0.5, 2, dim).astype(np.float16),
        chain.rotary.inputs[1]: np.broadcast_to(past + np.arange(tokens), (3, 1, tokens)).copy(),
        chain.rotary.inputs[2]: rng.uniform(-1, 1, (32, half)).astype(np.float32),
        chain.rotary.inputs[3]: rng.uniform(-1, 1, (32, half)).astype(np.float32),
        chain.rows.inputs[1]: chain.rows.inputs[1].const_value.numpy(),  # type: ignore[union-attr]
        chain.squeeze.inputs[1]: chain.squeeze.inputs[1].const_value.numpy(),  # type: ignore[union-attr]
    }
    feed = {value.name: array for value, array in given.items() if value is not None and value.name is not None}
    nodes = [chain.norm, chain.rows, chain.widened, chain.rotary, chain.cast, chain.squeeze]
    graph = onnx.helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "chain",
        [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in feed.items()
        ],
        [onnx.helper.make_tensor_value_info(chain.squeeze.outputs[0].name or "", onnx.TensorProto.FLOAT16, None)],
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    (found,) = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
    x, weight, _, cos, sin, *_ = (array.astype(np.float64) for array in given.values())
    epsilon = chain.norm.attributes["epsilon"].as_float()
    expected = fused(x, weight, (cos, sin), epsilon, past).reshape(tokens, -1)
    np.testing.assert_allclose(found, expected, atol=4e-3, rtol=2e-3)
