"""ValueCheck: what a weight's values must be, looked at piece by piece while the bytes pass.

Floats are judged by their bits: an exponent of ones is NaN or infinity, and magnitudes order as integers do. That is
ten times faster than arithmetic on types that NumPy knows only by conversion.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from builder.errors import Refused

FLOAT16_MAX = 65504.0
FLOAT16_ZERO = 2.0**-25
"""Half of float16's smallest number: this and everything below rounds to 0."""
PIECE = 1 << 17
"""Values looked at together; their copy stays in the processor's cache."""
LOST_SHARE = 1e-3
"""Of a tensor's values that are not 0. A few in a million is what every normal distribution has near its middle."""
FLOATS: tuple[np.dtype[Any], ...] = tuple(map(np.dtype, (np.float16, np.float32, ml_dtypes.bfloat16)))
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class ValueCheck:
    """One weight's check. name: the tensor's, for errors. narrowed: whether the graph casts it to float16."""

    def __init__(self, name: str | None, *, narrowed: bool) -> None:
        self.name, self.narrowed = name, narrowed
        self.nonzero = self.lost = 0

    def feed(self, values: NDArray[Any]) -> None:
        """Raises Refused for NaN or infinity, and where narrowed for what float16 cannot hold."""
        flat = values.reshape(-1)
        for start in range(0, flat.size, PIECE):
            self._feed_piece(flat[start : start + PIECE])

    def _feed_piece(self, values: NDArray[Any]) -> None:
        if values.dtype == E4M3:
            if int((values.view(np.uint8) & 0x7F).max()) == 0x7F:
                raise self._not_finite()
        elif values.dtype in FLOATS:
            self._feed_floats(values)

    def _feed_floats(self, values: NDArray[Any]) -> None:
        magnitudes = _magnitudes(values)
        largest = magnitudes.max()
        if largest >= _magnitudes(np.array([np.inf], values.dtype))[0]:
            raise self._not_finite()
        if not self.narrowed or values.dtype == np.float16:
            return
        if (most := float(largest.view(values.dtype))) > FLOAT16_MAX:
            raise Refused(
                f"tensor {self.name}",
                expected=f"values within {FLOAT16_MAX:.0f} for float16",
                found=most,
                remedy="export with --dtype bfloat16",
            )
        nonzero = int(np.count_nonzero(magnitudes))
        self.nonzero += nonzero
        zero = _magnitudes(np.array([FLOAT16_ZERO], values.dtype))[0]
        self.lost += int(np.count_nonzero(magnitudes <= zero)) - (values.size - nonzero)

    def _not_finite(self) -> Refused:
        """NaN or infinity in a weight turns every token after it into noise without an error."""
        return Refused(
            f"tensor {self.name}",
            expected="finite numbers",
            found="NaN or infinity",
            remedy="fetch or quantize it again",
        )

    def warning(self) -> str | None:
        """Says how much of the tensor float16 turns into zeros, where that is more than chance."""
        if self.lost <= LOST_SHARE * self.nonzero:
            return None
        return (
            f"{self.lost} of {self.nonzero} values of {self.name} are too small for float16 and become 0; "
            "--dtype bfloat16 keeps them"
        )


def _magnitudes(values: NDArray[Any]) -> NDArray[Any]:
    """Bits of floats without their signs, as unsigned integers in the floats' own order."""
    if values.dtype.itemsize == 2:
        return values.view(np.uint16) & np.uint16(0x7FFF)
    return values.view(np.uint32) & np.uint32(0x7FFF_FFFF)
