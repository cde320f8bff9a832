"""Choosing in the graph, so that logits need not leave a GPU, and are made for the rows alone that choose a token."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from builder import contract

TOKEN_IDS = "token_ids"
"""int64 [num_scored]: the best token of each scored row, the lowest id of a tie."""
BEST_LOGITS = "best_logits"
"""[num_scored, 1]: the logit of that token."""
SCORED_ROWS = "scored_rows"
"""int64 [num_scored]: packed rows that get logits."""


def choose_tokens(model: ir.Model) -> None:
    """Adds the input SCORED_ROWS in front of the LM head, and the outputs TOKEN_IDS and BEST_LOGITS behind it.

    Logits are then [num_scored, vocab]; they stay an output, which costs nothing while nobody fetches it. Chosen by
    TopK, because CUDA has no ArgMax of this opset, and a node on the CPU would copy the logits there.
    """
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    hidden = outputs.get(contract.HEAD_HIDDEN_STATES) or outputs[contract.HIDDEN_STATES]
    rows = ir.Value(name=SCORED_ROWS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["num_scored"]))
    graph.inputs.append(rows)
    heads = list(hidden.uses())
    picked = ir.Value(name="choose/picked", type=hidden.type)
    pick = ir.node("Gather", [hidden, rows], {"axis": 0}, outputs=[picked], name="choose/rows")
    graph.insert_before(heads[0].node, pick)
    for head in heads:
        head.node.replace_input_with(head.idx, picked)
    _add_best(graph, outputs[contract.LOGITS])


def _add_best(graph: ir.Graph, logits: ir.Value) -> None:
    logits.shape = ir.Shape(["num_scored", *logits.shape[1:]]) if logits.shape else None
    chosen = ir.Value(name=TOKEN_IDS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["num_scored"]))
    count, flat = (
        ir.node("Constant", [], {"value": ir.tensor(np.array([value]), name=name)}, name=name)
        for name, value in (("choose/one", 1), ("choose/flat", -1))
    )
    value = ir.Value(name=BEST_LOGITS, type=logits.type, shape=ir.Shape(["num_scored", 1]))
    places = ir.Value(name="choose/places")
    best = ir.node("TopK", [logits, count.outputs[0]], outputs=[value, places], name="choose/best")
    ids = ir.node("Reshape", [places, flat.outputs[0]], outputs=[chosen], name="choose")
    for node in (count, flat, best, ids):
        graph.append(node)
    graph.outputs.extend([chosen, value])
