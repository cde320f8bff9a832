"""Feeding in the graph: the head picks the hidden states that it is fed from memory that others have written."""

from __future__ import annotations

import onnx_ir as ir

from builder import contract

FED_ROWS = "fed_rows"
"""int64 [num_tokens]: the row of HIDDEN_STATES that each packed row is fed."""


def feed_by_number(model: ir.Model) -> None:
    """Adds the input FED_ROWS behind a head's hidden states, of which there may then be any number in any order.

    A target has no such input and stays as it is.
    """
    graph = model.graph
    hidden = next((value for value in graph.inputs if value.name == contract.HIDDEN_STATES), None)
    if hidden is None:
        return
    uses = list(hidden.uses())
    rows = ir.Value(name=FED_ROWS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["num_tokens"]))
    graph.inputs.append(rows)
    width = hidden.shape[1] if hidden.shape else None
    fed = ir.Value(name="feed/hidden", type=hidden.type, shape=ir.Shape(["num_tokens", width]))
    hidden.shape = ir.Shape(["num_hidden", width])
    graph.insert_before(uses[0].node, ir.node("Gather", [hidden, rows], {"axis": 0}, outputs=[fed], name="feed/rows"))
    for use in uses:
        use.node.replace_input_with(use.idx, fed)
