"""copy_bandwidth(): bytes a second that a GPU reads and writes while it copies, the limit of any memory-bound step."""

from __future__ import annotations

import statistics
import time

import numpy as np
import onnx
from onnx import helper

from runtime.bound_run import BoundRun
from runtime.place import GPU
from runtime.session import bare_session

VALUES = 1 << 28


def copy_bandwidth(repeats: int = 9) -> float:
    """A gigabyte of float32 plus one, read and written; the median of `repeats`."""
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [VALUES]) for name in ("x", "y")]
    one = helper.make_tensor("one", onnx.TensorProto.FLOAT, [1], [1.0])
    graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "copy", value[:1], value[1:], [one])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = bare_session(model.SerializeToString(), GPU)
    source, target = (GPU.device_zeros((VALUES,), np.dtype(np.float32)) for _ in range(2))
    run = BoundRun(session, GPU, {"x": source}, {"y": target})
    seconds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        run.run()
        seconds.append(time.perf_counter() - started)
    return 2 * source.nbytes / statistics.median(seconds[1:])
