"""Dense feed-forward block."""

from __future__ import annotations

from builder.graph import Graph, Value
from builder.models.layers import Linear
from builder.quant.modules import ModuleTensors


class MLP:
    """down(silu(gate(x)) * up(x)), from hidden through inner back to hidden features."""

    def __init__(self, tensors: ModuleTensors, hidden: int, inner: int) -> None:
        self.gate_proj = Linear(tensors, "gate_proj", inner, hidden)
        self.up_proj = Linear(tensors, "up_proj", inner, hidden)
        self.down_proj = Linear(tensors, "down_proj", hidden, inner)

    def __call__(self, graph: Graph, x: Value) -> Value:
        gate = self.gate_proj(graph, x)
        silu = graph.op.Mul(gate, graph.op.Sigmoid(gate))
        return self.down_proj(graph, graph.op.Mul(silu, self.up_proj(graph, x)))
