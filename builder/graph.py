"""Graph: one ONNX graph under construction, over onnxscript's GraphBuilder.

It adds what the builder leaves open: scoped and reproducible names, typed outputs for contrib ops, and initializers
that are promises (a Weight) until the package places their bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
from onnxscript import GraphBuilder

from builder.contract import IoSpec, TensorSpec
from builder.weights import Placement, Weight

IR_VERSION = 10
OPSETS = {"": 21, "com.microsoft": 1}
"""Pinned by what ORT 1.30 reads, never by the installed onnx."""

Value = ir.Value


def element_type(name: str) -> ir.DataType:
    """ "float16" to FLOAT16; "float32" is ONNX's FLOAT."""
    return ir.DataType.FLOAT if name == "float32" else ir.DataType[name.upper()]


class Graph:
    """io_dtype is the activation type. Values are onnx_ir Values; `op` emits standard ops, ops.py the contrib ones.

    matmuls counts linear modules by weight format, experts those of mixtures by the format they are carried in;
    dequantized says of each quantized module that is carried as float why it is.
    """

    def __init__(self, name: str, io: IoSpec, io_dtype: ir.DataType) -> None:
        graph = ir.Graph(inputs=[], outputs=[], nodes=[], name=name, opset_imports=dict(OPSETS))
        self.io = io
        self.io_dtype = io_dtype
        self.weights: dict[str, Weight] = {}
        self.narrowed: set[object] = set()
        self.matmuls: Counter[str] = Counter()
        self.experts: Counter[str] = Counter()
        self.dequantized: dict[str, str] = {}
        self._builder = GraphBuilder(graph)
        self._contrib = self._builder.opset("com.microsoft", 1)
        self._casts: dict[tuple[str, ir.DataType], Value] = {}
        self._inputs = {spec.name: self._input(spec) for spec in io.inputs}
        self._outputs: dict[str, Value] = {}

    @property
    def op(self):  # type: ignore[no-untyped-def]  # onnxscript's OpBuilder makes its methods on demand
        return self._builder.op

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Nodes and weights made inside carry `name` in their own names."""
        self._builder.push_module(name, "")
        try:
            yield
        finally:
            self._builder.pop_module()

    def input(self, name: str) -> Value:
        return self._inputs[name]

    def _input(self, spec: TensorSpec) -> Value:
        return self._builder.input(spec.name, element_type(spec.dtype), list(spec.shape))

    def set_output(self, name: str, value: Value) -> None:
        """Makes `value` the output of that name; its type must be the contract's."""
        spec = self.io.output(name)
        if value.dtype != element_type(spec.dtype):
            raise AssertionError(f"output {name}: {value.dtype} is not the contract's {spec.dtype}")
        value.name = name
        value.shape = ir.Shape(spec.shape)
        self._outputs[name] = value

    def output(self, name: str) -> Value:
        """A value that has been made an output."""
        return self._outputs[name]

    def choose(
        self,
        condition: Value,
        specs: Sequence[TensorSpec],
        then: Callable[[Any], Sequence[Value]],
        otherwise: Callable[[Any], Sequence[Value]],
    ) -> list[Value]:
        """Values that `then` makes where `condition` (one bool) holds, else those of `otherwise`; the other is not run.

        Both are given the `op` of a graph inside this one, and may use this one's values. specs: of the values.
        """
        branches = {}
        for name, make in (("then_branch", then), ("else_branch", otherwise)):
            with self.scope(name):
                types = [ir.Value(type=ir.TensorType(element_type(spec.dtype))) for spec in specs]
                branches[name] = self._builder.subgraph(make, inputs=[], outputs=types, name=name)
        values = self.op.If(condition, **branches, _outputs=len(specs))
        for value, spec in zip(values, specs, strict=True):
            value.dtype, value.shape = element_type(spec.dtype), ir.Shape(spec.shape)
        return list(values)

    def contrib(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        outputs: Sequence[tuple[ir.DataType, Sequence[int | str]] | None],
        attributes: Mapping[str, int | float | str | Sequence[int]],
    ) -> list[Value]:
        """A com.microsoft node. outputs: (element type, shape) of each, None for one that is left out."""
        count = self._builder.graph.num_nodes()
        names = [ir.Value(name="") if spec is None else f"{op_type}_{count}_{i}" for i, spec in enumerate(outputs)]
        result = getattr(self._contrib, op_type)(*inputs, **attributes, _outputs=names)
        values = list(result) if len(outputs) > 1 else [result]
        for value, spec in zip(values, outputs, strict=True):
            if spec is not None:
                value.dtype = spec[0]
                value.shape = ir.Shape(spec[1])
        return [value for value, spec in zip(values, outputs, strict=True) if spec is not None]

    def weight(self, name: str, weight: Weight) -> Value:
        """An initializer whose bytes `weight` promises. A name is filled once; asking again gives the same value."""
        initializers = self._builder.graph.initializers
        if name in self.weights:
            if self.weights[name].key != weight.key:
                raise AssertionError(f"initializer {name} is filled twice")
            return initializers[name]
        value = ir.Value(name=name, type=ir.TensorType(weight.dtype), shape=ir.Shape(weight.shape))
        initializers[name] = value
        self.weights[name] = weight
        return value

    def io_weight(self, name: str, weight: Weight) -> Value:
        """A weight in the activation type: stored as it is, with a Cast that the runtime folds at load."""
        value = self.weight(name, weight)
        if weight.dtype == self.io_dtype:
            return value
        if self.io_dtype == ir.DataType.FLOAT16:
            self.narrowed.add(weight.key)
        key = (name, self.io_dtype)
        if key not in self._casts:
            self._casts[key] = self.op.Cast(value, to=self.io_dtype)
        return self._casts[key]

    def to_model(self, places: Mapping[object, Placement]) -> ir.Model:
        """The finished model, its initializers pointing at their bytes."""
        graph = self._builder.graph
        graph.outputs.extend(self._outputs[spec.name] for spec in self.io.outputs)
        for node in graph.all_nodes():
            node.metadata_props.clear()
        for name, weight in self.weights.items():
            place = places[weight.key]
            graph.initializers[name].const_value = ir.ExternalTensor(
                location=place.file,
                offset=place.offset,
                length=place.length,
                dtype=weight.dtype,
                shape=ir.Shape(weight.shape),
                name=name,
            )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="draftsmith")

    def count(self, op_type: str) -> int:
        return sum(node.op_type == op_type for node in self._nodes)

    def required_ops(self) -> dict[tuple[str, str], set[str]]:
        """Attribute names by (domain, op type), over all nodes."""
        ops: dict[tuple[str, str], set[str]] = {}
        for node in self._nodes:
            ops.setdefault((node.domain, node.op_type), set()).update(node.attributes)
        return ops

    def __len__(self) -> int:
        return sum(1 for _ in self._nodes)

    @property
    def _nodes(self) -> Iterator[ir.Node]:
        """Those of branches too."""
        return self._builder.graph.all_nodes()
