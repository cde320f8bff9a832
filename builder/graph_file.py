"""An .onnx file as a model, without its weights, and its nodes with those of their branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx

from builder.errors import Refused


def load(path: Path) -> onnx.ModelProto:
    """Raises Refused for what is no model, or has data outside the file anywhere but in its initializers; OSError."""
    try:
        model = onnx.load(path, load_external_data=False)
        if not model.HasField("graph"):
            raise ValueError("a file without a graph")
    except OSError:
        raise
    except Exception as error:  # protobuf raises its own, undocumented, types
        raise Refused(path, expected="an ONNX model", found=error, remedy="export the package again") from None
    for tensor in _nested_tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            raise Refused(
                f"{path} tensor {tensor.name or 'without a name'}",
                expected="external data of the graph's initializers only",
                found="external data inside a node, a function or a sparse tensor",
                remedy="store it in the graph file",
            )
    return model


def _nested_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor but the graph's initializers."""
    yield from _sparse(model.graph.sparse_initializer)
    attributes = [entry for function in model.functions for entry in function.attribute_proto]
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    attributes += (entry for node in nodes for entry in node.attribute)
    while attributes:
        entry = attributes.pop()
        yield from (entry.t, *entry.tensors, *_sparse([entry.sparse_tensor, *entry.sparse_tensors]))
        for graph in (entry.g, *entry.graphs):
            yield from (*graph.initializer, *_sparse(graph.sparse_initializer))
            attributes += (inner for node in graph.node for inner in node.attribute)


def _sparse(tensors: Iterable[onnx.SparseTensorProto]) -> Iterator[onnx.TensorProto]:
    for tensor in tensors:
        yield from (tensor.values, tensor.indices)


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of branches behind the node that has them."""
    for node in graph.node:
        yield node
        for branch in branches(node):
            yield from nodes(branch)


def branches(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs inside a node, in the order of its attributes."""
    return [graph for entry in node.attribute for graph in ([entry.g] if entry.HasField("g") else entry.graphs)]


def captured(node: onnx.NodeProto) -> list[str]:
    """Values from outside that a node's branches use without being given them, each once."""
    found: dict[str, None] = {}
    for branch in branches(node):
        own = {value.name for value in (*branch.input, *branch.initializer)}
        for inner in branch.node:
            found |= dict.fromkeys(name for name in (*inner.input, *captured(inner)) if name and name not in own)
            own |= set(inner.output)
        found |= dict.fromkeys(value.name for value in branch.output if value.name not in own)
    return list(found)
