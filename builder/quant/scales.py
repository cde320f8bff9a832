"""check_scales: reads a module's scales and refuses what would load and be wrong.

Reads scales only, and the codes under them where a scale alone cannot decide; headers are linear.py's business.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.quant import codecs
from builder.quant.tensors import Fp8, Mxfp4, Nvfp4, QuantTensor

MXFP4_SCALE_END = 2.0**126
"""Six times this, the largest code, is no float32 any more."""
SMALLEST_EXPONENT = -126
"""Of a float32 with all its bits; a device may take smaller multipliers for 0."""


def check_scales(quantized: QuantTensor) -> QuantTensor:
    """The tensor, completed by what its scales tell: clamp_nan, global_exponent. Raises Refused.

    Multipliers must be finite and above 0. A block scale of 0 is legal (a block of zeros), a negative one is not.
    """
    match quantized:
        case Fp8(scale=scale):
            _check_positive(scale, codecs.decode_scale(scale.read()))
        case Nvfp4(global_scale=global_scale):
            _check_positive(global_scale, global_scale.read())
            _check_reciprocal(quantized)
            multiplier = quantized.multiplier(global_scale.read())
            return _check_blocks(replace(quantized, multiplier_value=float(multiplier[0])))
        case Mxfp4(block_scale=block_scale):
            scales = codecs.decode_scale(block_scale.read())
            _check_positive(block_scale, scales)
            _check_finite_products(quantized, scales)
            return replace(quantized, global_exponent=_global_exponent(quantized, scales))
    return quantized


def _refuse(ref: TensorRef, index: object, expected: str, found: object) -> Refused:
    return Refused(f"tensor {ref.name} at {index}", expected=expected, found=found, remedy="quantize it again")


def _check_positive(ref: TensorRef, values: NDArray[Any]) -> None:
    values = values.astype(np.float32)
    bad = codecs.first(~(np.isfinite(values) & (values > 0)))
    if bad is not None:
        index = [i for i, size in zip(bad, values.shape, strict=True) if size > 1] or [0]
        raise _refuse(ref, index if len(index) > 1 else index[0], "a finite scale above 0", float(values[bad]))


def _check_finite_products(quantized: Mxfp4, scales: NDArray[np.float32]) -> None:
    """Any scale will do over zeros."""
    large = scales >= MXFP4_SCALE_END
    if not large.any():
        return
    bad = codecs.first(large & ~codecs.zero_blocks(quantized.packed.read(), quantized.block_size))
    if bad is not None:
        expected = f"a scale below {MXFP4_SCALE_END:g} over weights that are not 0"
        raise _refuse(quantized.block_scale, list(bad), expected, float(scales[bad]))


def _check_reciprocal(quantized: Nvfp4) -> None:
    """A divisor may be so small that its reciprocal, the multiplier we write, leaves float32."""
    stored = quantized.global_scale.read()
    with np.errstate(over="ignore"):
        multiplier = quantized.multiplier(stored)
    if not np.isfinite(multiplier).all():
        raise _refuse(quantized.global_scale, 0, "a divisor with a finite reciprocal", float(stored.reshape(1)[0]))


def _check_blocks(quantized: Nvfp4) -> Nvfp4:
    """NaN over a block of zeros is what a division of 0 by 0 leaves: harmless once clamped. Any other NaN is not."""
    raw = quantized.block_scale.read().view(np.uint8)
    nan = (raw & 0x7F) == 0x7F
    negative = codecs.first((raw > 0x80) & ~nan)
    if negative is not None:
        raise _refuse(quantized.block_scale, list(negative), "a block scale of 0 or above", "a negative one")
    if not nan.any():
        return quantized
    harmful = codecs.first(nan & ~codecs.zero_blocks(quantized.packed.read(), quantized.block_size))
    if harmful is not None:
        raise _refuse(quantized.block_scale, list(harmful), "a finite block scale over weights that are not 0", "NaN")
    return replace(quantized, clamp_nan=True)


def _global_exponent(quantized: Mxfp4, scales: NDArray[np.float32]) -> int | None:
    """The exponent to move into NVFP4's global scale so that the rest fits E4M3, or None."""
    exponents = np.frexp(scales)[1].astype(np.int64) - 1
    highest = codecs.E4M3_POWERS[-1]
    if np.ptp(exponents) >= len(codecs.E4M3_POWERS):
        matters = ~codecs.zero_blocks(quantized.packed.read(), quantized.block_size)
        exponents = exponents[matters]
        if exponents.size == 0 or np.ptp(exponents) >= len(codecs.E4M3_POWERS):
            return None
    return max(int(exponents.max()) - highest, SMALLEST_EXPONENT)
