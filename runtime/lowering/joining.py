"""Joining float products of one input: fewer and larger kernels where launches, not arithmetic, take the time."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import onnx_ir as ir


def join_products(model: ir.Model) -> None:
    """Gemms of the same x [T, K] with weights [N_i, K] become one, whose result [T, sum N_i] is split.

    The decay gates of a GatedDeltaNet are such a pair. Weights are joined by a node that the runtime folds at load, so
    the package's files stay as they are. Each output keeps its own sum, so results do not depend on the joining but by
    how a kernel orders them.
    """
    graph = model.graph
    groups: dict[tuple[ir.Value, int | None], list[ir.Node]] = defaultdict(list)
    for node in graph:
        if _joins(node):
            groups[node.inputs[0], int(node.inputs[1].dtype or 0)].append(node)  # type: ignore[index,union-attr]
    for (x, _), nodes in groups.items():
        if len(nodes) > 1:
            _join(graph, x, nodes)


def _joins(node: ir.Node) -> bool:
    """Plain x W^T with a constant weight of known shape, for use within the graph."""
    if node.outputs[0].is_graph_output():
        return False
    if node.op_type != "Gemm" or len(node.inputs) != 2 or {**node.attributes}.keys() != {"transB"}:
        return False
    weight = node.inputs[1]
    return weight is not None and _rows(weight) is not None and node.attributes["transB"].as_int() == 1


def _rows(weight: ir.Value) -> int | None:
    """N of a weight [N, K] that is an initializer, or one that is cast."""
    producer = weight.producer()
    source = producer.inputs[0] if producer is not None and producer.op_type == "Cast" else weight
    if source is None or source.producer() is not None or source.is_graph_input() or source.shape is None:
        return None
    rows = source.shape[0]
    return rows if isinstance(rows, int) else None


def _join(graph: ir.Graph, x: ir.Value, nodes: list[ir.Node]) -> None:
    """A Cast that follows every one of the products stands before the split, once."""
    weights = [node.inputs[1] for node in nodes]
    sizes = np.array([_rows(weight) for weight in weights if weight is not None], np.int64)
    name = f"{nodes[0].name}/joined"
    joined = ir.node("Concat", weights, {"axis": 0}, name=f"{name}/weights")
    product = ir.node("Gemm", [x, joined.outputs[0]], {"transB": 1}, name=name)
    lengths = ir.node("Constant", [], {"value": ir.tensor(sizes, name=f"{name}/sizes")}, name=f"{name}/sizes")
    made, replaced = [joined, product, lengths], list(nodes)
    result = product.outputs[0]
    casts = _casts(nodes)
    if casts:
        cast = ir.node("Cast", [result], {"to": casts[0].attributes["to"].as_int()}, name=f"{name}/cast")
        result, replaced = cast.outputs[0], [*casts, *nodes]
        made.append(cast)
    ends = casts or nodes
    parts = [ir.Value(name=f"{name}/{i}", type=end.outputs[0].type) for i, end in enumerate(ends)]
    made.append(ir.node("Split", [result, lengths.outputs[0]], {"axis": -1}, outputs=parts, name=f"{name}/split"))
    for node in made:
        graph.append(node)
    for end, part in zip(ends, parts, strict=True):
        end.outputs[0].replace_all_uses_with(part)
    graph.remove(replaced, safe=True)
    graph.sort()


def _casts(nodes: list[ir.Node]) -> list[ir.Node]:
    """The Casts to one type that are the only users of these nodes, or none."""
    users = [list(node.outputs[0].uses()) for node in nodes]
    casts = [uses[0].node for uses in users if len(uses) == 1 and uses[0].node.op_type == "Cast"]
    if any(cast.outputs[0].is_graph_output() for cast in casts):
        return []
    same = len({cast.attributes["to"].as_int() for cast in casts}) == 1
    return casts if same and len(casts) == len(nodes) else []
