"""Widening: half precision becomes float32 in memory, so that a CPU shows what the graph means, not how it rounds."""

from __future__ import annotations

import onnx_ir as ir

HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
FLOAT = ir.DataType.FLOAT


def widen(graph: ir.Graph) -> None:
    """Every half-precision activation of `graph`, branches included, becomes float32. Stored weights keep their bytes,
    cast on use.
    """
    stored = {value for value in graph.initializers.values() if value.dtype in HALF}
    for graph_input in graph.inputs:
        if graph_input.dtype in HALF:
            graph_input.dtype = FLOAT
    widened: dict[ir.Value, ir.Value] = {}
    for node in list(graph.all_nodes()):
        if node.op_type == "Cast" and node.attributes["to"].as_int() in HALF:
            node.attributes["to"] = ir.AttrInt64("to", int(FLOAT))
        if node.op_type == "Gather" and node.inputs[0] in stored:
            stored.update(node.outputs)
            continue
        for index, value in enumerate(node.inputs):
            if value is not None and value in stored and node.op_type != "Cast":
                node.replace_input_with(index, _cast(graph, node, value, widened))
        for output in node.outputs:
            if output.dtype in HALF:
                output.dtype = FLOAT


def _cast(graph: ir.Graph, user: ir.Node, value: ir.Value, widened: dict[ir.Value, ir.Value]) -> ir.Value:
    if value not in widened:
        result = ir.Value(name=f"{value.name}.float32", type=ir.TensorType(FLOAT), shape=value.shape)
        cast = ir.node("Cast", [value], {"to": int(FLOAT)}, outputs=[result], name=f"{value.name}/widen")
        graph.insert_before(user, cast)
        widened[value] = result
    return widened[value]
