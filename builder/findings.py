"""What a checkpoint's values tell that its headers do not: dead rows, damaged scales, norms, KV scales, ties.

Nothing here changes what is exported; everything is evidence for a person. Values are streamed in runs of rows of at
most CHUNK_BYTES, so memory does not grow with the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.checkpoint import Checkpoint, TensorRef
from builder.config import ModelConfig
from builder.errors import Refused, one_line
from builder.progress import Progress, silent
from builder.quant import codecs
from builder.quant.scales import check_scales
from builder.quant.tensors import Dense, Fp8, Mxfp4, Nvfp4, QuantTensor, dequantize

CHUNK_BYTES = 1 << 23
FLAGGED_FRACTION = 0.5
"""More than this share of all-zero rows is odd: quantizers that flush small weights leave whole projections dead."""
NORM_THRESHOLD = 0.5
"""Half-way between weights around 0, which are read as 1 + w, and weights around 1, to which 1 was already added."""
FIRST_NOT_FINITE = {"F8_E4M3": 0x7F, "BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
"""Smallest magnitude bits (all but the sign) that are infinity or NaN. Sources: IEEE 754, OCP FP8 v1.0."""
KV_LEAVES = ("k_scale", "v_scale")


# --- streaming


def rows_of(ref: TensorRef, start: int, stop: int) -> TensorRef:
    """Rows [start, stop) of a tensor with at least one dimension, as a reference of their own."""
    row = ref.nbytes // ref.shape[0]
    return replace(
        ref, shape=(stop - start, *ref.shape[1:]), offset=ref.offset + start * row, nbytes=(stop - start) * row
    )


def row_ranges(ref: TensorRef, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Runs of rows [start, stop) of at most CHUNK_BYTES, or of `multiple` rows where those are larger."""
    count = ref.shape[0]
    step = max(CHUNK_BYTES // max(ref.nbytes // max(count, 1), 1) // multiple, 1) * multiple
    for start in range(0, count, step):
        yield start, min(start + step, count)


def values_of(ref: TensorRef) -> Iterator[NDArray[np.float64]]:
    """All values of a tensor of any type and rank, flat, in float64; bytes are exponents, as they are in scales."""
    flat = replace(ref, shape=(int(np.prod(ref.shape, dtype=np.int64)),))
    for start, stop in row_ranges(flat):
        stored = rows_of(flat, start, stop).read()
        with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
            values = (codecs.decode_scale(stored) if stored.dtype == np.uint8 else stored).astype(np.float64)
        yield values


# --- rows of zeros, numbers that are none


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
class ScaleTally:
    """Values of one scale tensor that are not positive numbers.

    lost: for block scales, how many are 0 or NaN over weights that are not all 0; those weights are lost. None for
    other scales. A block scale of 0 over a block of zeros is what quantizers write.
    """

    tensor: str
    values: int = 0
    zero: int = 0
    negative: int = 0
    nan: int = 0
    infinite: int = 0
    lost: int | None = None

    @property
    def odd(self) -> bool:
        return bool(self.zero or self.negative or self.nan or self.infinite)


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


def tally_scale(ref: TensorRef) -> ScaleTally:
    tally = ScaleTally(ref.name)
    for values in values_of(ref):
        tally.values += values.size
        tally.zero += int(np.count_nonzero(values == 0))
        tally.negative += int(np.count_nonzero(values < 0))
        tally.nan += int(np.count_nonzero(np.isnan(values)))
        tally.infinite += int(np.count_nonzero(np.isinf(values)))
    return tally


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


# --- the norm convention

NORM_NAME = re.compile(
    r"(?P<mtp>mtp\.)?(?:model\.|language_model\.|layers\.\d+\.)*(?P<role>"
    r"input_layernorm|post_attention_layernorm|self_attn\.[qk]_norm|linear_attn\.norm|pre_fc_norm_\w+|norm)\.weight"
)
SIGNS_OF_CONVENTION = ("input_layernorm", "post_attention_layernorm")
"""The norms that tell. Final norms do not: trained ones have a mean near 0.85 and are right as 1 + w."""


@dataclass(frozen=True)
class NormEvidence:
    """Which convention the norm weights follow: w around 0 for 1 + w as published, or around 1 with 1 already added.

    means: mean stored weight by role ("input_layernorm", "mtp.norm"), None where it is no finite number. conv_layouts:
    "C,1,K" as published, "C,K,1" as MLX converters leave it, which add 1 in the same step. `linear_attn.norm` is a
    plain w in either convention. Whether there is an MTP head says nothing.
    """

    means: dict[str, float | None]
    conv_layouts: list[str]

    def added(self, group: str) -> bool | None:
        """Whether the input and post-attention norms of a group ("" or "mtp.") look as if 1 was added already."""
        means = [self.means[group + role] for role in SIGNS_OF_CONVENTION if self.means.get(group + role) is not None]
        return None if not means else sum(mean for mean in means if mean is not None) / len(means) > NORM_THRESHOLD

    @property
    def convention(self) -> str:
        """ "1 + w", "w" (1 was added already), or "unclear" where norms, groups or convolutions disagree."""
        signs = {sign for sign in (self.added(""), self.added("mtp.")) if sign is not None}
        signs |= {layout == "C,K,1" for layout in self.conv_layouts}
        return {frozenset([False]): "1 + w", frozenset([True]): "w"}.get(frozenset(signs), "unclear")

    def to_json(self) -> dict[str, Any]:
        return {"convention": self.convention, "means": self.means, "conv_layouts": self.conv_layouts}

    def warnings(self) -> list[str]:
        lines = []
        for group, where in (("", "the layers'"), ("mtp.", "the MTP head's")):
            if self.added(group):
                means = ", ".join(f"{role} {_shown(self.means.get(group + role))}" for role in SIGNS_OF_CONVENTION)
                how = "used as they are" if "C,K,1" in self.conv_layouts else "read as 1 + w"
                lines.append(f"{where} norm weights look as if 1 was already added (means: {means}): they are {how}")
        if "C,K,1" in self.conv_layouts:
            lines.append(
                "conv1d.weight is laid out [C, K, 1], as converters leave it that add 1 to the norms as well: "
                "norm weights are used as they are"
            )
        return lines


def _shown(mean: float | None) -> str:
    return "not finite" if mean is None else f"{mean:.2f}"


def norm_evidence(tensors: Mapping[str, TensorRef]) -> NormEvidence:
    """Reads every norm of a checkpoint, which are small vectors; of the convolutions only headers. Never raises for
    what it finds, so that it can be asked before anything is refused.
    """
    sums: dict[str, list[float]] = {}
    for name, ref in tensors.items():
        match = NORM_NAME.fullmatch(name)
        if match and len(ref.shape) == 1 and ref.dtype in FIRST_NOT_FINITE and ref.nbytes:
            total = sums.setdefault(f"{match['mtp'] or ''}{match['role']}", [0.0, 0])
            with np.errstate(all="ignore"):  # a sum that is no finite number is shown as such
                total[0] += float(sum(values.sum() for values in values_of(ref)))
            total[1] += ref.shape[0]
    means = {role: total / count for role, (total, count) in sums.items()}
    shapes = {ref.shape for name, ref in tensors.items() if name.endswith("linear_attn.conv1d.weight")}
    layouts = {_conv_layout(shape) for shape in shapes}
    return NormEvidence({role: mean if np.isfinite(mean) else None for role, mean in means.items()}, sorted(layouts))


def _conv_layout(shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and 1 in shape[1:] and shape[1:] != (1, 1):
        return "C,1,K" if shape[1] == 1 else "C,K,1"
    return one_line(",".join(map(str, shape)))


def norm_warnings(tensors: Mapping[str, TensorRef]) -> list[str]:
    """For export: lines to show where the norms look as if 1 was already added. It reads a few hundred kilobytes."""
    return norm_evidence(tensors).warnings()


# --- scales of the KV cache

KV_NAME = re.compile(r"(?P<layer>.*layers\.\d+)\.self_attn\.(?:(?P<kv>[kv])_proj\.)?(?P<leaf>[kv])_scale")


@dataclass(frozen=True)
class KvScales:
    """declared: the KV cache's format as the configuration has it, by file. pairs: full-attention layers of the target
    with both scales; missing: those with one or none; elsewhere: KV scales of any other module, by name. spellings:
    "self_attn.k_scale" (compressed-tensors) or "self_attn.k_proj.k_scale" (ModelOpt). minimum, maximum: of all values,
    None without any.
    """

    declared: dict[str, str]
    scales: int
    pairs: list[int]
    missing: list[int]
    elsewhere: list[str]
    spellings: list[str]
    minimum: float | None
    maximum: float | None
    odd: list[str]

    @property
    def all_one(self) -> bool:
        return self.minimum == self.maximum == 1.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "all_one": self.all_one}

    def warnings(self) -> list[str]:
        lines = []
        if self.declared and not self.scales:
            said = next(iter(self.declared.values()))
            lines.append(f"the KV cache is declared {said} but no KV scales are stored")
        if self.scales and not self.declared:
            lines.append(f"{self.scales} KV scales are stored but no configuration declares a quantized KV cache")
        if self.scales and self.missing:
            total = len(self.pairs) + len(self.missing)
            lines.append(
                f"KV scales for {len(self.pairs)} of {total} full-attention layers; not layer {self.missing[0]}"
            )
        if self.elsewhere:
            lines.append(
                f"{len(self.elsewhere)} KV scales outside the target's full-attention layers: {self.elsewhere[0]}"
            )
        if len(self.spellings) > 1:
            lines.append(f"KV scales in more than one spelling: {', '.join(self.spellings)}")
        if self.all_one:
            lines.append(f"all {self.scales} KV scales are exactly 1.0: nobody calibrated them")
        if self.odd:
            lines.append(f"{len(self.odd)} KV scales are not positive finite numbers, the first {self.odd[0]}")
        return [one_line(line) for line in lines]


def kv_scales(checkpoint: Checkpoint, config: ModelConfig) -> KvScales:
    """KV scales under either spelling, counted against the target's full-attention layers. The cache of a package
    keeps the activation type, so none is used; the head's cache needs none either.
    """
    names = [name for name in checkpoint if name.rpartition(".")[2] in KV_LEAVES]
    layers = {f"{checkpoint.prefix}layers.{i}": i for i in config.layers_of("full_attention")}
    have: dict[int, set[str]] = {i: set() for i in layers.values()}
    elsewhere, spellings = [], set()
    for name in names:
        match = KV_NAME.fullmatch(name)
        if match is None or match["layer"] not in layers or match["kv"] not in (None, match["leaf"]):
            elsewhere.append(name)
            continue
        have[layers[match["layer"]]].add(match["leaf"])
        spellings.add("self_attn.k_proj.k_scale" if match["kv"] else "self_attn.k_scale")
    bounds = [
        bound for name in names for values in values_of(checkpoint[name]) for bound in (values.min(), values.max())
    ]
    tallies = [tally_scale(checkpoint[name]) for name in names]
    finite = bool(bounds) and bool(np.isfinite(bounds).all())
    return KvScales(
        declared=_declared_kv(checkpoint),
        scales=len(names),
        pairs=[i for i, leaves in have.items() if len(leaves) == 2],
        missing=[i for i, leaves in have.items() if len(leaves) < 2],
        elsewhere=elsewhere,
        spellings=sorted(spellings),
        minimum=float(min(bounds)) if finite else None,
        maximum=float(max(bounds)) if finite else None,
        odd=[tally.tensor for tally in tallies if tally.odd or not tally.values],
    )


def _declared_kv(checkpoint: Checkpoint) -> dict[str, str]:
    """What each file says: ModelOpt names an algorithm, compressed-tensors describes one; hf_quant_config.json alone
    may have it (nvidia's Qwen3.6 export).
    """
    declared = {}
    documents = {
        "config.json": checkpoint.config.get("quantization_config"),
        "hf_quant_config.json": (checkpoint.json("hf_quant_config.json") or {}).get("quantization"),
    }
    for file, section in documents.items():
        if not isinstance(section, dict):
            continue
        scheme = section.get("kv_cache_scheme")
        if isinstance(scheme, dict):
            declared[file] = one_line(f"{scheme.get('type')} {scheme.get('num_bits')}")
        elif section.get("kv_cache_quant_algo"):
            declared[file] = one_line(section["kv_cache_quant_algo"])
    return declared


# --- ties


@dataclass(frozen=True)
class Ties:
    """declared: tie_word_embeddings by place in config.json, where written. tied: what is exported. max_difference:
    largest |lm_head - embedding|, read only where the two are declared to be one and both are stored.
    """

    declared: dict[str, bool]
    lm_head_stored: bool
    tied: bool
    max_difference: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def warnings(self) -> list[str]:
        lines = []
        if len(set(self.declared.values())) > 1:
            said = ", ".join(f"{place} {str(value).lower()}" for place, value in self.declared.items())
            lines.append(f"tie_word_embeddings differs: {said}; what is stored decides")
        if self.max_difference is not None:
            lines.append(
                f"lm_head and embedding are declared tied; as stored they differ by up to {self.max_difference:g}"
            )
        return lines


def ties(checkpoint: Checkpoint, config: ModelConfig, lm_head: QuantTensor | None, progress: Progress = silent) -> Ties:
    """lm_head: None where none is stored."""
    text = checkpoint.config.get("text_config")
    places = {"config.json": checkpoint.config, "config.json text_config": text if isinstance(text, dict) else {}}
    said = {place: document.get("tie_word_embeddings") for place, document in places.items()}
    declared = {place: value for place, value in said.items() if isinstance(value, bool)}
    difference = None
    if config.tie_word_embeddings and lm_head is not None:
        embedding = checkpoint[f"{checkpoint.prefix}embed_tokens.weight"]
        difference = max_difference(lm_head, embedding, progress)
    return Ties(declared, lm_head is not None, config.tie_word_embeddings and lm_head is None, difference)


def max_difference(tensor: QuantTensor, other: TensorRef, progress: Progress = silent) -> float | None:
    """Largest absolute difference of two [N, K] weights in float32, None where it is no finite number."""
    largest = np.float32(0)
    for start, stop in row_ranges(other, multiple=128):  # a multiple of any block's rows
        with np.errstate(all="ignore"):  # what is no finite number ends as None
            there = rows_of(other, start, stop).read().astype(np.float32)
            largest = np.maximum(largest, np.abs(dequantize(_part(tensor, start, stop)) - there).max())
        progress("comparing lm_head with the embedding", stop, other.shape[0])
    return float(largest) if np.isfinite(largest) else None


def _part(tensor: QuantTensor, start: int, stop: int) -> QuantTensor:
    """Rows [start, stop) of a weight, start a multiple of its block's rows."""
    match tensor:
        case Dense():
            return Dense(rows_of(tensor.weight, start, stop))
        case Fp8(weight=weight, scale=scale, block=(rows, columns)):
            if rows >= tensor.shape[0]:  # one row of scales for the whole weight
                return Fp8(rows_of(weight, start, stop), scale, (stop - start, columns))
            return replace(
                tensor, weight=rows_of(weight, start, stop), scale=rows_of(scale, start // rows, -(-stop // rows))
            )
        case Nvfp4() | Mxfp4():
            packed, scale = tensor.packed, tensor.block_scale
            return replace(tensor, packed=rows_of(packed, start, stop), block_scale=rows_of(scale, start, stop))
