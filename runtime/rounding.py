"""Rounding: how far a run may be from exact arithmetic for the roundings of its own type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder import contract
from runtime.loading import LoadedPackage

Array = NDArray[Any]

UNIT: Mapping[str, float] = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff: the largest relative error of one rounding to the type."""
# ROOM was measured on 30 checkpoints of 4 and 8 layers, 8 of them mixtures, as the largest error / (u sqrt(layers)).
# float16 and bfloat16: transformers in that type against transformers in float32, dense checkpoints, at most 4.6 in
# either type behind any mixer or layer and 4.7 in the logits. Packages on an H200, 4 layers: 3.5 and 3.6 in the logits.
# Of mixtures the median row, at most 3.4. So 8 is 1.7 times the worst.
# float32: packages on the CPU against transformers. 21 dense ones and 6 mixtures with random weights stay below 16. The
# three trained ones reach 81, 277 and 283 in layer 0, by a formula: the released GatedDeltaNet divides queries and keys
# by their norm, transformers by sqrt(norm^2 + 1e-6). With the 1e-6 taken out of transformers they stay below 7. So 512
# is 1.8 times the worst.
ROOM: Mapping[str, float] = {"float32": 512.0, "float16": 8.0, "bfloat16": 8.0}
"""Unit roundoffs that the layers of a sound package may add, in units of the root of their number."""
EXPERTS = 4.0
"""What a mixture's turned-over experts may add. Measured as above: 1.3 in float16, 1.8 in bfloat16 (H200)."""
LOGIT_SCALE = 2.0
"""Root mean square of logits, where a reference has none. It is 3 to 6 in trained checkpoints, so 2 is strict."""


@dataclass(frozen=True)
class Rounding:
    """dtype: what a run computes in. layers: decoder layers that a value has passed. mixture: tokens choose experts."""

    dtype: str
    layers: int
    mixture: bool

    @classmethod
    def of(cls, loaded: LoadedPackage) -> Rounding:
        """Of the target's last layer, in the type in which it runs where it was loaded."""
        package = loaded.package
        own = package.target.io.output(contract.HIDDEN_STATES).dtype
        layers = len(package.full_layers) + len(package.linear_layers)
        return cls("float32" if loaded.target.place.widened else own, layers, package.target.mixture)

    def after(self, layers: int) -> Rounding:
        """The same run where a value has passed another number of layers."""
        return replace(self, layers=layers)

    @property
    def is_half(self) -> bool:
        return self.dtype != "float32"

    @property
    def turns_experts(self) -> bool:
        """Whether tokens get other experts by rounding alone: rows of a mixture in half precision may be far off."""
        return self.is_half and self.mixture

    @property
    def limit(self) -> float:
        """Largest relative error by norm: ROOM u sqrt(layers).

        Every layer rounds the stream twice, where it adds a branch, and each branch a few times more, to within u of
        its size each time. The roundings of one layer have nothing to do with those of another, so their errors add up
        like steps in random directions: by norm, with the root of the number of layers. (u times the number would be
        the bound of the worst case, in which all errors point one way.) The final norm and the LM head change the size
        of stream and error alike, so the limit holds for logits, too.
        Source: Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019.
        """
        return ROOM[self.dtype] * UNIT[self.dtype] * math.sqrt(self.layers)

    @property
    def limit_by_experts(self) -> float:
        """Largest relative error by norm over all rows of a mixture in half precision: EXPERTS sqrt(u sqrt(layers)).

        A token whose last chosen expert is nearly tied with the next one may get the other, and its row is then off by
        a share of its own size, however fine the type. How many rows are so close is proportional to the error of the
        scores, u sqrt(layers), and the norm grows with the root of how many they are. Measured at 4 and 8 layers: in a
        deep mixture a token passes more choices, so more rows are turned than this says.
        """
        return EXPERTS * math.sqrt(UNIT[self.dtype] * math.sqrt(self.layers))

    @property
    def near_tie(self) -> float:
        """Lead in logits, of a size that nobody tells, that rounding may turn over: 2 LOGIT_SCALE limit. Of a mixture
        LOGIT_SCALE limit_by_experts, because nobody tells either which tokens had other experts.

        8 layers: 0.044 in float16 and 0.35 in bfloat16. Along its own text in float32, transformers in half precision
        turns over leads of at most 0.003 and 0.08 in the trained dense checkpoint. Mixtures: 0.30 and 0.84. There it
        turned over 0.044 and 0.41, and in float32 with noise in its routers alone, as large as the error that the types
        make in half of their scores (7e-4, 6e-3), 0.22 and 0.55 (24 draws of 512 tokens; tests/reference/).
        """
        if self.turns_experts:
            return LOGIT_SCALE * self.limit_by_experts
        return 2 * LOGIT_SCALE * self.limit

    def turned_over(self, ours: Array, theirs: Array) -> Array:
        """Lead [T] in each row of `theirs` [T, vocab] that rounding may turn over: each of two logits may be off by the
        limit, taken of the row's root mean square. A mixture's row that is off by more than the limit had other
        experts, and is granted what those may add.
        """
        allowed: Array = np.full(len(theirs), self.limit)
        if self.turns_experts:
            allowed[row_errors(ours, theirs) > self.limit] = self.limit_by_experts
        return 2 * allowed * np.sqrt(np.mean(np.square(theirs, dtype=np.float64), axis=-1))


def relative_error(ours: Array, theirs: Array) -> float:
    """||ours - theirs|| / ||theirs|| over all numbers, in float64; NaN where either holds any."""
    difference = np.linalg.norm(np.subtract(ours, theirs, dtype=np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(difference / np.linalg.norm(theirs.astype(np.float64)))


def row_errors(ours: Array, theirs: Array) -> Array:
    """The same for each row of [T, N]: [T]."""
    differences = np.linalg.norm(np.subtract(ours, theirs, dtype=np.float64), axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(differences / np.linalg.norm(theirs.astype(np.float64), axis=-1))
