"""What kernels do themselves on a GPU: the nodes in front of them go, and all they said is said to the op."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from runtime import EngineOptions
from runtime.loading import LoadedPackage
from runtime.lowering.absorbing import absorb_rotations, absorb_splits
from runtime.recording import dump
from runtime.session import Session


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


def test_the_delta_rule_is_fed_the_convolution_as_it_is(trained_folder: Path) -> None:
    model = ir.load(trained_folder / "model.onnx")
    before = counts(model)
    absorb_splits(model)
    layers = before["GatedDeltaNet"]
    assert layers
    assert before - counts(model) == Counter({"Split": layers, "Reshape": 3 * layers})
    for node in model.graph:
        if node.op_type == "GatedDeltaNet":
            maker = node.inputs[0].producer() if node.inputs[0] else None
            assert maker and maker.op_type == "VarlenCausalConvWithState"
            assert node.inputs[1:3] == (None, None)
            assert node.inputs[6] is not None, "the state tells heads and sizes"


def test_a_split_in_another_order_stays(trained_folder: Path) -> None:
    model = ir.load(trained_folder / "model.onnx")
    for node in model.graph:
        if node.op_type == "GatedDeltaNet":
            query, key = node.inputs[:2]
            node.replace_input_with(0, key)
            node.replace_input_with(1, query)
    before = counts(model)
    absorb_splits(model)
    assert counts(model) == before


def test_packed_rows_give_the_same_numbers(
    trained: LoadedPackage, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the CPU's kernel, prompt and drafted steps alike."""
    options = EngineOptions(num_blocks=4, max_batch_size=1)
    plain = dump(trained, prompts[3], 3, options)
    packed = Session(trained.package.target, "cpu", edit=absorb_splits)
    monkeypatch.setattr(trained, "target", packed)
    arrays = dump(trained, prompts[3], 3, options)
    for name, expected in plain.items():
        np.testing.assert_allclose(arrays[name], expected, atol=1e-5, err_msg=name)


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
