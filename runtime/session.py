"""Session: one graph on one ONNX Runtime provider, with arrays bound in place of copies."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from onnxruntime.capi import onnxruntime_pybind11_state as ort_state

from builder.errors import MachineError, Refused, one_line
from builder.reader import GraphFile
from runtime.lowering import Edit, edited, lower
from runtime.lowering.absorbing import absorb_rotations, absorb_splits
from runtime.lowering.choosing import choose_tokens
from runtime.lowering.joining import join_products
from runtime.place import GPU, HOST, Array, DeviceArray, Place, element_type

ExecutionProvider = Literal["auto", "cpu", "cuda"]

ORT_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(kind for kind in vars(ort_state).values() if isinstance(kind, type) and issubclass(kind, Exception)),
)
"""Everything ONNX Runtime raises; its exceptions have no common base of their own."""
CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


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


def place_for(ep: ExecutionProvider) -> Place:
    """auto takes the GPU where the installed runtime has one. Raises MachineError for a GPU that is not there."""
    if ep == "cpu":
        return HOST
    missing = missing_for_gpu()
    if missing is None:
        return GPU
    if ep == "auto":
        return HOST
    raise MachineError(f"--ep cuda: {missing}, or use --ep cpu")


@lru_cache(maxsize=1)
def missing_for_gpu() -> str | None:
    """What keeps this process from using a GPU, or None. The provider is there also on machines that have none."""
    if CUDA_PROVIDER not in ort.get_available_providers():
        return (
            f"the installed onnxruntime {ort.__version__} has no CUDA provider; "
            "install draftsmith[cuda] in place of draftsmith[cpu]"
        )
    with contextlib.redirect_stdout(sys.stderr):  # it prints what it does not find
        ort.preload_dlls()  # CUDA's libraries may lie in Python packages, where the loader does not look
    try:
        ort.OrtValue.ortvalue_from_shape_and_type((1,), np.float32, GPU.device, 0)
    except ORT_ERRORS as error:
        return f"no usable GPU was found ({one_line(error)}); check the driver and CUDA's libraries"
    return None


class Session:
    """A loaded graph. `bind` prepares a run over given arrays, which may be kept and run again.

    On a GPU the graph runs without lowering; it chooses the best token of each row itself, and small products of one
    input are joined.
    """

    def __init__(
        self,
        graph: GraphFile,
        ep: ExecutionProvider = "auto",
        edit: Edit | None = None,
        place: Place | None = None,
        *,
        cuda_graph: bool = False,
    ) -> None:
        """edit: a change to the graph, in memory. place: instead of the one that `ep` means. cuda_graph: runs that are
        bound for capture are recorded once and replayed.
        """
        self.place = place or place_for(ep)
        self.records = cuda_graph and self.place.device == "cuda"
        if self.records and any(spec.dtype == "bfloat16" for spec in (*graph.io.inputs, *graph.io.outputs)):
            # NumPy has no such type, so its arrays are bound anew for each run, and a recording would keep the first.
            raise Refused(
                "--cuda-graph",
                expected="a package in float16",
                found=f"bfloat16 in {graph.path.name}",
                remedy="export with --dtype float16, or leave it out",
            )
        self._recorded = 0
        self.unrecorded = 0
        """Runs that were to be recorded after the session had as many as it keeps."""
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
        edits = [*([edit] if edit else []), *_edits(self.place)]
        model = lower(graph.path, has_cpu_kernel, edits) if self.place.device == "cpu" else edited(graph.path, edits)
        try:
            self._session = ort.InferenceSession(model, options, providers=_providers(self.place, self.records))
        except ORT_ERRORS as error:
            raise MachineError(
                f"{graph.path}: ONNX Runtime {ort.__version__} cannot load it: {one_line(error)}"
            ) from error

        if self.place.device == "cuda" and CUDA_PROVIDER not in self._session.get_providers():
            raise MachineError("--ep cuda: no usable GPU was found; use --ep cpu")

    def bind(
        self,
        inputs: Mapping[str, Array | DeviceArray],
        outputs: Mapping[str, Array | DeviceArray],
        *,
        capture: bool = False,
    ) -> BoundRun:
        """Every array must be C-contiguous; an array may be both input and output, which updates it in place.

        NumPy arrays may be changed between runs; where the session wants them on a device, each run copies them to and
        from memory there. capture: record the run the first time, as far as the session still may.
        """
        run = BoundRun(self._session, (inputs, outputs))
        wanted = {} if self.place.is_host else self._input_devices()
        for name, array in inputs.items():
            run.bind_input(name, array, wanted.get(name, "cpu"))
        for name, array in outputs.items():
            run.bind_output(name, array, "cpu" if self.place.is_host else self.place.device)
        if self.records:
            record = capture and self._recorded < MAX_RECORDED
            self._recorded += record
            self.unrecorded += capture and not record
            run.graph_id = self._recorded if record else -1
        return run

    def _input_devices(self) -> dict[str, str]:
        """Where the session wants each input: some kernels read one on the host."""
        infos = self._session.get_input_memory_infos()
        names = (entry.name for entry in self._session.get_inputs())
        return {
            name: "cpu" if "cpu" in str(info.name).lower() else self.place.device
            for name, info in zip(names, infos, strict=True)
        }


def _edits(place: Place) -> list[Edit]:
    """What makes a graph fit for a device: nothing goes to the host that need not, and fewer kernels are launched."""
    if place.is_host:
        return []
    return [choose_tokens, join_products, absorb_splits, *([absorb_rotations] if place.device == "cuda" else [])]


MAX_RECORDED = 48
"""Recorded runs of a session; each keeps memory of its own, and later shapes are run without."""


def _bind(bind: Callable[..., None], name: str, array: Array | DeviceArray) -> None:
    """The runtime takes the address alone and would read past any stride."""
    if isinstance(array, DeviceArray):
        bind(name, array.device, 0, element_type(array.dtype), array.shape, array.address)
        return
    if not array.flags.c_contiguous:
        raise AssertionError("only C-contiguous arrays can be bound")
    bind(name, "cpu", 0, element_type(array.dtype), array.shape, int(array.__array_interface__["data"][0]))


def bare_session(model: bytes, place: Place) -> ort.InferenceSession:
    """A graph of our own without weights, on `place`. Exact in float32: no TF32."""
    ort.set_default_logger_severity(3)  # kernels warn of ScatterND through it; our indices are never twice the same
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(model, options, providers=_providers(place))
    except ORT_ERRORS as error:
        raise MachineError(f"ONNX Runtime cannot move states on {place.device}: {one_line(error)}") from error


def _providers(place: Place, cuda_graph: bool = False) -> list[Any]:
    """TF32 would round the inputs of float32 products to 10 bits."""
    if place.device == "cpu":
        return [CPU_PROVIDER]
    options = {"use_tf32": "0", **({"enable_cuda_graph": "1"} if cuda_graph else {})}
    return [(CUDA_PROVIDER, options), CPU_PROVIDER]


def bind_arrays(
    session: ort.InferenceSession, inputs: Mapping[str, Array | DeviceArray], outputs: Mapping[str, DeviceArray]
) -> None:
    """Binds everything anew and runs, for runs that are too rare to be kept."""
    binding = session.io_binding()
    for name, array in inputs.items():
        _bind(binding.bind_input, name, array)
    for name, output in outputs.items():
        _bind(binding.bind_output, name, output)
    try:
        session.run_with_iobinding(binding)
    except ORT_ERRORS as error:
        raise MachineError(f"ONNX Runtime failed to move states: {one_line(error)}") from error


@dataclass
class Upload:
    """An array and its memory on a device, which gets what has changed since the last time."""

    array: Array
    value: ort.OrtValue
    _sent: Array | None = None

    def send(self) -> bool:
        """Whether anything had to be copied."""
        if self._sent is not None and np.array_equal(self._sent, self.array):
            return False
        self.value.update_inplace(self.array)
        self._sent = self.array.copy()
        return True


class BoundRun:
    """One prepared run; it keeps its arrays alive because the runtime only holds their addresses.

    graph_id: number of the recorded run, -1 for none of them; 0 where the session records nothing.
    """

    def __init__(self, session: ort.InferenceSession, arrays: tuple[Any, Any]) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._arrays = arrays
        self._uploads: list[Upload] = []
        self._anew: dict[str, Array] = {}
        self._downloads: list[tuple[Array, ort.OrtValue]] = []
        self.graph_id = 0

    def bind_input(self, name: str, array: Array | DeviceArray, device: str) -> None:
        if isinstance(array, DeviceArray) or device == "cpu":
            _bind(self._binding.bind_input, name, array)
        elif element_type(array.dtype) is array.dtype.type:
            value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, device, 0)
            self._binding.bind_ortvalue_input(name, value)
            self._uploads.append(Upload(array, value))
        else:  # a type that NumPy does not know cannot be copied by itself, but binding copies it
            self._anew[name] = array

    def bind_output(self, name: str, array: Array | DeviceArray, device: str) -> None:
        if isinstance(array, DeviceArray) or device == "cpu" or element_type(array.dtype) is not array.dtype.type:
            _bind(self._binding.bind_output, name, array)
            return
        value = ort.OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, device, 0)
        self._binding.bind_ortvalue_output(name, value)
        self._downloads.append((array, value))

    def run(self) -> None:
        try:
            self._upload()
            if self.graph_id:
                options = ort.RunOptions()
                options.add_run_config_entry("gpu_graph_id", str(self.graph_id))
                self._session.run_with_iobinding(self._binding, options)
            else:
                self._session.run_with_iobinding(self._binding)
            for array, value in self._downloads:
                array[...] = value.numpy()
        except ORT_ERRORS as error:
            raise MachineError(f"ONNX Runtime failed in the middle of a run: {one_line(error)}") from error

    def _upload(self) -> None:
        for name, array in self._anew.items():
            _bind(self._binding.bind_input, name, array)
        sent = [upload for upload in self._uploads if upload.send()]
        if sent:
            # A copy from pageable memory may return before it has arrived, and the session's stream does not wait for
            # the stream of these copies; reading back does.
            min(sent, key=lambda upload: upload.array.nbytes).value.numpy()
