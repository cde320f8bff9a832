"""Dense checkpoints: the states after each token of a verify step, beside the compact updates that they are made of.

All layers stand in one branch that is taken where the step captures, so that any other step pays for a single node.
The recurrence does what a replay of the capsules does, in its order and in float32, and gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from builder import contract
from builder.config import ModelConfig
from builder.graph import Graph, Value, element_type
from builder.models.step import Step
from builder.ops import Capture

BOOL, INT64 = ir.DataType.BOOL, ir.DataType.INT64
Op = Any
"""onnxscript's OpBuilder, of the branch that is being made."""


def add_checkpoints(graph: Graph, config: ModelConfig, step: Step) -> None:
    """Sets the outputs that contract.target_io declares for checkpoints; the state updates must be set already."""
    capture = step.capture
    if capture is None:
        raise AssertionError("checkpoints are made of captured state updates")
    layers = [layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    names = contract.checkpoint_names(layers)
    if not names:
        return
    series = Series(graph, config, capture, step.packing.cumulative_lengths)
    made = graph.choose(
        graph.op.Cast(capture.active, to=BOOL),
        [graph.io.output(name) for name in names],
        lambda op: series.of(op, layers),
        lambda op: _nothing(op, graph, names),
    )
    for name, value in zip(names, made, strict=True):
        graph.set_output(name, value)


def _nothing(op: Op, graph: Graph, names: list[str]) -> list[Value]:
    """No rows. Made in float32 and cast, as everything whose type follows the activations' is."""
    found = []
    for name in names:
        spec = graph.io.output(name)
        empty = op.Constant(value=ir.tensor(np.zeros((0, *spec.shape[1:]), np.float32)))  # type: ignore[arg-type]
        found.append(op.Cast(empty, to=element_type(spec.dtype)))
    return found


@dataclass(frozen=True)
class Series:
    """Both series of a layer, from its past states and captured updates. W is the capacity, B the batch size."""

    graph: Graph
    config: ModelConfig
    capture: Capture
    cumulative_lengths: Value

    def of(self, op: Op, layers: Sequence[int]) -> list[Value]:
        """Of each layer the convolution's and the recurrence's."""
        factors = self._factors(op, layers)
        found = []
        for index, layer in enumerate(layers):
            own = slice(index * self.capture.capacity, (index + 1) * self.capture.capacity)
            found += [self._conv(op, layer), self._recurrent(op, layer, factors[own])]
        return found

    def _conv(self, op: Op, layer: int) -> Value:
        """[B, W, C, K - 1], aligned left: windows over the past rows and the captured ones."""
        width = self.config.linear_conv_kernel_dim - 1
        past = op.Transpose(self.graph.input(contract.PAST_CONV.format(layer)), perm=[0, 2, 1])
        rows = op.Concat(past, self.graph.output(contract.CONV_UPDATE.format(layer)), axis=1)
        windows = 1 + np.arange(self.capture.capacity)[:, None] + np.arange(width)
        return op.Transpose(op.Gather(rows, op.Constant(value=ir.tensor(windows)), axis=1), perm=[0, 1, 3, 2])

    def _recurrent(self, op: Op, layer: int, factors: Sequence[tuple[Value, Value, Value]]) -> Value:
        """[B, W, Hv, dv, dk], aligned right: S = decay * S + outer(delta, key). Slots in front keep the past state."""
        state = op.Unsqueeze(self.graph.input(contract.PAST_RECURRENT.format(layer)), [1])
        states = []
        for decay, key, delta in factors:
            state = op.Add(op.Mul(state, decay), op.Mul(delta, key))
            states.append(state)
        return op.Concat(*states, axis=1)

    def _factors(self, op: Op, layers: Sequence[int]) -> list[tuple[Value, Value, Value]]:
        """Decay [B, 1, Hv, 1, 1], key [B, 1, Hv, 1, dk] and delta [B, 1, Hv, dv, 1] of every slot of every layer.

        All layers at once, because a node costs more than its work here. A slot without a token has decay 1 and delta
        0; what a capsule holds of tokens that were not captured is never used.
        """
        config, capacity, total = self.config, self.capture.capacity, len(layers) * self.capture.capacity
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        sizes = [heads, key_heads * key_dim, heads * value_dim]
        capsules = op.Concat(*(self.graph.output(contract.RECURRENT_UPDATE.format(layer)) for layer in layers), axis=1)
        capsules = op.Reshape(capsules, [0, len(layers), capacity * sum(sizes)])
        parts = op.Split(capsules, [capacity * size for size in sizes], axis=2, _outputs=3)
        token, captured = self._alignment(op, len(layers))
        decays, keys, deltas = (
            op.Where(captured, op.GatherND(op.Reshape(part, [0, 0, capacity, size]), token, batch_dims=2), neutral)
            for part, size, neutral in zip(parts, sizes, _floats(op, 1, 0, 0), strict=True)
        )
        shared = op.Constant(value=ir.tensor(np.repeat(np.arange(key_heads), heads // key_heads)))
        stacked = (
            op.Reshape(decays, [0, total, heads, 1, 1]),
            op.Gather(op.Reshape(keys, [0, total, key_heads, 1, key_dim]), shared, axis=2),
            op.Reshape(deltas, [0, total, heads, value_dim, 1]),
        )
        if total == 1:
            return [stacked]
        return list(zip(*(op.Split(part, num_outputs=total, axis=1, _outputs=total) for part in stacked), strict=True))

    def _alignment(self, op: Op, num_layers: int) -> tuple[Value, Value]:
        """For slots aligned right: each one's token [B, layers, W, 1], and whether it was captured [B, 1, W, 1]."""
        capacity = self.capture.capacity
        bounds = self.cumulative_lengths
        lengths = op.Sub(op.Slice(bounds, [1], [2**31 - 1], [0]), op.Slice(bounds, [0], [-1], [0]))
        count = op.Min(self.capture.count, lengths, op.Constant(value=ir.tensor(np.array([capacity], np.int32))))
        slots = op.Constant(value=ir.tensor(np.arange(-capacity, 0, dtype=np.int64)[None, None, :, None]))
        token = op.Add(slots, op.Cast(op.Unsqueeze(count, [1, 2, 3]), to=INT64))
        zero = op.Constant(value=ir.tensor(np.zeros(1, np.int64)))
        every = op.Constant(value=ir.tensor(np.array([1, num_layers, 1, 1])))
        return op.Expand(op.Max(token, zero), every), op.GreaterOrEqual(token, zero)


def _floats(op: Op, *values: float) -> list[Value]:
    return [op.Constant(value=ir.tensor(np.array(value, np.float32))) for value in values]
