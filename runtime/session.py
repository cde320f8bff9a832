"""Session: one graph on one ONNX Runtime provider, with arrays bound in place of copies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from builder.contract import TensorSpec
from builder.errors import MachineError, Refused, one_line
from builder.reader import GraphFile
from runtime.lowering import Edit, lower

Array = NDArray[Any]
ExecutionProvider = Literal["auto", "cpu", "cuda"]

ORT_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for kind in vars(ort_state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""Everything ONNX Runtime raises; its exceptions have no common base of their own."""
CPU_PROVIDER = "CPUExecutionProvider"
NUMPY_TYPES: Mapping[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float32),  # widened on the CPU
    "bfloat16": np.dtype(np.float32),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


@lru_cache(maxsize=1)
def _cpu_kernels() -> frozenset[tuple[str, str]]:
    """(domain, op) of every CPU kernel that takes float32, from the installed runtime's own registry."""
    return frozenset(
        (kernel.domain, kernel.op_name)
        for kernel in ort_state.get_all_opkernel_def()
        if kernel.provider == CPU_PROVIDER and "tensor(float)" in kernel.type_constraints.get("T", ["tensor(float)"])
    )


def has_cpu_kernel(domain: str, op_type: str) -> bool:
    return (domain, op_type) in _cpu_kernels()


def array_type(spec: TensorSpec) -> np.dtype[Any]:
    """The NumPy type in which a graph tensor lives on the CPU."""
    return NUMPY_TYPES[spec.dtype]


class Session:
    """A loaded graph. `bind` prepares a run over given arrays, which may be kept and run again."""

    def __init__(self, graph: GraphFile, ep: ExecutionProvider = "auto", edit: Edit | None = None) -> None:
        if ep == "cuda":
            raise MachineError("--ep cuda: this version runs packages on the CPU only; use --ep cpu")
        if not str(graph.path).isascii() and "\udc80" <= max(str(graph.path)) <= "\udcff":
            raise Refused(graph.path, expected="a path in UTF-8", found="other bytes", remedy="rename the folder")
        self.io = graph.io
        options = ort.SessionOptions()
        options.log_severity_level = 4  # its own lines would come beside ours, in colour
        # Target and head take turns: threads that spin after a run would take the other session's cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(graph.path.parent.absolute())
        )
        try:
            self._session = ort.InferenceSession(
                lower(graph.path, has_cpu_kernel, edit), options, providers=[CPU_PROVIDER]
            )
        except ORT_ERRORS as error:
            raise MachineError(
                f"{graph.path}: ONNX Runtime {ort.__version__} cannot load it: {one_line(error)}"
            ) from error

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> BoundRun:
        """Every array must be C-contiguous; an array may be both input and output, which updates it in place."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, _address(array))
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, _address(array))
        return BoundRun(self._session, binding, (inputs, outputs))


def _address(array: Array) -> int:
    """Where a C-contiguous array's data lie. The runtime takes the address alone and would read past any stride."""
    if not array.flags.c_contiguous:
        raise AssertionError("only C-contiguous arrays can be bound")
    return int(array.__array_interface__["data"][0])


class BoundRun:
    """One prepared run; it keeps its arrays alive because the runtime only holds their addresses."""

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, arrays: tuple[Any, ...]) -> None:
        self._session = session
        self._binding = binding
        self._arrays = arrays

    def run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except ORT_ERRORS as error:
            raise MachineError(f"ONNX Runtime failed in the middle of a run: {one_line(error)}") from error
