"""Spreading in the graph: attention is told of sequences of its own, apart from those of the layers that carry states.

A step that verifies drafts has a few rows a request. As a sequence of one row each, over the same blocks and one token
longer than the row before, they attend to exactly what they would attend to as one sequence, since keys and values of
all rows are written before any row reads; and CUDA has a kernel for single rows that shares a long text out over the
whole device, where its kernel for several rows goes through it step by step.
"""

from __future__ import annotations

import onnx_ir as ir

from builder import contract

ATTENDED_LENGTHS = "attended_cumulative_lengths"
"""int32 [num_sequences + 1]: where the rows of each sequence start. Block table and past lengths, which nothing but
attention reads, have a row for each of these sequences.
"""
MAX_SPREAD_ROWS = contract.MAX_CAPACITY
"""Rows of a request that are sequences of their own: as many as a step may verify."""
SPREAD_CONTEXT = 2048
"""Tokens of the longest text from which on it pays: below, both kernels take as long, and the one for single rows is
first compiled for every new number of them, which takes up to a second.
"""

LENGTHS = 5
"""Which input of PagedAttention says where sequences start."""


def spread_attention(model: ir.Model) -> None:
    """Adds the input ATTENDED_LENGTHS, which every PagedAttention reads in place of the lengths of requests."""
    graph = model.graph
    size, sequences = ir.SymbolicDim("num_sequences + 1"), ir.SymbolicDim("num_sequences")
    lengths = ir.Value(name=ATTENDED_LENGTHS, type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([size]))
    graph.inputs.append(lengths)
    for value in graph.inputs:
        if value.name in (contract.BLOCK_TABLE, contract.PAST_LENGTHS) and value.shape:
            value.shape = ir.Shape([sequences, *value.shape[1:]])
    for node in graph:
        if node.op_type == "PagedAttention":
            node.replace_input_with(LENGTHS, lengths)
