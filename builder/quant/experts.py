"""The experts of one block, whatever layout stores them, as one linear module each: gate, up and down.

Layouts (name below `mlp.experts`):
- one by one: `3.gate_proj.weight` [I, H], also with the index last, `gate_proj.3.weight`
- stacked: `gate_proj.weight` [E, I, H] or [E * I, H]
- fused: `gate_up_proj` [E, 2 I, H], gate rows first, and `down_proj` [E, H, I], with or without `.weight`
Scales lie beside the weights under the names of their dialect, `gate_up_proj_weight_scale` where there is no `.weight`.
A slice of rows is a run of bytes, so every expert of a stacked tensor is a TensorRef of its own. Nothing is read here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from builder.checkpoint import NUMPY_DTYPES, TensorRef
from builder.errors import Refused
from builder.quant.tensors import QuantTensor

GATE, UP, DOWN = "gate_proj", "up_proj", "down_proj"
FUSED = "gate_up_proj"
BLOCK = 128
"""Rows of a block of block-scaled FP8."""
LEAVES = {"": "weight", "scale": "weight_scale", "scale_inv": "weight_scale_inv", "packed": "weight_packed"}
"""What follows a stacked tensor's name where that has no `.weight`, to the last name part it would have had."""

Modules = Mapping[str, Mapping[str, TensorRef]]
Own = dict[str, TensorRef]
"""Tensors of one module by last name part."""


@dataclass(frozen=True)
class Experts:
    """Weights by expert: gate and up [I, H], down [H, I]."""

    gate: tuple[QuantTensor, ...]
    up: tuple[QuantTensor, ...]
    down: tuple[QuantTensor, ...]

    def __iter__(self) -> Iterator[QuantTensor]:
        yield from (*self.gate, *self.up, *self.down)


@dataclass(frozen=True)
class Sizes:
    """experts E; inner I; hidden H."""

    experts: int
    inner: int
    hidden: int

    def shape(self, projection: str) -> tuple[int, int]:
        """[out_features, in_features] of one expert's module."""
        return (self.hidden, self.inner) if projection == DOWN else (self.inner, self.hidden)


def stored_under(modules: Modules, name: str) -> bool:
    """Whether any layout has experts under the module `name`."""
    return name in modules or any(module.startswith(f"{name}.") for module in modules)


def split(modules: Modules, name: str, sizes: Sizes) -> dict[str, list[tuple[str, Own]]]:
    """For each projection every expert's module name, as if stored one by one, and its tensors.

    Raises Refused for experts that are not there, or more of them than configured.
    """
    return {projection: _projection(modules, name, projection, sizes) for projection in (GATE, UP, DOWN)}


def _projection(modules: Modules, name: str, projection: str, sizes: Sizes) -> list[tuple[str, Own]]:
    names = [f"{name}.{expert}.{projection}" for expert in range(sizes.experts)]
    for pattern in (f"{name}.{{}}.{projection}", f"{name}.{projection}.{{}}"):
        if any(pattern.format(expert) in modules for expert in range(sizes.experts)):
            _refuse_more(modules, pattern, sizes.experts)
            return [(one, dict(modules.get(pattern.format(e), {}))) for e, one in enumerate(names)]
    stacked, first = _stacked(modules, f"{name}.{projection}"), 0
    if not stacked and projection != DOWN:
        stacked, first = _stacked(modules, f"{name}.{FUSED}"), sizes.inner * (projection == UP)
        rows = 2 * sizes.inner
    else:
        rows = sizes.shape(projection)[0]
    if not stacked:
        raise Refused(
            f"tensor {names[0]}.weight",
            expected="experts one by one, stacked or fused",
            found="none",
            remedy="check that every shard is there",
        )
    part = _Part(first, sizes.shape(projection)[0], rows)
    return [(one, {leaf: part.of(ref, e, sizes) for leaf, ref in stacked.items()}) for e, one in enumerate(names)]


def _refuse_more(modules: Modules, pattern: str, experts: int) -> None:
    if pattern.format(experts) in modules:
        raise Refused(
            "config.json num_experts",
            expected=f"the number of experts that are stored, such as {pattern.format(experts)}",
            found=experts,
            remedy="check that config.json belongs to this checkpoint",
        )


def _stacked(modules: Modules, name: str) -> Own:
    """Tensors of all experts at once: those of the module of that name, or those whose name begins with it."""
    if name in modules:
        return dict(modules[name])
    parent, _, projection = name.rpartition(".")
    found: Own = {}
    for leaf, ref in modules.get(parent, {}).items():
        if leaf == projection or leaf.startswith(f"{projection}_"):
            suffix = leaf.removeprefix(projection).removeprefix("_")
            found[LEAVES.get(suffix, suffix)] = ref
    return found if "weight" in found or "weight_packed" in found else {}


@dataclass(frozen=True)
class _Part:
    """Which of an expert's `total` rows belong to a projection: `rows` from `first` on."""

    first: int
    rows: int
    total: int

    def of(self, ref: TensorRef, expert: int, sizes: Sizes) -> TensorRef:
        """One expert's slice. Raises Refused for a shape that is none of experts by rows, blocks or numbers."""
        experts, shape = sizes.experts, ref.shape
        if math.prod(shape) == 1:
            return replace(ref, shape=())
        if len(shape) == 2 and shape[0] == experts * self.total:
            shape = (experts, self.total, shape[1])
        if shape[:1] != (experts,):
            raise self._refused(ref, sizes)
        inner = shape[1:]
        if math.prod(inner) == 1:
            return _slice(ref, expert, 1, ())
        if inner == (2,) and self.total == 2 * self.rows:
            return _slice(ref, 2 * expert + bool(self.first), 1, ())
        blocks = -(-self.total // BLOCK)
        if inner[0] == self.total:
            begin, count = self.first, self.rows
        elif inner[0] == blocks and not self.first % BLOCK:
            begin, count = self.first // BLOCK, -(-self.rows // BLOCK)
        else:
            raise self._refused(ref, sizes)
        width = math.prod(inner[1:])
        return _slice(ref, (expert * inner[0] + begin) * width, count * width, (count, *inner[1:]))

    def _refused(self, ref: TensorRef, sizes: Sizes) -> Refused:
        return Refused(
            f"tensor {ref.name}",
            expected=f"{sizes.experts} experts of {self.total} rows, or a scale for each of them",
            found=f"{ref.dtype} {list(ref.shape)}",
            remedy="this layout is not supported, or config.json belongs to another checkpoint",
        )


def _slice(ref: TensorRef, start: int, count: int, shape: tuple[int, ...]) -> TensorRef:
    """`count` elements from `start` on, with a name that tells where they are from."""
    size = NUMPY_DTYPES[ref.dtype].itemsize
    name = f"{ref.name}[{start}:{start + count}]"
    return TensorRef(name, ref.file, ref.dtype, shape, ref.offset + start * size, count * size)


def source_name(ref: TensorRef) -> str:
    """The checkpoint's name of the tensor that a slice was taken from."""
    return ref.name.rpartition("[")[0] if ref.name.endswith("]") else ref.name


def whole(refs: tuple[TensorRef, ...]) -> TensorRef | None:
    """One tensor [E, ...] of all experts' where their bytes follow each other in one file, else None."""
    first = refs[0]
    for before, after in itertools.pairwise(refs):
        follows = after.file == before.file and after.offset == before.offset + before.nbytes
        if not follows or after.dtype != first.dtype or after.shape != first.shape:
            return None
    nbytes = len(refs) * first.nbytes
    return TensorRef(source_name(first), first.file, first.dtype, (len(refs), *first.shape), first.offset, nbytes)
