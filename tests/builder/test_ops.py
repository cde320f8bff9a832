"""The table of contrib ops, and every node that is emitted, against the installed ONNX Runtime's own schemas."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from builder import ops
from builder.contract import IoSpec, TensorSpec
from builder.graph import OPSETS, Graph, element_type
from tests.builder import oracle

ATTRIBUTE_TYPES = {
    onnx.AttributeProto.FLOAT: "FLOAT",
    onnx.AttributeProto.INT: "INT",
    onnx.AttributeProto.STRING: "STRING",
    onnx.AttributeProto.INTS: "INTS",
    onnx.AttributeProto.TENSOR: "TENSOR",
    onnx.AttributeProto.GRAPH: "GRAPH",
}


@lru_cache(maxsize=1)
def schemas() -> Mapping[tuple[str, str], Any]:
    """The schema of each (domain, op) that our opset imports select: the newest one that is not newer."""
    selected: dict[tuple[str, str], Any] = {}
    for schema in ort_state.get_all_operator_schema():
        if schema.since_version <= OPSETS.get(schema.domain, 0):
            known = selected.setdefault((schema.domain, schema.name), schema)
            if schema.since_version > known.since_version:
                selected[schema.domain, schema.name] = schema
    return selected


@pytest.mark.parametrize("op_type", ops.SCHEMAS)
def test_the_table_lists_nothing_the_runtime_does_not_know(op_type: str) -> None:
    ours, theirs = ops.SCHEMAS[op_type], schemas()[ops.DOMAIN, op_type]
    assert not theirs.deprecated
    assert ours.attributes <= set(theirs.attributes)
    assert theirs.min_input <= ours.max_inputs <= theirs.max_input
    assert theirs.min_output <= ours.max_outputs <= theirs.max_output
    required = {name for name, attribute in theirs.attributes.items() if attribute.required}
    assert required <= ours.attributes


def test_every_node_conforms_to_its_schema(package_folder: Path) -> None:
    for path in sorted(package_folder.glob("*.onnx")):
        graph = oracle.graph(package_folder, path.name)
        types = oracle.element_types(graph)
        for node in oracle.nodes(graph):
            check_node(node, types)


def check_node(node: onnx.NodeProto, types: Mapping[str, str]) -> None:
    schema = schemas()[node.domain, node.op_type]
    where = f"{node.op_type} {node.name}"
    for attribute in node.attribute:
        assert attribute.name in schema.attributes, where
        assert schema.attributes[attribute.name].type.name == ATTRIBUTE_TYPES[attribute.type], where
    given = {attribute.name for attribute in node.attribute}
    assert {name for name, attribute in schema.attributes.items() if attribute.required} <= given, where
    constraints = {c.type_param_str: set(c.allowed_type_strs) for c in schema.type_constraints}
    bound: dict[str, str] = {}
    for formal, names in ((schema.inputs, list(node.input)), (schema.outputs, list(node.output))):
        assert len(names) <= len(formal) or formal[-1].option.name == "Variadic", where
        for index, parameter in enumerate(formal):
            actual = names[index] if index < len(names) else ""
            assert actual or parameter.option.name != "Single", f"{where} lacks {parameter.name}"
            if not actual:
                continue
            allowed = constraints.get(parameter.typeStr, {parameter.typeStr})
            assert types[actual] in allowed, f"{where} {parameter.name}"
            if parameter.option.name != "Variadic":  # one type variable has one type
                assert bound.setdefault(parameter.typeStr, types[actual]) == types[actual], f"{where} {parameter.name}"


def test_the_check_above_sees_faults(packages: Mapping[str, Path]) -> None:
    """Each of these passes onnxscript and onnx.checker, which do not know the ops."""
    graph = oracle.graph(packages["tiny"])
    types = oracle.element_types(graph)
    node = next(node for node in graph.node if node.op_type == "GatedDeltaNet")
    check_node(node, types)
    faults = [onnx.NodeProto.FromString(node.SerializeToString()) for _ in range(5)]
    faults[0].attribute.append(onnx.helper.make_attribute("max_checkpoints", 4))
    faults[1].input[0] = ""
    faults[2].input[6] = faults[2].input[0]  # the recurrent state in float16
    faults[3].output.append("a fourth output")
    next(a for a in faults[4].attribute if a.name == "qk_l2_norm").CopyFrom(
        onnx.helper.make_attribute("qk_l2_norm", 1.0)
    )
    for fault in faults:
        with pytest.raises((AssertionError, KeyError)):
            check_node(fault, types)


def test_what_the_table_does_not_list_is_not_emitted() -> None:
    io = IoSpec((TensorSpec("x", "float16", ("num_tokens", 8)),), ())
    graph = Graph("test", io, element_type("float16"))
    x = graph.input("x")
    with pytest.raises(AssertionError, match="GatedRMSNorm: \\['axis'\\]"):
        ops._emit(graph, "GatedRMSNorm", [x, x, x], [ops.like(x)], axis=-1)
    with pytest.raises(AssertionError, match="4 inputs"):
        ops._emit(graph, "GatedRMSNorm", [x, x, x, x], [ops.like(x)])
    with pytest.raises(AssertionError, match="2 outputs"):
        ops._emit(graph, "GatedRMSNorm", [x, x, x], [ops.like(x)] * 2)
    assert len(graph) == 0
