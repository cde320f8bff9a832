"""Small modules every layer uses. Attribute names equal checkpoint tensor names."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from builder import ops
from builder.checkpoint import TensorRef
from builder.graph import Graph, Value
from builder.quant import codecs
from builder.quant.modules import ModuleTensors
from builder.quant.tensors import Dense, Fp8, Mxfp4, Nvfp4, QuantTensor, dequantize
from builder.weights import Computed, Stored

DECAY = "the decay it computes is exponentiated"
STORED_DTYPES = {"BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16, "F32": ir.DataType.FLOAT}


def stored(ref: TensorRef) -> Stored:
    """A float tensor's own bytes in its own type."""
    return Stored(ref, STORED_DTYPES[ref.dtype], ref.shape)


def as_float32(ref: TensorRef) -> Stored | Computed:
    """A float tensor in float32, which every stored float type widens to exactly."""
    if ref.dtype == "F32":
        return stored(ref)
    return Computed("float32", (ref,), ref.shape, lambda: ref.read().astype(np.float32))


class Linear:
    """y = x W^T without bias; the op follows the weight's storage and keeps its bytes wherever it can."""

    def __init__(self, tensors: ModuleTensors, name: str, out_features: int, in_features: int) -> None:
        self.name = f"{tensors.prefix}{name}"
        self.weight: QuantTensor = tensors.linear(name, out_features, in_features)

    def __call__(self, graph: Graph, x: Value) -> Value:
        match self.weight:
            case Nvfp4():
                return self._nvfp4(graph, x, self.weight)
            case Mxfp4(global_exponent=int()):
                return self._mxfp4(graph, x, self.weight)
            case Fp8():
                return self._fp8(graph, x, self.weight)
            case _:
                return float_linear(graph, x, self.name, self.weight, "its block scales span more than E4M3 holds")

    def _nvfp4(self, graph: Graph, x: Value, weight: Nvfp4) -> Value:
        ref, global_ref = weight.block_scale, weight.global_scale
        block_scale: Stored | Computed = Stored(ref, ir.DataType.UINT8, ref.shape)
        if weight.clamp_nan:
            block_scale = Computed("clamp_nan", (ref,), ref.shape, weight.scale_bytes, ir.DataType.UINT8)
        multiplier: Stored | Computed = Stored(global_ref, ir.DataType.FLOAT, (1,))
        if weight.global_is_divisor:
            multiplier = Computed("reciprocal", (global_ref,), (1,), lambda: weight.multiplier(global_ref.read()))
        return self._four_bit(graph, x, weight, block_scale, multiplier)

    def _mxfp4(self, graph: Graph, x: Value, weight: Mxfp4) -> Value:
        """An NVFP4 weight with blocks of 32: the exponents' common part moves into the global scale, to the bit."""
        ref, common = weight.block_scale, weight.global_exponent or 0

        def scales() -> NDArray[np.uint8]:
            exponents = np.frexp(codecs.decode_scale(ref.read()))[1].astype(np.int64) - 1 - common
            # Only blocks of zeros lie outside, and any scale leaves them zero.
            return codecs.encode_e4m3_powers(np.clip(exponents, codecs.E4M3_POWERS[0], codecs.E4M3_POWERS[-1]))

        block_scale = Computed("e8m0_as_e4m3", (ref,), ref.shape, scales, ir.DataType.UINT8)
        multiplier = Computed("power", (ref,), (1,), lambda: np.exp2(np.array([common], np.float32)))
        return self._four_bit(graph, x, weight, block_scale, multiplier)

    def _four_bit(
        self,
        graph: Graph,
        x: Value,
        weight: Nvfp4 | Mxfp4,
        block_scale: Stored | Computed,
        multiplier: Stored | Computed,
    ) -> Value:
        graph.matmuls[weight.kind] += 1
        return ops.matmul_nvfp4(
            graph,
            x,
            graph.weight(f"{self.name}.nvfp4_weight", Stored(weight.packed, ir.DataType.UINT8, weight.packed.shape)),
            graph.weight(f"{self.name}.nvfp4_weight_scale", block_scale),
            graph.weight(f"{self.name}.nvfp4_weight_scale_2", multiplier),
            block_size=weight.block_size,
        )

    def _fp8(self, graph: Graph, x: Value, weight: Fp8) -> Value:
        graph.matmuls[weight.kind] += 1
        (rows, columns), ref = weight.shape, weight.scale
        shape = rows, -(-columns // weight.block[1])
        scale: Stored | Computed = Computed("row_scales", (ref,), shape, lambda: weight.row_scales(ref.read()))
        if ref.dtype == "F32" and weight.block[0] == 1:
            scale = Stored(ref, ir.DataType.FLOAT, shape)
        return ops.matmul_fp8(
            graph,
            x,
            graph.weight(f"{self.name}.fp8_weight", Stored(weight.weight, ir.DataType.FLOAT8E4M3FN, (rows, columns))),
            graph.weight(f"{self.name}.fp8_weight_scale", scale),
            block_size=weight.block[1],
        )


class FloatLinear:
    """A linear whose result decides too much to be quantized: its weight is float whatever it is stored as.

    reason: what it decides, for whoever stored it quantized.
    """

    def __init__(
        self, tensors: ModuleTensors, name: str, out_features: int, in_features: int, reason: str = DECAY
    ) -> None:
        self.name = f"{tensors.prefix}{name}"
        self.weight = tensors.linear(name, out_features, in_features)
        self.reason = reason

    def __call__(self, graph: Graph, x: Value) -> Value:
        return float_linear(graph, x, self.name, self.weight, self.reason)


def float_linear(graph: Graph, x: Value, name: str, weight: QuantTensor, reason: str) -> Value:
    """x W^T with a float weight; a quantized one is dequantized exactly, in float32, and reported with `reason`."""
    graph.matmuls["float"] += 1
    if isinstance(weight, Dense):
        source: Stored | Computed = stored(weight.weight)
    else:
        graph.dequantized[name] = reason
        source = Computed("dequantize", weight.refs, weight.shape, lambda: dequantize(weight))
    return graph.op.Gemm(x, graph.io_weight(f"{name}.weight", source), transB=1)


class RMSNorm:
    """x / rms(x) * (1 + w): this family stores its norm weights around zero. The sum is taken in float32.

    Where a converter has added the 1 already, the stored weight is used as it is.
    """

    def __init__(self, tensors: ModuleTensors, name: str, size: int, epsilon: float) -> None:
        self.name = f"{tensors.prefix}{name}.weight"
        self.weight = tensors.tensor(f"{name}.weight", (size,))
        self.whole = tensors.whole_norms
        self.epsilon = epsilon

    def scale(self, graph: Graph) -> Value:
        ref = self.weight
        if self.whole:
            return graph.io_weight(self.name, as_float32(ref))

        def plus_one() -> NDArray[np.float32]:
            with np.errstate(invalid="ignore"):  # NaN is refused where weights are placed
                return ref.read().astype(np.float32) + np.float32(1)

        return graph.io_weight(self.name, Computed("plus_one", (ref,), ref.shape, plus_one))

    def __call__(self, graph: Graph, x: Value) -> Value:
        """x [..., size]"""
        return ops.rms_norm(graph, x, self.scale(graph), epsilon=self.epsilon)

    def after_add(self, graph: Graph, residual: Value, branch: Value) -> tuple[Value, Value]:
        """The norm of residual + branch, and that sum."""
        normed, total = ops.skip_rms_norm(graph, residual, branch, self.scale(graph), epsilon=self.epsilon)
        return normed, total

    def after_last_add(self, graph: Graph, residual: Value, branch: Value | None) -> Value:
        """The norm of residual + branch where nobody needs the sum any more."""
        if branch is None:
            return self(graph, residual)
        return ops.skip_rms_norm(graph, residual, branch, self.scale(graph), epsilon=self.epsilon, keep_sum=False)[0]


class Embedding:
    """Rows of weight [vocab, hidden], gathered in the stored type and cast after: the bytes stay the checkpoint's."""

    def __init__(self, tensors: ModuleTensors, name: str, vocab_size: int, hidden_size: int) -> None:
        self.name = f"{tensors.prefix}{name}.weight"
        self.weight = tensors.tensor(f"{name}.weight", (vocab_size, hidden_size))

    def __call__(self, graph: Graph, input_ids: Value) -> Value:
        weight = stored(self.weight)
        rows = graph.op.Gather(graph.weight(self.name, weight), input_ids)
        if weight.dtype == graph.io_dtype:
            return rows
        if graph.io_dtype == ir.DataType.FLOAT16:
            graph.narrowed.add(weight.key)
        return graph.op.Cast(rows, to=graph.io_dtype)


class TiedHead:
    """An LM head that is the embedding: the same bytes under the head's own name."""

    def __init__(self, embedding: Embedding) -> None:
        self.weight = Dense(embedding.weight)

    def __call__(self, graph: Graph, x: Value) -> Value:
        return float_linear(graph, x, "lm_head", self.weight, "")
