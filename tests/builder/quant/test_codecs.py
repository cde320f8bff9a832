"""Small float formats, exhaustively, against the tables and formulas of their specifications."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from builder.quant import codecs
from tests.builder import oracle


def test_every_e2m1_code_has_its_value_and_sign() -> None:
    # Compared as bits: a table without -0.0 at code 8 is equal as numbers.
    expected = np.array(oracle.E2M1, np.float32)
    assert np.array_equal(codecs.E2M1_VALUES.view(np.uint32), expected.view(np.uint32))


def test_the_low_nibble_is_the_even_column() -> None:
    packed = np.array([[low | high << 4 for low, high in zip(range(0, 16, 2), range(1, 16, 2), strict=True)]], np.uint8)
    assert packed[0, :2].tolist() == [0x10, 0x32]
    values = codecs.unpack_e2m1(packed)
    assert np.array_equal(values.view(np.uint32), np.array([oracle.E2M1], np.float32).view(np.uint32))


def test_every_byte_unpacks_as_the_loop_does() -> None:
    packed = np.arange(256, dtype=np.uint8).reshape(2, 4, 32)
    expected = np.stack([oracle.e2m1(rows) for rows in packed])
    values = codecs.unpack_e2m1(packed)
    assert values.shape == (2, 4, 64)
    assert np.array_equal(values, expected)
    assert np.array_equal(np.signbit(values), np.signbit(expected))


BYTES = np.arange(256, dtype=np.uint8)


def test_every_e4m3_byte_has_its_value() -> None:
    assert np.array_equal(codecs.decode_e4m3(BYTES), oracle.e4m3(BYTES), equal_nan=True)


@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu], ids=["U8", "F8_E8M0"])
def test_every_exponent_has_its_power_of_two(dtype: type) -> None:
    """The smallest, 2 ** -127, is a subnormal of float32 and not zero; 255 alone is NaN."""
    values = codecs.decode_scale(BYTES.view(dtype))
    assert values.dtype == np.float32
    assert values[0] > 0 and values[127] == 1 and values[254] == 2.0**127
    assert np.array_equal(values, oracle.e8m0(BYTES), equal_nan=True)
    assert np.isnan(values).nonzero()[0].tolist() == [255]


def test_scales_that_are_floats_are_only_widened() -> None:
    for dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        scale = np.array([[0.3, 127.0], [2.0**-14, 1e4]]).astype(dtype)
        assert np.array_equal(codecs.decode_scale(scale), scale.astype(np.float64))


def test_nan_is_clamped_and_nothing_else_changes() -> None:
    clamped = codecs.clamp_e4m3_nan(BYTES)
    assert np.isnan(oracle.e4m3(BYTES)).nonzero()[0].tolist() == [0x7F, 0xFF]
    assert oracle.e4m3(clamped[[0x7F, 0xFF]]).tolist() == [448.0, 448.0]
    assert np.delete(clamped, [0x7F, 0xFF]).tolist() == np.delete(BYTES, [0x7F, 0xFF]).tolist()


def test_the_powers_of_two_of_e4m3_are_all_there_are() -> None:
    """Of the 127 positive numbers, those whose significand is one half."""
    positive = oracle.e4m3(BYTES[1:0x7F])
    powers = [int(np.log2(value)) for value in positive if np.frexp(value)[0] == 0.5]
    assert powers == list(codecs.E4M3_POWERS)
    encoded = codecs.encode_e4m3_powers(np.array(powers))
    assert encoded.dtype == np.uint8 and oracle.e4m3(encoded).tolist() == [2.0**power for power in powers]


@pytest.mark.parametrize("block_size", [16, 32])
def test_zero_blocks_hold_zeros_of_either_sign(block_size: int) -> None:
    """Every code at every place of the middle block of three."""
    for column in range(block_size):
        for code in range(16):
            packed = np.full((2, 3 * block_size // 2), 0x99, np.uint8)
            packed[1, block_size // 2 : block_size] = np.resize([0x08, 0x80, 0x88, 0x00], block_size // 2)
            byte, shift = divmod(block_size + column, 2)
            packed[1, byte] = packed[1, byte] & (0xF0 >> 4 * shift) | code << 4 * shift
            middle = oracle.e2m1(packed)[1, block_size : 2 * block_size]
            assert codecs.zero_blocks(packed, block_size).tolist() == [[False] * 3, [False, not middle.any(), False]]


def test_the_first_bad_scale_is_the_one_named() -> None:
    bad = np.zeros((4, 4), np.bool_)
    assert codecs.first(bad) is None
    bad[3, 0] = bad[2, 3] = True
    assert codecs.first(bad) == (2, 3)
