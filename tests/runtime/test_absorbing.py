"""What kernels do themselves on a GPU: the nodes in front of them go, and all they said is said to the op."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest

from runtime.lowering.absorbing import absorb_rotations


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


def test_a_rotation_with_another_user_stays(trained_folder: Path) -> None:
    model = ir.load(trained_folder / "model.onnx")
    node = next(node for node in model.graph if node.op_type == "PagedAttention")
    model.graph.insert_before(node, ir.node("Identity", [node.inputs[0]], name="another user"))
    before = counts(model)["MRotaryEmbedding"]
    absorb_rotations(model)
    assert counts(model)["MRotaryEmbedding"] == 2
    assert before > 2
