"""Reference functions against float64 arithmetic, and which nodes are swapped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from builder.errors import MachineError
from runtime.kernels import has_cpu_kernel
from runtime.lowering import HasKernel, lower

Array = NDArray[Any]
HALF = TensorProto.FLOAT16
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
SUM_NOISE = 2e-6
"""Sums of 32 and 16 float32 products, as a share of the largest result."""


def save(path: Path, node: onnx.NodeProto, inputs: list[Any], outputs: list[Any], weights: dict[str, Any]) -> Path:
    graph = helper.make_graph([node], "one", inputs, outputs, list(weights.values()))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), path)
    return path


def run_lowered(path: Path, feeds: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    session = ort.InferenceSession(lower(path, has_cpu_kernel), options, providers=["CPUExecutionProvider"])
    return [np.asarray(output) for output in session.run(None, feeds)]


def rows(*shape: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("block_size", [32, 128])
def test_fp8_matmul(tmp_path: Path, block_size: int) -> None:
    """32 of 128 columns a block; and one block for the whole row, as per-channel weights are exported."""
    weight = rows(24, 128, seed=0).astype(ml_dtypes.float8_e4m3fn)
    scale = np.abs(rows(24, 128 // block_size, seed=1)) + 0.1
    x = rows(5, 128, seed=2)
    node = helper.make_node(
        "MatMulBlockQuantizedFp8Weight", ["x", "w", "s"], ["y"], domain="com.microsoft", block_size=block_size
    )
    stored = {
        "w": helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, weight.shape, weight.tobytes(), raw=True),
        "s": onnx.numpy_helper.from_array(scale, "s"),
    }
    path = save(
        tmp_path / "m.onnx",
        node,
        [helper.make_tensor_value_info("x", HALF, ["T", 128])],
        [helper.make_tensor_value_info("y", HALF, ["T", 24])],
        stored,
    )
    dense = weight.astype(np.float64) * np.repeat(scale.astype(np.float64), block_size, axis=1)
    np.testing.assert_allclose(run_lowered(path, {"x": x})[0], x.astype(np.float64) @ dense.T, rtol=1e-5, atol=1e-4)


def test_fp4_matmul_decodes_every_code_and_scale(tmp_path: Path) -> None:
    """The identity as activations shows the dequantized weight itself, to the bit."""
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    codes = np.stack([np.arange(16), np.arange(15, -1, -1), np.arange(16)[::-1], np.arange(16)]).astype(np.uint8)
    codes = np.concatenate([codes, codes[::-1]], axis=1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    scale = np.array([[0.0625, 448.0], [1.0, 2.0**-9], [1.125, 3.5], [0.0, 240.0]]).astype(ml_dtypes.float8_e4m3fn)
    global_scale = np.float32(0.0371)
    node = helper.make_node(
        "MatMulBlockQuantizedFp4Weight", ["x", "w", "s", "g"], ["y"], domain="com.microsoft", block_size=16
    )
    stored = {
        "w": onnx.numpy_helper.from_array(packed, "w"),
        "s": onnx.numpy_helper.from_array(scale.view(np.uint8), "s"),
        "g": onnx.numpy_helper.from_array(global_scale.reshape(1), "g"),
    }
    path = save(
        tmp_path / "m.onnx",
        node,
        [helper.make_tensor_value_info("x", HALF, ["T", 32])],
        [helper.make_tensor_value_info("y", HALF, ["T", 4])],
        stored,
    )
    scales = np.repeat(scale.astype(np.float32) * global_scale, 16, axis=1)
    expected = np.array(values, np.float32)[codes] * scales
    found = run_lowered(path, {"x": np.eye(32, dtype=np.float32)})[0].T
    np.testing.assert_array_equal(found, expected)


def paged_model(path: Path, heads: int, kv_heads: int, dim: int, **attributes: Any) -> Path:
    node = helper.make_node(
        "PagedAttention",
        ["q", "k", "v", "kc", "vc", "cu", "past", "table", *[""] * 8, "meta"],
        ["y", "kc_out", "vc_out"],
        domain="com.microsoft",
        **{"num_heads": heads, "kv_num_heads": kv_heads, "scale": dim**-0.5, "do_rotary": 0, **attributes},
    )

    def info(name: str, kind: int, *shape: Any) -> Any:
        return helper.make_tensor_value_info(name, kind, shape)

    cache = ("N", "S", kv_heads, dim)
    inputs = [
        *(info(name, HALF, "T", width * dim) for name, width in (("q", heads), ("k", kv_heads), ("v", kv_heads))),
        info("kc", HALF, *cache),
        info("vc", HALF, *cache),
        info("cu", TensorProto.INT32, "B1"),
        info("past", TensorProto.INT32, "B"),
        info("table", TensorProto.INT32, "B", "P"),
        info("meta", TensorProto.INT32, 3),
    ]
    outputs = [info("y", HALF, "T", heads * dim), info("kc_out", HALF, *cache), info("vc_out", HALF, *cache)]
    return save(path, node, inputs, outputs, {})


def attend(feeds: dict[str, Array], heads: int, kv_heads: int, dim: int) -> tuple[Array, Array, Array]:
    """Row by row in float64, straight from the op's documentation."""
    keys, values = feeds["kc"].astype(np.float64), feeds["vc"].astype(np.float64)
    block_size = keys.shape[1]
    output = np.zeros(feeds["q"].shape)
    for b in range(len(feeds["past"])):
        start, end = feeds["cu"][b], feeds["cu"][b + 1]
        where = [(feeds["table"][b, p // block_size], p % block_size) for p in range(feeds["past"][b] + end - start)]
        for t in range(start, end):
            slot = where[feeds["past"][b] + t - start]
            keys[slot] = feeds["k"][t].reshape(kv_heads, dim)
            values[slot] = feeds["v"][t].reshape(kv_heads, dim)
        for t in range(start, end):
            visible = where[: feeds["past"][b] + t - start + 1]
            for h in range(heads):
                group = h // (heads // kv_heads)
                query = feeds["q"][t].reshape(heads, dim)[h].astype(np.float64)
                scores = np.array([keys[slot][group] @ query for slot in visible]) * dim**-0.5
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                output[t, h * dim : (h + 1) * dim] = weights @ np.array([values[slot][group] for slot in visible])
    return output, keys, values


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_paged_attention(tmp_path: Path, block_size: int) -> None:
    """A ragged batch: a long prompt, one row, a few rows over a cache, a fresh one-token prompt; scrambled blocks."""
    heads, kv_heads, dim = 4, 2, 16
    lengths, past = [7, 1, 4, 1], [0, 9, 3, 0]
    needed = [-(-(length + before) // block_size) for length, before in zip(lengths, past, strict=True)]
    order = np.random.default_rng(3).permutation(sum(needed) + 2)
    table = np.full((4, max(needed) + 1), -1, np.int32)
    for b, count in enumerate(needed):
        table[b, :count] = order[sum(needed[:b]) : sum(needed[:b]) + count]
    tokens = sum(lengths)
    feeds = {
        "q": rows(tokens, heads * dim, seed=4),
        "k": rows(tokens, kv_heads * dim, seed=5),
        "v": rows(tokens, kv_heads * dim, seed=6),
        "kc": rows(len(order), block_size, kv_heads, dim, seed=7),
        "vc": rows(len(order), block_size, kv_heads, dim, seed=8),
        "cu": np.cumsum([0, *lengths]).astype(np.int32),
        "past": np.array(past, np.int32),
        "table": table,
        "meta": np.array([7, 10, 10], np.int32),
    }
    found = run_lowered(paged_model(tmp_path / "m.onnx", heads, kv_heads, dim), feeds)
    output, keys, values = attend(feeds, heads, kv_heads, dim)
    np.testing.assert_allclose(found[0], output, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found[1], keys.astype(np.float32))
    np.testing.assert_array_equal(found[2], values.astype(np.float32))


@pytest.mark.parametrize("attributes", [{"do_rotary": 1}, {"local_window_size": 8}, {"softcap": 30.0}], ids=str)
def test_what_the_reference_does_not_cover_is_refused(tmp_path: Path, attributes: dict[str, Any]) -> None:
    path = paged_model(tmp_path / "m.onnx", 4, 2, 16, **attributes)
    with pytest.raises(MachineError, match=next(iter(attributes))):
        lower(path, has_cpu_kernel)


def test_an_op_without_kernel_or_reference_is_named(tmp_path: Path) -> None:
    node = helper.make_node("NoSuchOp", ["x"], ["y"], domain="com.microsoft", name="layers.3/NoSuchOp")
    infos = [helper.make_tensor_value_info(name, HALF, ["T"]) for name in ("x", "y")]
    path = save(tmp_path / "m.onnx", node, infos[:1], infos[1:], {})
    with pytest.raises(MachineError, match=r"layers\.3/NoSuchOp.*no kernel for NoSuchOp"):
        lower(path, has_cpu_kernel)


@pytest.mark.parametrize(
    ("has_kernel", "kept"), [(has_cpu_kernel, False), (lambda node: True, True)], ids=["missing", "there"]
)
def test_a_kernel_that_exists_is_used(trained_folder: Path, has_kernel: HasKernel, kept: bool) -> None:
    """A test of the rule and of today's facts: when ORT's CPU learns one of these ops, the first case fails."""
    model = onnx.load_from_string(lower(trained_folder / "model.onnx", has_kernel))
    contrib = {node.op_type for node in model.graph.node if node.domain == "com.microsoft"}
    lowered = {"PagedAttention", "MatMulBlockQuantizedFp4Weight", "MatMulBlockQuantizedFp8Weight"}
    assert lowered <= contrib if kept else not lowered & contrib
    assert {"GatedDeltaNet", "VarlenCausalConvWithState", "GatedRMSNorm"} <= contrib


def test_activations_are_widened_and_weights_are_not(trained_folder: Path) -> None:
    as_written = onnx.load(trained_folder / "model.onnx", load_external_data=False)
    widened = onnx.load_from_string(lower(trained_folder / "model.onnx", has_cpu_kernel))

    def types(values: Any) -> set[int]:
        return {value.type.tensor_type.elem_type for value in values}

    assert HALF in types(as_written.graph.input)
    assert HALF not in types([*widened.graph.input, *widened.graph.output, *widened.graph.value_info])
    stored = {tensor.name: tensor.data_type for tensor in as_written.graph.initializer}
    assert {tensor.name: tensor.data_type for tensor in widened.graph.initializer} == stored


# Mixtures of experts


def stored(arrays: dict[str, Any]) -> dict[str, onnx.TensorProto]:
    types = {
        np.dtype(np.float32): TensorProto.FLOAT,
        np.dtype(np.uint8): TensorProto.UINT8,
        E4M3: TensorProto.FLOAT8E4M3FN,
    }
    return {
        name: helper.make_tensor(name, types[array.dtype], array.shape, np.ascontiguousarray(array).tobytes(), raw=True)
        for name, array in arrays.items()
    }


INPUTS = [
    helper.make_tensor_value_info("x", TensorProto.FLOAT, ["t", 32]),
    helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["t", 5]),
]
OUTPUTS = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["t", 32])]


def mixture(seed: int) -> dict[str, Array]:
    """Rows, router scores and experts gate, up [E, I, H] and down [E, H, I]."""
    shapes = {"x": (7, 32), "scores": (7, 5), "gate": (5, 16, 32), "up": (5, 16, 32), "down": (5, 32, 16)}
    return {name: rows(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}


def mixed(case: dict[str, Array], best: int) -> NDArray[np.float64]:
    """The op's documentation, in float64, row by row."""
    case = {name: array.astype(np.float64) for name, array in case.items()}
    result = np.zeros_like(case["x"])
    for row, (x, scores) in enumerate(zip(case["x"], case["scores"], strict=True)):
        shares = np.exp(scores) / np.exp(scores).sum()
        chosen = np.argsort(-shares)[:best]
        for expert in chosen:
            gate, up = case["gate"][expert] @ x, case["up"][expert] @ x
            inner = gate / (1 + np.exp(-gate)) * up
            result[row] += shares[expert] / shares[chosen].sum() * (case["down"][expert] @ inner)
    return result


MIXTURE: dict[str, Any] = {
    "normalize_routing_weights": 1,
    "activation_type": "swiglu",
    "activation_alpha": 1.0,
    "activation_beta": 0.0,
    "swiglu_fusion": 1,
}


def by_turns(first: Array, second: Array) -> Array:
    """Rows of two stacks [E, I, ...] by turns."""
    both = np.empty((first.shape[0], 2 * first.shape[1], *first.shape[2:]), first.dtype)
    both[:, ::2], both[:, 1::2] = first, second
    return both


@pytest.mark.parametrize("best", [1, 2, 5])
@pytest.mark.parametrize("has_moe", [True, False], ids=["kernel", "reference"])
def test_moe(tmp_path: Path, best: int, has_moe: bool) -> None:
    """The runtime's own kernel and the reference function mean the same."""
    case = mixture(best)
    node = onnx.helper.make_node(
        "MoE", ["x", "scores", "w1", "", "w2"], ["y"], domain="com.microsoft", k=best, **MIXTURE
    )
    weights = stored({"w1": by_turns(case["gate"], case["up"]), "w2": case["down"]})
    path = save(tmp_path / "m.onnx", node, INPUTS, OUTPUTS, weights)
    model = lower(path, lambda node: node.op_type != "MoE" or has_moe)
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": case["x"], "scores": case["scores"]})[0]
    expected = mixed(case, best)
    assert np.abs(found - expected).max() < SUM_NOISE * np.abs(expected).max()


def nvfp4_experts(case: dict[str, Array]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Random NVFP4 experts as QMoE takes them, and what they mean."""
    rng = np.random.default_rng(3)
    weights: dict[str, Any] = {}
    meaning = {"x": case["x"], "scores": case["scores"]}
    codes = {name: rng.integers(0, 16, case[name].shape) for name in ("gate", "up", "down")}
    scales = {
        name: rng.uniform(0.5, 2, (*case[name].shape[:2], case[name].shape[2] // 16)).astype(E4M3) for name in codes
    }
    multipliers = {"gate": rng.uniform(0.01, 0.1, 5).astype(np.float32), "down": np.full(5, 0.03, np.float32)}
    multipliers["up"] = multipliers["gate"]
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name, code in codes.items():
        factor = np.repeat(scales[name].astype(np.float64), 16, axis=2)
        meaning[name] = values[code] * factor * multipliers[name][:, None, None].astype(np.float64)
    joined = {"w1": by_turns(codes["gate"], codes["up"]), "w2": codes["down"]}
    for name, code in joined.items():
        columns = code.transpose(0, 2, 1)
        weights[name] = (columns[..., ::2] | columns[..., 1::2] << 4).astype(np.uint8)
    weights |= {"s1": by_turns(scales["gate"], scales["up"]), "s2": scales["down"]}
    return {**weights, "g1": multipliers["gate"], "g2": multipliers["down"]}, meaning


def qmoe_model(path: Path, weights: dict[str, Any]) -> Path:
    names = ["x", "scores", "w1", "s1", "", "w2", "s2", "", *[""] * 7, "g1", "g2"]
    attributes = {**MIXTURE, "k": 2, "quant_type": "nvfp4", "block_size": 16, "expert_weight_bits": 4}
    node = onnx.helper.make_node("QMoE", names, ["y"], domain="com.microsoft", **attributes)
    return save(path, node, INPUTS, OUTPUTS, stored(weights))


@pytest.mark.parametrize("has_moe", [True, False], ids=["kernel", "reference"])
def test_nvfp4_experts(tmp_path: Path, has_moe: bool) -> None:
    case = mixture(0)
    weights, meaning = nvfp4_experts(case)
    path = qmoe_model(tmp_path / "q.onnx", weights)
    model = lower(path, lambda node: node.op_type != "MoE" or has_moe)
    session = ort.InferenceSession(model, providers=["CPUExecutionProvider"])
    found = session.run(None, {"x": case["x"], "scores": case["scores"]})[0]
    expected = mixed(meaning, 2)
    assert np.abs(found - expected).max() < SUM_NOISE * np.abs(expected).max()


def test_the_cpus_own_kernel_does_not_take_these_experts_yet(tmp_path: Path) -> None:
    """When this fails, the runtime has learned them, and lowering can leave QMoE alone where it is right."""
    case = mixture(0)
    weights, _ = nvfp4_experts(case)
    path = qmoe_model(tmp_path / "q.onnx", weights)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with pytest.raises(Exception, match="Tensor type mismatch"):
        ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def test_experts_that_the_reference_does_not_cover_are_refused(tmp_path: Path) -> None:
    case = mixture(0)
    path = qmoe_model(tmp_path / "q.onnx", nvfp4_experts(case)[0])
    model = onnx.load(path)
    for name, value in (("swiglu_fusion", 2), ("activation_alpha", 1.702), ("quant_type", "fp8")):
        changed = onnx.ModelProto.FromString(model.SerializeToString())
        (attribute,) = (each for each in changed.graph.node[0].attribute if each.name == name)
        attribute.CopyFrom(onnx.helper.make_attribute(name, value))
        onnx.save(changed, tmp_path / f"{name}.onnx")
        with pytest.raises(MachineError, match=f"{name}=.* of QMoE has no reference"):
            lower(tmp_path / f"{name}.onnx", lambda node: True)
