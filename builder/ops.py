"""The only file that emits com.microsoft ops, each with typed arguments and typed outputs.

SCHEMAS lists what the released ops take, because onnxscript accepts any attribute of any op; a test compares the
table with the schemas of the installed ONNX Runtime. Sources: the op documentation of ONNX Runtime 1.30 to 1.32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from builder.graph import Graph, Value

DOMAIN = "com.microsoft"
FLOAT = ir.DataType.FLOAT
MINIMUM_RUNTIME = "1.30"
"""The first ONNX Runtime that has all of SCHEMAS, with these attributes; its CPU has them all but three from 1.32."""
Attributes = Mapping[str, int | float | str | Sequence[int]]
OutputSpec = tuple[ir.DataType, Sequence[int | str]]


@dataclass(frozen=True)
class OpSchema:
    """Attribute names, and how many inputs and outputs the op takes at most, as far as we use them."""

    attributes: frozenset[str]
    max_inputs: int
    max_outputs: int


def _schema(max_inputs: int, max_outputs: int, *attributes: str) -> OpSchema:
    return OpSchema(frozenset(attributes), max_inputs, max_outputs)


MOE_ATTRIBUTES = (
    "k",
    "normalize_routing_weights",
    "activation_type",
    "activation_alpha",
    "activation_beta",
    "swiglu_fusion",
)
SCHEMAS: Mapping[str, OpSchema] = {
    "MatMulBlockQuantizedFp4Weight": _schema(4, 1, "block_size"),
    "MatMulBlockQuantizedFp8Weight": _schema(3, 1, "block_size"),
    "GatedAdd": _schema(3, 1),
    "MoE": _schema(5, 1, *MOE_ATTRIBUTES),
    "QMoE": _schema(17, 1, *MOE_ATTRIBUTES, "quant_type", "block_size", "expert_weight_bits"),
    "SkipSimplifiedLayerNormalization": _schema(3, 4, "epsilon"),
    "GatedRMSNorm": _schema(3, 1, "epsilon", "activation"),
    "MRotaryEmbedding": _schema(
        4, 1, "num_heads", "rotary_embedding_dim", "interleaved", "mrope_section", "mrope_layout", "is_packed_batching"
    ),
    "PagedAttention": _schema(17, 3, "num_heads", "kv_num_heads", "scale", "do_rotary", "local_window_size"),
    "VarlenCausalConvWithState": _schema(6, 3, "activation", "state_update_capacity"),
    "GatedDeltaNet": _schema(
        11,
        3,
        "update_rule",
        "scale",
        "gate_activation",
        "beta_activation",
        "qk_l2_norm",
        "chunk_size",
        "state_update_capacity",
    ),
}


def like(value: Value) -> OutputSpec:
    """An output of the same type and shape as `value`."""
    if value.dtype is None or value.shape is None:
        raise AssertionError(f"{value.name} has no type or shape")
    return value.dtype, [dim if isinstance(dim, int) else str(dim) for dim in value.shape]


def _rows(graph: Graph, weight: Value) -> list[OutputSpec]:
    """Rows of activations as wide as `weight` [N, ...] has rows."""
    return [(graph.io_dtype, ("num_tokens", like(weight)[1][0]))]


def _emit(
    graph: Graph,
    op_type: str,
    inputs: Sequence[Value | None],
    outputs: Sequence[OutputSpec | None],
    **attributes: object,
) -> list[Value]:
    schema = SCHEMAS[op_type]
    unknown = set(attributes) - schema.attributes
    if unknown or len(inputs) > schema.max_inputs or len(outputs) > schema.max_outputs:
        raise AssertionError(f"{op_type}: {sorted(unknown)}, {len(inputs)} inputs, {len(outputs)} outputs")
    return graph.contrib(op_type, inputs, outputs, attributes)  # type: ignore[arg-type]


def matmul_nvfp4(
    graph: Graph, x: Value, packed: Value, block_scale: Value, global_scale: Value, *, block_size: int
) -> Value:
    """x [T, K] times the transpose of e2m1(packed [N, K/2]) * e4m3(scale [N, K/block_size]) * global [1]."""
    outputs = _rows(graph, packed)
    inputs = [x, packed, block_scale, global_scale]
    return _emit(graph, "MatMulBlockQuantizedFp4Weight", inputs, outputs, block_size=block_size)[0]


def matmul_fp8(graph: Graph, x: Value, weight: Value, scale: Value, *, block_size: int) -> Value:
    """x [T, K] times the transpose of weight E4M3 [N, K] * scale F32 [N, K/block_size]; activations are kept."""
    outputs = _rows(graph, weight)
    return _emit(graph, "MatMulBlockQuantizedFp8Weight", [x, weight, scale], outputs, block_size=block_size)[0]


def moe(graph: Graph, x: Value, scores: Value, gate_up: Value, down: Value, *, per_token: int) -> Value:
    """x [T, H] through the experts of its per_token best scores [T, E]: gate_up [E, 2 I, H] with gate and up rows by
    turns (the only order that released CUDA kernels take rightly), down [E, H, I].
    """
    return _emit(graph, "MoE", [x, scores, gate_up, None, down], [like(x)], **_mixture(per_token))[0]


def qmoe(
    graph: Graph,
    x: Value,
    scores: Value,
    gate_up: Value,
    gate_up_scale: Value,
    gate_up_multiplier: Value,
    down: Value,
    down_scale: Value,
    down_multiplier: Value,
    *,
    per_token: int,
) -> Value:
    """As moe, with NVFP4 experts: codes [E, K, N/2], E4M3 scales [E, N, K/16], one multiplier an expert [E]."""
    weights = [gate_up, gate_up_scale, None, down, down_scale, None]
    inputs = [x, scores, *weights, *[None] * 7, gate_up_multiplier, down_multiplier]
    quantized = {"quant_type": "nvfp4", "block_size": 16, "expert_weight_bits": 4}
    return _emit(graph, "QMoE", inputs, [like(x)], **_mixture(per_token), **quantized)[0]


def _mixture(per_token: int) -> dict[str, object]:
    """silu(gate) * up, and weights of the best experts that sum to 1."""
    return {
        "k": per_token,
        "normalize_routing_weights": 1,
        "activation_type": "swiglu",
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "swiglu_fusion": 1,
    }


def gated_add(graph: Graph, x: Value, y: Value, gate: Value) -> Value:
    """x + y * gate, where gate [T, 1] weighs rows."""
    return _emit(graph, "GatedAdd", [x, y, gate], [like(x)])[0]


def rms_norm(graph: Graph, x: Value, weight: Value, *, epsilon: float) -> Value:
    """RMS norm over the last axis of x, taken in float32. ORT keeps the op in the standard domain; onnx does not."""
    normed = graph.op.SimplifiedLayerNormalization(x, weight, axis=-1, epsilon=epsilon, stash_type=1)
    normed.dtype, normed.shape = x.dtype, x.shape
    return normed


def skip_rms_norm(
    graph: Graph, residual: Value, branch: Value, weight: Value, *, epsilon: float, keep_sum: bool = True
) -> list[Value]:
    """RMS norm of residual + branch [T, H], then that sum where it is kept."""
    spec = like(residual)
    outputs = [spec, None, None, spec] if keep_sum else [spec]
    return _emit(graph, "SkipSimplifiedLayerNormalization", [residual, branch, weight], outputs, epsilon=epsilon)


def gated_rms_norm(graph: Graph, x: Value, weight: Value, gate: Value, *, epsilon: float) -> Value:
    """RMS norm over each trailing group of len(weight) of x [T, H * C], times weight, times silu(gate)."""
    return _emit(graph, "GatedRMSNorm", [x, weight, gate], [like(x)], epsilon=epsilon, activation="silu")[0]


def mrope(
    graph: Graph,
    x: Value,
    position_ids: Value,
    cos: Value,
    sin: Value,
    *,
    num_heads: int,
    rotary_dim: int,
    sections: Sequence[int],
) -> Value:
    """Interleaved multimodal rotary embedding of x [1, T, heads * D]; position_ids [3, 1, T]; cos, sin [L, R / 2].

    The first R = rotary_dim channels of each head are rotated in halves, the rest pass through.
    """
    return _emit(
        graph,
        "MRotaryEmbedding",
        [x, position_ids, cos, sin],
        [like(x)],
        num_heads=num_heads,
        rotary_embedding_dim=rotary_dim,
        interleaved=0,
        mrope_section=list(sections),
        mrope_layout=1,
        is_packed_batching=1,
    )[0]


def paged_attention(
    graph: Graph,
    query: Value,
    key: Value,
    value: Value,
    caches: tuple[Value, Value],
    packing: Packing,
    *,
    num_heads: int,
    kv_num_heads: int,
    scale: float,
) -> tuple[Value, Value, Value]:
    """Causal attention of packed rows over a block table. query [T, heads * D], key and value [T, kv_heads * D].

    Returns the rows [T, heads * D] and both caches [blocks, block_size, kv_heads, D], updated in place.
    """
    unused = [None] * 8  # rotary caches, slot mapping, head sink, q/k norms, k/v scales
    inputs = [query, key, value, *caches, packing.cumulative_lengths, packing.past_lengths, packing.block_table]
    outputs = [like(query), *map(like, caches)]
    rows, new_key, new_value = _emit(
        graph,
        "PagedAttention",
        [*inputs, *unused, packing.attention_metadata],
        outputs,
        num_heads=num_heads,
        kv_num_heads=kv_num_heads,
        scale=scale,
        do_rotary=0,
        local_window_size=-1,
    )
    return rows, new_key, new_value


@dataclass(frozen=True)
class Packing:
    """The graph inputs that say how requests lie in the packed rows; int32, see the contract for shapes."""

    cumulative_lengths: Value
    past_lengths: Value
    block_table: Value
    attention_metadata: Value


@dataclass(frozen=True)
class Capture:
    """The graph inputs that steer capture of state updates, and how many tokens the outputs have room for."""

    capacity: int
    count: Value
    active: Value


def causal_conv(
    graph: Graph, x: Value, weight: Value, cumulative_lengths: Value, bias: Value, state: Value, capture: Capture | None
) -> tuple[Value, Value, Value | None]:
    """Depthwise causal convolution with SiLU over packed rows x [T, C]; weight [C, 1, K]; state [B, C, K - 1].

    Returns rows, the state after each request's last row, and with capture the raw rows [B, capacity, C].
    """
    outputs: list[OutputSpec | None] = [like(x), like(state)]
    inputs = [x, weight, cumulative_lengths, bias, state]
    attributes: dict[str, object] = {"activation": "silu"}
    if capture:
        inputs.append(capture.count)
        attributes["state_update_capacity"] = capture.capacity
        outputs.append((graph.io_dtype, ("batch_size", capture.capacity, like(x)[1][1])))
    values = _emit(graph, "VarlenCausalConvWithState", inputs, outputs, **attributes)
    return values[0], values[1], values[2] if capture else None


def gated_delta_net(
    graph: Graph,
    qkv: tuple[Value, Value, Value],
    gates: tuple[Value, Value],
    parameters: tuple[Value, Value],
    cumulative_lengths: Value,
    state: Value,
    capture: Capture | None,
    *,
    capsule_width: int,
) -> tuple[Value, Value, Value | None]:
    """Gated delta rule over packed rows. q, k [T, Hk, dk], v [T, Hv, dv]; raw gates a, b [T, Hv] in float32;
    A_log, dt_bias [Hv] in float32; state F32 [B, Hv, dv, dk].

    g = -exp(A_log) * softplus(a + dt_bias), beta = sigmoid(b), q and k L2-normalized, output scaled by dk ** -0.5.
    Returns rows [T, Hv, dv], the state after each request's last row, and with capture the capsules
    [B, capacity * capsule_width]. "qwen" is the gate name that ORT 1.30, 1.31 and 1.32 all know.
    """
    q, k, v = qkv
    outputs: list[OutputSpec | None] = [like(v), like(state)]
    inputs = [q, k, v, cumulative_lengths, *gates, state, *parameters]
    attributes: dict[str, object] = {
        "update_rule": "gated_delta",
        "scale": 0.0,
        "gate_activation": "qwen",
        "beta_activation": "sigmoid",
        "qk_l2_norm": 1,
        "chunk_size": 64,
    }
    if capture:
        inputs += [capture.count, capture.active]
        attributes["state_update_capacity"] = capture.capacity
        outputs.append((FLOAT, ("batch_size", capture.capacity * capsule_width)))
    values = _emit(graph, "GatedDeltaNet", inputs, outputs, **attributes)
    return values[0], values[1], values[2] if capture else None
