"""Dequantization against compressed-tensors' own code, module by module."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from builder.checkpoint import Checkpoint
from builder.exporter import read_source
from builder.quant.tensors import Fp8, Nvfp4, dequantize
from fixtures import CHECKPOINTS

pytestmark = pytest.mark.reference

PRESETS = {"nvfp4": "NVFP4", "fp8": "FP8_DYNAMIC"}
FOLDERS = ["ct_mixed_dense_vl", "llmc_nvfp4_dense_vl", "trained_mixed_dense_text"]


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

    schemes = {kind: preset_name_to_scheme(name, ["Linear"]) for kind, name in PRESETS.items()}

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
    assert "nvfp4" in seen
