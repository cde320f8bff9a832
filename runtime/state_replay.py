"""Replay on a device: the graph that brings the states of a step back to a prefix of its tokens.

Per layer, R rows: past convolution [R, C, K - 1] and recurrence [R, Hv, dv, dk] to present ones. conv_update
[L * R, capacity, C] and capsule [L * R, capacity * width] are what the step captured, kept [L * R] how many of the
tokens count; rows of all layers, the first layer's first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from builder import contract
from runtime.fixed_state import StateGeometry
from runtime.lowering import CONTRIB

Op = Any
"""onnxscript's OpBuilder."""
Values = Mapping[str, ir.Value]
Shape = tuple[int | str, ...]
Input = tuple[ir.DataType, Shape]


def inputs(geometry: StateGeometry, conv_type: ir.DataType) -> dict[str, Input]:
    """Types and shapes by name; R rows and M = L * R."""
    captured: dict[str, Input] = {
        "conv_update": (conv_type, ("M", geometry.capacity, geometry.conv[0])),
        "capsule": (ir.DataType.FLOAT, ("M", geometry.capacity * geometry.capsule_width)),
        "kept": (ir.DataType.INT64, ("M",)),
    }
    return captured | _states(geometry, conv_type, contract.PAST_CONV, contract.PAST_RECURRENT)


def outputs(geometry: StateGeometry, conv_type: ir.DataType) -> dict[str, Input]:
    return _states(geometry, conv_type, contract.PRESENT_CONV, contract.PRESENT_RECURRENT)


def _states(geometry: StateGeometry, conv_type: ir.DataType, conv: str, recurrent: str) -> dict[str, Input]:
    """All convolutions, then all recurrences."""
    convs: dict[str, Input] = {conv.format(i): (conv_type, ("R", *geometry.conv)) for i in geometry.layers}
    return convs | {recurrent.format(i): (ir.DataType.FLOAT, ("R", *geometry.recurrent)) for i in geometry.layers}


def build(op: Op, values: Values, geometry: StateGeometry) -> list[ir.Value]:
    """The present states, in the order of `outputs`."""
    return [*_convolutions(op, values, geometry), *_recurrences(op, values, geometry)]


MOST = 32
"""Inputs of a Concat and outputs of a Split whose addresses CUDA's kernels take as arguments: with more they read them
from memory that a recording does not keep.
"""


def can_be_recorded(geometry: StateGeometry) -> bool:
    """Whether every split has so few outputs: not where a prime above MOST divides the number of layers."""
    count = len(geometry.layers)
    while (size := _parts(count)) < count:
        count //= size
    return size <= MOST


def _parts(count: int) -> int:
    """Into how many equal parts `count` layers are split first: as many as one split may have, else all of them."""
    return next((size for size in range(min(count, MOST), 1, -1) if count % size == 0), count)


def _joined(op: Op, values: Sequence[ir.Value]) -> ir.Value:
    """All rows below one another."""
    while len(values) > 1:
        values = [op.Concat(*values[first : first + MOST], axis=0) for first in range(0, len(values), MOST)]
    return values[0]


def _by_layer(op: Op, value: ir.Value, count: int) -> list[ir.Value]:
    """The rows of each of `count` layers."""
    if count == 1:
        return [op.Identity(value)]
    size = _parts(count)
    parts = list(op.Split(value, num_outputs=size, axis=0, _outputs=size))
    return parts if size == count else [layer for part in parts for layer in _by_layer(op, part, count // size)]


def _convolutions(op: Op, values: Values, geometry: StateGeometry) -> Sequence[ir.Value]:
    """The K - 1 newest rows after `kept` more: a window over the past rows and the captured ones."""
    past = _joined(op, [values[contract.PAST_CONV.format(layer)] for layer in geometry.layers])
    appended = op.Transpose(values["conv_update"], perm=[0, 2, 1])
    window = np.broadcast_to(np.arange(geometry.conv[1]), (1, *geometry.conv))  # no Shape: recordings have none
    places = op.Add(op.Unsqueeze(values["kept"], [1, 2]), op.Constant(value=ir.tensor(window.copy())))
    moved = op.GatherElements(op.Concat(past, appended, axis=2), places, axis=2)
    return _by_layer(op, moved, len(geometry.layers))


def _recurrences(op: Op, values: Values, geometry: StateGeometry) -> list[ir.Value]:
    """S = decay * S + outer(delta, key) token by token: LinearAttention's rule "gated" with the deltas as its keys and
    the keys as its values, which reads and writes each state once.

    Tokens that are not kept have decay 1 and delta 0; what a capsule holds of them is never used.
    """
    heads = geometry.recurrent[0]
    decays, keys, deltas = (_by_layer(op, part, len(geometry.layers)) for part in _transitions(op, values, geometry))
    states = []
    for index, layer in enumerate(geometry.layers):
        _, state = op.LinearAttention(
            deltas[index],  # the queries of a result that nobody reads
            deltas[index],
            keys[index],
            values[contract.PAST_RECURRENT.format(layer)],
            decays[index],
            q_num_heads=heads,
            kv_num_heads=heads,
            update_rule="gated",
            scale=1.0,
            _domain=CONTRIB,
            _outputs=2,
        )
        states.append(state)
    return states


def _transitions(op: Op, values: Values, geometry: StateGeometry) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Logarithms of decays [M, capacity, Hv], keys [M, capacity, Hv * dk] and deltas [M, capacity, Hv * dv]."""
    heads, value_dim, key_dim = geometry.recurrent
    capacity, key_heads = geometry.capacity, geometry.key_heads
    sizes = [capacity * size for size in (heads, key_heads * key_dim, heads * value_dim)]
    parts = op.Split(values["capsule"], sizes, axis=1, _outputs=3)
    tokens = op.Constant(value=ir.tensor(np.arange(capacity)[None, :, None]))
    kept = op.Less(tokens, op.Unsqueeze(values["kept"], [1, 2]))
    one, zero = (op.Constant(value=ir.tensor(np.array(value, np.float32))) for value in (1, 0))
    decays = op.Log(op.Where(kept, op.Reshape(parts[0], [0, capacity, heads]), one))
    keys = op.Where(kept, op.Reshape(parts[1], [0, capacity, key_heads * key_dim]), zero)
    deltas = op.Where(kept, op.Reshape(parts[2], [0, capacity, heads * value_dim]), zero)
    shared = op.Constant(value=ir.tensor(np.repeat(np.arange(key_heads), heads // key_heads)))
    each = op.Gather(op.Reshape(keys, [0, capacity, key_heads, key_dim]), shared, axis=2)
    return decays, op.Reshape(each, [0, capacity, heads * key_dim]), deltas
