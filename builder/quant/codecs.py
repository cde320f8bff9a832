"""Small float formats. E4M3 and E8M0 come from ml_dtypes; packed E2M1 is unpacked here, low nibble first."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

E2M1_VALUES: NDArray[np.float32] = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""Value of each 4-bit code: sign in bit 3, then 0, 0.5, 1, 1.5, 2, 3, 4, 6. Code 8 is -0.0."""
E4M3_MAX_BYTE = 0x7E
E4M3_POWERS = range(-9, 9)
"""Exponents of the powers of two that E4M3 holds, its subnormals included."""


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [..., K/2] to float32 [..., K]: column 2j is the low nibble of byte j, column 2j + 1 the high one."""
    codes = np.stack([packed & 0x0F, packed >> 4], axis=-1)
    return E2M1_VALUES[codes].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def zero_blocks(packed: NDArray[np.uint8], block_size: int) -> NDArray[np.bool_]:
    """[N, K/2] to [N, K/block_size]: whether a block holds nothing but zeros of either sign."""
    zeros = (packed & 0x77) == 0
    return zeros.reshape(packed.shape[0], -1, block_size // 2).all(axis=-1)


def decode_e4m3(raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    """E4M3 bytes to float32; 0x7F and 0xFF are NaN."""
    return raw.view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def decode_scale(stored: NDArray[Any]) -> NDArray[np.float32]:
    """A scale tensor as float32: floats as they are, bytes as E8M0, 2 ** (byte - 127) with 255 as NaN."""
    exponents = stored.view(ml_dtypes.float8_e8m0fnu) if stored.dtype == np.uint8 else stored
    return exponents.astype(np.float32)


def clamp_e4m3_nan(raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """E4M3 bytes with NaN replaced by 448."""
    return np.where((raw & 0x7F) == 0x7F, np.uint8(E4M3_MAX_BYTE), raw)


def encode_e4m3_powers(exponents: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The E4M3 bytes of 2 ** exponents, which must lie in E4M3_POWERS."""
    return np.exp2(exponents).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def first(bad: NDArray[np.bool_]) -> tuple[int, ...] | None:
    """Index of the first True, or None."""
    return tuple(map(int, np.argwhere(bad)[0])) if bad.any() else None
