"""Mixture of experts: a router, its experts in one op, and a shared expert behind a gate of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from builder import ops
from builder.checkpoint import TensorRef
from builder.config import MoeConfig
from builder.graph import Graph, Value
from builder.models.layers import STORED_DTYPES, FloatLinear
from builder.models.mlp import MLP
from builder.quant import packing
from builder.quant.experts import Experts, Sizes, whole
from builder.quant.modules import ModuleTensors
from builder.quant.tensors import Dense, Mxfp4, Nvfp4, QuantTensor, dequantize
from builder.weights import Computed, Stored, Weight

Pieces = Callable[[], Iterator[NDArray[Any]]]


class MoE:
    """sum of the k best experts by softmax(router(x)), renormalized, plus sigmoid(shared_gate(x)) * shared(x).

    Source: transformers, modeling_qwen3_5_moe.py. The router's scores go into the op, which takes softmax over all
    experts, keeps the k best and divides by their sum.
    """

    def __init__(self, tensors: ModuleTensors, hidden: int, moe: MoeConfig) -> None:
        sizes = Sizes(moe.num_experts, moe.moe_intermediate_size, hidden)
        self.name = f"{tensors.prefix}experts"
        self.config = moe
        self.gate = FloatLinear(tensors, "gate", sizes.experts, hidden, "its scores choose experts")
        self.experts = tensors.experts("experts", sizes)
        self.shared_expert = MLP(tensors.sub("shared_expert"), hidden, moe.shared_expert_intermediate_size)
        self.shared_expert_gate = FloatLinear(tensors, "shared_expert_gate", 1, hidden, "it weighs a whole expert")

    def __call__(self, graph: Graph, x: Value) -> Value:
        """x [T, H]"""
        routed = self._routed(graph, x, self.gate(graph, x))
        with graph.scope("shared_expert"):
            shared = self.shared_expert(graph, x)
        return ops.gated_add(graph, routed, shared, graph.op.Sigmoid(self.shared_expert_gate(graph, x)))

    def _routed(self, graph: Graph, x: Value, scores: Value) -> Value:
        experts, name, per_token = self.experts, self.name, self.config.num_experts_per_tok
        reason = unlike(experts)
        kind = next(iter(experts)).kind
        graph.experts[kind if reason is None else "float"] += len(experts.gate)
        if reason is None and kind != Dense.kind:
            return ops.qmoe(graph, x, scores, *nvfp4_weights(graph, name, experts), per_token=per_token)
        if reason is not None:
            graph.dequantized[name] = reason
        gate_up, down = float_weights(graph, name, experts)
        return ops.moe(graph, x, scores, gate_up, down, per_token=per_token)


def unlike(experts: Experts) -> str | None:
    """Why these experts' bytes cannot be carried by one op; None where they can, quantized or float."""
    kinds = {weight.kind for weight in experts}
    if len(kinds) > 1:
        return f"its experts are stored as {' and '.join(sorted(kinds))}, and one op carries them all"
    if kinds == {Dense.kind}:
        return None
    if kinds & {"fp8", "mxfp8"}:
        return "released runtimes have no kernel for FP8 experts"
    if not all(map(packing.four_bit, experts)):
        return "scales or sizes of its experts do not fit the op for NVFP4 experts"
    pairs = zip(experts.gate, experts.up, strict=True)
    if any(not same_multiplier(gate, up) for gate, up in pairs):
        return "gate and up of an expert have different global scales, and the op takes one for both"
    return None


def same_multiplier(gate: QuantTensor, up: QuantTensor) -> bool:
    """Whether one global scale serves both; headers alone are believed."""
    match gate, up:
        case Nvfp4(multiplier_value=None), Nvfp4():
            return True
        case Nvfp4(), Nvfp4():
            return gate.multiplier_value == up.multiplier_value
        case Mxfp4(), Mxfp4():
            return gate.global_exponent == up.global_exponent
    return False


def nvfp4_weights(graph: Graph, name: str, experts: Experts) -> tuple[Value, Value, Value, Value, Value, Value]:
    """Codes, block scales and multipliers of gate and up (interleaved), then of down."""
    gates, ups, downs = experts.gate, experts.up, experts.down
    count, (inner, hidden) = len(gates), gates[0].shape

    def pairs(pack: Callable[[Any], NDArray[Any]], join: Callable[..., NDArray[Any]]) -> Pieces:
        return lambda: packing.each(lambda gate, up: join(pack(gate), pack(up))[None], gates, ups)

    def halves(down: Any) -> NDArray[Any]:
        rows = packing.codes(down)
        return packing.pack_rows(rows[::2], rows[1::2])[None]

    def down_scales(down: Any) -> NDArray[Any]:
        return e4m3(down)[None]

    def singly(pack: Callable[[Any], NDArray[Any]]) -> Pieces:
        return lambda: packing.each(pack, downs)

    def add(leaf: str, refs: tuple[TensorRef, ...], shape: tuple[int, ...], made: Pieces, dtype: ir.DataType) -> Value:
        return graph.weight(f"{name}.{leaf}", Computed(f"experts {leaf}", refs, shape, made, dtype))

    def refs(which: int, *parts: tuple[QuantTensor, ...]) -> tuple[TensorRef, ...]:
        """0 codes, 1 block scales, -1 what makes the multiplier."""
        return tuple(weight.refs[which] for part in parts for weight in part)

    def e4m3(weight: Any) -> NDArray[Any]:
        return packing.block_scales(weight).view(ir.DataType.FLOAT8E4M3FN.numpy())

    def multipliers(weights: tuple[QuantTensor, ...]) -> Pieces:
        return lambda: iter([np.array([packing.multiplier(weight) for weight in weights], np.float32)])  # type: ignore[arg-type]

    u8, f8, f32 = ir.DataType.UINT8, ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT
    codes, scales, both = pairs(packing.codes, packing.pack_rows), pairs(e4m3, packing.interleave), (gates, ups)
    scale_columns = hidden // packing.BLOCK, inner // packing.BLOCK
    return (
        add("gate_up.nvfp4_weight", refs(0, *both), (count, hidden, inner), codes, u8),
        add("gate_up.nvfp4_weight_scale", refs(1, *both), (count, 2 * inner, scale_columns[0]), scales, f8),
        add("gate_up.nvfp4_weight_scale_2", refs(-1, *both), (count,), multipliers(gates), f32),
        add("down.nvfp4_weight", refs(0, downs), (count, inner, hidden // 2), singly(halves), u8),
        add("down.nvfp4_weight_scale", refs(1, downs), (count, hidden, scale_columns[1]), singly(down_scales), f8),
        add("down.nvfp4_weight_scale_2", refs(-1, downs), (count,), multipliers(downs), f32),
    )


def float_weights(graph: Graph, name: str, experts: Experts) -> tuple[Value, Value]:
    """Gate and up [E, 2 I, H] by turns of rows, and down [E, H, I], in the stored type if it is one, else float32."""
    gates, ups, downs = experts.gate, experts.up, experts.down
    count, (inner, hidden) = len(gates), gates[0].shape
    dtypes = {weight.weight.dtype if isinstance(weight, Dense) else "F32" for weight in experts}
    dtype = STORED_DTYPES[dtypes.pop()] if len(dtypes) == 1 else ir.DataType.FLOAT

    def values(weight: QuantTensor) -> NDArray[Any]:
        return weight.weight.read().astype(dtype.numpy()) if isinstance(weight, Dense) else dequantize(weight)

    def refs(*parts: tuple[QuantTensor, ...]) -> tuple[TensorRef, ...]:
        return tuple(ref for part in parts for weight in part for ref in weight.refs)

    gate_up = Computed(
        "experts interleaved",
        refs(gates, ups),
        (count, 2 * inner, hidden),
        lambda: (packing.interleave(values(gate), values(up))[None] for gate, up in zip(gates, ups, strict=True)),
        dtype,
    )
    down: Weight = Computed(
        "experts stacked", refs(downs), (count, hidden, inner), lambda: (values(down)[None] for down in downs), dtype
    )
    in_place = whole(refs(downs)) if all(isinstance(weight, Dense) for weight in downs) else None
    if in_place is not None and STORED_DTYPES[in_place.dtype] == dtype:
        down = Stored(in_place, dtype, in_place.shape)
    return graph.io_weight(f"{name}.gate_up", gate_up), graph.io_weight(f"{name}.down", down)
