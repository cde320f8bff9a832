"""What kernels do themselves on a GPU: the nodes in front of them go, and all they said is said to the op."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from runtime.lowering.absorbing import absorb_rotations
from runtime.place import GPU, HOST
from runtime.session import _edits
from tests.runtime.conftest import ADDRESSED


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
