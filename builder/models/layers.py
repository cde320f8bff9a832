"""Small modules every layer uses. Attribute names equal checkpoint tensor names."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from builder import ops
from builder.checkpoint import TensorRef
from builder.graph import Graph, Value
from builder.quant.modules import ModuleTensors
from builder.quant.tensors import Dense, Fp8, Nvfp4, QuantTensor, dequantize
from builder.weights import Computed, Stored

STORED_DTYPES = {"BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16, "F32": ir.DataType.FLOAT}


def stored(ref: TensorRef) -> Stored:
    """A float tensor's own bytes in its own type."""
    return Stored(ref, STORED_DTYPES[ref.dtype], ref.shape)


def as_float32(ref: TensorRef) -> Stored | Computed:
    """A float tensor in float32, which every stored float type widens to exactly."""
    if ref.dtype == "F32":
        return stored(ref)
    return Computed("float32", ref.name, ref.shape, lambda: ref.read().astype(np.float32))


class Linear:
    """y = x W^T without bias; the op follows the weight's storage and keeps its bytes."""

    def __init__(self, tensors: ModuleTensors, name: str, out_features: int, in_features: int) -> None:
        self.name = f"{tensors.prefix}{name}"
        self.weight: QuantTensor = tensors.linear(name, out_features, in_features)

    def __call__(self, graph: Graph, x: Value) -> Value:
        match self.weight:
            case Nvfp4():
                return self._nvfp4(graph, x, self.weight)
            case Fp8():
                return self._fp8(graph, x, self.weight)
            case Dense(weight=weight):
                return graph.op.Gemm(x, graph.io_weight(f"{self.name}.weight", stored(weight)), transB=1)

    def _nvfp4(self, graph: Graph, x: Value, weight: Nvfp4) -> Value:
        packed = Stored(weight.packed, ir.DataType.UINT8, weight.packed.shape)
        block_scale = Stored(weight.block_scale, ir.DataType.UINT8, weight.block_scale.shape)
        global_ref = weight.global_scale
        if weight.global_is_divisor:
            multiplier: Stored | Computed = Computed(
                "reciprocal", global_ref.name, (1,), lambda: weight.multiplier(global_ref.read())
            )
        else:
            multiplier = Stored(global_ref, ir.DataType.FLOAT, (1,))
        return ops.matmul_nvfp4(
            graph,
            x,
            graph.weight(f"{self.name}.nvfp4_weight", packed),
            graph.weight(f"{self.name}.nvfp4_weight_scale", block_scale),
            graph.weight(f"{self.name}.nvfp4_weight_scale_2", multiplier),
            block_size=weight.block_size,
        )

    def _fp8(self, graph: Graph, x: Value, weight: Fp8) -> Value:
        rows, columns = weight.shape
        ref = weight.scale
        if ref.dtype == "F32" and ref.shape in ((rows,), (rows, 1)):
            scale: Stored | Computed = Stored(ref, ir.DataType.FLOAT, (rows, 1))
        else:
            scale = Computed("channel_scales", ref.name, (rows, 1), lambda: weight.channel_scales(ref.read()))
        return ops.matmul_fp8(
            graph,
            x,
            graph.weight(f"{self.name}.fp8_weight", Stored(weight.weight, ir.DataType.FLOAT8E4M3FN, (rows, columns))),
            graph.weight(f"{self.name}.fp8_weight_scale", scale),
            block_size=columns,
        )


class FloatLinear:
    """A linear whose result is exponentiated (the decay gates), so its weight stays float whatever it is stored as."""

    def __init__(self, tensors: ModuleTensors, name: str, out_features: int, in_features: int) -> None:
        self.name = f"{tensors.prefix}{name}"
        self.weight = tensors.linear(name, out_features, in_features)

    def __call__(self, graph: Graph, x: Value) -> Value:
        quantized = self.weight
        if isinstance(quantized, Dense):
            source: Stored | Computed = stored(quantized.weight)
        else:
            source = Computed("dequantize", self.name, quantized.shape, lambda: dequantize(quantized))
        return graph.op.Gemm(x, graph.io_weight(f"{self.name}.weight", source), transB=1)


class RMSNorm:
    """x / rms(x) * (1 + w): this family stores its norm weights around zero. The sum is taken in float32."""

    def __init__(self, tensors: ModuleTensors, name: str, size: int, epsilon: float) -> None:
        self.name = f"{tensors.prefix}{name}.weight"
        self.weight = tensors.tensor(f"{name}.weight", (size,))
        self.epsilon = epsilon

    def scale(self, graph: Graph) -> Value:
        ref = self.weight
        plus_one = Computed("plus_one", ref.name, ref.shape, lambda: ref.read().astype(np.float32) + np.float32(1))
        return graph.io_weight(self.name, plus_one)

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
        self.weight = embedding.weight

    def __call__(self, graph: Graph, x: Value) -> Value:
        return graph.op.Gemm(x, graph.io_weight("lm_head.weight", stored(self.weight)), transB=1)
