"""Gated attention of the full-attention layers, over a paged cache."""

from __future__ import annotations

import onnx_ir as ir

from builder import contract, ops
from builder.config import ModelConfig
from builder.graph import Graph, Value
from builder.models.layers import Linear, RMSNorm
from builder.models.step import Rotary, Step
from builder.quant.modules import ModuleTensors

FLOAT = ir.DataType.FLOAT


class Attention:
    """q_proj rows are [query | gate] per head; q and k are normalized per head before the rotation."""

    def __init__(self, tensors: ModuleTensors, config: ModelConfig) -> None:
        self.config = config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        hidden = config.hidden_size
        self.q_proj = Linear(tensors, "q_proj", 2 * heads * dim, hidden)
        self.k_proj = Linear(tensors, "k_proj", kv_heads * dim, hidden)
        self.v_proj = Linear(tensors, "v_proj", kv_heads * dim, hidden)
        self.o_proj = Linear(tensors, "o_proj", hidden, heads * dim)
        self.q_norm = RMSNorm(tensors, "q_norm", dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(tensors, "k_norm", dim, config.rms_norm_eps)

    def __call__(self, graph: Graph, x: Value, layer: int, step: Step) -> Value:
        """x [T, H]; `layer` names the cache tensors."""
        config = self.config
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        per_head = graph.op.Reshape(self.q_proj(graph, x), [0, heads, 2 * dim])
        query, gate = graph.op.Split(per_head, [dim, dim], axis=-1, _outputs=2)
        key = graph.op.Reshape(self.k_proj(graph, x), [0, kv_heads, dim])
        caches = (graph.input(contract.PAST_KEY.format(layer)), graph.input(contract.PAST_VALUE.format(layer)))
        attended, new_key, new_value = ops.paged_attention(
            graph,
            self._rotate(graph, self.q_norm(graph, query), heads, step.rotary),
            self._rotate(graph, self.k_norm(graph, key), kv_heads, step.rotary),
            self.v_proj(graph, x),
            caches,
            step.packing,
            num_heads=heads,
            kv_num_heads=kv_heads,
            scale=dim**-0.5,
        )
        graph.set_output(contract.PRESENT_KEY.format(layer), new_key)
        graph.set_output(contract.PRESENT_VALUE.format(layer), new_value)
        gate = graph.op.Sigmoid(graph.op.Reshape(gate, [0, heads * dim]))
        return self.o_proj(graph, graph.op.Mul(attended, gate))

    def _rotate(self, graph: Graph, x: Value, heads: int, rotary: Rotary) -> Value:
        """x [T, heads, D] to rotated rows [T, heads * D], in float32 like the tables: the op takes one type."""
        config = self.config
        width = heads * config.head_dim
        rows = graph.op.Reshape(x, [1, -1, width])
        rows.shape = ir.Shape((1, "num_tokens", width))  # shape inference gives up on the -1
        rows = graph.op.Cast(rows, to=FLOAT)
        rows.shape = ir.Shape((1, "num_tokens", width))
        rotated = ops.mrope(
            graph,
            rows,
            rotary.position_ids,
            rotary.cos,
            rotary.sin,
            num_heads=heads,
            rotary_dim=config.rotary_dim,
            sections=config.rope.mrope_section,
        )
        return graph.op.Squeeze(graph.op.Cast(rotated, to=graph.io_dtype), [0])
