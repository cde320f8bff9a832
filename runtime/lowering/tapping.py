"""Tapping the residual stream: the sums between mixers and MLPs become outputs, so that a run shows every layer."""

from __future__ import annotations

import onnx_ir as ir

from builder import contract
from builder.errors import Refused

ADD_AND_NORM = "SkipSimplifiedLayerNormalization"
SUM = 3
"""Which of its outputs is the sum of its first two inputs."""
TAP = "residual.{}"
"""[num_tokens, hidden]: the stream after the n-th add, by number."""


def tap_residuals(model: ir.Model, num_layers: int) -> None:
    """Adds an output for the residual stream after each mixer and each MLP, in order: TAP.format(0) is after the first
    layer's mixer, 1 after its MLP, 2 after the second layer's mixer, and so on.

    They are found by structure, not by name. Every add of a layer lies in an ADD_AND_NORM, whose output SUM is an input
    of the next one; the last of them is the final norm, which makes hidden_states. So they are followed from there back
    to the embedding. The final norm keeps no sum in a package, because nobody needs it, and is made to keep it here.

    Raises Refused for a graph whose hidden_states are not made of so many adds.
    """
    hidden = next(value for value in model.graph.outputs if value.name == contract.HIDDEN_STATES)
    chain = _chain(hidden)
    if len(chain) != 2 * num_layers:
        raise Refused(
            contract.HIDDEN_STATES,
            expected=f"{2 * num_layers} nodes {ADD_AND_NORM} in a row, two a layer",
            found=len(chain),
            remedy="export the package again",
        )
    for number, node in enumerate(chain):
        total = _sum(node)
        total.name = TAP.format(number)
        total.type, total.shape = hidden.type, ir.Shape(hidden.shape) if hidden.shape else None
        model.graph.outputs.append(total)


def _chain(hidden: ir.Value) -> list[ir.Node]:
    """From the embedding to the final norm."""
    chain: list[ir.Node] = []
    node = hidden.producer()
    while node is not None and node.op_type == ADD_AND_NORM:
        chain.append(node)
        node = next((value.producer() for value in node.inputs[:2] if value is not None and _is_sum(value)), None)
    return chain[::-1]


def _is_sum(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == ADD_AND_NORM and value.index() == SUM


def _sum(node: ir.Node) -> ir.Value:
    """Its output SUM, kept from now on."""
    if len(node.outputs) <= SUM:
        kept = len(node.outputs)
        node.resize_outputs(SUM + 1)
        for value in node.outputs[kept:]:
            value.name = ""
    return node.outputs[SUM]
