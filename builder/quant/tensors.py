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
    """weight E4M3 [N, K]; scale float, one element (per tensor) or N elements (per output channel), a multiplier."""

    weight: TensorRef
    scale: TensorRef
    kind = "fp8"

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return self.weight, self.scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def channel_scales(self, scale: NDArray[Any]) -> NDArray[np.float32]:
        """The stored scale as float32 [N, 1], a per-tensor scale repeated."""
        column = scale.astype(np.float32).reshape(-1, 1)
        return np.ascontiguousarray(np.broadcast_to(column, (self.shape[0], 1)))


@dataclass(frozen=True)
class Nvfp4:
    """packed U8 [N, K/2], even column in the low nibble; block_scale E4M3 [N, K/block_size]; global_scale F32 [1].

    global_is_divisor: compressed-tensors stores the reciprocal of ModelOpt's multiplier.
    """

    packed: TensorRef
    block_scale: TensorRef
    global_scale: TensorRef
    global_is_divisor: bool
    block_size: int = 16
    kind = "nvfp4"

    @property
    def refs(self) -> tuple[TensorRef, ...]:
        return self.packed, self.block_scale, self.global_scale

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def multiplier(self, global_scale: NDArray[Any]) -> NDArray[np.float32]:
        """The global scale as a float32 multiplier [1]."""
        value = global_scale.astype(np.float32).reshape(1)
        return np.float32(1) / value if self.global_is_divisor else value


QuantTensor = Dense | Fp8 | Nvfp4


def dequantize(tensor: QuantTensor) -> NDArray[np.float32]:
    """The weight [N, K] in float32, every product taken in float32."""
    match tensor:
        case Dense():
            return tensor.weight.read().astype(np.float32)
        case Fp8():
            return tensor.weight.read().astype(np.float32) * tensor.channel_scales(tensor.scale.read())
        case Nvfp4():
            scales = tensor.block_scale.read().astype(np.float32) * tensor.multiplier(tensor.global_scale.read())
            codes = codecs.unpack_e2m1(tensor.packed.read())
            blocks = codes.reshape(*scales.shape, tensor.block_size) * scales[..., None]
            return blocks.reshape(codes.shape)
