"""Unpacked weights: the target's quantized weights once more, in the activations' type, for steps of many rows.

Steps of up to PACKED_ROWS rows leave them alone: they are as fast with the packed ones, which are a quarter or a half
of the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from builder.contract import HIDDEN_STATES
from builder.errors import MachineError, one_line
from builder.reader import GraphFile
from runtime.bound_run import ORT_ERRORS
from runtime.lowering.unpacking import packed_products, take_unpacked, unpack_all
from runtime.place import Array, DeviceArray, Place, element_type
from runtime.session import Session, weighted_session

PACKED_ROWS = 16
"""Most rows for which kernels that decode as they read take no longer than a product of twice to four times the bytes
does; measured (benchmarks/gpu-notes.md).
"""


def unpacked_session(graph: GraphFile, place: Place, *, cuda_graph: bool = False) -> Session | None:
    """The graph over unpacked weights; None where it has no quantized product.

    Raises MachineError where memory does not suffice.
    """
    if not any(packed_products(ir.load(graph.path).graph)):
        return None
    weights = unpack(graph, place)
    return Session(graph, "auto", take_unpacked, place, cuda_graph=cuda_graph, given=weights)


def unpack(graph: GraphFile, place: Place) -> Mapping[str, DeviceArray]:
    """Every quantized weight [K, N] on a device, by the name of the input that take_unpacked makes of it."""
    dtype = place.array_type(graph.io.output(HIDDEN_STATES))
    session = weighted_session(graph.path, [unpack_all], place, sparing=True)
    binding, kept = session.io_binding(), []
    for entry in session.get_inputs():
        identity = _identity(entry.shape[0], dtype, place)
        binding.bind_input(entry.name, place.device, 0, element_type(dtype), entry.shape, identity.data_ptr())
        kept.append(identity)
    outputs = session.get_outputs()
    for entry in outputs:
        binding.bind_output(entry.name, place.device, 0, element_type(dtype), entry.shape)
    try:
        session.run_with_iobinding(binding)
    except ORT_ERRORS as error:
        size = sum(math.prod(entry.shape) for entry in outputs) * dtype.itemsize
        raise MachineError(
            f"{size:,} bytes of unpacked weights on {place.device} cannot be made: {one_line(error)}; "
            "leave --unpacked-weights out"
        ) from error
    return {
        entry.name: DeviceArray(tuple(entry.shape), dtype, value.data_ptr(), place.device, value)
        for entry, value in zip(outputs, binding.get_outputs(), strict=True)
    }


def _identity(size: int, dtype: np.dtype[np.generic], place: Place) -> ort.OrtValue:
    rows: Array = np.eye(size, dtype=dtype)
    return ort.OrtValue.ortvalue_from_numpy(rows.view(np.uint8).ravel(), place.device, 0)
