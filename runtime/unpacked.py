"""Unpacked weights: the target's quantized weights once more, in the activations' type, for steps of many rows.

Steps of up to PACKED_ROWS rows leave them alone: they are as fast with the packed ones, which are a quarter or a half
of the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from builder.contract import HIDDEN_STATES
from builder.errors import MachineError
from builder.reader import GraphFile
from runtime.bound_run import BoundRun
from runtime.lowering.unpacking import packed_products, take_unpacked, unpack_all
from runtime.place import DeviceArray, NoMemory, Place
from runtime.session import Session, weighted_session

PACKED_ROWS = 16
"""Most rows for which kernels that decode as they read take no longer than products of twice to four times the bytes
would; how that was told is in benchmarks/gpu-notes.md.
"""
REMEDY = "leave --unpacked-weights out"


def unpacked_session(graph: GraphFile, place: Place, *, cuda_graph: bool = False) -> Session | None:
    """The graph over unpacked weights; None where it has no quantized product.

    Raises MachineError where memory does not suffice.
    """
    if not any(packed_products(ir.load(graph.path).graph)):
        return None
    try:
        weights = unpack(graph, place)
        return Session(graph, "auto", take_unpacked, place, cuda_graph=cuda_graph, given=weights)
    except MachineError as error:
        what = error.what if isinstance(error, NoMemory) else error
        raise MachineError(f"quantized weights cannot be unpacked: {what}; {REMEDY}") from error


def unpack(graph: GraphFile, place: Place) -> Mapping[str, DeviceArray]:
    """Every quantized weight [K, N] on a device, by the name of the input that take_unpacked makes of it.

    Into memory of its own, since what a session made keeps that session, and its packed weights, alive.
    """
    dtype = place.array_type(graph.io.output(HIDDEN_STATES))
    session = weighted_session(graph.path, [unpack_all], place, sparing=True)
    weights = {entry.name: place.device_empty(entry.shape, dtype) for entry in session.get_outputs()}
    identities = {entry.name: np.eye(entry.shape[0], dtype=dtype) for entry in session.get_inputs()}
    BoundRun(session, place, identities, weights).run()
    return weights
