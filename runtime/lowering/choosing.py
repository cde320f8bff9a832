"""Choosing in the graph, so that logits need not leave a GPU, and are made for the rows alone that choose a token."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from builder import contract

TOKEN_IDS = "token_ids"
"""int64 [num_scored]: the best token of each scored row, the lowest id of a tie."""
BEST_LOGITS = "best_logits"
"""[num_scored, 1]: the logit of that token."""
SCORED_HIDDEN = "scored_hidden"
"""[num_scored, hidden]: the hidden states that those logits are made of."""
SCORED_ROWS = "scored_rows"
"""int64 [num_scored]: packed rows that get logits."""


def choose_tokens(model: ir.Model) -> None:
    """Adds the input SCORED_ROWS in front of the LM head, and the outputs TOKEN_IDS and BEST_LOGITS behind it.

    Logits are then [num_scored, vocab]; they stay an output, which costs nothing while nobody fetches it. Of a head,
    SCORED_HIDDEN becomes an output, too: with the tokens it is what the next run of a chain of drafts is fed.
    """
    graph = model.graph
    outputs = {value.name: value for value in graph.outputs}
    is_head = contract.HEAD_HIDDEN_STATES in outputs
    hidden = outputs[contract.HEAD_HIDDEN_STATES if is_head else contract.HIDDEN_STATES]
    rows = ir.Value(name=SCORED_ROWS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["num_scored"]))
    graph.inputs.append(rows)
    heads = list(hidden.uses())
    width = hidden.shape[1] if hidden.shape else None
    picked = ir.Value(name=SCORED_HIDDEN, type=hidden.type, shape=ir.Shape(["num_scored", width]))
    pick = ir.node("Gather", [hidden, rows], {"axis": 0}, outputs=[picked], name="choose/rows")
    graph.insert_before(heads[0].node, pick)
    for head in heads:
        head.node.replace_input_with(head.idx, picked)
    if is_head:
        graph.outputs.append(picked)
    _add_best(graph, outputs[contract.LOGITS])


def _add_best(graph: ir.Graph, logits: ir.Value) -> None:
    """By ArgMax, for which CUDA has a kernel from ONNX Runtime 1.31.1 on."""
    logits.shape = ir.Shape(["num_scored", *logits.shape[1:]]) if logits.shape else None
    places = ir.Value(name="choose/places")
    best = ir.node("ArgMax", [logits], {"axis": -1, "keepdims": 1}, outputs=[places], name="choose/best")
    value = ir.Value(name=BEST_LOGITS, type=logits.type, shape=ir.Shape(["num_scored", 1]))
    look = ir.node("GatherElements", [logits, places], {"axis": -1}, outputs=[value], name="choose/look")
    flat = ir.node("Constant", [], {"value": ir.tensor(np.array([-1]), name="choose/flat")}, name="choose/flat")
    chosen = ir.Value(name=TOKEN_IDS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["num_scored"]))
    ids = ir.node("Reshape", [places, flat.outputs[0]], outputs=[chosen], name="choose")
    for node in (best, look, flat, ids):
        graph.append(node)
    graph.outputs.extend([chosen, value])
