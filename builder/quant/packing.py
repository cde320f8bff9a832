"""Expert weights as QMoE and MoE of ONNX Runtime take them, one expert at a time.

QMoE "nvfp4" (N-packed): codes [E, K, N/2], a byte holding row 2j of column k in its low nibble and row 2j + 1 in its
high one; block scales E4M3 [E, N, K/16]; one multiplier an expert. Rows of gate and up are interleaved: g0, u0, g1, u1.
Source: ONNX Runtime 1.32's operator documentation, and its CUDA kernel of 1.31.1, which takes no other layout rightly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from builder.quant import codecs
from builder.quant.tensors import Mxfp4, Nvfp4, QuantTensor

Made = TypeVar("Made")
BLOCK = 16
"""Columns under one scale of QMoE's NVFP4."""
TILE_ROWS = 128
LINE = 64
"""A cache line. Rows of a power of two bytes would all fall into the same few sets of the cache; one line more spreads
them."""


def pack_rows(even: NDArray[np.uint8], odd: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """E2M1 codes of even rows [R, K/2] and of odd ones, even column in the low nibble, to [K, R].

    Some rows at a time, through scratch memory that stays in a core's cache: twice as fast as whole arrays.
    """
    rows, half = even.shape
    packed = np.empty((half, 2, rows), np.uint8)
    merged = np.empty((TILE_ROWS, half + LINE), np.uint8)[:, :half]
    shifted = np.empty((TILE_ROWS, half), np.uint8)
    for start in range(0, rows, TILE_ROWS):
        tile = slice(start, start + TILE_ROWS)
        first, second = even[tile], odd[tile]
        into, other = merged[: len(first)], shifted[: len(first)]
        np.bitwise_and(first, 0x0F, out=into)
        np.left_shift(second, 4, out=other)
        into |= other
        packed[:, 0, tile] = into.T
        np.right_shift(first, 4, out=into)
        np.bitwise_and(second, 0xF0, out=other)
        into |= other
        packed[:, 1, tile] = into.T
    return packed.reshape(2 * half, rows)


def interleave(even: NDArray[Any], odd: NDArray[Any]) -> NDArray[Any]:
    """Rows of two arrays [R, ...] by turns: [2 R, ...]."""
    return np.stack([even, odd], axis=1).reshape(2 * len(even), *even.shape[1:])


def each(make: Callable[..., Made], *weights: Iterable[Any]) -> Iterator[Made]:
    """make() of every expert in order, on all cores: NumPy leaves the interpreter's lock alone while it moves bytes."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(make, *weights)


def codes(weight: Nvfp4 | Mxfp4) -> NDArray[np.uint8]:
    """[N, K/2], even column in the low nibble."""
    packed: NDArray[np.uint8] = weight.packed.read()
    return packed


def block_scales(weight: Nvfp4 | Mxfp4) -> NDArray[np.uint8]:
    """E4M3 bytes [N, K/16]. A scale of 32 columns stands twice; MXFP4's exponents lose their common part."""
    if isinstance(weight, Mxfp4):
        exponents = np.frexp(codecs.decode_scale(weight.block_scale.read()))[1].astype(np.int64) - 1
        common = weight.global_exponent or 0
        lowest, highest = codecs.E4M3_POWERS[0], codecs.E4M3_POWERS[-1]
        scales = codecs.encode_e4m3_powers(np.clip(exponents - common, lowest, highest))
    else:
        scales = weight.scale_bytes()
    return np.repeat(scales, weight.block_size // BLOCK, axis=1)


def multiplier(weight: Nvfp4 | Mxfp4) -> np.float32:
    """What every block scale is multiplied by."""
    if isinstance(weight, Mxfp4):
        return np.float32(np.exp2(np.float32(weight.global_exponent or 0)))
    return np.float32(weight.multiplier(weight.global_scale.read())[0])


def four_bit(weight: QuantTensor) -> bool:
    """Whether QMoE can carry the weight to the bit, as far as headers tell."""
    native = isinstance(weight, Nvfp4) or (isinstance(weight, Mxfp4) and weight.global_exponent is not None)
    return native and weight.shape[1] % BLOCK == 0 and weight.shape[0] % 2 == 0
