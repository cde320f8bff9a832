"""Which kernels the installed runtime has, found by asking it to load one node.

Its own registry would list them, but it opens every provider that was built in, and where a library of one is missing,
as TensorRT's mostly is beside a CUDA build, that ends the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from runtime.bound_run import ORT_ERRORS

NO_KERNEL = "Could not find an implementation"
"""What ONNX Runtime says of a node without a kernel."""
FLOAT = "tensor(float)"
CPU_ALONE = ("CPUExecutionProvider",)


@lru_cache(maxsize=1)
def _schemas() -> dict[tuple[str, str], Any]:
    return {(schema.domain, schema.name): schema for schema in ort_state.get_all_operator_schema()}


def has_cpu_kernel(node: ir.Node) -> bool:
    """Whether a node of a contributed op can run on a CPU with activations in float32."""
    return _has_kernel(node, CPU_ALONE)


def has_cuda_kernel(node: ir.Node) -> bool:
    """The same on a GPU, or on the CPU beside it."""
    return _has_kernel(node, ("CUDAExecutionProvider", *CPU_ALONE))


def _has_kernel(node: ir.Node, providers: tuple[str, ...]) -> bool:
    proto = onnx.NodeProto(op_type=node.op_type, domain=node.domain)
    proto.input.extend(f"input{index}" if value is not None else "" for index, value in enumerate(node.inputs))
    proto.output.extend(f"output{index}" for index in range(len(node.outputs)))
    proto.attribute.extend(ir.to_proto(node.attributes[name]) for name in sorted(node.attributes))
    return _loads(proto.SerializeToString(deterministic=True), providers)


@lru_cache(maxsize=64)
def _loads(node: bytes, providers: tuple[str, ...]) -> bool:
    """Whether there is a kernel for a node, which stands alone in a graph that is loaded."""
    proto = onnx.NodeProto.FromString(node)
    schema = _schemas().get((proto.domain, proto.op_type))
    if schema is None:
        return False
    types = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    if FLOAT not in types.get("T", [FLOAT]):
        return False
    model = helper.make_model(
        helper.make_graph(
            [proto],
            proto.op_type,
            _typed(proto.input, schema.inputs, types),
            _typed(proto.output, schema.outputs, types),
        ),
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid(proto.domain, 1)],
        ir_version=10,
    )
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=list(providers))
    except ORT_ERRORS as error:
        return NO_KERNEL not in str(error)  # any other complaint is the kernel's own
    return True


def _typed(names: Sequence[str], formals: Sequence[Any], types: Mapping[str, list[str]]) -> list[onnx.ValueInfoProto]:
    """Values of float32 where they may be, else of the first type that may be."""
    found = []
    for name, formal in zip(names, formals, strict=False):
        allowed = types.get(formal.typeStr, [formal.typeStr])
        chosen = FLOAT if FLOAT in allowed else allowed[0]
        kind = onnx.TensorProto.DataType.Value(chosen.removeprefix("tensor(").removesuffix(")").upper())
        if name:
            found.append(helper.make_tensor_value_info(name, kind, None))
    return found
