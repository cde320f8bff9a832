"""Unpacking: products with quantized weights become products with the same weights in the activations' own type.

Kernels for packed weights decode them as they read, which pays for a few rows. With more of them the op decodes the
whole weight first, at every run: a third of such a step. Weights that were decoded once are given to the graph from
outside instead; they are what the op itself multiplies with, since it is the op that decodes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from builder import contract

COLUMNS_PER_ELEMENT: Mapping[str, int] = {"MatMulBlockQuantizedFp4Weight": 2, "MatMulBlockQuantizedFp8Weight": 1}
"""Columns of a weight that an element of the stored one holds, by op."""
NUM_INPUTS: Mapping[str, int] = {"MatMulBlockQuantizedFp4Weight": 4, "MatMulBlockQuantizedFp8Weight": 3}
"""Activations, a weight and its scales; a node with more inputs does more than multiply."""
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

    @property
    def unpacked_shape(self) -> ir.Shape:
        return ir.Shape([self.num_columns, self.num_rows])


def packed_products(graph: ir.Graph) -> Iterator[PackedProduct]:
    """Every product of `graph` that nothing but its weight and its scales have a part in."""
    for node in graph:
        packed = COLUMNS_PER_ELEMENT.get(node.op_type)
        weight = node.inputs[1] if packed else None
        if packed is None or weight is None or weight.shape is None or any(node.inputs[NUM_INPUTS[node.op_type] :]):
            continue
        rows, elements = weight.shape
        if isinstance(rows, int) and isinstance(elements, int):
            yield PackedProduct(node, str(weight.name), rows, elements * packed)


def _by_weight(graph: ir.Graph) -> Mapping[str, list[PackedProduct]]:
    """The products by the name of their weight, which has the same scales in each of them."""
    found: dict[str, list[PackedProduct]] = defaultdict(list)
    for product in packed_products(graph):
        found[product.name].append(product)
        if product.node.inputs[1:] != found[product.name][0].node.inputs[1:]:
            raise AssertionError(f"{product.name} has other scales in {product.node.name}")
    return found


def take_unpacked(model: ir.Model) -> None:
    """Every packed product reads its weight from an input UNPACKED, of which two may share one."""
    graph, dtype = model.graph, _activations(model)
    for name, products in _by_weight(graph).items():
        given = _input(graph, UNPACKED.format(name), dtype, products[0].unpacked_shape)
        for product in products:
            _multiply(graph, product.node, given)
    for name, value in list(graph.initializers.items()):
        if not value.uses():  # the packed weights: what a graph names may be loaded
            del graph.initializers[name]


def _multiply(graph: ir.Graph, node: ir.Node, weight: ir.Value) -> None:
    """A plain product in place of a packed one."""
    old = node.outputs[0]
    new = ir.Value(type=old.type, shape=old.shape)
    plain = ir.node("MatMul", [node.inputs[0], weight], outputs=[new], name=f"{node.name}/unpacked")
    graph.insert_before(node, plain)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    new.name = old.name


def unpack_all(model: ir.Model) -> None:
    """What is left is a packed product for each weight, fed the identity UNIT_ROWS: its output UNPACKED is the weight,
    transposed.

    Each value is one product with 1 beside products with 0, and the op rounds weights to the activations' type before
    it multiplies: so it is the number that the op multiplies with (of zeros, any sign).
    """
    graph, dtype = model.graph, _activations(model)
    kept = [products[0] for products in _by_weight(graph).values()]
    graph.inputs.clear()
    identities: dict[int, ir.Value] = {}
    for product in kept:
        columns = product.num_columns
        if columns not in identities:
            identities[columns] = _input(graph, UNIT_ROWS.format(columns), dtype, ir.Shape([columns, columns]))
        product.node.replace_input_with(0, identities[columns])
        output = product.node.outputs[0]
        output.name, output.dtype, output.shape = UNPACKED.format(product.name), dtype, product.unpacked_shape
    graph.outputs[:] = [product.node.outputs[0] for product in kept]
    nodes = {product.node for product in kept}
    graph.remove([node for node in graph if node not in nodes])


def _activations(model: ir.Model) -> ir.DataType:
    hidden = next(value for value in model.graph.outputs if value.name == contract.HIDDEN_STATES)
    if hidden.dtype is None:
        raise AssertionError(f"{hidden.name} has no type")
    return hidden.dtype


def _input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: ir.Shape) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=shape)
    graph.inputs.append(value)
    return value
