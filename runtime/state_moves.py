"""StateMoves: what is done to states that live on a device, as small graphs on that device.

A bank is [N, ...] with one state of one layer of one slot in each row; rows are named by number. Copies change a bank
in place: the same memory is bound as a graph's input and its output.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxscript import GraphBuilder

from runtime import state_replay
from runtime.bound_run import BoundRun
from runtime.fixed_state import StateGeometry
from runtime.lowering import CONTRIB
from runtime.place import Array, DeviceArray, Place
from runtime.session import MAX_RECORDED, bare_session
from runtime.state_replay import Input, Op, Values

FLOAT, INT64 = ir.DataType.FLOAT, ir.DataType.INT64
OPSET = 21
INDEX: Input = (INT64, ("M",))
PIECE = 32
"""Values that one thread moves."""


def piece_of(shape: tuple[int, ...]) -> int:
    """Values of a state of this shape that lie in one piece of its bank."""
    return math.gcd(shape[-1], PIECE)


MAX_KEPT_RUNS = 64


class StateMoves:
    """Gather and copy for the two kinds of states of a geometry, whose convolutions are of `conv_type`; and replay.

    Runs over the same memory are kept bound: what a step moves, the next one often moves, too.
    """

    def __init__(self, geometry: StateGeometry, place: Place, conv_type: ir.DataType) -> None:
        self._place = place
        self._shapes = {"conv": geometry.conv, "recurrent": geometry.recurrent}
        self._moves = _moves(geometry, place, conv_type)
        self._runs: OrderedDict[tuple[object, ...], BoundRun] = OrderedDict()

    def gather(self, kind: str, bank: DeviceArray, source: Array, out: DeviceArray) -> None:
        """out[i] = bank[source[i]]."""
        self._run(f"gather_{kind}", {"bank": bank, "source": source}, {"out": out})

    def copy(self, kind: str, bank: DeviceArray, states: DeviceArray, row: Array, target: Array) -> None:
        """bank[target[i]] = states[row[i]]."""
        pieces = self._pieces(kind, bank)
        self._run(f"copy_{kind}", {"pieces": pieces, "states": states, "row": row, "target": target}, {"out": pieces})

    def replay(self, inputs: Mapping[str, Array | DeviceArray], outputs: Mapping[str, DeviceArray]) -> None:
        """Every layer's states of a view after the first kept[row] captured tokens; names as of state_replay."""
        self._run("replay", inputs, outputs)

    def _pieces(self, kind: str, bank: DeviceArray) -> DeviceArray:
        piece = piece_of(self._shapes[kind])
        return bank.reshape(math.prod(bank.shape) // piece, piece)

    def _run(self, name: str, inputs: Mapping[str, Array | DeviceArray], outputs: Mapping[str, DeviceArray]) -> None:
        arrays = [*inputs.values(), *outputs.values()]
        key = (name, *(a.address if isinstance(a, DeviceArray) else 0 for a in arrays), *(a.shape for a in arrays))
        if key not in self._runs:
            own = {name: array if isinstance(array, DeviceArray) else array.copy() for name, array in inputs.items()}
            self._runs[key] = self._moves[name].bind(self._place, own, outputs)
            if len(self._runs) > MAX_KEPT_RUNS:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        run = self._runs[key]
        for index, array in inputs.items():
            kept = run.inputs[index]
            if not isinstance(array, DeviceArray) and not isinstance(kept, DeviceArray):
                kept[...] = array
        run.run()


class Move:
    """A loaded graph. On a GPU its runs may be recorded, as far as a session may record: it pays where many small
    kernels are launched one after the other.
    """

    def __init__(self, session: ort.InferenceSession, *, records: bool = False) -> None:
        self._session, self._records, self._recorded = session, records, 0

    def bind(
        self, place: Place, inputs: Mapping[str, Array | DeviceArray], outputs: Mapping[str, DeviceArray]
    ) -> BoundRun:
        run = BoundRun(self._session, place, inputs, outputs)
        if self._records:
            record = self._recorded < MAX_RECORDED
            self._recorded += record
            run.graph_id = self._recorded if record else -1
        return run


@lru_cache(maxsize=8)
def _moves(geometry: StateGeometry, place: Place, conv_type: ir.DataType) -> Mapping[str, Move]:
    """Every move by name, loaded once however many engines there are."""
    moves = {}
    for kind, dtype, shape in (("conv", conv_type, geometry.conv), ("recurrent", FLOAT, geometry.recurrent)):
        bank: Input = (dtype, ("N", *shape))
        pieces: Input = (dtype, ("P", piece_of(shape)))
        moves[f"gather_{kind}"] = Move(load_move(place, {"bank": bank, "source": INDEX}, gather_rows, {"out": bank}))
        copied: dict[str, Input] = {"pieces": pieces, "states": (dtype, ("R", *shape)), "row": INDEX, "target": INDEX}
        moves[f"copy_{kind}"] = Move(load_move(place, copied, partial(_copy, shape=shape), {"out": pieces}))
    if geometry.capacity:
        inputs, outputs = state_replay.inputs(geometry, conv_type), state_replay.outputs(geometry, conv_type)
        build = partial(state_replay.build, geometry=geometry)
        records = place.device == "cuda" and state_replay.can_be_recorded(geometry)
        moves["replay"] = Move(load_move(place, inputs, build, outputs, cuda_graph=records), records=records)
    return moves


def load_move(
    place: Place,
    inputs: Mapping[str, Input],
    build: Callable[[Op, Values], Sequence[ir.Value]],
    outputs: Mapping[str, Input],
    *,
    cuda_graph: bool = False,
) -> ort.InferenceSession:
    """outputs: types and shapes of what `build` gives, in order, their first axes aside."""
    graph = ir.Graph(inputs=[], outputs=[], nodes=[], name="move", opset_imports={"": OPSET, CONTRIB: 1})
    builder = GraphBuilder(graph)
    values = {name: builder.input(name, dtype, list(shape)) for name, (dtype, shape) in inputs.items()}
    for (name, (dtype, shape)), out in zip(outputs.items(), build(builder.op, values), strict=True):
        out.name, out.dtype, out.shape = name, dtype, ir.Shape(["M", *shape[1:]])
        graph.outputs.append(out)
    model = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return bare_session(model, place, cuda_graph=cuda_graph)


def gather_rows(op: Op, values: Values) -> list[ir.Value]:
    return [op.Gather(values["bank"], values["source"], axis=0)]


def _put(op: Op, values: Values, states: ir.Value, shape: tuple[int, ...]) -> ir.Value:
    """pieces, but for those of state target[i] of this shape, which become states[i]'s.

    CUDA's ScatterND gives each index to one thread: whole states of megabytes would go through a few dozen threads.
    """
    piece = piece_of(shape)
    count = math.prod(shape) // piece
    first = op.Mul(values["target"], op.Constant(value=ir.tensor(np.array([count]))))
    places = op.Add(op.Unsqueeze(first, [1]), op.Constant(value=ir.tensor(np.arange(count)[None])))
    return op.ScatterND(values["pieces"], op.Reshape(places, [-1, 1]), op.Reshape(states, [-1, piece]))


def _copy(op: Op, values: Values, shape: tuple[int, ...]) -> list[ir.Value]:
    return [_put(op, values, op.Gather(values["states"], values["row"], axis=0), shape)]
