"""Trace: the residual stream of one prompt, layer by layer, beside what it should be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.errors import Refused
from builder.reader import Package
from runtime.limits import check_request
from runtime.loading import LoadedPackage, open_session
from runtime.lowering import NoKernel
from runtime.lowering.tapping import TAP, tap_residuals
from runtime.packing import Segment
from runtime.place import Place
from runtime.rounding import Rounding, relative_error, row_errors
from runtime.session import ExecutionProvider
from runtime.target import TargetModel

Array = NDArray[Any]
PARTS = ("mixer", "mlp")
WHOLE = "layer"
KINDS = ("linear_attention", "full_attention")


@dataclass(frozen=True)
class Point:
    """The stream behind one part of a layer.

    layer counts from 0; kind: one of KINDS; part: one of PARTS, or WHOLE where nothing is known between them.
    error: relative, by norm; the larger one of all rows together and of the median row. (Of a mixture in half precision
    that of the median row.) limit: what rounding explains of it.
    """

    layer: int
    kind: str
    part: str
    error: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.error <= self.limit  # NaN is no agreement

    @property
    def place(self) -> str:
        part = "" if self.part == WHOLE else f" {self.part}"
        return f"layer {self.layer}{part} ({self.kind})"

    def to_json(self) -> dict[str, Any]:
        """error: null where it is no number."""
        error = self.error if math.isfinite(self.error) else None
        return {"layer": self.layer, "kind": self.kind, "part": self.part, "error": error, "limit": self.limit}


def trace(loaded: LoadedPackage, token_ids: Sequence[int], layers: Array | None) -> tuple[list[Point], str]:
    """Every part in the order of the stream, of a prompt fed in one step, and what it was compared with.

    layers: the stream behind each decoder layer [L, T, hidden], or [L - 1, T, hidden] without the last one. None
    compares with the same package in float32, mixers and MLPs apart.

    Raises Refused for a prompt or layers that do not fit the package, MachineError where it cannot be run.
    """
    check_request(token_ids, 1, loaded.package)
    ours = residual_stream(loaded, token_ids, loaded.ep)
    parts: Sequence[str] = PARTS
    if layers is None:
        theirs, against = _in_float32(loaded, token_ids)
    else:
        ours, theirs, against, parts = ours[1::2], layers, "the reference", (WHOLE,)
        _check_shape(ours, theirs)
    rounding, kinds = Rounding.of(loaded), _kinds(loaded.package)
    points = []
    for place, row in enumerate(theirs):
        layer, part = divmod(place, len(parts))
        allowed = rounding.after(layer + 1)
        points.append(Point(layer, kinds[layer], parts[part], _error(ours[place], row, allowed), allowed.limit))
    return points, f"{against}, {len(token_ids)} tokens"


def describe(points: Sequence[Point], against: str) -> str:
    """The largest error and where it is. Raises Refused for the first point whose error rounding does not explain.

    against: what the stream was compared with.
    """
    largest = max(points, key=lambda point: math.inf if math.isnan(point.error) else point.error)
    first = next((point for point in points if not point.ok), None)
    if first is None:
        seen = f"largest relative error {largest.error:.1e} of at most {largest.limit:.1e}, {largest.place}"
        return f"{seen}; against {against}"
    raise Refused(
        first.place,
        expected=f"a relative error of at most {first.limit:.1e} against {against}",
        found=f"{first.error:.1e}, the first beyond; the largest is {largest.error:.1e}, {largest.place}",
        remedy="compare its weights and nodes with the checkpoint",
    )


def _in_float32(loaded: LoadedPackage, token_ids: Sequence[int]) -> tuple[Array, str]:
    """The stream, and where it was made: on the CPU, or on the GPU where the CPU lacks a kernel.

    On the GPU, too, ops without a kernel for float32 are then spelled out in standard ones: products and attention.
    """
    try:
        return residual_stream(loaded, token_ids, "cpu"), "float32 on the CPU"
    except NoKernel:
        wide = replace(loaded.target.place, widened=True)
        stream = residual_stream(loaded, token_ids, loaded.ep, wide)
        return stream, "float32 on the GPU, for want of a kernel on the CPU"


def residual_stream(
    loaded: LoadedPackage, token_ids: Sequence[int], ep: ExecutionProvider, place: Place | None = None
) -> Array:
    """float32 [2 L, T, hidden]: the stream behind each layer's mixer and each layer's MLP, by a session of its own."""
    package, num_layers = loaded.package, len(_kinds(loaded.package))
    session = open_session(package.target, ep, partial(tap_residuals, num_layers=num_layers), place)
    num_blocks = -(-len(token_ids) // package.block_size)
    taps = [TAP.format(number) for number in range(2 * num_layers)]
    model = TargetModel(package, session, num_blocks, package.block_size, 1, taps)
    view = model.states.view([model.states.take()]) if model.states else None
    done = model.run([Segment(token_ids, 0, range(num_blocks))], view, [0], scored=[0], with_logits=False)
    return np.stack([tap.astype(np.float32) for tap in done.taps])


def _kinds(package: Package) -> list[str]:
    """The kind of each decoder layer, in order."""
    linear, full = KINDS
    kinds = {**dict.fromkeys(package.linear_layers, linear), **dict.fromkeys(package.full_layers, full)}
    return [kinds[layer] for layer in sorted(kinds)]


def _check_shape(ours: Array, theirs: Array) -> None:
    count, *due = ours.shape
    if list(theirs.shape[1:]) != due or len(theirs) not in (count, count - 1):
        raise Refused(
            "layer_hidden_states",
            expected=f"{count} or {count - 1} layers of {due}",
            found=list(theirs.shape),
            remedy="use this package's reference",
        )


def _error(ours: Array, theirs: Array, rounding: Rounding) -> float:
    """A row that is much larger than the others, as those of attention sinks are, would hide them; and a mixture's
    tokens that get other experts by rounding would hide all that comes behind them.
    """
    median = float(np.median(row_errors(ours, theirs)))
    return median if rounding.turns_experts else float(np.maximum(relative_error(ours, theirs), median))
