"""NVIDIA ModelOpt: names of its tensors and what its configuration declares.

NVFP4 is `weight` U8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_scale_2` F32 [] (a multiplier); FP8 is `weight`
E4M3 [N, K] with a scalar `weight_scale`. `input_scale` and the KV scales quantize activations, which we leave alone.
"""

from collections.abc import Mapping
from typing import Any

from builder.checkpoint import TensorRef
from builder.quant.tensors import Nvfp4

FORMATS = {"NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4", "FP8": "fp8"}


def nvfp4(tensors: Mapping[str, TensorRef]) -> Nvfp4:
    """tensors: the module's own, by last name part."""
    return Nvfp4(
        packed=tensors["weight"],
        block_scale=tensors["weight_scale"],
        global_scale=tensors["weight_scale_2"],
        global_is_divisor=False,
    )


def declared_formats(section: Mapping[str, Any]) -> dict[str, str]:
    """Module prefix to format, as far as a MIXED_PRECISION map declares one; a single algorithm names no modules."""
    layers = section.get("quantized_layers") or {}
    return {
        name: FORMATS.get(str(entry.get("quant_algo")).upper(), str(entry.get("quant_algo")))
        for name, entry in layers.items()
        if isinstance(entry, Mapping)
    }
