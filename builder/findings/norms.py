"""The convention of norm weights: w around 0 for 1 + w, or around 1 with 1 already added."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from builder.checkpoint import TensorRef
from builder.errors import one_line
from builder.findings.streaming import FIRST_NOT_FINITE, values_of

NORM_THRESHOLD = 0.5
"""Half-way between weights around 0, which are read as 1 + w, and weights around 1, to which 1 was already added."""
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
