"""graph_file.load(): a model whose only data outside the file is its initializers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from onnx import helper

from builder import graph_file
from builder.errors import Refused


def outside(name: str = "hidden") -> onnx.TensorProto:
    tensor = onnx.TensorProto(name=name, data_type=onnx.TensorProto.FLOAT, dims=[1])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="/etc/passwd")
    return tensor


def initializer(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(outside())


def constant(model: onnx.ModelProto) -> None:
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=outside()))


def subgraph(model: onnx.ModelProto) -> None:
    inner = helper.make_graph([], "inner", [], [], [outside()])
    model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))


def nested_constant(model: onnx.ModelProto) -> None:
    inner = helper.make_graph([helper.make_node("Constant", [], ["c"], value=outside())], "inner", [], [])
    model.graph.node.append(helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner))


def function(model: onnx.ModelProto) -> None:
    node = helper.make_node("Constant", [], ["c"], value=outside())
    model.functions.append(onnx.FunctionProto(name="f", domain="d", node=[node]))


def default_of_a_function(model: onnx.ModelProto) -> None:
    attribute = helper.make_attribute("a", outside())
    model.functions.append(onnx.FunctionProto(name="f", domain="d", attribute_proto=[attribute]))


def sparse(model: onnx.ModelProto) -> None:
    model.graph.sparse_initializer.append(onnx.SparseTensorProto(values=outside(), indices=outside("at")))


def saved(path: Path, edit: Callable[[onnx.ModelProto], None]) -> Path:
    model = helper.make_model(helper.make_graph([], "g", [], []))
    edit(model)
    path.write_bytes(model.SerializeToString())
    return path


def test_an_initializer_may_lie_outside(tmp_path: Path) -> None:
    assert graph_file.load(saved(tmp_path / "m.onnx", initializer)).graph.initializer[0].name == "hidden"


@pytest.mark.parametrize("edit", [constant, subgraph, nested_constant, function, default_of_a_function, sparse])
def test_nothing_else_may(tmp_path: Path, edit: Callable[[onnx.ModelProto], None]) -> None:
    with pytest.raises(Refused, match=r"m\.onnx tensor hidden: expected external data of the graph's initializers"):
        graph_file.load(saved(tmp_path / "m.onnx", edit))
