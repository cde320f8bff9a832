"""read_linear: the QuantTensor of one module. The bytes on disk decide; the configuration only cross-checks.

Nothing here branches on quant_method: the same layout is read the same way whoever wrote it.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.quant import codecs, compressed_tensors, modelopt
from builder.quant.tensors import Dense, Fp8, Nvfp4, QuantTensor

FLOAT_DTYPES = ("BF16", "F16", "F32")
UNSUPPORTED = {"bias", "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "weight_zero_point"}
"""Tensors of a module that change what it computes, in ways the graph does not carry."""


def read_linear(module: str, tensors: Mapping[str, TensorRef], shape: tuple[int, int]) -> QuantTensor:
    """module: its checkpoint name, for errors; tensors: the module's own, by last name part; shape: [N, K] due.

    Reads headers only. Raises Refused for a missing tensor, a format this version does not carry, or a wrong shape.
    """
    if "weight_packed" in tensors:
        _require(module, tensors, ("weight_scale", "weight_global_scale"))
        quantized: QuantTensor = compressed_tensors.nvfp4(tensors)
    elif "weight" not in tensors:
        raise Refused(
            f"tensor {module}.weight", expected="a weight", found="none", remedy="check that every shard is there"
        )
    elif tensors["weight"].dtype == "U8":
        _require(module, tensors, ("weight_scale", "weight_scale_2"))
        quantized = modelopt.nvfp4(tensors)
    elif tensors["weight"].dtype == "F8_E4M3":
        _require(module, tensors, ("weight_scale",))
        quantized = Fp8(tensors["weight"], tensors["weight_scale"])
    else:
        quantized = Dense(tensors["weight"])
    _check_layout(module, tensors, quantized, shape)
    return quantized


def _require(module: str, tensors: Mapping[str, TensorRef], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in tensors:
            raise Refused(
                f"tensor {module}.{name}",
                expected=f"the scale of a quantized weight ({', '.join(names)})",
                found=", ".join(sorted(tensors)),
                remedy="this module's format is not supported, or the checkpoint is incomplete",
            )


def _check_layout(
    module: str, tensors: Mapping[str, TensorRef], quantized: QuantTensor, shape: tuple[int, int]
) -> None:
    rows, columns = shape
    match quantized:
        case Dense(weight=weight):
            _check(module, weight, FLOAT_DTYPES, [shape])
        case Fp8(weight=weight, scale=scale):
            _check(module, weight, ("F8_E4M3",), [shape])
            _check(module, scale, FLOAT_DTYPES, [(), (1,), (1, 1), (rows,), (rows, 1)])
        case Nvfp4(packed=packed, block_scale=block_scale, global_scale=global_scale, block_size=block_size):
            if columns % block_size:
                raise Refused(
                    f"tensor {packed.name}",
                    expected=f"a multiple of {block_size} columns",
                    found=columns,
                    remedy="this layout is not supported",
                )
            _check(module, packed, ("U8",), [(rows, columns // 2)])
            _check(module, block_scale, ("F8_E4M3",), [(rows, columns // block_size)])
            _check(module, global_scale, ("F32",), [(), (1,)])
    extra = UNSUPPORTED & set(tensors)
    if extra:
        raise Refused(
            f"tensor {module}.{min(extra)}",
            expected="weights without biases, zero points or input transforms (AWQ, SVD)",
            found="one",
            remedy="this variant is not supported",
        )


def _check(module: str, ref: TensorRef, dtypes: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    if ref.dtype not in dtypes or ref.shape not in shapes:
        raise Refused(
            f"tensor {ref.name}",
            expected=f"{' or '.join(dtypes)} {' or '.join(str(list(s)) for s in shapes)}",
            found=f"{ref.dtype} {list(ref.shape)}",
            remedy="this format is not supported, or config.json belongs to another checkpoint",
        )


def check_scales(quantized: QuantTensor) -> None:
    """Reads the scales and refuses any that is not finite and positive. A zero block scale means a zero block."""
    match quantized:
        case Fp8(scale=scale):
            _check_positive(scale)
        case Nvfp4(block_scale=block_scale, global_scale=global_scale):
            _check_positive(global_scale)
            _check_reciprocal(quantized)
            blocks = block_scale.read()
            for found, index in (
                ("NaN", codecs.first_nan_e4m3(blocks)),
                ("a negative one", codecs.first_negative_e4m3(blocks)),
            ):
                if index is not None:
                    raise Refused(
                        f"tensor {block_scale.name} at {list(index)}",
                        expected="a finite block scale of 0 or above",
                        found=found,
                        remedy="quantize it again",
                    )


def _check_reciprocal(quantized: Nvfp4) -> None:
    """A divisor may be so small that its reciprocal, the multiplier we write, leaves float32."""
    stored = quantized.global_scale.read()
    with np.errstate(over="ignore"):
        multiplier = quantized.multiplier(stored)
    if not np.isfinite(multiplier).all():
        raise Refused(
            f"tensor {quantized.global_scale.name} at 0",
            expected="a divisor with a finite reciprocal",
            found=float(stored.reshape(1)[0]),
            remedy="quantize it again",
        )


def _check_positive(ref: TensorRef) -> None:
    values: np.ndarray[Any, Any] = ref.read().astype(np.float32).reshape(-1)
    bad = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if bad.size:
        raise Refused(
            f"tensor {ref.name} at {int(bad[0])}",
            expected="a finite scale above 0",
            found=float(values[bad[0]]),
            remedy="quantize it again",
        )
