"""QuantTensors mean what the formats say, whichever dialect stored them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from builder.checkpoint import Checkpoint, read_header
from builder.config import parse_config
from builder.quant.linear import read_linear
from builder.quant.tensors import Dense, Fp8, Nvfp4, QuantTensor, dequantize
from builder.source import Source, read_source
from fixtures.writer import Tiny
from tests.builder import oracle
from tests.conftest import TinyFactory

FLOAT32_PRODUCTS = 3 * 2.0**-24
"""Three roundings to float32: of a reciprocal and of two products."""


def source(folder: Path) -> Source:
    return read_source(Checkpoint(folder), "auto")


def test_real_checkpoints_dequantize_to_the_formula_in_float64(real_checkpoint: Path) -> None:
    tensors = oracle.read_checkpoint(real_checkpoint)
    linears = source(real_checkpoint).linears
    layers = parse_config(Checkpoint(real_checkpoint).config).num_hidden_layers
    assert len(linears) > 7 * layers
    for module, quantized in linears.items():
        expected = oracle.weight(tensors, module)
        actual = dequantize(quantized)
        assert actual.dtype == np.float32 and actual.shape == quantized.shape == expected.shape
        assert np.allclose(actual, expected, rtol=FLOAT32_PRODUCTS, atol=0), module
        assert np.array_equal(np.signbit(actual), np.signbit(expected)), module


@pytest.mark.parametrize(
    "options",
    [
        Tiny(),
        Tiny(fp8_per_channel=True, gates="fp8"),
        Tiny(gates="nvfp4", vision=True, tied=True),
        Tiny(projections="fp8 block"),
        Tiny(projections="mxfp8", gates="mxfp8"),
        Tiny(projections="nvfp4 32"),
        Tiny(projections="mxfp4", gates="mxfp4"),
    ],
    ids=["per tensor", "per channel", "quantized gates", "fp8 block", "mxfp8", "nvfp4 32", "mxfp4"],
)
def test_both_dialects_dequantize_bit_identically(tiny: TinyFactory, options: Tiny) -> None:
    modelopt, compressed = tiny("modelopt", options), tiny("compressed-tensors", options)
    stored = oracle.read_checkpoint(modelopt)
    ours, theirs = source(modelopt).linears, source(compressed).linears
    assert list(ours) == list(theirs)
    kinds = {quantized.kind for quantized in ours.values()}
    assert kinds == ({"float", options.projections.split()[0]} if options.projections else {"float", "fp8", "nvfp4"})
    for module, quantized in ours.items():
        assert quantized.kind == theirs[module].kind
        values = dequantize(quantized)
        assert np.array_equal(values.view(np.uint32), dequantize(theirs[module]).view(np.uint32)), module
        # Every scale is a power of two or has four bits, so float32 is exact.
        assert np.array_equal(values, oracle.weight(stored, module)), module


def test_a_divisor_is_inverted_exactly_once(tiny: TinyFactory) -> None:
    module = "model.layers.0.mlp.gate_proj"
    folder = tiny("compressed-tensors", edit=lambda t, c: t[f"{module}.weight_global_scale"].fill(3584.0))
    quantized = source(folder).linears[module]
    expected = oracle.weight(oracle.read_checkpoint(folder), module)
    for _ in range(2):  # reading it a second time inverts nothing again
        assert np.allclose(dequantize(quantized), expected, rtol=FLOAT32_PRODUCTS, atol=0)


def test_parts_of_one_mlp_keep_their_own_global_scales(tiny: TinyFactory) -> None:
    names = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up")]

    def edit(tensors: dict[str, np.ndarray], config: object) -> None:
        for name, divisor in zip(names, (1000.0, 2140.0), strict=True):
            tensors[f"{name}.weight_global_scale"][:] = divisor

    folder = tiny("compressed-tensors", edit=edit)
    linears = source(folder).linears
    for name, divisor in zip(names, (1000.0, 2140.0), strict=True):
        quantized = linears[name]
        assert isinstance(quantized, Nvfp4)
        assert quantized.multiplier(quantized.global_scale.read()) == np.float32(1 / divisor)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (6,), (6, 1)], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=["F32", "BF16", "F16"])
def test_fp8_scales_of_every_shape_multiply_their_rows(tmp_path: Path, shape: tuple[int, ...], dtype: type) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (6, 4), np.uint8)
    scale = rng.uniform(0.5, 2, shape).astype(dtype)
    quantized = stored_linear(tmp_path, {"weight": codes.view(ml_dtypes.float8_e4m3fn), "weight_scale": scale}, (6, 4))
    assert isinstance(quantized, Fp8)
    rows = np.broadcast_to(scale.astype(np.float64).reshape(-1, 1), (6, 1))
    assert np.array_equal(dequantize(quantized), (oracle.e4m3(codes) * rows).astype(np.float32))
    per_row = quantized.row_scales(scale)
    assert per_row.dtype == np.float32 and per_row.shape == (6, 1) and np.array_equal(per_row, rows)


def fp8_codes(shape: tuple[int, int]) -> np.ndarray:
    """E4M3 bytes of either sign, no NaN."""
    rng = np.random.default_rng(3)
    return rng.integers(0, 0x7F, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7


BLOCK_SPELLINGS = ["weight_scale", "ModelOpt", "weight_scale_inv"]


def spelled(spelling: str, grid: np.ndarray) -> dict[str, np.ndarray]:
    """Block scales [N / 128, K / 128] as one of the three dialects stores them."""
    if spelling == "ModelOpt":
        return {"weight_scale": grid.reshape(grid.shape[0], 1, grid.shape[1], 1)}
    return {spelling: grid}


@pytest.mark.parametrize("shape", [(256, 256), (300, 200), (128, 129), (129, 128), (5, 7), (1, 260), (260, 1)], ids=str)
@pytest.mark.parametrize("spelling", BLOCK_SPELLINGS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu], ids=["F32", "BF16", "E8"])
def test_block_scales_multiply_their_blocks(tmp_path: Path, shape: tuple[int, int], spelling: str, dtype: type) -> None:
    """The last blocks are cut where the matrix ends. weight_scale_inv multiplies, whatever its name says."""
    codes, blocks = fp8_codes(shape), (-(-shape[0] // 128), -(-shape[1] // 128))
    grid = np.random.default_rng(4).uniform(1e-3, 8, blocks).astype(dtype)
    stored = {"weight": codes.view(ml_dtypes.float8_e4m3fn), **spelled(spelling, grid)}
    quantized = stored_linear(tmp_path, stored, shape)
    scales = np.kron(grid.astype(np.float64), np.ones((128, 128)))[: shape[0], : shape[1]]
    values = dequantize(quantized)
    assert quantized.kind == "fp8" and values.dtype == np.float32
    assert np.array_equal(values, (oracle.e4m3(codes) * scales).astype(np.float32))


def test_one_matrix_in_every_fp8_spelling_is_one_matrix(tmp_path: Path) -> None:
    """Dropped, or taken for a divisor, the scale would leave weights 200 or 40,000 times off."""
    codes, scale = fp8_codes((256, 256)), np.float32(0.005)
    scales: list[dict[str, np.ndarray]] = [{"weight_scale": np.full(s, scale)} for s in [(), (1,), (256,), (256, 1)]]
    scales += [spelled(spelling, np.full((2, 2), scale)) for spelling in BLOCK_SPELLINGS]
    expected = (oracle.e4m3(codes) * np.float64(scale)).astype(np.float32)
    for i, own in enumerate(scales):
        stored = {"weight": codes.view(ml_dtypes.float8_e4m3fn), **own}
        assert np.array_equal(dequantize(stored_linear(tmp_path / str(i), stored, (256, 256))), expected), own.keys()


EXPONENT_TYPES = pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu], ids=["U8", "F8_E8M0"])


@EXPONENT_TYPES
def test_mxfp8_scales_by_powers_of_two_for_32_columns(tmp_path: Path, dtype: type) -> None:
    """Every exponent that keeps 448 within float32, down to 0, which is 2 ** -127."""
    codes, exponents = fp8_codes((24, 320)), np.arange(240, dtype=np.uint8).reshape(24, 10)
    stored = {"weight": codes.view(ml_dtypes.float8_e4m3fn), "weight_scale": exponents.view(dtype)}
    quantized = stored_linear(tmp_path, stored, (24, 320))
    expected = (oracle.e4m3(codes) * np.repeat(oracle.e8m0(exponents), 32, axis=1)).astype(np.float32)
    assert quantized.kind == "mxfp8" and np.array_equal(dequantize(quantized), expected)


@EXPONENT_TYPES
@pytest.mark.parametrize("name", ["weight", "weight_packed"])
def test_mxfp4_scales_by_powers_of_two_for_32_columns(tmp_path: Path, name: str, dtype: type) -> None:
    packed = np.random.default_rng(5).integers(0, 256, (25, 160), np.uint8)
    exponents = np.arange(250, dtype=np.uint8).reshape(25, 10)
    quantized = stored_linear(tmp_path, {name: packed, "weight_scale": exponents.view(dtype)}, (25, 320))
    expected = oracle.e2m1(packed) * np.repeat(oracle.e8m0(exponents), 32, axis=1)
    values = dequantize(quantized)
    assert quantized.kind == "mxfp4" and values.dtype == np.float32 and np.array_equal(values, expected)
    assert np.array_equal(np.signbit(values), np.signbit(expected))


@pytest.mark.filterwarnings("error")
def test_an_mxfp4_product_beyond_float32_is_infinite_without_a_warning(tmp_path: Path) -> None:
    """6 * 2 ** 127; infinity is for whoever places the weight to refuse."""
    packed, exponents = np.full((1, 16), 0x77, np.uint8), np.full((1, 1), 254, np.uint8)
    quantized = stored_linear(tmp_path, {"weight": packed, "weight_scale": exponents}, (1, 32))
    assert np.isposinf(dequantize(quantized)).all()


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize("divides", [False, True], ids=["multiplier", "divisor"])
def test_the_width_of_nvfp4_scales_says_the_block_size(tmp_path: Path, size: int, divides: bool) -> None:
    rng = np.random.default_rng(6)
    packed = rng.integers(0, 256, (3, 48), np.uint8)
    blocks = rng.integers(0, 0x7F, (3, 96 // size), np.uint8)
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    stored = {names[0]: packed, names[1]: np.array([8 if divides else 0.125], np.float32)}
    quantized = stored_linear(tmp_path, {**stored, "weight_scale": blocks.view(ml_dtypes.float8_e4m3fn)}, (3, 96))
    assert isinstance(quantized, Nvfp4) and quantized.block_size == size
    expected = oracle.e2m1(packed) * np.repeat(oracle.e4m3(blocks), size, axis=1) * 0.125
    assert np.array_equal(dequantize(quantized), expected)


def test_the_smallest_scales_lose_no_weight_to_zero(tmp_path: Path) -> None:
    """2 ** -9 times 2 ** -17: folded in half precision, the product alone would already be 0."""
    packed = np.arange(256, dtype=np.uint8).reshape(16, 16)
    blocks = np.full((16, 2), 0x01, np.uint8).view(ml_dtypes.float8_e4m3fn)
    stored = {"weight": packed, "weight_scale": blocks, "weight_scale_2": np.array(2.0**-17, np.float32)}
    values = dequantize(stored_linear(tmp_path, stored, (16, 32)))
    codes = oracle.e2m1(packed)
    assert np.count_nonzero(values) == np.count_nonzero(codes) == 448
    assert np.array_equal(values, codes * 2.0**-26)


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
@pytest.mark.parametrize("divides", [False, True], ids=["multiplier", "divisor"])
def test_nvfp4_globals_may_be_scalars_or_vectors_of_one(tmp_path: Path, shape: tuple[int, ...], divides: bool) -> None:
    rng = np.random.default_rng(1)
    packed = rng.integers(0, 256, (3, 16), np.uint8)
    blocks = rng.integers(0, 0x7F, (3, 2), np.uint8)
    scale = np.full(shape, 4.0 if divides else 0.25, np.float32)
    names = ("weight_packed", "weight_global_scale") if divides else ("weight", "weight_scale_2")
    stored = {names[0]: packed, names[1]: scale, "weight_scale": blocks.view(ml_dtypes.float8_e4m3fn)}
    quantized = stored_linear(tmp_path, stored, (3, 32))
    expected = oracle.e2m1(packed) * np.repeat(oracle.e4m3(blocks), 16, axis=1) * 0.25
    assert np.array_equal(dequantize(quantized), expected)


def test_a_zero_block_scale_means_zeros(tmp_path: Path) -> None:
    packed = np.full((2, 8), 0x77, np.uint8)
    blocks = np.array([[0x00], [0x38]], np.uint8).view(ml_dtypes.float8_e4m3fn)
    stored = {"weight": packed, "weight_scale": blocks, "weight_scale_2": np.array(1, np.float32)}
    values = dequantize(stored_linear(tmp_path, stored, (2, 16)))
    assert values[0].tolist() == [0.0] * 16 and values[1].tolist() == [6.0] * 16


def test_dense_weights_widen_exactly(tmp_path: Path) -> None:
    for index, dtype in enumerate((ml_dtypes.bfloat16, np.float16, np.float32)):
        weight = np.random.default_rng(2).standard_normal((5, 3)).astype(dtype)
        quantized = stored_linear(tmp_path / str(index), {"weight": weight}, (5, 3))
        assert isinstance(quantized, Dense) and np.array_equal(dequantize(quantized), weight.astype(np.float32))


def stored_linear(folder: Path, stored: dict[str, np.ndarray], shape: tuple[int, int]) -> QuantTensor:
    """Writes the tensors of one module and reads them as a linear."""
    folder.mkdir(exist_ok=True)
    save_file(stored, folder / "linear.safetensors")
    tensors = {name: replace(ref, name=f"m.{name}") for name, ref in read_header(folder / "linear.safetensors").items()}
    return read_linear("m", tensors, shape)
