"""GraphDiff: what differs between two ONNX models, their initializers aside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import onnx

from builder import digests, structure
from builder.changes import Changes, between
from builder.structure import Renaming, StructureDiff, Unlike

COMPARED_FIELDS = ("node", "initializer", "input", "output", "value_info")
"""Fields of a graph that are compared piece by piece; every other one is compared whole."""


@dataclass(frozen=True)
class GraphDiff:
    """model: fields of the model beside its graph's parts. values: types noted for values of nodes that are equal.

    nodes: by name; empty where `renamed` explains every difference. first: the first node of A and of B that computes
    what no node of the other does.
    """

    inputs: Changes
    outputs: Changes
    opsets: Changes
    model: Changes
    values: Changes
    nodes: Changes
    renamed: Renaming
    structure: StructureDiff
    first: Unlike

    def __bool__(self) -> bool:
        return bool(self.renamed) or not self.content_equal

    @property
    def content_equal(self) -> bool:
        """Whether both compute the same, whatever nodes and values are called."""
        parts = (self.inputs, self.outputs, self.opsets, self.model, self.values, self.nodes, self.structure)
        return not any(parts)

    def to_json(self) -> dict[str, Any]:
        parts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "first"}
        first = dict(zip("ab", self.first, strict=True))
        return {**{name: part.to_json() for name, part in parts.items()}, "first": first}


def compare(a: onnx.ModelProto, b: onnx.ModelProto) -> GraphDiff:
    by_name, parts = between(_nodes(a.graph), _nodes(b.graph)), structure.compare(a.graph, b.graph)
    renamed, first = structure.renaming(a.graph, b.graph)
    if parts:  # of nodes that are equal another one may be used, which is more than a renaming
        renamed = None
    return GraphDiff(
        inputs=between(_types(a.graph.input), _types(b.graph.input)),
        outputs=between(_types(a.graph.output), _types(b.graph.output)),
        opsets=between(_opsets(a), _opsets(b)),
        model=between(_model(a), _model(b)),
        values=_values(a.graph, b.graph, by_name),
        nodes=by_name if renamed is None else Changes(),
        renamed=renamed or Renaming({}, 0),
        structure=parts,
        first=first,
    )


def _nodes(graph: onnx.GraphProto) -> dict[str, dict[str, Any]]:
    """Op, attributes, inputs and outputs by distinct name."""
    return {
        name: {
            "op": structure.op_name(node) + (f":{node.overload}" if node.overload else ""),
            **{f"attribute {key}": value for key, value in structure.attributes(node).items()},
            "inputs": list(node.input),
            "outputs": list(node.output),
        }
        for name, node in zip(structure.node_names(graph), graph.node, strict=True)
    }


def _types(values: Iterable[onnx.ValueInfoProto]) -> dict[str, dict[str, Any]]:
    return {value.name: _type(value.type) for value in values}


def _type(found: onnx.TypeProto) -> dict[str, Any]:
    """dtype and shape of a tensor (shape None: unknown rank; "?": unknown size); a digest of any other type."""
    if found.WhichOneof("value") != "tensor_type":
        return {"type": digests.of_bytes(found.SerializeToString(deterministic=True))}
    tensor = found.tensor_type
    shape = [dim.dim_param or (dim.dim_value if dim.HasField("dim_value") else "?") for dim in tensor.shape.dim]
    return {"dtype": structure.type_name(tensor.elem_type), "shape": shape if tensor.HasField("shape") else None}


def _opsets(model: onnx.ModelProto) -> dict[str, int]:
    return {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}


def _values(a: onnx.GraphProto, b: onnx.GraphProto, nodes: Changes) -> Changes:
    """Types that the graphs note for initializers, and for what the nodes of one name and content make (None: they note
    none).
    """
    initializers = {tensor.name for tensor in a.initializer} & {tensor.name for tensor in b.initializer}
    alike = sorted(initializers) + [
        name
        for own, node in zip(structure.node_names(a), a.node, strict=True)
        if own not in nodes.removed and own not in nodes.changed
        for name in node.output
    ]
    types = [_types(graph.value_info) for graph in (a, b)]
    return between(*({name: own.get(name) for name in alike} for own in types))


def _model(model: onnx.ModelProto) -> dict[str, Any]:
    """All that is compared nowhere else, so that nothing differs unseen: text and numbers themselves, else digests."""
    own = {field.name: value for field, value in model.ListFields() if field.name not in ("graph", "opset_import")}
    graph = {
        f"graph.{field.name}": value for field, value in model.graph.ListFields() if field.name not in COMPARED_FIELDS
    }
    return {name: value if isinstance(value, str | int) else _digest(value) for name, value in (own | graph).items()}


def _digest(messages: Iterable[Any]) -> str:
    pieces = [message.SerializeToString(deterministic=True) for message in messages]
    return digests.of_bytes(b"".join(len(piece).to_bytes(8, "little") + piece for piece in pieces))
