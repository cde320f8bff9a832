"""ScaleTally: how many values of a scale tensor are no positive numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from builder.checkpoint import TensorRef
from builder.findings.streaming import values_of


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


def tally_scale(ref: TensorRef) -> ScaleTally:
    tally = ScaleTally(ref.name)
    for values in values_of(ref):
        tally.values += values.size
        tally.zero += int(np.count_nonzero(values == 0))
        tally.negative += int(np.count_nonzero(values < 0))
        tally.nan += int(np.count_nonzero(np.isnan(values)))
        tally.infinite += int(np.count_nonzero(np.isinf(values)))
    return tally
