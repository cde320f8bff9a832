"""Mixtures of experts: what is written means in float64 what the checkpoint says; what cannot be carried is said."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnxruntime_genai import Config as GenaiConfig

import builder
from builder.config import parse_config
from builder.errors import Refused
from fixtures.writer import BF16, CONFIG, MIXTURE, Config, Edit, Kind, Tensors, Tiny
from tests.builder import oracle
from tests.conftest import CHECKPOINTS, TinyFactory

LAYER = "model.layers.1.mlp"
E, INNER, HIDDEN = 4, 32, 64


def export(tiny: TinyFactory, out: Path, kind: Kind | None, dialect: Any = "modelopt", edit: Edit | None = None) -> Any:
    """An exported tiny mixture, its source folder and its report."""
    folder = tiny(dialect, Tiny(mixture=True, projections=kind), edit)
    return folder, builder.export(folder, out).to_json()


def carried(package: Path, layer: str, file: str = "model.onnx") -> dict[str, NDArray[np.float64]]:
    """gate, up [E, I, H] and down [E, H, I] as the initializers say, by the ops' documentation."""

    def value(leaf: str) -> NDArray[Any]:
        return oracle.initializer(package, f"{layer}.experts.{leaf}", file)

    names = {tensor.name for tensor in oracle.graph(package, file).initializer}
    if f"{layer}.experts.gate_up" in names:
        gate_up, down = (value(leaf).astype(np.float64) for leaf in ("gate_up", "down"))
    else:
        gate_up, down = (unpacked(*(value(f"{part}.{leaf}") for leaf in LEAVES)) for part in ("gate_up", "down"))
    return {"gate_proj": gate_up[:, ::2], "up_proj": gate_up[:, 1::2], "down_proj": down}


LEAVES = ("nvfp4_weight", "nvfp4_weight_scale", "nvfp4_weight_scale_2")


def unpacked(codes: NDArray[Any], scales: NDArray[Any], multipliers: NDArray[Any]) -> NDArray[np.float64]:
    """Codes [E, K, N/2], row 2j in the low nibble; scales [E, N, K/16]; multipliers [E]."""
    experts, columns, half = codes.shape
    values = np.empty((experts, 2 * half, columns))
    values[:, ::2] = E2M1[codes % 16].transpose(0, 2, 1)
    values[:, 1::2] = E2M1[codes // 16].transpose(0, 2, 1)
    factors = oracle.e4m3(scales.view(np.uint8)) * multipliers.astype(np.float64)[:, None, None]
    return values * np.repeat(factors, 16, axis=2)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stored(folder: Path, layer: str, count: int = E) -> dict[str, NDArray[np.float64]]:
    tensors = oracle.read_checkpoint(folder)
    return {
        part: np.stack([oracle.weight(tensors, f"{layer}.experts.{e}.{part}") for e in range(count)])
        for part in ("gate_proj", "up_proj", "down_proj")
    }


def assert_same(folder: Path, package: Path) -> None:
    for layer, file in ((LAYER, "model.onnx"), ("mtp.layers.0.mlp", "mtp.onnx")):
        found = carried(package, layer, file)
        for part, expected in stored(folder, layer).items():
            assert np.array_equal(found[part], expected.astype(np.float32)), (layer, part)


@pytest.mark.parametrize("name", ["trained_ct_moe_text", "trained_mo_moe_text"])
def test_real_experts_mean_what_the_checkpoint_does(name: str, tmp_path: Path) -> None:
    """As compressed-tensors and ModelOpt wrote them; the divisor of one of them is inverted in float32."""
    builder.export(CHECKPOINTS / name, tmp_path / "p")
    for layer, file in (("model.layers.5.mlp", "model.onnx"), ("mtp.layers.0.mlp", "mtp.onnx")):
        found = carried(tmp_path / "p", layer, file)
        for part, expected in stored(CHECKPOINTS / name, layer, 8).items():
            assert np.allclose(found[part], expected, rtol=2.0**-22, atol=0), (layer, part)


def ops(package: Path, file: str = "model.onnx") -> Counter[str]:
    return Counter(node.op_type for node in oracle.graph(package, file).node)


def same_globals(tensors: Tensors, config: Config) -> None:
    """gate and up of an expert share a global scale, as every quantizer makes them."""
    for name in [
        name for name in tensors if name.endswith(("gate_proj.weight_scale_2", "gate_proj.weight_global_scale"))
    ]:
        tensors[name.replace("gate_proj", "up_proj")] = tensors[name]


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4 32"])
def test_four_bit_experts_are_carried_to_the_bit(tiny: TinyFactory, tmp_path: Path, dialect: Any, kind: Kind) -> None:
    """Case A32."""
    folder, report = export(tiny, tmp_path / "p", kind, dialect, same_globals)
    assert_same(folder, tmp_path / "p")
    assert report["graphs"]["target"]["experts"] == {"nvfp4": 16} and report["graphs"]["mtp"]["experts"] == {"float": 4}
    assert not any("experts" in module for module in report["graphs"]["target"]["dequantized"])
    assert ops(tmp_path / "p")["QMoE"] == 4 and ops(tmp_path / "p", "mtp.onnx")["MoE"] == 1


@pytest.mark.parametrize("kind", ["fp8", "fp8 block", "mxfp8", "nvfp4"])
def test_what_one_op_cannot_carry_is_dequantized_and_said(tiny: TinyFactory, tmp_path: Path, kind: Kind) -> None:
    """Among it NVFP4 whose gate and up have different global scales."""

    def differ(tensors: Tensors, config: Config) -> None:
        same_globals(tensors, config)
        if kind == "nvfp4":
            tensors[f"{LAYER}.experts.2.up_proj.weight_scale_2"] = np.array(0.125, np.float32)

    folder, report = export(tiny, tmp_path / "p", kind, "modelopt", differ)
    assert_same(folder, tmp_path / "p")
    reason = report["graphs"]["target"]["dequantized"][f"{LAYER}.experts"]
    expected = "different global scales" if kind == "nvfp4" else "no kernel for FP8 experts"
    assert expected in reason
    assert report["graphs"]["target"]["experts"] == ({"nvfp4": 12, "float": 4} if kind == "nvfp4" else {"float": 16})


def test_an_expert_of_another_format_makes_its_layer_float(tiny: TinyFactory, tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        same_globals(tensors, config)
        name = f"{LAYER}.experts.3.down_proj"
        for leaf in ("weight_scale", "weight_scale_2", "input_scale"):
            del tensors[f"{name}.{leaf}"]
        tensors[f"{name}.weight"] = np.random.default_rng(0).standard_normal((HIDDEN, INNER)).astype(BF16)

    folder, report = export(tiny, tmp_path / "p", "nvfp4", "modelopt", edit)
    assert_same(folder, tmp_path / "p")
    target = report["graphs"]["target"]
    assert "stored as float and nvfp4" in target["dequantized"][f"{LAYER}.experts"]
    assert target["experts"] == {"nvfp4": 12, "float": 4}


def test_unquantized_experts_keep_their_bytes_and_are_counted(tiny: TinyFactory, tmp_path: Path) -> None:
    """Case A17."""

    def fuse(tensors: Tensors, config: Config) -> None:
        for layer in (*(f"model.layers.{i}.mlp" for i in range(4)), "mtp.layers.0.mlp"):
            own = {
                part: np.stack([tensors.pop(f"{layer}.experts.{e}.{part}.weight") for e in range(E)])
                for part in ("gate_proj", "up_proj", "down_proj")
            }
            tensors[f"{layer}.experts.gate_up_proj"] = np.concatenate([own["gate_proj"], own["up_proj"]], axis=1)
            tensors[f"{layer}.experts.down_proj"] = own["down_proj"]

    plain, _ = export(tiny, tmp_path / "apart", "float")
    _, report = export(tiny, tmp_path / "fused", "float", edit=fuse)
    assert_same(plain, tmp_path / "apart")
    for layer, file in ((LAYER, "model.onnx"), ("mtp.layers.0.mlp", "mtp.onnx")):
        apart, fused = (carried(tmp_path / name, layer, file) for name in ("apart", "fused"))
        assert all(np.array_equal(apart[part], fused[part]) for part in apart)
    assert report["graphs"]["target"]["experts"] == {"float": 16}
    manifest = json.loads((tmp_path / "fused" / "manifest.json").read_text("utf-8"))
    down = manifest["initializers"]["model.onnx"][f"{LAYER}.experts.down"]
    assert down["transform"] is None and down["file"] == "model.safetensors"
    assert manifest["census"]["graphs"]["target"]["experts"] == {"float": 16}


def test_router_and_shared_gate_are_float_whatever_is_declared(tiny: TinyFactory, tmp_path: Path) -> None:
    """Case A11."""

    def declare(tensors: Tensors, config: Config) -> None:
        same_globals(tensors, config)
        config["quantization_config"]["quantized_layers"][f"{LAYER}.gate"] = {"quant_algo": "NVFP4", "group_size": 16}

    _, report = export(tiny, tmp_path / "p", "nvfp4", "modelopt", declare)
    graph = oracle.graph(tmp_path / "p")
    made = {output: node for node in graph.node for output in node.output}
    for node in (node for node in graph.node if node.op_type == "QMoE"):
        assert made[node.input[1]].op_type == "Gemm"
    assert any("declared nvfp4 but stored as float" in line and f"{LAYER}.gate" in line for line in report["warnings"])


def test_the_ops_attributes_are_the_familys(tiny: TinyFactory, tmp_path: Path) -> None:
    """Case A32: weights of the chosen experts sum to 1, silu(gate) * up, rows by turns; nothing else is left open."""
    export(tiny, tmp_path / "p", "nvfp4", edit=same_globals)
    common: dict[str, Any] = {
        "k": 2,
        "normalize_routing_weights": 1,
        "activation_type": b"swiglu",
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "swiglu_fusion": 1,
    }
    quantized = {"quant_type": b"nvfp4", "block_size": 16, "expert_weight_bits": 4}
    for file, op, expected in (("model.onnx", "QMoE", {**common, **quantized}), ("mtp.onnx", "MoE", common)):
        for node in (node for node in oracle.graph(tmp_path / "p", file).node if node.op_type == op):
            assert {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute} == expected


def test_the_shared_experts_gate_comes_behind_its_projection(tiny: TinyFactory, tmp_path: Path) -> None:
    """Case A33: routed + sigmoid(gate) * shared, where shared has passed down_proj."""
    export(tiny, tmp_path / "p", "float")
    graph = oracle.graph(tmp_path / "p")
    made = {output: node for node in graph.node for output in node.output}
    gated = [node for node in graph.node if node.op_type == "GatedAdd"]
    assert len(gated) == 4
    for index, node in enumerate(gated):
        routed, shared, gate = (made[name] for name in node.input)
        assert (routed.op_type, shared.op_type, gate.op_type) == ("MoE", "Gemm", "Sigmoid")
        assert f"layers.{index}.mlp.shared_expert.down_proj.weight" in weight_name(made, shared)
        assert f"layers.{index}.mlp.shared_expert_gate.weight" in weight_name(made, made[gate.input[0]])


def weight_name(made: dict[str, onnx.NodeProto], gemm: onnx.NodeProto) -> str:
    name = gemm.input[1]
    return str(made[name].input[0] if name in made else name)


def test_the_configuration_is_a_mixtures_and_genai_takes_it(tiny: TinyFactory, tmp_path: Path) -> None:
    export(tiny, tmp_path / "p", "nvfp4", edit=same_globals)
    config = json.loads((tmp_path / "p" / "genai_config.json").read_text("utf-8"))
    assert config["model"]["type"] == "qwen3_5_moe_text"
    GenaiConfig(str(tmp_path / "p"))


def test_parameters_are_counted_and_so_are_those_that_a_token_passes(tiny: TinyFactory) -> None:
    folder = tiny("modelopt", Tiny(mixture=True, projections="float"))
    found = builder.plan(folder).parameters
    tensors = oracle.read_checkpoint(folder)
    sizes = {
        name: int(np.prod(raw.shape))
        for name, raw in tensors.items()
        if len(raw.shape) == 2 and not name.startswith("mtp.")
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert found == {"total": sum(sizes.values()), "active": sum(sizes.values()) - experts // 2}


# What is refused


def without(name: str) -> Edit:
    def edit(tensors: Tensors, config: Config) -> None:
        for leaf in [tensor for tensor in tensors if tensor.startswith(name)]:
            del tensors[leaf]

    return edit


def router_of_another_shape(tensors: Tensors, config: Config) -> None:
    tensors[f"{LAYER}.gate.weight"] = np.zeros((E + 1, HIDDEN), BF16)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (without(f"{LAYER}.experts.2.up_proj"), rf"tensor {LAYER}.experts.2.up_proj.weight: expected a weight"),
        (router_of_another_shape, rf"tensor {LAYER}.gate.weight: expected .* \[4, 64\], found BF16 \[5, 64\]"),
        (without(f"{LAYER}.shared_expert_gate"), rf"tensor {LAYER}.shared_expert_gate.weight: expected a weight"),
        (
            without("mtp.layers.0.mlp.experts"),
            "MTP head: expected all of it, found half of it, without mtp.layers.0.mlp.experts",
        ),
    ],
    ids=["an expert", "router", "shared gate", "the head's experts"],
)
def test_what_is_missing_or_misshapen_is_named(tiny: TinyFactory, tmp_path: Path, edit: Edit, words: str) -> None:
    with pytest.raises(Refused, match=words):
        export(tiny, tmp_path / "p", "float", edit=edit)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts": None}, "num_experts: expected"),
        ({"num_experts": 0}, "num_experts: expected"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok: expected at most num_experts 4, found 5"),
        ({"moe_intermediate_size": -1}, "moe_intermediate_size: expected"),
    ],
)
def test_a_mixture_needs_its_sizes(change: Config, words: str) -> None:
    document = {**CONFIG, **MIXTURE, "model_type": "qwen3_5_moe_text", **change}
    with pytest.raises(Refused, match=f"config.json {words}"):
        parse_config({key: value for key, value in document.items() if value is not None})


def test_a_dense_model_needs_its_width_and_a_mixture_does_not() -> None:
    dense = {key: value for key, value in CONFIG.items() if key != "intermediate_size"}
    with pytest.raises(Refused, match="intermediate_size: expected a value, found nothing"):
        parse_config(dense)
    assert parse_config({**dense, **MIXTURE, "model_type": "qwen3_5_moe_text"}).moe is not None
