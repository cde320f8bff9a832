"""Which kernels the installed runtime has on a CPU, found by asking it to load one node.

Its own registry would list them, but it opens every provider that was built in, and where a library of one is missing,
as TensorRT's mostly is beside a CUDA build, that ends the process.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import onnx
import onnxruntime as ort
from onnx import helper
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from runtime.bound_run import ORT_ERRORS

NO_KERNEL = "Could not find an implementation"
"""What ONNX Runtime says of a node without a kernel."""
FLOAT = "tensor(float)"


@lru_cache(maxsize=1)
def _schemas() -> dict[tuple[str, str], Any]:
    return {(schema.domain, schema.name): schema for schema in ort_state.get_all_operator_schema()}


@lru_cache(maxsize=64)
def has_cpu_kernel(domain: str, op_type: str) -> bool:
    """Whether activations in float32 can go through an op on a CPU."""
    schema = _schemas().get((domain, op_type))
    if schema is None:
        return False
    types = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
    if FLOAT not in types.get("T", [FLOAT]):
        return False
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        ort.InferenceSession(_alone(schema, types).SerializeToString(), options, providers=["CPUExecutionProvider"])
    except ORT_ERRORS as error:
        return NO_KERNEL not in str(error)  # any other complaint is the kernel's own
    return True


def _alone(schema: Any, types: dict[str, list[str]]) -> onnx.ModelProto:
    """A graph of one node with the inputs and attributes that it must have."""
    required = type(schema.inputs[0].option).Single
    inputs, names = [], []
    for index, formal in enumerate(schema.inputs):
        names.append(f"input{index}" if formal.option == required else "")
        if names[-1]:
            inputs.append(helper.make_tensor_value_info(names[-1], _element(formal.typeStr, types), None))
    attributes = {name: _filled(attribute) for name, attribute in schema.attributes.items() if attribute.required}
    node = helper.make_node(schema.name, names, ["output"], domain=schema.domain, **attributes)
    output = helper.make_tensor_value_info("output", _element(schema.outputs[0].typeStr, types), None)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(
        helper.make_graph([node], schema.name, inputs, [output]), opset_imports=opsets, ir_version=10
    )


def _element(type_name: str, types: dict[str, list[str]]) -> int:
    """float32 where it may be, else the first type that may be."""
    allowed = types.get(type_name, [type_name])
    name = FLOAT if FLOAT in allowed else allowed[0]
    return int(onnx.TensorProto.DataType.Value(name.removeprefix("tensor(").removesuffix(")").upper()))


def _filled(attribute: Any) -> Any:
    kind = attribute.type.name
    return {"INT": 1, "FLOAT": 1.0, "STRING": "", "INTS": [1], "FLOATS": [1.0]}[kind]
