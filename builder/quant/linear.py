"""read_linear: the QuantTensor of one module. The bytes on disk decide; the configuration only cross-checks.

Nothing here branches on quant_method: the same layout is read the same way whoever wrote it.
"""

from collections.abc import Mapping

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.quant import compressed_tensors, modelopt
from builder.quant.tensors import EXPONENT_DTYPES, Dense, Fp8, Mxfp4, Nvfp4, QuantTensor

FLOAT_DTYPES = ("BF16", "F16", "F32")
BLOCK = 128
"""Rows and columns of a block of block-scaled FP8, in every dialect that has it."""
UNSUPPORTED = {"bias", "pre_quant_scale", "svdquant_lora_a", "svdquant_lora_b", "weight_zero_point"}
"""Tensors of a module that change what it computes, in ways the graph does not carry."""


def read_linear(module: str, tensors: Mapping[str, TensorRef], shape: tuple[int, int]) -> QuantTensor:
    """module: its checkpoint name, for errors; tensors: the module's own, by last name part; shape: [N, K] due.

    Reads headers only. Raises Refused for a missing tensor, a format this version does not carry, or a wrong shape.
    """
    _refuse_unsupported(module, tensors)
    packed = tensors.get("weight_packed", tensors.get("weight"))
    if packed is None:
        raise Refused(
            f"tensor {module}.weight", expected="a weight", found="none", remedy="check that every shard is there"
        )
    if packed.dtype == "U8":
        return _four_bit(module, tensors, packed, shape)
    if "weight_packed" in tensors:
        _check(module, packed, ("U8",), [(shape[0], shape[1] // 2)])
    if packed.dtype == "F8_E4M3":
        return _fp8(module, tensors, shape)
    _check(module, packed, FLOAT_DTYPES, [shape])
    return Dense(packed)


def _four_bit(
    module: str, tensors: Mapping[str, TensorRef], packed: TensorRef, shape: tuple[int, int]
) -> Nvfp4 | Mxfp4:
    """NVFP4 in either dialect, or MXFP4: told apart by whether the block scales are E4M3 or exponents."""
    rows, columns = shape
    _require(module, tensors, ("weight_scale",))
    scale = tensors["weight_scale"]
    mx = scale.dtype in EXPONENT_DTYPES
    block = Mxfp4.block_size if mx else 32 if scale.shape == (rows, columns // 32) else 16
    if columns % block:
        raise Refused(
            f"tensor {packed.name}",
            expected=f"a multiple of {block} columns",
            found=columns,
            remedy="this layout is not supported",
        )
    _check(module, packed, ("U8",), [(rows, columns // 2)])
    if mx:
        _check(module, scale, EXPONENT_DTYPES, [(rows, columns // block)])
        return Mxfp4(packed, scale)
    divisor = "weight_packed" in tensors
    _require(module, tensors, ("weight_global_scale" if divisor else "weight_scale_2",))
    quantized = compressed_tensors.nvfp4(tensors) if divisor else modelopt.nvfp4(tensors)
    _check(module, scale, ("F8_E4M3",), [(rows, columns // block)])
    _check(module, quantized.global_scale, ("F32",), [(), (1,)])
    return quantized


def _fp8(module: str, tensors: Mapping[str, TensorRef], shape: tuple[int, int]) -> Fp8:
    """The shape of the scale says what it spans. `weight_scale_inv` is a multiplier too, whatever its name says."""
    names = [name for name in ("weight_scale", "weight_scale_inv") if name in tensors]
    if len(names) == 2:
        raise Refused(
            f"tensor {module}.weight_scale_inv",
            expected="one scale",
            found="weight_scale as well",
            remedy="keep the one that belongs to this weight",
        )
    _require(module, tensors, tuple(names) or ("weight_scale",))
    scale, (rows, columns) = tensors[names[0]], shape
    _check(module, tensors["weight"], ("F8_E4M3",), [shape])
    row_blocks, column_blocks = -(-rows // BLOCK), -(-columns // BLOCK)
    if scale.dtype in EXPONENT_DTYPES and scale.shape == (rows, columns // 32) and columns % 32 == 0:
        return Fp8(tensors["weight"], scale, (1, 32))
    spans: dict[tuple[int, ...], tuple[int, int]] = {
        (row_blocks, column_blocks): (BLOCK, BLOCK),
        (row_blocks, 1, column_blocks, 1): (BLOCK, BLOCK),
    }
    if scale.dtype in EXPONENT_DTYPES:  # of a whole row or matrix nobody writes them: it would be MXFP8 cut short
        _check(module, scale, EXPONENT_DTYPES, [*spans, (rows, columns // 32)])
        return Fp8(tensors["weight"], scale, spans[scale.shape])
    spans |= {(rows,): (1, columns), (rows, 1): (1, columns)}
    spans |= dict.fromkeys([(), (1,), (1, 1)], (rows, columns))
    _check(module, scale, FLOAT_DTYPES, list(spans))
    return Fp8(tensors["weight"], scale, spans[scale.shape])


def _refuse_unsupported(module: str, tensors: Mapping[str, TensorRef]) -> None:
    extra = UNSUPPORTED & set(tensors)
    if extra:
        raise Refused(
            f"tensor {module}.{min(extra)}",
            expected="weights without biases, zero points or input transforms (AWQ, SVD)",
            found="one",
            remedy="this variant is not supported",
        )


def _require(module: str, tensors: Mapping[str, TensorRef], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in tensors:
            raise Refused(
                f"tensor {module}.{name}",
                expected=f"the scale of a quantized weight ({', '.join(names)})",
                found=", ".join(sorted(tensors)),
                remedy="this module's format is not supported, or the checkpoint is incomplete",
            )


def _check(module: str, ref: TensorRef, dtypes: tuple[str, ...], shapes: list[tuple[int, ...]]) -> None:
    if ref.dtype not in dtypes or ref.shape not in shapes:
        raise Refused(
            f"tensor {ref.name}",
            expected=f"{' or '.join(dtypes)} {' or '.join(str(list(s)) for s in shapes)}",
            found=f"{ref.dtype} {list(ref.shape)}",
            remedy="this format is not supported, or config.json belongs to another checkpoint",
        )
