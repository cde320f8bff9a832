"""Lowering: makes a package's graph run on a provider that lacks some of its kernels, at load and in memory.

A node is swapped when the installed runtime has no kernel for it on the provider; so a new kernel takes over by
itself, and the artifact that is validated stays the artifact that ships. A node whose attributes the reference
function does not cover is refused, never approximated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from builder.errors import MachineError
from runtime.lowering.widening import widen

CONTRIB = "com.microsoft"
LOWERED_OPSET = 23
"""The reference functions use Attention, which opset 23 brought."""

HasKernel = Callable[[ir.Node], bool]
"""Whether the provider has a kernel for a node in float32."""


class NoKernel(MachineError):
    """An op of the graph can be run neither as it is nor by a reference function."""


Edit = Callable[[ir.Model], None]
"""A change to a loaded model, made in memory before anything else."""


def edited(path: Path, edits: Sequence[Edit]) -> bytes:
    """The model at `path` with changes made in memory, serialized; weights stay external."""
    model = ir.load(path)
    for edit in edits:
        edit(model)
    return ir.to_proto(model).SerializeToString()


def lower(path: Path, has_kernel: HasKernel, edits: Sequence[Edit] = ()) -> bytes:
    """The model at `path` in float32 with every kernel-less contrib op replaced, serialized; weights stay external.

    Raises MachineError for an op that has neither kernel nor reference function.
    """
    model = ir.load(path)
    for edit in edits:
        edit(model)
    widen(model.graph)
    for node in list(model.graph):
        if node.op_type == "QMoE":
            _dequantize_experts(model, node)
        if node.domain == CONTRIB and not has_kernel(node):
            _replace(model, node)
    model.opset_imports[""] = LOWERED_OPSET
    return ir.to_proto(model).SerializeToString()


def _dequantize_experts(model: ir.Model, node: ir.Node) -> None:
    """QMoE becomes MoE over float experts: a CPU's kernel does not take their layout, or not to the last bit."""
    from runtime.lowering import functions

    _check_covered(node, len(node.inputs), {"k"})
    float_inputs = list(node.inputs[:2])
    for codes, scales, multipliers in ((2, 3, 15), (5, 6, 16)):
        stored = [node.inputs[index] for index in (codes, scales, multipliers)]
        experts = ir.node("NvFp4Experts", stored, domain=functions.DOMAIN, name=f"{node.name}/{codes}")
        model.graph.insert_before(node, experts)
        float_inputs += [experts.outputs[0], None]
    _define(model, functions.NvFp4Experts)
    node.op_type = "MoE"
    node.resize_inputs(5)
    for index, value in enumerate(float_inputs[:5]):
        node.replace_input_with(index, value)
    for name in ("quant_type", "block_size", "expert_weight_bits"):
        del node.attributes[name]


def _define(model: ir.Model, function: Any) -> None:
    signature = function.function_ir
    model.functions[signature.identifier()] = signature
    model.opset_imports[signature.domain] = 1


def _replace(model: ir.Model, node: ir.Node) -> None:
    from runtime.lowering import functions

    function = getattr(functions, node.op_type, None)
    if function is None:
        raise NoKernel(f"{node.name}: the installed ONNX Runtime has no kernel for {node.op_type}; install another one")
    signature = function.function_ir
    _check_covered(node, len(signature.inputs), set(signature.attributes))
    _define(model, function)
    node.domain = functions.DOMAIN
    node.resize_inputs(len(signature.inputs))
    for name in set(node.attributes) - set(signature.attributes):
        del node.attributes[name]


MIXTURE: Mapping[str, Any] = {
    "normalize_routing_weights": 1,
    "activation_type": "swiglu",
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "swiglu_fusion": 1,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "PagedAttention": {"do_rotary": 0, "local_window_size": -1},
    "MoE": MIXTURE,
    "QMoE": {**MIXTURE, "quant_type": "nvfp4", "block_size": 16, "expert_weight_bits": 4},
}
"""Attribute values that the reference functions imply, by op."""
IGNORED_INPUTS = {"PagedAttention": {16}}
"""Inputs that only size workspaces: attention_metadata."""


def _check_covered(node: ir.Node, arity: int, attributes: set[str]) -> None:
    implied = DEFAULTS.get(node.op_type, {})
    for name, attribute in node.attributes.items():
        if name not in attributes and implied.get(name) != attribute.value:
            raise MachineError(
                f"{node.name}: {name}={attribute.value} of {node.op_type} has no reference on this provider"
            )
    for index, value in enumerate(node.inputs):
        if index >= arity and value is not None and index not in IGNORED_INPUTS.get(node.op_type, set()):
            raise MachineError(f"{node.name}: input {index} of {node.op_type} has no reference on this provider")
