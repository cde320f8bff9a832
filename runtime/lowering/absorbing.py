"""Absorbing: nodes in front of an op that the op's own kernel does as well, so that a step launches fewer kernels."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from builder import contract

ROTARY, QUERY_NORM, KEY_NORM = (8, 9), 12, 13
"""Inputs of PagedAttention: cosine and sine tables, and the weights that normalize queries and keys."""


def absorb_rotations(model: ir.Model) -> None:
    """PagedAttention normalizes and rotates queries and keys itself, with tables of the activations' type.

    It counts positions from the past length on, as this runtime's position ids do in all three of their rows; for other
    ids the graph would not mean the same. What is not exactly such a pair of chains stays as it is.
    """
    tables: dict[tuple[ir.Value, int], ir.Value] = {}
    for node in list(model.graph):
        if node.op_type == "PagedAttention":
            query, key = _rotation(node.inputs[0]), _rotation(node.inputs[1])
            if query and key and _is_free(node) and _is_plain(query) and _are_alike(query, key):
                _absorb(model.graph, node, (query, key), tables)


@dataclass(frozen=True)
class _Rotation:
    """The nodes that make a query or key of its projection, the last one first."""

    squeeze: ir.Node
    cast: ir.Node
    rotary: ir.Node
    widened: ir.Node
    rows: ir.Node
    norm: ir.Node


def _is_free(node: ir.Node) -> bool:
    """Whether an attention has no norm and no rotation of its own."""
    taken = (*ROTARY, QUERY_NORM, KEY_NORM)
    return not _number(node, "do_rotary") and not any(node.inputs[i] for i in taken if i < len(node.inputs))


def _is_plain(chain: _Rotation) -> bool:
    """Halves are rotated, unscaled, by the graph's own position ids."""
    ids = chain.rotary.inputs[1]
    producer = ids.producer() if ids is not None else None
    source = producer.inputs[0] if producer is not None and producer.op_type == "Unsqueeze" else ids
    return (
        source is not None
        and source.name == contract.POSITION_IDS
        and source.is_graph_input()
        and not _number(chain.rotary, "interleaved")
        and _number(chain.rotary, "scale", 1.0) == 1.0
        and _number(chain.norm, "axis", -1) in (-1, 2)
    )


def _are_alike(query: _Rotation, key: _Rotation) -> bool:
    """Whether queries and keys differ in heads and weights alone."""
    names = ("rotary_embedding_dim", "interleaved", "scale", "mrope_layout")
    return (
        query.rotary.inputs[1:] == key.rotary.inputs[1:]
        and all(_number(query.rotary, name) == _number(key.rotary, name) for name in names)
        and _number(query.norm, "epsilon") == _number(key.norm, "epsilon")
        and _number(query.norm, "axis", -1) == _number(key.norm, "axis", -1)
        and _number(query.cast, "to") == _number(key.cast, "to")
    )


def _number(node: ir.Node, name: str, default: float = 0) -> float:
    attribute = node.attributes.get(name)
    return default if attribute is None else float(attribute.value)


def _absorb(
    graph: ir.Graph, node: ir.Node, chains: tuple[_Rotation, _Rotation], tables: dict[tuple[ir.Value, int], ir.Value]
) -> None:
    removed: list[ir.Node] = []
    node.resize_inputs(max(len(node.inputs), KEY_NORM + 1))
    for index, chain, place in zip((0, 1), chains, (QUERY_NORM, KEY_NORM), strict=True):
        node.replace_input_with(place, chain.norm.inputs[1])
        chain.rows.replace_input_with(0, chain.norm.inputs[0])
        flat = ir.node("Squeeze", [chain.rows.outputs[0], chain.squeeze.inputs[1]], name=f"{chain.rows.name}/flat")
        graph.insert_before(node, flat)
        node.replace_input_with(index, flat.outputs[0])
        removed += [chain.squeeze, chain.cast, chain.rotary, chain.widened, chain.norm]
    query, _ = chains
    for table, source in zip(ROTARY, query.rotary.inputs[2:4], strict=True):
        node.replace_input_with(table, _table(graph, source, int(_number(query.cast, "to")), tables))
    node.attributes["qk_norm_epsilon"] = ir.AttrFloat32("qk_norm_epsilon", _number(query.norm, "epsilon"))
    node.attributes["do_rotary"] = ir.AttrInt64("do_rotary", 1)
    graph.remove(removed, safe=True)


def _table(graph: ir.Graph, table: ir.Value | None, dtype: int, made: dict[tuple[ir.Value, int], ir.Value]) -> ir.Value:
    """A float32 table in the type that rotated rows are cast to."""
    if table is None:
        raise AssertionError("a rotation has both tables")
    if (table, dtype) not in made:
        narrowed = ir.node("Cast", [table], {"to": dtype}, name=f"{table.name}/narrowed")
        graph.insert_before(next(iter(graph)), narrowed)
        made[table, dtype] = narrowed.outputs[0]
    return made[table, dtype]


ROTATION = ("Squeeze", "Cast", "MRotaryEmbedding", "Cast", "Reshape", "SimplifiedLayerNormalization")
"""What stands in front of a query or key, the last node first."""


def _rotation(value: ir.Value | None) -> _Rotation | None:
    """The nodes of ROTATION that make `value` and nothing else, or None."""
    nodes: list[ir.Node] = []
    for op_type in ROTATION:
        node = _sole(value, op_type)
        if node is None:
            return None
        nodes.append(node)
        value = node.inputs[0]
    return _Rotation(*nodes)


def _sole(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The node of this type that makes `value`, whose one user is what asks."""
    node = value.producer() if value is not None else None
    if value is None or node is None or node.op_type != op_type or value.is_graph_output():
        return None
    return node if len(list(value.uses())) == 1 else None
