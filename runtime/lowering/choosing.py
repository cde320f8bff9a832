"""Choosing in the graph: the best token of every row as an output, so that logits need not leave a GPU."""

from __future__ import annotations

import onnx_ir as ir

from builder import contract

TOKEN_IDS = "token_ids"
"""int64 [num_tokens]: the best token of each row of logits, the lowest id of a tie."""


def add_token_ids(model: ir.Model) -> None:
    """Adds the output TOKEN_IDS. The logits stay an output, which costs nothing while nobody fetches it."""
    graph = model.graph
    logits = next(value for value in graph.outputs if value.name == contract.LOGITS)
    chosen = ir.Value(name=TOKEN_IDS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["num_tokens"]))
    graph.append(ir.node("ArgMax", [logits], {"axis": -1, "keepdims": 0}, outputs=[chosen], name="choose"))
    graph.outputs.append(chosen)
