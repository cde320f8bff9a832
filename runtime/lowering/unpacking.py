"""Unpacking: products with quantized weights become products with the same weights in the activations' own type.

Kernels for packed weights decode them as they read, which pays for a few rows. With more of them the op decodes the
whole weight first, at every run: half of such a step's time. Weights that were decoded once are given to the graph from
outside instead; they are what the op itself multiplies with, since it is the op that decodes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from builder import contract

COLUMNS_PER_ELEMENT: Mapping[str, int] = {"MatMulBlockQuantizedFp4Weight": 2, "MatMulBlockQuantizedFp8Weight": 1}
"""Columns of a weight that an element of the stored one holds, by op."""
SCALED_INPUTS = 4
"""Activations, weight and its scales; ops with more inputs do more than multiply."""
UNPACKED = "unpacked.{}"
"""[K, N], in the activations' type: a weight [N, K] by the name of its stored bytes."""
UNIT_ROWS = "unit_rows.{}"
"""[K, K]: rows of the identity, for weights of K columns."""


@dataclass(frozen=True)
class PackedProduct:
    """A product x [T, K] W^T [K, N] with a quantized weight."""

    node: ir.Node
    name: str
    num_rows: int
    num_columns: int


def packed_products(graph: ir.Graph) -> Iterator[PackedProduct]:
    """Every product of `graph` that nothing but its weight and its scales have a part in."""
    for node in graph:
        packed = COLUMNS_PER_ELEMENT.get(node.op_type)
        weight = node.inputs[1] if packed else None
        if packed is None or weight is None or weight.shape is None or any(node.inputs[SCALED_INPUTS:]):
            continue
        rows, elements = weight.shape
        if isinstance(rows, int) and isinstance(elements, int):
            yield PackedProduct(node, str(weight.name), rows, elements * packed)


def take_unpacked(model: ir.Model) -> None:
    """Every packed product reads its weight from an input UNPACKED, of which two may share one."""
    graph, dtype = model.graph, _activations(model)
    given: dict[str, ir.Value] = {}
    for product in list(packed_products(graph)):
        if product.name not in given:
            given[product.name] = _input(graph, UNPACKED.format(product.name), dtype, product)
        node = product.node
        name = f"{node.name}/unpacked"
        plain = ir.node("MatMul", [node.inputs[0], given[product.name]], outputs=[_like(node.outputs[0])], name=name)
        graph.insert_before(node, plain)
        node.outputs[0].replace_all_uses_with(plain.outputs[0], replace_graph_outputs=True)
        graph.remove(node, safe=True)
        plain.outputs[0].name = node.outputs[0].name
    _forget_unused(graph)


def unpack_all(model: ir.Model) -> None:
    """What is left is every packed product, fed the identity UNIT_ROWS: its output UNPACKED is its weight, transposed.

    To the bit: each value is one product with 1 beside products with 0, and the op rounds weights to the activations'
    type before it multiplies.
    """
    graph, dtype = model.graph, _activations(model)
    kept = {product.name: product for product in packed_products(graph)}
    identities: dict[int, ir.Value] = {}
    for product in kept.values():
        columns = product.num_columns
        if columns not in identities:
            square = PackedProduct(product.node, product.name, columns, columns)
            identities[columns] = _input(graph, UNIT_ROWS.format(columns), dtype, square)
        product.node.replace_input_with(0, identities[columns])
        output = product.node.outputs[0]
        output.name, output.dtype = UNPACKED.format(product.name), dtype
        output.shape = ir.Shape([columns, product.num_rows])
    graph.outputs[:] = [product.node.outputs[0] for product in kept.values()]
    nodes = {product.node for product in kept.values()}
    graph.remove([node for node in graph if node not in nodes], safe=False)
    graph.inputs[:] = list(identities.values())
    _forget_unused(graph)


def _activations(model: ir.Model) -> ir.DataType:
    hidden = next(value for value in model.graph.outputs if value.name == contract.HIDDEN_STATES)
    if hidden.dtype is None:
        raise AssertionError(f"{hidden.name} has no type")
    return hidden.dtype


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, product: PackedProduct) -> ir.Value:
    shape = ir.Shape([product.num_columns, product.num_rows])
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
    graph.inputs.append(value)
    return value


def _like(value: ir.Value) -> ir.Value:
    return ir.Value(type=value.type, shape=value.shape)


def _forget_unused(graph: ir.Graph) -> None:
    """Weights that nobody reads any more are not loaded either."""
    for name, value in list(graph.initializers.items()):
        if not value.uses() and not value.is_graph_output():
            del graph.initializers[name]
