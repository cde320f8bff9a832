"""GatedDeltaNet: short convolution and gated delta rule of the linear-attention layers, with checkpoint outputs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from builder import contract, ops
from builder.config import ModelConfig
from builder.graph import Graph, Value
from builder.models.layers import FloatLinear, Linear, as_float32, stored
from builder.models.step import Step
from builder.quant.modules import ModuleTensors
from builder.weights import Computed

FLOAT = ir.DataType.FLOAT


class GatedDeltaNet:
    """in_proj_qkv rows are [q | k | v]; value head h reads key head h // (Hv / Hk), which the op does by shapes."""

    def __init__(self, tensors: ModuleTensors, config: ModelConfig) -> None:
        self.config = config
        hidden, value_heads, value_dim = config.hidden_size, config.linear_num_value_heads, config.linear_value_dim
        channels = config.conv_channels
        self.name = tensors.prefix
        self.in_proj_qkv = Linear(tensors, "in_proj_qkv", channels, hidden)
        self.in_proj_z = Linear(tensors, "in_proj_z", value_dim, hidden)
        self.in_proj_b = FloatLinear(tensors, "in_proj_b", value_heads, hidden)
        self.in_proj_a = FloatLinear(tensors, "in_proj_a", value_heads, hidden)
        self.out_proj = Linear(tensors, "out_proj", hidden, value_dim)
        kernel = config.linear_conv_kernel_dim
        conv1d = tensors.tensor(
            "conv1d.weight", (channels, kernel, 1) if tensors.whole_norms else (channels, 1, kernel)
        )
        self.conv1d = replace(conv1d, shape=(channels, 1, kernel))  # the same bytes in either layout
        self.A_log = tensors.tensor("A_log", (value_heads,))
        self.dt_bias = tensors.tensor("dt_bias", (value_heads,))
        self.norm = tensors.tensor("norm.weight", (config.linear_value_head_dim,))  # plain w, unlike every other norm

    def __call__(self, graph: Graph, x: Value, layer: int, step: Step) -> Value:
        """x [T, H]; `layer` names the state tensors."""
        config, name = self.config, self.name
        mixed = self._convolve(graph, self.in_proj_qkv(graph, x), layer, step)
        gates = (
            graph.op.Cast(self.in_proj_a(graph, x), to=FLOAT),
            graph.op.Cast(self.in_proj_b(graph, x), to=FLOAT),
        )
        rows, state, update = ops.gated_delta_net(
            graph,
            self._split(graph, mixed),
            gates,
            (
                graph.weight(f"{name}A_log", as_float32(self.A_log)),
                graph.weight(f"{name}dt_bias", as_float32(self.dt_bias)),
            ),
            step.packing.cumulative_lengths,
            graph.input(contract.PAST_RECURRENT.format(layer)),
            step.capture,
            capsule_width=contract.capsule_width(config),
        )
        graph.set_output(contract.PRESENT_RECURRENT.format(layer), state)
        if update is not None:
            graph.set_output(contract.RECURRENT_UPDATE.format(layer), update)
        normed = ops.gated_rms_norm(
            graph,
            graph.op.Reshape(rows, [0, config.linear_value_dim]),
            graph.io_weight(f"{name}norm.weight", stored(self.norm)),
            self.in_proj_z(graph, x),
            epsilon=config.rms_norm_eps,
        )
        return self.out_proj(graph, normed)

    def _convolve(self, graph: Graph, qkv: Value, layer: int, step: Step) -> Value:
        channels = self.config.conv_channels
        zeros = Computed("zeros", (), (channels,), lambda: np.zeros(channels, np.float32))
        rows, state, update = ops.causal_conv(
            graph,
            qkv,
            graph.io_weight(f"{self.name}conv1d.weight", stored(self.conv1d)),
            step.packing.cumulative_lengths,
            graph.io_weight("conv1d.bias", zeros),
            graph.input(contract.PAST_CONV.format(layer)),
            step.capture,
        )
        graph.set_output(contract.PRESENT_CONV.format(layer), state)
        if update is not None:
            graph.set_output(contract.CONV_UPDATE.format(layer), update)
        return rows

    def _split(self, graph: Graph, mixed: Value) -> tuple[Value, Value, Value]:
        """[T, C] to q, k [T, Hk, dk] and v [T, Hv, dv]."""
        config = self.config
        key_dim, value_dim = config.linear_key_dim, config.linear_value_dim
        q, k, v = graph.op.Split(mixed, [key_dim, key_dim, value_dim], axis=-1, _outputs=3)
        key_shape = [0, config.linear_num_key_heads, config.linear_key_head_dim]
        value_shape = [0, config.linear_num_value_heads, config.linear_value_head_dim]
        return graph.op.Reshape(q, key_shape), graph.op.Reshape(k, key_shape), graph.op.Reshape(v, value_shape)
