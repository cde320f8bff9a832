"""What the runtime says of its kernels when it is asked to load a node, against its own registry."""

from __future__ import annotations

import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from builder.ops import SCHEMAS
from runtime.kernels import has_cpu_kernel

CONTRIB = "com.microsoft"


@pytest.mark.parametrize("op_type", sorted(SCHEMAS))
def test_every_op_of_ours_is_found_as_the_registry_has_it(op_type: str) -> None:
    listed = [
        kernel
        for kernel in ort_state.get_all_opkernel_def()
        if (kernel.provider, kernel.domain, kernel.op_name) == ("CPUExecutionProvider", CONTRIB, op_type)
    ]
    floats = ["tensor(float)"]
    assert has_cpu_kernel(CONTRIB, op_type) == any(
        "tensor(float)" in k.type_constraints.get("T", floats) for k in listed
    )


def test_both_answers_occur() -> None:
    assert has_cpu_kernel(CONTRIB, "GatedDeltaNet")
    assert not has_cpu_kernel(CONTRIB, "PagedAttention"), "it takes half precision alone"
    assert not has_cpu_kernel(CONTRIB, "MatMulBlockQuantizedFp8Weight")


def test_what_is_no_op_has_no_kernel() -> None:
    assert not has_cpu_kernel(CONTRIB, "NoSuchOp")
