"""Session: one graph on one ONNX Runtime provider, with arrays bound in place of copies."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime as ort

from builder.errors import MachineError, Refused, one_line
from builder.reader import GraphFile
from runtime.bound_run import ORT_ERRORS, BoundRun
from runtime.kernels import has_cpu_kernel, has_cuda_kernel
from runtime.lowering import Edit, edited, lower
from runtime.lowering.absorbing import absorb_rotations
from runtime.lowering.choosing import choose_tokens
from runtime.lowering.feeding import feed_by_number
from runtime.lowering.joining import join_products
from runtime.lowering.spreading import spread_attention
from runtime.place import GPU, HOST, Array, DeviceArray, Place

ExecutionProvider = Literal["auto", "cpu", "cuda"]

CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


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

    On a GPU the graph runs without lowering, but for a place that is widened. It chooses the best token of each row
    itself, and small products of one input are joined.
    """

    def __init__(
        self,
        graph: GraphFile,
        ep: ExecutionProvider = "auto",
        edit: Edit | None = None,
        place: Place | None = None,
        *,
        cuda_graph: bool = False,
        given: Mapping[str, DeviceArray] | None = None,
    ) -> None:
        """edit: a change to the graph, in memory. place: instead of the one that `ep` means. cuda_graph: runs that are
        bound for capture are recorded once and replayed. given: inputs that are the same in every run.
        """
        self.place = place or place_for(ep)
        self._given = given or {}
        self.records = cuda_graph and self.place.device == "cuda"
        self._recorded = 0
        self.unrecorded = 0
        """Runs that were to be recorded after the session had as many as it keeps."""
        if not str(graph.path).isascii() and "\udc80" <= max(str(graph.path)) <= "\udcff":
            raise Refused(graph.path, expected="a path in UTF-8", found="other bytes", remedy="rename the folder")
        self.io = graph.io
        edits = [*([edit] if edit else []), *_edits(self.place)]
        self._session = weighted_session(graph.path, edits, self.place, cuda_graph=self.records)
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
        inputs = {**inputs, **self._given}
        run = BoundRun(self._session, self.place, inputs, outputs, () if self.place.is_host else self._kept_on_host())
        if self.records:
            record = capture and self._recorded < MAX_RECORDED
            self._recorded += record
            self.unrecorded += capture and not record
            run.graph_id = self._recorded if record else -1
        return run

    def _kept_on_host(self) -> list[str]:
        """Inputs that kernels read on the host, although the graph runs on a device."""
        if self.place.device == "cpu":
            return []
        infos = self._session.get_input_memory_infos()
        names = (entry.name for entry in self._session.get_inputs())
        return [name for name, info in zip(names, infos, strict=True) if "cpu" in str(info.name).lower()]


def _edits(place: Place) -> list[Edit]:
    """What makes a graph fit for a device: nothing goes to the host that need not, and fewer kernels are launched."""
    if place.is_host:
        return []
    added = [choose_tokens, feed_by_number, spread_attention]
    return [*added, join_products, *([] if place.widened else [absorb_rotations])]


MAX_RECORDED = 48
"""Recorded runs of a session; each keeps memory of its own, and later shapes are run without."""


def weighted_session(
    path: Path, edits: Sequence[Edit], place: Place, *, cuda_graph: bool = False, sparing: bool = False
) -> ort.InferenceSession:
    """The graph at `path` after these changes, with its weights. sparing: takes no memory in advance, which costs time
    where runs need ever other amounts.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4  # its own lines would come beside ours, in colour
    # Target and head take turns: threads that spin after a run would take the other session's cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(path.parent.absolute())
    )
    if place.device == "cuda":  # else weights lie in an arena, which grows by doubling
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    has_kernel = has_cpu_kernel if place.device == "cpu" else has_cuda_kernel
    model = lower(path, has_kernel, edits) if place.widened else edited(path, edits)
    try:
        return ort.InferenceSession(model, options, providers=_providers(place, cuda_graph, sparing=sparing))
    except ORT_ERRORS as error:
        raise MachineError(f"{path}: ONNX Runtime {ort.__version__} cannot load it: {one_line(error)}") from error


def bare_session(model: bytes, place: Place, *, cuda_graph: bool = False) -> ort.InferenceSession:
    """A graph of our own without weights, on `place`. Exact in float32: no TF32."""
    ort.set_default_logger_severity(3)  # kernels warn of ScatterND through it; our indices are never twice the same
    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        return ort.InferenceSession(model, options, providers=_providers(place, cuda_graph))
    except ORT_ERRORS as error:
        raise MachineError(f"ONNX Runtime cannot move states on {place.device}: {one_line(error)}") from error


def _providers(place: Place, cuda_graph: bool = False, *, sparing: bool = False) -> list[Any]:
    """TF32 would round the inputs of float32 products to 10 bits."""
    if place.device == "cpu":
        return [CPU_PROVIDER]
    options = {"use_tf32": "0", **({"enable_cuda_graph": "1"} if cuda_graph else {})}
    if sparing:
        options["arena_extend_strategy"] = "kSameAsRequested"
    return [(CUDA_PROVIDER, options), CPU_PROVIDER]
