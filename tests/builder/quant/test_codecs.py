"""Small float formats, exhaustively, against the tables and formulas of their specifications."""

from __future__ import annotations

import numpy as np

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


def test_nan_and_negative_e4m3_are_found_in_every_byte() -> None:
    for byte in range(256):
        scale = np.zeros((3, 2), np.uint8)
        scale[1, 1] = byte
        value = oracle.e4m3(np.array([byte], np.uint8))[0]
        assert codecs.first_nan_e4m3(scale) == ((1, 1) if np.isnan(value) else None), byte
        if not np.isnan(value):
            assert codecs.first_negative_e4m3(scale) == ((1, 1) if value < 0 else None), byte


def test_the_first_bad_scale_is_the_one_named() -> None:
    scale = np.zeros((4, 4), np.uint8)
    scale[3, 0] = scale[2, 3] = 0xFF
    assert codecs.first_nan_e4m3(scale) == (2, 3)
