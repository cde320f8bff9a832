"""What values tell: rows of zeros, numbers that are none, scales that are damaged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.checkpoint import TensorRef
from builder.config import ModelConfig
from builder.errors import Refused, one_line
from builder.findings.scale_tally import ScaleTally, tally_scale
from builder.findings.streaming import FIRST_NOT_FINITE, row_ranges, rows_of
from builder.progress import Progress, silent
from builder.quant.scales import check_scales
from builder.quant.tensors import Dense, Fp8, Mxfp4, Nvfp4, QuantTensor

FLAGGED_FRACTION = 0.5
"""More than this share of all-zero rows is odd: quantizers that flush small weights leave whole projections dead."""


@dataclass(frozen=True)
class ZeroRows:
    """Rows of a weight that hold nothing but zeros. part: "k" of a fused projection, or "" for the whole weight."""

    module: str
    part: str
    rows: int
    zero: int

    @property
    def fraction(self) -> float:
        return self.zero / self.rows

    @property
    def flagged(self) -> bool:
        return self.fraction > FLAGGED_FRACTION


@dataclass
class Values:
    """zero_rows: of every weight and part of one that has any, and `fractions` by module. not_finite: rows with NaN or
    infinity, by tensor. scales: a tally of each scale tensor. refusals: what export says of damaged scales.
    """

    zero_rows: list[ZeroRows] = field(default_factory=list)
    fractions: dict[str, float] = field(default_factory=dict)
    not_finite: dict[str, int] = field(default_factory=dict)
    scales: list[ScaleTally] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        odd = [asdict(tally) for tally in self.scales if tally.odd]
        return {
            "zero_rows": [{**asdict(found), "fraction": found.fraction} for found in self.zero_rows],
            "not_finite": self.not_finite,
            "scales": {
                "tensors": len(self.scales),
                "values": sum(tally.values for tally in self.scales),
                "zero": sum(tally.zero for tally in self.scales),
                "nan": sum(tally.nan for tally in self.scales),
                "odd": odd,
            },
        }

    def warnings(self) -> list[str]:
        return [*self._zero_row_lines(), *self._not_finite_lines(), *self._scale_lines()]

    def _zero_row_lines(self) -> Iterator[str]:
        """One line for each projection of a kind, however many layers it is dead in; none for parts of a dead one."""
        kinds: dict[str, list[ZeroRows]] = {}
        dead = {found.module for found in self.zero_rows if found.flagged and not found.part}
        for found in self.zero_rows:
            if found.flagged and not (found.part and found.module in dead):
                kind = re.sub(r"\.\d+\.", ".N.", found.module)
                kinds.setdefault(f"{kind} {found.part}".strip(), []).append(found)
        for kind, many in kinds.items():
            first, most = many[0], max(found.fraction for found in many)
            yield one_line(
                f"more than half of the rows are all zero, up to {most:.0%}, in {len(many)} of {kind}:"
                f" the first {first.module} with {first.zero} of {first.rows}"
            )

    def _not_finite_lines(self) -> Iterator[str]:
        if self.not_finite:
            name, rows = next(iter(self.not_finite.items()))
            count = len(self.not_finite)
            yield one_line(
                f"NaN or infinity in {count} weight tensors, the first {name} ({rows} rows): export refuses it"
            )

    def _scale_lines(self) -> Iterator[str]:
        blocks = [tally for tally in self.scales if tally.lost]
        if blocks:
            yield one_line(
                f"{sum(tally.lost or 0 for tally in blocks)} block scales are 0 or NaN over weights that are not 0,"
                f" in {len(blocks)} tensors, the first {blocks[0].tensor}"
            )
        clamped = [tally for tally in self.scales if tally.lost == 0 and tally.nan]
        if clamped:
            yield one_line(
                f"{sum(tally.nan for tally in clamped)} block scales are NaN over blocks of zeros (read as 448),"
                f" in {len(clamped)} tensors, the first {clamped[0].tensor}"
            )
        odd = [tally for tally in self.scales if tally.lost is None and tally.odd]
        if odd:
            yield one_line(
                f"{len(odd)} scale tensors hold values that are not positive finite numbers ({_census(odd)}),"
                f" the first {odd[0].tensor}"
            )
        if self.refusals:
            yield one_line(
                f"export refuses {len(self.refusals)} modules for their scales, the first: {self.refusals[0]}"
            )


def _census(tallies: list[ScaleTally]) -> str:
    counts = {name: sum(getattr(tally, name) for tally in tallies) for name in ("zero", "negative", "nan", "infinite")}
    return ", ".join(f"{count} {'NaN' if name == 'nan' else name}" for name, count in counts.items() if count)


def read_values(
    linears: Mapping[str, QuantTensor],
    others: Iterable[TensorRef],
    config: ModelConfig,
    progress: Progress = silent,
) -> Values:
    """Reads every weight once. linears: by module; others: the float tensors in use and the activation scales."""
    found = Values()
    others = list(others)
    todo = sum(ref.nbytes for linear in linears.values() for ref in linear.refs) + sum(ref.nbytes for ref in others)
    done = 0
    for module, linear in linears.items():
        _read_linear(found, module, linear, config)
        done += sum(ref.nbytes for ref in linear.refs)
        progress("reading values", done, todo)
    for ref in others:
        _read_other(found, ref)
        done += ref.nbytes
        progress("reading values", done, todo)
    return found


def _read_linear(found: Values, module: str, linear: QuantTensor, config: ModelConfig) -> None:
    tallies: list[ScaleTally] = []
    match linear:
        case Dense(weight=weight):
            zero = _float_rows(found, weight)
        case Fp8(weight=weight, scale=scale):
            zero = _float_rows(found, weight)
            tallies = [tally_scale(scale)]
        case Nvfp4():
            zero, blocks = _nvfp4_rows(linear)
            tallies = [tally_scale(linear.global_scale), blocks]
        case Mxfp4(packed=packed, block_scale=block_scale):
            pieces = [
                _zero_blocks(rows_of(packed, *span), linear.block_size).all(axis=1) for span in row_ranges(packed)
            ]
            zero = np.concatenate(pieces)
            tallies = [tally_scale(block_scale)]
    found.scales += tallies
    found.fractions[module] = _count_zero_rows(found, module, zero, config)
    if any(tally.odd for tally in tallies):
        try:  # the one place that knows which of them are harmful
            check_scales(linear)
        except Refused as refusal:
            found.refusals.append(str(refusal))


def _read_other(found: Values, ref: TensorRef) -> None:
    if ref.name.rpartition(".")[2].endswith("_scale"):
        found.scales.append(tally_scale(ref))
    elif ref.dtype in FIRST_NOT_FINITE and ref.shape and ref.nbytes:
        zero = _float_rows(found, ref)
        if len(ref.shape) > 1:  # a vector of zeros is what norms start from
            _add_zero_rows(found, ref.name.rpartition(".")[0], "", zero)


def _float_rows(found: Values, ref: TensorRef) -> NDArray[np.bool_]:
    """Which rows of a float tensor [N, ...] are all zero, by their bits: as fast as the bytes can be read."""
    bits = np.dtype(f"u{ref.nbytes // int(np.prod(ref.shape, dtype=np.int64))}")
    magnitude = bits.type(np.iinfo(bits).max >> 1)
    largest = np.concatenate(
        [
            (part.read().reshape(part.shape[0], -1).view(bits) & magnitude).max(axis=1)
            for part in (rows_of(ref, *span) for span in row_ranges(ref))
        ]
    )
    bad = int(np.count_nonzero(largest >= FIRST_NOT_FINITE[ref.dtype]))
    if bad:
        found.not_finite[ref.name] = bad
    return largest == 0


def _zero_blocks(packed: TensorRef, block_size: int) -> NDArray[np.bool_]:
    """[N, K/2] of two codes a byte to [N, K/block_size]: blocks of zeros of either sign, eight bytes at a time."""
    words = packed.read().view(np.uint64).reshape(packed.shape[0], -1, block_size // 16)
    zeros = (words & np.uint64(0x7777777777777777)) == 0
    return zeros[..., 0] if block_size == 16 else zeros.all(axis=-1)


def _nvfp4_rows(linear: Nvfp4) -> tuple[NDArray[np.bool_], ScaleTally]:
    """Rows whose every block is zero, by its codes or by its scale, and the tally of the block scales."""
    tally = ScaleTally(linear.block_scale.name)
    lost = 0
    rows = []
    for span in row_ranges(linear.packed):
        blocks = _zero_blocks(rows_of(linear.packed, *span), linear.block_size)
        raw = rows_of(linear.block_scale, *span).read().view(np.uint8)
        magnitude = raw & 0x7F
        zero, nan = magnitude == 0, magnitude == 0x7F
        tally.values += raw.size
        tally.zero += int(zero.sum())
        tally.nan += int(nan.sum())
        tally.negative += int(((raw > 0x80) & ~nan).sum())
        lost += int(((zero | nan) & ~blocks).sum())
        rows.append((blocks | zero).all(axis=1))
    tally.lost = lost
    return np.concatenate(rows), tally


def _count_zero_rows(found: Values, module: str, zero: NDArray[np.bool_], config: ModelConfig) -> float:
    for part, rows in _parts(module, zero, config).items():
        _add_zero_rows(found, module, part, rows)
    return float(zero.mean())


def _add_zero_rows(found: Values, module: str, part: str, zero: NDArray[np.bool_]) -> None:
    count = int(np.count_nonzero(zero))
    if count:
        found.zero_rows.append(ZeroRows(module, part, zero.size, count))


def _parts(module: str, rows: NDArray[np.bool_], config: ModelConfig) -> dict[str, NDArray[np.bool_]]:
    """A weight's rows, and those of each projection fused into it: all keys dead are a fifth of in_proj_qkv only."""
    leaf = module.rpartition(".")[2]
    if leaf == "in_proj_qkv" and rows.size == config.conv_channels:
        q, k, v = np.split(rows, [config.linear_key_dim, 2 * config.linear_key_dim])
        return {"": rows, "q": q, "k": k, "v": v}
    if leaf == "q_proj" and rows.size == 2 * config.num_attention_heads * config.head_dim:
        heads = rows.reshape(config.num_attention_heads, 2, config.head_dim)
        return {"": rows, "query": heads[:, 0].reshape(-1), "gate": heads[:, 1].reshape(-1)}
    return {"": rows}
