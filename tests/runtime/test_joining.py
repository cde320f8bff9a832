"""Products of one input, joined in memory: the same numbers from fewer nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from runtime import EngineOptions
from runtime.loading import LoadedPackage
from runtime.lowering.joining import join_products
from runtime.recording import dump
from runtime.session import Session


def model(*, third: str = "", cast_second: bool = True, share: bool = True) -> Any:
    """Two products of x with weights of 3 and 5 rows, cast to float64; the second of y where they do not share."""
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((rows, 4)).astype(np.float32) for name, rows in (("v", 3), ("w", 5))}
    kind = TensorProto.DOUBLE if cast_second else TensorProto.FLOAT
    nodes = [
        helper.make_node("Gemm", ["x", "v"], ["a"], name="first", transB=1),
        helper.make_node("Cast", ["a"], ["a64"], name="cast_a", to=TensorProto.DOUBLE),
        helper.make_node("Gemm", ["x" if share else "y", "w"], ["b"], name="second", transB=1),
        helper.make_node("Cast", ["b"], ["b64"], name="cast_b", to=kind),
        helper.make_node("Neg", ["a64"], ["minus_a"], name="minus_a"),
        helper.make_node("Neg", ["b64"], ["minus_b"], name="minus_b"),
    ]
    if third:
        nodes.append(helper.make_node("Gemm", ["x", "v", "bias"], ["c"], name="third", transB=1))
    outputs = [("minus_a", TensorProto.DOUBLE, 3), ("minus_b", kind, 5)]
    outputs += [("c", TensorProto.FLOAT, 3)] if third else []
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    tensors += [numpy_helper.from_array(np.ones(3, np.float32), "bias")] if third else []
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["T", 4]) for name in ("x", "y")],
        [helper.make_tensor_value_info(name, dtype, ["T", rows]) for name, dtype, rows in outputs],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def run(proto: Any) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    inputs = {name: rng.standard_normal((2, 4)).astype(np.float32) for name in ("x", "y")}
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "gemms"),
    [({}, 1), ({"cast_second": False}, 1), ({"share": False}, 2), ({"third": "with a bias"}, 2)],
    ids=str,
)
def test_results_are_the_same_and_products_fewer(options: dict[str, Any], gemms: int) -> None:
    proto = model(**options)
    changed = ir.from_proto(proto)
    join_products(changed)
    found = ir.to_proto(changed)
    assert sum(node.op_type == "Gemm" for node in found.graph.node) == gemms
    for ours, theirs in zip(run(found), run(proto), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_the_gates_of_every_recurrent_layer_are_joined(trained_folder: Path) -> None:
    graph = ir.load(trained_folder / "model.onnx")
    before = sum(node.op_type == "Gemm" for node in graph.graph)
    join_products(graph)
    layers = sum(node.op_type == "GatedDeltaNet" for node in graph.graph)
    joined = [node for node in graph.graph if node.name and node.name.endswith("/joined")]
    assert len(joined) == layers
    assert sum(node.op_type == "Gemm" for node in graph.graph) == before - layers


def test_logits_do_not_depend_on_it(trained: LoadedPackage, prompts: list[list[int]]) -> None:
    edited = Session(trained.package.target, "cpu", join_products)
    options = EngineOptions(num_blocks=2, max_batch_size=1)
    plain = dump(trained, prompts[1], 0, options)["logits"]
    kept, trained.target = trained.target, edited
    try:
        joined = dump(trained, prompts[1], 0, options)["logits"]
    finally:
        trained.target = kept
    np.testing.assert_allclose(joined, plain, atol=1e-4)
