"""What ops without a CPU kernel mean, spelled out in standard ONNX ops. Source: ONNX Runtime's operator documentation.

Each function bears its op's name and takes its inputs in order. Activations are float32: half precision is widened
before. Index arithmetic that depends on packing alone comes out alike in every layer, so ORT merges it into one copy.
"""

# mypy: ignore-errors
from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper
from onnxscript import opset23 as op
from onnxscript import script
from onnxscript.values import Opset

DOMAIN = "draftsmith.lowering"
LOWERING = Opset(DOMAIN, 1)
FLOAT = onnx.TensorProto.FLOAT
INT32 = onnx.TensorProto.INT32
INT64 = onnx.TensorProto.INT64

E2M1 = numpy_helper.from_array(
    np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32), "e2m1_values"
)
E4M3 = numpy_helper.from_array(
    np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32), "e4m3_values"
)


@script(LOWERING, default_opset=op)
def MatMulBlockQuantizedFp8Weight(A, B, b_scale, block_size: int):
    """A [T, K] @ (e4m3(B [N, K]) * b_scale [N, ceil(K / block_size)]) transposed."""
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    columns = op.Gather(op.Shape(B), one)
    blocks = op.Div(op.Range(zero, columns, one), op.Constant(value_int=block_size))
    weight = op.Mul(op.Cast(B, to=FLOAT), op.Gather(b_scale, blocks, axis=1))
    return op.Gemm(A, weight, transB=1)


@script(LOWERING, default_opset=op)
def MatMulBlockQuantizedFp4Weight(A, B, weight_scale, weight_scale_2, block_size: int):
    """A [T, K] @ (e2m1(B [N, K/2]) * e4m3(weight_scale [N, K / block_size]) * weight_scale_2 [1]) transposed.

    Byte j of a row holds column 2j in its low nibble and column 2j + 1 in its high one.
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    low = op.BitwiseAnd(B, op.Constant(value=onnx.helper.make_tensor("nibble", onnx.TensorProto.UINT8, [], [15])))
    high = op.BitShift(
        B, op.Constant(value=onnx.helper.make_tensor("four", onnx.TensorProto.UINT8, [], [4])), direction="RIGHT"
    )
    last = op.Constant(value_ints=[-1])
    pairs = op.Concat(op.Unsqueeze(low, last), op.Unsqueeze(high, last), axis=-1)
    codes = op.Reshape(pairs, op.Constant(value_ints=[0, -1]))
    values = op.Gather(op.Constant(value=E2M1), op.Cast(codes, to=INT32))
    scales = op.Mul(op.Gather(op.Constant(value=E4M3), op.Cast(weight_scale, to=INT32)), weight_scale_2)
    columns = op.Gather(op.Shape(values), one)
    blocks = op.Div(op.Range(zero, columns, one), op.Constant(value_int=block_size))
    weight = op.Mul(values, op.Gather(scales, blocks, axis=1))
    return op.Gemm(A, weight, transB=1)


@script(LOWERING, default_opset=op)
def PagedAttention(
    query,
    key,
    value,
    key_cache,
    value_cache,
    cumulative_sequence_length,
    past_seqlens,
    block_table,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
):
    """Causal attention of packed rows: writes key and value at their slots, then attends over the block table.

    Row t of request b stands at position past[b] + t - cu[b] and sees every position up to its own. Requests are
    padded to the longest of the step for one dense Attention; padded and unmapped positions are masked. Columns [T, 1]
    and [B, P, 1] are kept as such through the index arithmetic: on small steps a node costs more than its work.
    """
    zero = op.Constant(value_int=0)
    one = op.Constant(value_int=1)
    last = op.Constant(value_ints=[-1])
    bounds = op.Cast(cumulative_sequence_length, to=INT64)
    past = op.Cast(past_seqlens, to=INT64)
    pages = op.Unsqueeze(op.Cast(block_table, to=INT64), last)
    starts = op.Slice(bounds, op.Constant(value_ints=[0]), last)
    ends = op.Slice(bounds, op.Constant(value_ints=[1]), op.Constant(value_ints=[9223372036854775807]))
    num_tokens = op.ReduceMax(bounds, keepdims=0)
    rows = op.Unsqueeze(op.Range(zero, num_tokens, one), last)
    request = op.ReduceSum(op.Cast(op.GreaterOrEqual(rows, ends), to=INT64), last)
    position = op.Add(rows, op.Gather(op.Sub(past, starts), request))

    block_size = op.Shape(key_cache, start=1, end=2)
    block = op.GatherND(pages, op.Concat(request, op.Div(position, block_size), axis=-1))
    slots = op.Concat(block, op.Mod(position, block_size), axis=-1)
    per_head = op.Concat(last, op.Shape(key_cache, start=2), axis=0)
    new_key_cache = op.ScatterND(key_cache, slots, op.Reshape(key, per_head))
    new_value_cache = op.ScatterND(value_cache, slots, op.Reshape(value, per_head))

    in_block = op.Range(zero, op.Squeeze(block_size), one)
    context = op.Reshape(op.Add(op.Mul(pages, block_size), in_block), op.Constant(value_ints=[0, -1]))
    keys = op.Gather(op.Flatten(new_key_cache, axis=2), context)
    values = op.Gather(op.Flatten(new_value_cache, axis=2), context)

    longest = op.ReduceMax(op.Sub(ends, starts), keepdims=0)
    padding = op.Range(zero, longest, one)
    padded_rows = op.Min(op.Add(op.Unsqueeze(starts, last), padding), op.Sub(num_tokens, one))
    newest = op.Add(op.Reshape(past, op.Constant(value_ints=[-1, 1, 1, 1])), op.Unsqueeze(padding, last))
    positions = op.Range(zero, op.Squeeze(op.Shape(context, start=1)), one)
    attended = op.Attention(
        op.Gather(query, padded_rows),
        keys,
        values,
        op.LessOrEqual(positions, newest),
        q_num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
    )
    output = op.GatherND(attended, op.Concat(request, op.Sub(rows, op.Gather(starts, request)), axis=-1))
    return output, new_key_cache, new_value_cache


@script(LOWERING, default_opset=op)
def GatedAdd(X, Y, gate):
    """X + Y * gate, gate [T, 1] without a weight of its own."""
    return op.Add(X, op.Mul(Y, gate))


@script(LOWERING, default_opset=op)
def MoE(input, router_probs, fc1_experts_weights, fc1_experts_bias, fc2_experts_weights, k: int):
    """The k best experts of a row by softmax over all of them, their weights divided by their sum.

    fc1 [E, 2 I, H] has gate and up rows by turns; an expert is fc2 (silu(gate) * up). Every expert sees every row here,
    and those that were not chosen weigh nothing.
    """
    last = op.Constant(value_ints=[-1])
    best = op.Reshape(op.Constant(value_int=k), last)
    chosen, experts = op.TopK(op.Softmax(router_probs, axis=-1), best)
    shares = op.Div(chosen, op.ReduceSum(chosen, last))
    nothing = op.ConstantOfShape(op.Shape(router_probs))
    mixture = op.ScatterElements(nothing, experts, shares, axis=-1)
    rows = op.Unsqueeze(input, op.Constant(value_ints=[0]))
    both = op.MatMul(rows, op.Transpose(fc1_experts_weights, perm=[0, 2, 1]))
    parts = op.Reshape(both, op.Constant(value_ints=[0, 0, -1, 2]))
    gate = op.Gather(parts, op.Constant(value_int=0), axis=3)
    up = op.Gather(parts, op.Constant(value_int=1), axis=3)
    inner = op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)
    outputs = op.MatMul(inner, op.Transpose(fc2_experts_weights, perm=[0, 2, 1]))
    weighted = op.Mul(outputs, op.Unsqueeze(op.Transpose(mixture, perm=[1, 0]), last))
    return op.ReduceSum(weighted, op.Constant(value_ints=[0]), keepdims=0)


@script(LOWERING, default_opset=op)
def NvFp4Experts(weights, scales, multipliers):
    """Codes [E, K, N/2], row 2j in the low nibble, times E4M3 [E, N, K/16] times [E]: [E, N, K]."""
    nibble = op.Constant(value=onnx.helper.make_tensor("nibble", onnx.TensorProto.UINT8, [], [15]))
    four = op.Constant(value=onnx.helper.make_tensor("four", onnx.TensorProto.UINT8, [], [4]))
    last = op.Constant(value_ints=[-1])
    low = op.Unsqueeze(op.BitwiseAnd(weights, nibble), last)
    high = op.Unsqueeze(op.BitShift(weights, four, direction="RIGHT"), last)
    rows = op.Reshape(op.Concat(low, high, axis=-1), op.Constant(value_ints=[0, 0, -1]))
    values = op.Gather(op.Constant(value=E2M1), op.Cast(op.Transpose(rows, perm=[0, 2, 1]), to=INT32))
    factors = op.Mul(op.Cast(scales, to=FLOAT), op.Reshape(multipliers, op.Constant(value_ints=[-1, 1, 1])))
    blocks = op.Reshape(values, op.Concat(op.Shape(factors), last, axis=0))
    return op.Reshape(op.Mul(blocks, op.Unsqueeze(factors, last)), op.Shape(values))
