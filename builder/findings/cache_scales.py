"""Scales of the KV cache, under either spelling."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from builder.checkpoint import Checkpoint
from builder.config import ModelConfig
from builder.errors import one_line
from builder.findings.scale_tally import tally_scale
from builder.findings.streaming import values_of

KV_LEAVES = ("k_scale", "v_scale")
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
