"""What the runtime says of its kernels when it is asked to load a node, against its own registry."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

import builder
from fixtures import CHECKPOINTS
from runtime.kernels import has_cpu_kernel
from runtime.lowering import CONTRIB

FLOAT = "tensor(float)"


def listed(op_type: str) -> bool:
    """Whether the registry has a kernel that takes float32."""
    kernels = [
        kernel
        for kernel in ort_state.get_all_opkernel_def()
        if (kernel.provider, kernel.domain, kernel.op_name) == ("CPUExecutionProvider", CONTRIB, op_type)
    ]
    return any(FLOAT in kernel.type_constraints.get("T", [FLOAT]) for kernel in kernels)


@pytest.mark.parametrize("graph", ["model.onnx", "mtp.onnx"])
@pytest.mark.parametrize("name", ["ct_mixed_dense_vl", "trained_ct_moe_text"])
def test_every_op_of_a_package_is_found_as_the_registry_has_it(name: str, graph: str, tmp_path: Path) -> None:
    builder.export(CHECKPOINTS / name, tmp_path / "package")
    found = {}
    for node in ir.load(tmp_path / "package" / graph).graph:
        if node.domain == CONTRIB and node.op_type != "QMoE":  # rewritten before anybody asks
            found.setdefault(node.op_type, set()).add(has_cpu_kernel(node))
    assert found == {op_type: {listed(op_type)} for op_type in found}
    assert found["PagedAttention"] == {False}, "it takes half precision alone"
    assert found["MRotaryEmbedding"] == {True}


def test_what_is_no_op_has_no_kernel() -> None:
    assert not has_cpu_kernel(ir.node("NoSuchOp", [], domain=CONTRIB))
