"""QuantTensor: the weight of one linear module as it is stored, free of its dialect's names.

Every kind is weight [out_features, in_features], row-major, as references to bytes. `dequantize` spells out each
kind's meaning in float32; the packaged graph keeps the bytes and leaves that to the op.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from builder.checkpoint import TensorRef
from builder.quant import codecs

EXPONENT_DTYPES = ("U8", "F8_E8M0")
"""Stored types of a scale that is a power of two, 2 ** (byte - 127)."""


@dataclass(frozen=True)
class Dense:
    """weight [N, K] in BF16, F16 or F32."""

    weight: TensorRef
    kind = "float"

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return (self.weight,)

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]


@dataclass(frozen=True)
class Fp8:
    """weight E4M3 [N, K]; scale one multiplier for each block of (rows, columns), row-major over the blocks.

    (N, K) is one scale per tensor, (1, K) one per channel, (128, 128) DeepSeek's blocks, (1, 32) MXFP8.
    """

    weight: TensorRef
    scale: TensorRef
    block: tuple[int, int]

    @property
    def kind(self) -> str:
        return "mxfp8" if self.block == (1, 32) else "fp8"

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return self.weight, self.scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def row_scales(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        """The stored scales as float32 [N, ceil(K / block columns)], each repeated for every row of its block."""
        (rows, columns), (block_rows, block_columns) = self.shape, self.block
        grid = codecs.decode_scale(stored).reshape(-(-rows // block_rows), -(-columns // block_columns))
        return np.ascontiguousarray(np.repeat(grid, block_rows, axis=0)[:rows])


@dataclass(frozen=True)
class Nvfp4:
    """packed U8 [N, K/2], even column in the low nibble; block_scale E4M3 [N, K/block_size]; global_scale F32 [1].

    global_is_divisor: compressed-tensors stores the reciprocal of ModelOpt's multiplier. clamp_nan: NaN block scales
    stand over blocks of zeros alone and are read as 448, which leaves the zeros zero. multiplier_value: what the global
    scale multiplies by, once it was read.
    """

    packed: TensorRef
    block_scale: TensorRef
    global_scale: TensorRef
    global_is_divisor: bool
    clamp_nan: bool = False
    multiplier_value: float | None = None
    kind = "nvfp4"

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return self.packed, self.block_scale, self.global_scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    @property
    def block_size(self) -> int:
        return self.shape[1] // self.block_scale.shape[1]

    def multiplier(self, global_scale: NDArray[Any]) -> NDArray[np.float32]:
        """The global scale as a float32 multiplier [1]."""
        value = global_scale.astype(np.float32).reshape(1)
        return np.float32(1) / value if self.global_is_divisor else value

    def scale_bytes(self) -> NDArray[np.uint8]:
        """The block scales' E4M3 bytes [N, K/block_size], NaN clamped where that was found harmless."""
        stored: NDArray[np.uint8] = self.block_scale.read().view(np.uint8)
        return codecs.clamp_e4m3_nan(stored) if self.clamp_nan else stored


@dataclass(frozen=True)
class Mxfp4:
    """packed U8 [N, K/2], even column in the low nibble; block_scale [N, K/32], exponents of powers of two.

    global_exponent: g such that every block scale that matters is an E4M3 number times 2 ** g, which makes the weight
    an NVFP4 one to the bit; None where the scales span too much for that, 0 until they were read.
    """

    packed: TensorRef
    block_scale: TensorRef
    global_exponent: int | None = 0
    kind = "mxfp4"
    block_size = 32

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return self.packed, self.block_scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]


QuantTensor = Dense | Fp8 | Nvfp4 | Mxfp4


def dequantize(tensor: QuantTensor) -> NDArray[np.float32]:
    """The weight [N, K] in float32, every product taken in float32."""
    match tensor:
        case Dense():
            return tensor.weight.read().astype(np.float32)
        case Fp8():
            scales = np.repeat(tensor.row_scales(tensor.scale.read()), tensor.block[1], axis=1)
            return tensor.weight.read().astype(np.float32) * scales[:, : tensor.shape[1]]
        case Nvfp4():
            scales = codecs.decode_e4m3(tensor.scale_bytes()) * tensor.multiplier(tensor.global_scale.read())
            return _scale_blocks(tensor.packed.read(), scales)
        case Mxfp4():
            return _scale_blocks(tensor.packed.read(), codecs.decode_scale(tensor.block_scale.read()))


def _scale_blocks(packed: NDArray[np.uint8], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """E2M1 codes [N, K/2] packed, times one scale [N, blocks] for each run of K / blocks columns."""
    codes = codecs.unpack_e2m1(packed)
    with np.errstate(over="ignore"):  # infinity is refused where weights are placed, by name
        return (codes.reshape(*scales.shape, -1) * scales[..., None]).reshape(codes.shape)
