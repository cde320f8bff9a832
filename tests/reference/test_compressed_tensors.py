"""Dequantization against compressed-tensors' own code, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from builder.checkpoint import Checkpoint, read_header
from builder.quant.modules import ModuleTensors
from builder.quant.tensors import Fp8, Nvfp4, dequantize
from builder.source import read_source
from fixtures import CHECKPOINTS, writer

pytestmark = pytest.mark.reference

FOLDERS = {
    "ct_mixed_dense_vl": {"fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4"},
    "trained_mixed_dense_text": {"fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4"},
    "trained_ct_moe_text": {"fp8": "FP8_DYNAMIC", "nvfp4": "NVFP4A16"},
    "ct_fp8block_dense_text": {"fp8": "FP8_BLOCK"},
}
"""The preset of each kind of module in a checkpoint."""
WRITTEN: list[tuple[writer.Kind, str]] = [("fp8 block", "FP8_BLOCK"), ("mxfp8", "MXFP8"), ("mxfp4", "MXFP4")]


def quantized_modules(folder: Path) -> Iterator[tuple[str, Nvfp4 | Fp8]]:
    for name, module in read_source(Checkpoint(folder), "auto").linears.items():
        if isinstance(module, Nvfp4 | Fp8):
            yield name, module


@pytest.mark.parametrize("folder", FOLDERS)
def test_dequantize_is_compressed_tensors_formula(folder: str) -> None:
    """Their own functions with float32 scales; their `decompress` would round to bfloat16, 0.4% away."""
    import torch
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize as reference

    schemes = {kind: preset_name_to_scheme(name, ["Linear"]) for kind, name in FOLDERS[folder].items()}

    seen = set()
    arguments = {kind: scheme.weights for kind, scheme in schemes.items()}
    for name, module in quantized_modules(CHECKPOINTS / folder):
        rows, columns = module.shape
        if isinstance(module, Nvfp4):
            packed = torch.from_numpy(module.packed.read())
            values = unpack_fp4_from_uint8(packed, rows, columns, dtype=torch.float32)
            scale = torch.from_numpy(module.block_scale.read().astype(np.float32))
            divisor = torch.from_numpy(module.global_scale.read())
            expected = reference(values, scale, None, arguments[module.kind], torch.float32, divisor)
        else:
            values = torch.from_numpy(module.weight.read().astype(np.float32))
            scale = torch.from_numpy(module.scale.read().astype(np.float32))
            expected = reference(values, scale, None, arguments[module.kind], torch.float32)
        np.testing.assert_allclose(dequantize(module), expected.float().numpy(), rtol=1e-6, atol=0, err_msg=name)
        seen.add(module.kind)
    assert seen == set(FOLDERS[folder])


@pytest.mark.parametrize("shape", [(300, 320), (128, 256)], ids=str)
@pytest.mark.parametrize(("kind", "preset"), WRITTEN)
def test_decompress_gives_the_same_weight(
    tmp_path: Path, kind: writer.Kind, preset: str, shape: tuple[int, int]
) -> None:
    """Their compressors, whole: scales are powers of two, so nothing is lost in the bfloat16 they answer in."""
    import torch
    from compressed_tensors.compressors import MXFP4PackedCompressor, MXFP8QuantizationCompressor
    from compressed_tensors.compressors import NaiveQuantizationCompressor as Naive
    from compressed_tensors.quantization import preset_name_to_scheme

    stored = writer.quantize(
        np.random.default_rng(0).standard_normal(shape).astype(np.float32), kind, "compressed-tensors"
    )
    save_file({f"m.{leaf}": array for leaf, array in stored.items()}, tmp_path / "m.safetensors")
    ours = ModuleTensors.of(read_header(tmp_path / "m.safetensors")).linear("m", *shape)
    compressor = {"mxfp4": MXFP4PackedCompressor, "mxfp8": MXFP8QuantizationCompressor, "fp8": Naive}[ours.kind]
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        state = {name.removeprefix("m."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    theirs = compressor.decompress(state, preset_name_to_scheme(preset, ["Linear"]))["weight"]
    assert theirs.dtype == torch.bfloat16
    np.testing.assert_array_equal(dequantize(ours), theirs.float().numpy())
