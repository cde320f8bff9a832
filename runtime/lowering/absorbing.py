"""Absorbing: nodes in front of an op that the op's own kernel does as well, so that a step launches fewer kernels."""

from __future__ import annotations

import onnx_ir as ir

ROTARY, QUERY_NORM, KEY_NORM = (8, 9), 12, 13
"""Inputs of PagedAttention: cosine and sine tables, and the weights that normalize queries and keys."""


def absorb_rotations(model: ir.Model) -> None:
    """PagedAttention normalizes and rotates queries and keys itself.

    It counts positions from the past length on, as this runtime's position ids do in all three of their rows; for other
    ids the graph would not mean the same. Its tables are of the activations' type.
    """
    tables: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type == "PagedAttention":
            _absorb_rotation(model.graph, node, tables)


def _absorb_rotation(graph: ir.Graph, node: ir.Node, tables: dict[ir.Value, ir.Value]) -> None:
    chains = [_rotation(node.inputs[index]) for index in (0, 1)]
    if None in chains:
        return
    removed: list[ir.Node] = []
    node.resize_inputs(max(len(node.inputs), KEY_NORM + 1))
    for index, chain, place in zip((0, 1), chains, (QUERY_NORM, KEY_NORM), strict=True):
        assert chain is not None
        squeeze, cast, rotary, widened, rows, norm = chain
        node.replace_input_with(place, norm.inputs[1])
        rows.replace_input_with(0, norm.inputs[0])
        flat = ir.node("Squeeze", [rows.outputs[0], squeeze.inputs[1]], name=f"{rows.name}/flat")
        graph.insert_before(node, flat)
        node.replace_input_with(index, flat.outputs[0])
        for table, source in zip(ROTARY, rotary.inputs[2:4], strict=True):
            node.replace_input_with(table, _table(graph, source, cast, tables))
        removed += [squeeze, cast, rotary, widened, norm]
        node.attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", norm.attributes["epsilon"].as_float())
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    graph.remove(removed, safe=True)


def _table(graph: ir.Graph, table: ir.Value | None, cast: ir.Node, made: dict[ir.Value, ir.Value]) -> ir.Value:
    """A float32 table in the type that rotated rows are cast to."""
    assert table is not None
    if table not in made:
        narrowed = ir.node("Cast", [table], {"to": cast.attributes["to"].as_int()}, name=f"{table.name}/narrowed")
        graph.insert_before(next(iter(graph)), narrowed)
        made[table] = narrowed.outputs[0]
    return made[table]


ROTATION = ("Squeeze", "Cast", "MRotaryEmbedding", "Cast", "Reshape", "SimplifiedLayerNormalization")
"""What stands in front of a query or key, the last node first."""


def _rotation(value: ir.Value | None) -> list[ir.Node] | None:
    """The nodes of ROTATION that make `value` and nothing else, or None."""
    nodes = []
    for op_type in ROTATION:
        node = _sole(value, op_type)
        if node is None:
            return None
        nodes.append(node)
        value = node.inputs[0]
    return nodes


def _sole(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of this type that makes `value`, whose one user is what asks."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.op_type != op_type or value.is_graph_output():
        return None
    return node if len(list(value.uses())) == 1 else None
