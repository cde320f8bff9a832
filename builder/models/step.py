"""Step: what all layers of one graph share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from builder import contract
from builder.config import ModelConfig
from builder.graph import Graph, Value
from builder.ops import Capture, Packing
from builder.weights import Computed


@dataclass(frozen=True)
class Rotary:
    """What every attention layer of a graph shares: position_ids [3, 1, T] and the float32 cos and sin tables."""

    position_ids: Value
    cos: Value
    sin: Value

    @classmethod
    def of(cls, graph: Graph, config: ModelConfig, positions: int) -> Rotary:
        """Tables for `positions` positions, as initializers of the graph."""
        shape = (positions, config.rotary_dim // 2)
        cos = Computed("cos", (), shape, lambda: rotary_table(config, positions, np.cos))
        sin = Computed("sin", (), shape, lambda: rotary_table(config, positions, np.sin))
        return cls(
            graph.op.Unsqueeze(graph.input(contract.POSITION_IDS), [1]),
            graph.weight(contract.ROTARY_TABLE, cos),
            graph.weight("sin_cache", sin),
        )


@dataclass(frozen=True)
class Step:
    """What the layers of one graph share: how rows are packed, positions, and where state updates are captured."""

    packing: Packing
    rotary: Rotary
    capture: Capture | None

    @classmethod
    def of(cls, graph: Graph, config: ModelConfig, positions: int, capacity: int) -> Step:
        packing = Packing(
            graph.input(contract.CUMULATIVE_LENGTHS),
            graph.input(contract.PAST_LENGTHS),
            graph.input(contract.BLOCK_TABLE),
            graph.input(contract.ATTENTION_METADATA),
        )
        capture = None
        if capacity:
            capture = Capture(capacity, graph.input(contract.CAPTURE_COUNT), graph.input(contract.CAPTURE_ACTIVE))
        return cls(packing, Rotary.of(graph, config, positions), capture)


ROWS_AT_ONCE = 1 << 16


def rotary_table(config: ModelConfig, positions: int, function: np.ufunc) -> NDArray[np.float32]:
    """np.cos or np.sin of every angle, [positions, rotary_dim / 2] in float32, some rows at a time to spare memory.

    Angles are rounded as transformers rounds them (inverse frequencies and their products in float32), because that is
    what the model was trained with; only cos and sin themselves are taken in float64.
    """
    dim = config.rotary_dim
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    inverse = (np.float32(1) / np.power(np.float32(config.rope.theta), exponents)).astype(np.float32)
    table = np.empty((positions, dim // 2), np.float32)
    for start in range(0, positions, ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, positions), dtype=np.float32)
        table[start : start + len(rows)] = function((rows[:, None] * inverse).astype(np.float64))
    return table
