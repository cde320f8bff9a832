"""Choosing in the graph: the best token of every row as an output, so that logits need not leave a GPU."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from builder import contract

TOKEN_IDS = "token_ids"
"""int64 [num_tokens]: the best token of each row of logits, the lowest id of a tie."""


def add_token_ids(model: ir.Model) -> None:
    """Adds the output TOKEN_IDS. The logits stay an output, which costs nothing while nobody fetches it.

    By TopK, because CUDA has no ArgMax of this opset, and a node on the CPU would copy the logits there.
    """
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == contract.LOGITS)
    one = ir.tensor(np.array([1]), name="choose/one")
    chosen = ir.Value(name=TOKEN_IDS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["num_tokens"]))
    count = ir.node("Constant", [], {"value": one}, name="choose/count")
    best = ir.node("TopK", [logits, count.outputs[0]], num_outputs=2, name="choose/best")
    shape = ir.node("Constant", [], {"value": ir.tensor(np.array([-1]), name="choose/flat")}, name="choose/shape")
    flat = ir.node("Reshape", [best.outputs[1], shape.outputs[0]], outputs=[chosen], name="choose")
    for node in (count, best, shape, flat):
        graph.append(node)
    graph.outputs.append(chosen)
