"""Small float formats. E4M3 and E8M0 come from ml_dtypes; packed E2M1 is unpacked here, low nibble first."""

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

E2M1_VALUES: NDArray[np.float32] = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
"""Value of each 4-bit code: sign in bit 3, then 0, 0.5, 1, 1.5, 2, 3, 4, 6. Code 8 is -0.0."""


def unpack_e2m1(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """uint8 [..., K/2] to float32 [..., K]: column 2j is the low nibble of byte j, column 2j + 1 the high one."""
    codes = np.stack([packed & 0x0F, packed >> 4], axis=-1)
    return E2M1_VALUES[codes].reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def first_nan_e4m3(scale: NDArray[Any]) -> tuple[int, ...] | None:
    """Index of the first NaN (bytes 0x7F and 0xFF) of an E4M3 array, or None."""
    return _first((scale.view(np.uint8) & 0x7F) == 0x7F)


def first_negative_e4m3(scale: NDArray[Any]) -> tuple[int, ...] | None:
    """Index of the first value below 0, or None. Block scales are unsigned: kernels disagree on what a sign means."""
    return _first(scale.view(np.uint8) > 0x80)


def _first(bad: NDArray[np.bool_]) -> tuple[int, ...] | None:
    return tuple(map(int, np.argwhere(bad)[0])) if bad.any() else None
