"""StateMoves: what is done to states that live on a device, as small graphs of standard ops on that device.

A bank is [N, ...] with one state of one layer of one slot in each row; rows are named by number. Banks are changed in
place: the same memory is bound as a graph's input and its output.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxscript import GraphBuilder

from runtime.bound_run import BoundRun
from runtime.fixed_state import StateGeometry
from runtime.place import Array, DeviceArray, Place
from runtime.session import bare_session

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
OPSET = 21
Op = Any
"""onnxscript's OpBuilder."""
Values = Mapping[str, ir.Value]
Shape = tuple[int | str, ...]
Input = tuple[ir.DataType, Shape]
INDEX: Input = (INT64, ("M",))
PIECE = 32
"""Values that one thread moves."""


def piece_of(shape: tuple[int, ...]) -> int:
    """Values of a state of this shape that lie in one piece of its bank."""
    return math.gcd(shape[-1], PIECE)


MAX_KEPT_RUNS = 64


class StateMoves:
    """Gather, copy and replay for the two kinds of states of a geometry, whose convolutions are of `conv_type`.

    Runs over the same memory are kept bound: what a step moves, the next one often moves, too.
    """

    def __init__(self, geometry: StateGeometry, place: Place, conv_type: ir.DataType) -> None:
        self._place = place
        self._shapes = {"conv": geometry.conv, "recurrent": geometry.recurrent}
        self._sessions = _sessions(geometry, place, conv_type)
        self._runs: OrderedDict[tuple[object, ...], BoundRun] = OrderedDict()

    def gather(self, kind: str, bank: DeviceArray, source: Array, out: DeviceArray) -> None:
        """out[i] = bank[source[i]]."""
        self._run(f"gather_{kind}", {"bank": bank, "source": source}, out)

    def copy(self, kind: str, bank: DeviceArray, states: DeviceArray, row: Array, target: Array) -> None:
        """bank[target[i]] = states[row[i]]."""
        pieces = self._pieces(kind, bank)
        self._run(f"copy_{kind}", {"pieces": pieces, "states": states, "row": row, "target": target}, pieces)

    def replay(self, kind: str, bank: DeviceArray, updates: DeviceArray, moved: Mapping[str, Array]) -> None:
        """bank[target[i]] = bank[source[i]] after the first kept[i] updates of row[i]; moved names these four."""
        pieces = self._pieces(kind, bank)
        self._run(f"replay_{kind}", {"bank": bank, "pieces": pieces, "updates": updates, **moved}, pieces)

    def _pieces(self, kind: str, bank: DeviceArray) -> DeviceArray:
        piece = piece_of(self._shapes[kind])
        return bank.reshape(math.prod(bank.shape) // piece, piece)

    def _run(self, name: str, inputs: Mapping[str, Array | DeviceArray], out: DeviceArray) -> None:
        arrays = [*inputs.values(), out]
        key = (name, *(a.address if isinstance(a, DeviceArray) else 0 for a in arrays), *(a.shape for a in arrays))
        if key not in self._runs:
            own = {name: array if isinstance(array, DeviceArray) else array.copy() for name, array in inputs.items()}
            self._runs[key] = BoundRun(self._sessions[name], self._place, own, {"out": out})
            if len(self._runs) > MAX_KEPT_RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        run = self._runs[key]
        for index, array in inputs.items():
            kept = run.inputs[index]
            if not isinstance(array, DeviceArray) and not isinstance(kept, DeviceArray):
                kept[...] = array
        run.run()


@lru_cache(maxsize=8)
def _sessions(geometry: StateGeometry, place: Place, conv_type: ir.DataType) -> Mapping[str, ort.InferenceSession]:
    """The graphs of every move, by name, loaded once however many engines there are."""
    replays = {"conv": _replay_conv, "recurrent": _replay_recurrent}
    widths = {
        "conv": (geometry.capacity, geometry.conv[0]),
        "recurrent": (geometry.capacity * geometry.capsule_width,),
    }
    sessions = {}
    for kind, dtype, shape in (("conv", conv_type, geometry.conv), ("recurrent", FLOAT, geometry.recurrent)):
        bank: Input = (dtype, ("N", *shape))
        pieces: Input = (dtype, ("P", piece_of(shape)))
        sessions[f"gather_{kind}"] = load_move(place, {"bank": bank, "source": INDEX}, gather_rows, bank)
        copied: dict[str, Input] = {"pieces": pieces, "states": (dtype, ("R", *shape)), "row": INDEX, "target": INDEX}
        sessions[f"copy_{kind}"] = load_move(place, copied, partial(_copy, shape=shape), pieces)
        if geometry.capacity:
            moved: dict[str, Input] = {"bank": bank, "pieces": pieces, "updates": (dtype, ("R", *widths[kind]))}
            moved |= dict.fromkeys(("source", "row", "kept", "target"), INDEX)
            sessions[f"replay_{kind}"] = load_move(place, moved, partial(replays[kind], geometry=geometry), pieces)
    return sessions


def load_move(
    place: Place, inputs: Mapping[str, Input], build: Callable[[Op, Values], ir.Value], made: Input
) -> ort.InferenceSession:
    """made: the type and shape of what `build` gives, its first axis aside."""
    graph = ir.Graph(inputs=[], outputs=[], nodes=[], name="move", opset_imports={"": OPSET})
    builder = GraphBuilder(graph)
    values = {name: builder.input(name, dtype, list(shape)) for name, (dtype, shape) in inputs.items()}
    out = build(builder.op, values)
    out.name, out.dtype, out.shape = "out", made[0], ir.Shape(["M", *made[1][1:]])
    graph.outputs.append(out)
    return bare_session(ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString(), place)


def gather_rows(op: Op, values: Values) -> ir.Value:
    return op.Gather(values["bank"], values["source"], axis=0)


def _put(op: Op, values: Values, states: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """pieces, but for those of state target[i] of this shape, which become states[i]'s.

    CUDA's ScatterND gives each index to one thread: whole states of megabytes would go through a few dozen threads.
    """
    piece = piece_of(shape)
    count = math.prod(shape) // piece
    first = op.Mul(values["target"], op.Constant(value=ir.tensor(np.array([count]))))
    places = op.Add(op.Unsqueeze(first, [1]), op.Constant(value=ir.tensor(np.arange(count)[None])))
    return op.ScatterND(values["pieces"], op.Reshape(places, [-1, 1]), op.Reshape(states, [-1, piece]))


def _copy(op: Op, values: Values, shape: tuple[int, ...]) -> ir.Value:
    return _put(op, values, op.Gather(values["states"], values["row"], axis=0), shape)


def _replay_conv(op: Op, values: Values, geometry: StateGeometry) -> ir.Value:
    """The K - 1 newest rows after `kept` more: a window over the past rows and the captured ones."""
    past = op.Gather(values["bank"], values["source"], axis=0)
    appended = op.Transpose(op.Gather(values["updates"], values["row"], axis=0), perm=[0, 2, 1])
    window = op.Constant(value=ir.tensor(np.arange(geometry.conv[1])[None, None]))
    places = op.Expand(op.Add(op.Unsqueeze(values["kept"], [1, 2]), window), op.Shape(past))
    return _put(op, values, op.GatherElements(op.Concat(past, appended, axis=2), places, axis=2), geometry.conv)


def _replay_recurrent(op: Op, values: Values, geometry: StateGeometry) -> ir.Value:
    """S = decay * S + outer(delta, key) token by token, multiplied out to pass over the states once.

    S_c = S_0 prod(decay) + sum_t w_t outer(delta_t, key_t), with w_t the product of the decays behind t. Tokens that
    are not kept have decay 1 and delta 0; what a capsule holds of them is never used.
    """
    heads, value_dim, key_dim = geometry.recurrent
    capacity, key_heads = geometry.capacity, geometry.key_heads
    sizes = [capacity * size for size in (heads, key_heads * key_dim, heads * value_dim)]
    capsule = op.Gather(values["updates"], values["row"], axis=0)
    parts = op.Split(capsule, sizes, axis=1, _outputs=3)
    tokens = op.Constant(value=ir.tensor(np.arange(capacity)[None, :, None]))
    kept = op.Less(tokens, op.Unsqueeze(values["kept"], [1, 2]))
    one, zero = (op.Constant(value=ir.tensor(np.array(value, np.float32))) for value in (1, 0))
    decays = op.Where(kept, op.Reshape(parts[0], [0, capacity, heads]), one)
    keys = op.Where(kept, op.Reshape(parts[1], [0, capacity, key_heads * key_dim]), zero)
    deltas = op.Where(kept, op.Reshape(parts[2], [0, capacity, heads * value_dim]), zero)
    weights, total = _weights(op, decays, capacity, one)
    shared = op.Constant(value=ir.tensor(np.repeat(np.arange(key_heads), heads // key_heads)))
    keys = op.Gather(op.Reshape(keys, [0, capacity, key_heads, key_dim]), shared, axis=2)
    weighted = op.Mul(op.Reshape(deltas, [0, capacity, heads, value_dim]), op.Unsqueeze(weights, [3]))
    added = op.MatMul(op.Transpose(weighted, perm=[0, 2, 3, 1]), op.Transpose(keys, perm=[0, 2, 1, 3]))
    before = op.Gather(values["bank"], values["source"], axis=0)
    state = op.Add(op.Mul(before, op.Reshape(total, [0, heads, 1, 1])), added)
    return _put(op, values, state, geometry.recurrent)


def _weights(op: Op, decays: ir.Value, capacity: int, one: ir.Value) -> tuple[ir.Value, ir.Value]:
    """[M, capacity, heads]: the product of the decays behind each token; and [M, 1, heads]: of all of them."""
    each = op.Split(decays, num_outputs=capacity, axis=1, _outputs=capacity) if capacity > 1 else [decays]
    product = op.Expand(one, op.Shape(each[0]))
    behind: list[ir.Value] = []
    for decay in reversed(list(each)):
        behind.insert(0, product)
        product = op.Mul(product, decay)
    return op.Concat(*behind, axis=1), product
