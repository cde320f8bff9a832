"""Failure cases that no other file shows to come out right; tests/test_cases.py says which test answers for which."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import builder
from builder import reader
from builder.checkpoint import Checkpoint
from builder.config import parse_config
from builder.errors import Refused
from builder.exporter import ExportOptions
from builder.models.step import rotary_table
from builder.source import read_source
from fixtures import writer
from fixtures.writer import BF16, CONFIG, Config, Dialect, Edit, Tensors, Tiny
from tests.builder import oracle
from tests.builder.test_models import LAYER, answers, assert_different, assert_same, swapped
from tests.builder.test_package import COPY, LAYOUTS, PAPERS, contents, external, substance
from tests.conftest import TinyFactory

Float = NDArray[np.float64]
LINEAR_LAYERS = [f"model.layers.{i}" for i in range(3)]
GATE, UP = (f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up"))


def exported(folder: Path, options: ExportOptions | None = None, suffix: str = "") -> Path:
    """The package of a checkpoint, beside it under a name of its own."""
    out = folder.parent.parent / f"package {folder.name}{suffix}"
    builder.export(folder, out, options)
    return out


def warnings_of(folder: Path) -> list[str]:
    return read_source(Checkpoint(folder), "auto").warnings


def both(*edits: Edit) -> Edit:
    """Edits one after the other."""
    return lambda tensors, config: [edit(tensors, config) for edit in edits]


def as_float(tensors: Tensors, module: str, weight: NDArray[Any]) -> None:
    """Replaces whatever a module is stored as by a BF16 weight."""
    for name in [name for name in tensors if name.rpartition(".")[0] == module]:
        del tensors[name]
    tensors[f"{module}.weight"] = weight.astype(BF16)


# A02: input scales


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4"])
def test_input_scales_may_be_absent_everywhere(tiny: TinyFactory, algorithm: str) -> None:
    """Weights are all we use, so nothing is missing, nothing is made up, and the package is the same."""

    def edit(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.endswith("input_scale")]:
            del tensors[name]
        for layer in config["quantization_config"]["quantized_layers"].values():
            layer["quant_algo"] = algorithm if "NVFP4" in layer["quant_algo"] else layer["quant_algo"]

    bare = tiny("modelopt", edit=edit)
    assert not any("input" in name and "scale" in name for name in Checkpoint(bare))
    assert warnings_of(bare) == []
    assert substance(exported(bare, COPY)) == substance(exported(tiny("modelopt"), COPY))


@pytest.mark.parametrize(
    ("dialect", "leaf"), [("modelopt", "input_scale"), ("compressed-tensors", "input_global_scale")]
)
def test_a_lost_input_scale_is_named(tiny: TinyFactory, dialect: Dialect, leaf: str) -> None:
    """It hints at a damaged file. The case asks for an error; as no such scale is used, a warning it is."""
    folder = tiny(dialect, edit=lambda tensors, config: tensors.pop(f"{GATE}.{leaf}"))
    assert warnings_of(folder) == [f"1 of 12 nvfp4 modules have no input scale (none is used here): {GATE}"]
    exported(folder)


# A03, A23: projections that others store as one


def test_gate_and_up_of_different_scales_are_packaged_exactly(tiny: TinyFactory) -> None:
    """What the package dequantizes to is, to the bit, what each part does with its own divisor."""
    divisors = {GATE: 1000.0, UP: 2140.0}

    def edit(tensors: Tensors, config: Config) -> None:
        for module, divisor in divisors.items():
            tensors[f"{module}.weight_global_scale"][:] = divisor

    folder = tiny("compressed-tensors", edit=edit)
    stored, out = oracle.read_checkpoint(folder), exported(folder)
    for module, divisor in divisors.items():
        codes, scales, multiplier = (
            oracle.initializer(out, f"{module}.nvfp4_weight{part}") for part in ("", "_scale", "_scale_2")
        )
        ours = oracle.e2m1(codes) * np.repeat(oracle.e4m3(scales), 16, axis=1) * np.float64(multiplier[0])
        theirs = oracle.e2m1(stored[f"{module}.weight_packed"].bytes_array())
        theirs = theirs * np.repeat(stored[f"{module}.weight_scale"].values(), 16, axis=1)
        assert np.array_equal(ours, theirs * np.float64(np.float32(1) / np.float32(divisor))), module
        assert ours.any()


FUSED = {
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}


@pytest.mark.parametrize("fused", FUSED)
def test_fused_projections_are_refused_by_name(tiny: TinyFactory, tmp_path: Path, fused: str) -> None:
    """Qwen3-Next packs rows by key head, engines stack them: a split by guess would load and be wrong."""

    def edit(tensors: Tensors, config: Config) -> None:
        for layer in LINEAR_LAYERS:
            rows = [writer.float_weights(Tiny())[f"{layer}.{part}.weight"] for part in FUSED[fused]]
            for part in FUSED[fused]:
                for name in [name for name in tensors if name.startswith(f"{layer}.{part}.")]:
                    del tensors[name]
            tensors[f"{layer}.{fused}.weight"] = np.concatenate(rows).astype(BF16)

    folder = tiny("modelopt", edit=edit)
    with pytest.raises(Refused) as caught:
        builder.export(folder, tmp_path / "out")
    message = str(caught.value)
    assert f"tensor model.layers.0.{fused}.weight: " in message
    assert all(part.rpartition(".")[2] in message for part in FUSED[fused])
    assert not (tmp_path / "out").exists()


# A04: a scale that is no number


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_nan_scale_over_zeros_is_clamped_and_said(tiny: TinyFactory, dialect: Dialect, byte: int) -> None:
    """0 / 0 in somebody's quantizer. Zeros stay zeros under 448, and no other byte changes."""
    packed = f"{GATE}.{'weight' if dialect == 'modelopt' else 'weight_packed'}"

    def edit(tensors: Tensors, config: Config) -> None:
        tensors[packed][41, 16:24] = np.resize([0x00, 0x08, 0x80, 0x88], 8)  # zeros of either sign
        tensors[f"{GATE}.weight_scale"].view(np.uint8)[41, 2] = byte

    folder = tiny(dialect, edit=edit)
    assert warnings_of(folder) == [
        f"1 modules have NaN scales over blocks of zeros (read as 448, so they stay zero), the first {GATE}"
    ]
    stored = oracle.read_checkpoint(folder)[f"{GATE}.weight_scale"].bytes_array().copy()
    ours = oracle.initializer(exported(folder), f"{GATE}.nvfp4_weight_scale")
    assert not ((ours & 0x7F) == 0x7F).any()
    stored[41, 2] = 0x7E
    assert np.array_equal(ours, stored)


# A10, A12, A16: what the configuration leaves out


def test_an_exclude_list_that_forgets_the_heads_fc_is_said_once(tiny: TinyFactory) -> None:
    """An algorithm for all modules but a list that names the head's layer and not its fc, which is BF16 on disk."""

    def edit(tensors: Tensors, config: Config) -> None:
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "mtp.layers.0*", "*in_proj_a", "*in_proj_b"],
        }

    folder = tiny("modelopt", edit=edit)
    (folder / "hf_quant_config.json").unlink()
    about_floats = [line for line in warnings_of(folder) if "stored as float" in line]
    assert about_floats == ["1 modules are declared nvfp4 but stored as float (used as stored), the first mtp.fc"]
    graph = oracle.graph(exported(folder), "mtp.onnx")
    cast = next(node for node in graph.node if node.op_type == "Cast" and node.input[0] == "mtp.fc.weight")
    assert any(node.op_type == "Gemm" and node.input[1] == cast.output[0] for node in graph.node)


def float_mixers(tensors: Tensors, config: Config) -> None:
    """Every mixer of the linear layers in BF16, and out of the configuration's lists."""
    section, weights = config["quantization_config"], writer.float_weights(Tiny())
    modules = [f"{layer}.linear_attn.{name}" for layer in LINEAR_LAYERS for name in ("in_proj_qkv", "in_proj_z")]
    modules += [f"{layer}.linear_attn.out_proj" for layer in LINEAR_LAYERS]
    for module in modules:
        as_float(tensors, module, weights[f"{module}.weight"])
        section.get("quantized_layers", {}).pop(module, None)
        for group in section.get("config_groups", {}).values():
            group["targets"] = [target for target in group["targets"] if target != module]
    section["ignore"] += modules


def test_float_mixers_are_carried_in_both_dialects(tiny: TinyFactory) -> None:
    """Nothing is dropped because of who wrote it: all used, all filled, and the answers equal to the bit."""
    folders = [tiny(dialect, edit=float_mixers) for dialect in ("modelopt", "compressed-tensors")]
    outs = []
    for folder in folders:
        source = read_source(Checkpoint(folder), "auto")
        assert source.warnings == [] and source.skipped["unclaimed"] == []
        out, stored = exported(folder), oracle.read_checkpoint(folder)
        for layer in LINEAR_LAYERS:
            for name in ("in_proj_qkv", "in_proj_z", "out_proj"):
                tensor = f"{layer}.linear_attn.{name}.weight"
                assert oracle.initializer(out, tensor).tobytes() == stored[tensor].data
        outs.append(out)
    one, other = map(answers, outs)
    for name, values in one.items():
        assert np.isfinite(values).all() and np.array_equal(values, other[name]), name


@pytest.mark.parametrize("written", ["nvfp4-pack-quantized", "mixed-precision", None])
def test_config_groups_may_be_missing(tiny: TinyFactory, written: str | None) -> None:
    """The outer format, or nothing at all, and a single file without an index."""

    def edit(tensors: Tensors, config: Config) -> None:
        del config["quantization_config"]["config_groups"]
        config["quantization_config"]["format"] = written

    folder = tiny("compressed-tensors", edit=edit)
    assert not (folder / "model.safetensors.index.json").exists()
    for ours, options in LAYOUTS.items():
        made = substance(exported(folder, options, ours))
        assert made == substance(exported(tiny("compressed-tensors"), options, ours)) and ours in made


# A23, A24, A34: the recurrence


def silu(x: Float) -> Float:
    return x / (1 + np.exp(-x))


def normed(x: Float, weight: Float) -> Float:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def gated_delta_layer(tensors: Mapping[str, oracle.Raw], layer: str, x: Float, value_heads: int) -> Float:
    """x [T, 64] normalized, through one mixer from an empty state, token by token and head by head.

    Two key heads and `value_heads` value heads of 16; value head h reads key head h // (value_heads / 2).
    Source: transformers' recurrent gated delta rule.
    """

    def values(name: str) -> Float:
        return tensors[f"{layer}.linear_attn.{name}"].values()

    qkv, z, a, b = (x @ values(f"in_proj_{part}.weight").T for part in ("qkv", "z", "a", "b"))
    kernel = values("conv1d.weight")[:, 0]
    padded = np.concatenate([np.zeros((3, qkv.shape[1])), qkv])
    mixed = silu(np.stack([(padded[t : t + 4] * kernel.T).sum(0) for t in range(len(x))]))
    decay = np.exp(-np.exp(values("A_log")) * np.log1p(np.exp(a + values("dt_bias"))))
    beta = 1 / (1 + np.exp(-b))
    rows = np.zeros((len(x), value_heads, 16))
    for h in range(value_heads):
        key_head, state = h // (value_heads // 2), np.zeros((16, 16))
        for t in range(len(x)):
            q, k = (mixed[t, 32 * part + 16 * key_head :][:16] for part in range(2))
            q, k = (part / np.sqrt((part * part).sum() + 1e-6) for part in (q, k))
            v = mixed[t, 64 + 16 * h :][:16]
            state = state * decay[t, h]
            state = state + np.outer(beta[t, h] * (v - state @ k), k)
            rows[t, h] = state @ (q * 16**-0.5)
    gated = normed(rows, values("norm.weight")) * silu(z).reshape(rows.shape)
    return gated.reshape(len(x), -1) @ values("out_proj.weight").T


@pytest.mark.parametrize("value_heads", [4, 6, 2], ids=["2 a key head", "3 a key head", "1 a key head"])
def test_a_gated_delta_layer_is_the_recurrence_in_float64(tiny: TinyFactory, value_heads: int) -> None:
    """All else is silenced, so that hidden states are the final norm of embedding plus the first layer's mixer."""
    width = 16 * value_heads
    rng = np.random.default_rng(5)
    shapes = {
        "in_proj_qkv.weight": (64 + width, 64),
        "in_proj_z.weight": (width, 64),
        "in_proj_a.weight": (value_heads, 64),
        "in_proj_b.weight": (value_heads, 64),
        "out_proj.weight": (64, width),
        "conv1d.weight": (64 + width, 1, 4),
        "A_log": (value_heads,),
        "dt_bias": (value_heads,),
    }

    def edit(tensors: Tensors, config: Config) -> None:
        config["linear_num_value_heads"] = value_heads
        for layer in LINEAR_LAYERS:
            for name, shape in shapes.items():
                module, _, leaf = f"{layer}.linear_attn.{name}".rpartition(".")
                weight = rng.standard_normal(shape) * (1.0 if len(shape) == 1 else shape[-1] ** -0.5)
                if leaf == "weight":
                    as_float(tensors, module, weight)
                else:
                    tensors[f"{module}.{leaf}"] = weight.astype(np.float32)
        for silent in (*(f"{layer}.linear_attn.out_proj" for layer in LINEAR_LAYERS[1:]), f"{LAYER}o_proj"):
            tensors[f"{silent}.weight"] = np.zeros_like(tensors[f"{silent}.weight"])
        for i in range(4):
            tensors[f"model.layers.{i}.mlp.down_proj.weight"][:] = 0

    folder = tiny("modelopt", Tiny(mtp=False), edit)
    tensors = oracle.read_checkpoint(folder)
    tokens = [3, 14, 15, 92, 65, 35, 89, 79, 32]
    x = tensors["model.embed_tokens.weight"].values()[tokens]
    norms = [1 + tensors[f"model.{name}.weight"].values() for name in ("layers.0.input_layernorm", "norm")]
    mixed = gated_delta_layer(tensors, "model.layers.0", normed(x, norms[0]), value_heads)
    assert np.abs(mixed).mean() > 0.05
    found = answers(exported(folder), tokens, 0)["hidden_states"]
    assert np.abs(found - normed(x + mixed, norms[1])).max() < 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_states_are_float32_in_every_graph(tiny: TinyFactory, dtype: Any) -> None:
    """What adds up over a long context is float32: states in and out, captured updates, decays and their gates."""
    graph = oracle.graph(exported(tiny("modelopt"), ExportOptions(dtype=dtype)))
    types = oracle.element_types(graph)
    deltas = [node for node in graph.node if node.op_type == "GatedDeltaNet"]
    assert len(deltas) == 3
    for node in deltas:
        a, b, state, a_log, dt_bias = node.input[4:9]
        assert a_log.endswith("A_log") and dt_bias.endswith("dt_bias") and state.endswith("recurrent")
        assert {types[name] for name in (a, b, state, a_log, dt_bias, *node.output[1:])} == {"tensor(float)"}
        assert types[node.output[0]] == f"tensor({dtype})"  # the op has one type for q, k, v and its rows


# A25: rows of a query


def test_blocks_of_a_quantized_query_belong_to_their_head(tiny: TinyFactory) -> None:
    """Heads of an NVFP4 q_proj exchanged with their block scales and o_proj's columns: nothing changes."""
    weight = writer.float_weights(Tiny())[f"{LAYER}q_proj.weight"]

    def nvfp4(tensors: Tensors, config: Config) -> None:
        del tensors[f"{LAYER}q_proj.weight_scale"]
        tensors |= {
            f"{LAYER}q_proj.{leaf}": part for leaf, part in writer.quantize(weight, "nvfp4", "modelopt").items()
        }

    def rows(tensors: Tensors, config: Config) -> None:
        for leaf in ("weight", "weight_scale"):
            name = f"{LAYER}q_proj.{leaf}"
            tensors[name] = swapped(tensors[name], 0, (slice(0, 64), slice(64, 128)))

    def columns(tensors: Tensors, config: Config) -> None:
        tensors[f"{LAYER}o_proj.weight"] = swapped(tensors[f"{LAYER}o_proj.weight"], 1, (slice(0, 32), slice(32, 64)))

    expected, same, other = (
        answers(exported(tiny("modelopt", edit=edit)))
        for edit in (nvfp4, both(nvfp4, rows, columns), both(nvfp4, rows))
    )
    assert_same(same, expected)
    assert_different(other, expected)


# A26: norms


def test_the_norm_convention_does_not_depend_on_the_head(tiny: TinyFactory) -> None:
    """mtp.* tensors tell nothing of how norms are stored."""
    whole, headless = tiny("modelopt"), tiny("modelopt", Tiny(mtp=False))
    stored = oracle.read_checkpoint(headless)
    norms = [name for name in stored if "norm" in name and "linear_attn" not in name]
    assert len(norms) == 4 * 2 + 2 + 1
    outs = [exported(folder) for folder in (whole, headless)]
    for name in norms:
        expected = (1 + stored[name].values()).astype(np.float32)
        # The writer draws weights in one order, so both checkpoints hold the same ones.
        assert all(np.array_equal(oracle.initializer(out, name), expected) for out in outs), name


@pytest.mark.parametrize("mtp", [True, False])
def test_norms_that_look_converted_are_exported_with_a_warning(tiny: TinyFactory, mtp: bool) -> None:
    """Around 1 under a convolution as published: nobody can be sure, so they are read as 1 + w, and that is said."""
    layers = [
        f"model.layers.{i}.{norm}.weight" for i in range(4) for norm in ("input_layernorm", "post_attention_layernorm")
    ]

    def edit(tensors: Tensors, config: Config) -> None:
        for name in layers:
            tensors[name] = (tensors[name].astype(np.float32) + 1).astype(BF16)

    folder = tiny("modelopt", Tiny(mtp=mtp), edit)
    said = [line for line in warnings_of(folder) if "norm" in line]
    assert len(said) == 1 and "look as if 1 was already added" in said[0] and "read as 1 + w" in said[0]
    stored, out = oracle.read_checkpoint(folder), exported(folder)
    for name in layers:
        assert np.array_equal(oracle.initializer(out, name), (1 + stored[name].values()).astype(np.float32))
    assert not any("norm" in line for line in warnings_of(tiny("modelopt", Tiny(mtp=mtp))))


def test_final_norms_far_from_zero_are_no_sign(tiny: TinyFactory) -> None:
    """Trained ones come out near 1.85 as 1 + w, and are right."""

    def edit(tensors: Tensors, config: Config) -> None:
        for name in ("model.norm.weight", "mtp.norm.weight"):
            tensors[name] = np.full(64, 0.85, BF16)

    assert warnings_of(tiny("modelopt", edit=edit)) == []


# A27: rotation


def test_text_rotates_as_plain_partial_rope(packages: Mapping[str, Path], tmp_path: Path) -> None:
    """The package's own node at position 300: three equal axes make it plain, in halves of the first quarter."""
    graph = oracle.graph(packages["tiny"])
    node = next(node for node in graph.node if node.op_type == "MRotaryEmbedding")
    copy = onnx.NodeProto.FromString(node.SerializeToString())
    copy.input[:], copy.output[:] = ["x", "positions", "cos", "sin"], ["y"]
    sizes = {"x": (1, 2, 64), "cos": (512, 4), "sin": (512, 4)}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in sizes.items()]
    inputs.append(helper.make_tensor_value_info("positions", TensorProto.INT64, (3, 1, 2)))
    one = helper.make_graph([copy], "one", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, sizes["x"])])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(one, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal(sizes["x"]).astype(np.float32)
    cos, sin = (rotary_table(parse_config(CONFIG), 512, function) for function in (np.cos, np.sin))
    positions = np.array([0, 300])
    feeds = {"x": x, "positions": np.broadcast_to(positions, (3, 1, 2)).copy(), "cos": cos, "sin": sin}
    rotated = np.asarray(session.run(None, feeds)[0]).reshape(2, 2, 32)
    heads = x.reshape(2, 2, 32).astype(np.float64)
    angle = positions[:, None, None] * 10000.0 ** (-np.arange(4) / 4)
    low, high = heads[..., :4], heads[..., 4:8]
    expected = [low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)]
    assert np.array_equal(rotated[..., 8:], heads[..., 8:])
    assert np.abs(rotated[..., :8] - np.concatenate(expected, axis=-1)).max() < 1e-4
    assert np.abs(rotated[1, :, :8] - heads[1, :, :8]).max() > 0.5


# A29, A30, A31: embedding and LM head


def test_one_of_two_tied_tensors_is_enough(tiny: TinyFactory) -> None:
    """Whichever of them was saved."""

    def head_only(tensors: Tensors, config: Config) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    usual, other = tiny("modelopt", Tiny(tied=True)), tiny("modelopt", Tiny(tied=True), head_only)
    assert warnings_of(other) == []
    expected, found = (answers(exported(folder)) for folder in (usual, other))
    for name, values in expected.items():
        assert np.array_equal(values, found[name]), name
    places = external(exported_place(other), "model.onnx")
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]


def exported_place(folder: Path) -> Path:
    return folder.parent.parent / f"package {folder.name}"


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_lookup_needs_a_float_embedding(tiny: TinyFactory, tmp_path: Path, dialect: Dialect) -> None:
    """A quantized LM head alone cannot serve as one, tied or not; nor can a float one that is not tied."""
    drop: Edit = lambda tensors, config: tensors.pop("model.embed_tokens.weight")  # noqa: E731
    tied: Edit = lambda tensors, config: config.update(tie_word_embeddings=True)  # noqa: E731
    floating: Edit = lambda tensors, config: as_float(  # noqa: E731
        tensors, "lm_head", writer.float_weights(Tiny())["lm_head.weight"]
    )
    for edit in (both(drop, tied), both(drop, floating)):
        with pytest.raises(Refused, match=r"model\.embed_tokens\.weight: expected .*, found none"):
            builder.export(tiny(dialect, edit=edit), tmp_path / "out")


def test_untied_tensors_are_not_shared(tiny: TinyFactory) -> None:
    """Not even where an LM head holds the very numbers of the embedding."""

    def copied(tensors: Tensors, config: Config) -> None:
        as_float(tensors, "lm_head", tensors["model.embed_tokens.weight"])

    places = external(exported(tiny("modelopt", edit=copied)), "model.onnx")
    assert places["lm_head.weight"] != places["model.embed_tokens.weight"]


@pytest.mark.parametrize("kind", ["nvfp4", "fp8"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_quantized_head_is_never_looked_up(tiny: TinyFactory, dialect: Dialect, kind: Any) -> None:
    """The tie flag says they are one, the bytes that they are two: rows come from the float one."""

    def edit(tensors: Tensors, config: Config) -> None:
        as_float(tensors, "lm_head", np.zeros(1))
        del tensors["lm_head.weight"]
        weight = writer.float_weights(Tiny())["lm_head.weight"]
        tensors |= {f"lm_head.{leaf}": part for leaf, part in writer.quantize(weight, kind, dialect).items()}
        config["tie_word_embeddings"] = True

    out = exported(tiny(dialect, edit=edit))
    for file in ("model.onnx", "mtp.onnx"):
        graph = oracle.graph(out, file)
        known = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer} | {""}
        for node in graph.node:
            assert set(node.input) <= known, node.name
            known |= set(node.output)
        gathers = [node for node in graph.node if node.op_type == "Gather" and "input_ids" in node.input]
        assert [node.input[0] for node in gathers] == ["model.embed_tokens.weight"]
        last = next(node for node in graph.node if "logits" in node.output)
        assert last.input[1] == f"lm_head.{kind}_weight"
    assert np.isfinite(answers(out)["logits"]).all()


def test_a_head_that_is_ignored_and_tied_is_the_embedding(tiny: TinyFactory) -> None:
    """compressed-tensors lists lm_head in `ignore` also where there is none of its own."""
    folder = tiny(
        "compressed-tensors",
        Tiny(tied=True),
        lambda tensors, config: config["quantization_config"]["ignore"].append("lm_head"),
    )
    places = external(exported(folder), "model.onnx")
    assert places["lm_head.weight"] == places["model.embed_tokens.weight"]


# A40: a head with more than it may have


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_head_with_embeddings_of_its_own_is_refused(tiny: TinyFactory, tmp_path: Path, dialect: Dialect) -> None:
    folder = tiny(dialect, edit=lambda tensors, config: config.update(mtp_use_dedicated_embeddings=True))
    with pytest.raises(Refused, match=r"config\.json mtp_use_dedicated_embeddings: expected False, found True"):
        builder.export(folder, tmp_path / "out")
    exported(tiny(dialect, edit=lambda tensors, config: config.update(mtp_use_dedicated_embeddings=False)))


# A54, A66, A69: files


def test_an_unknown_tokenizer_class_is_copied_verbatim(tiny: TinyFactory) -> None:
    """A class that no runtime here knows, a template that no engine here can run, and no special_tokens_map.json."""
    folder = tiny("modelopt")
    template = "{% for m in messages[::-1] %}{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endfor %}\r\n"
    files = {
        "tokenizer.json": json.dumps({"version": "1.0", "added_tokens": []}),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "TokenizersBackend", "backend": "tokenizers"}),
        "chat_template.jinja": template,
    }
    for name, text in files.items():
        (folder / name).write_bytes(text.encode())
    made = contents(exported(folder, COPY))
    assert {name: made[name].decode() for name in files} == files
    overlays = {"overlays/latency.json", "overlays/plain.json"}
    assert set(made) == {*files, "model.onnx", "mtp.onnx", "weights.data", "genai_config.json", *overlays, *PAPERS}


def test_a_padded_vocabulary_is_not_trimmed(tiny: TinyFactory) -> None:
    """96 rows for a tokenizer of 90: the logits stay as wide as the LM head, and its last rows are there."""

    def edit(tensors: Tensors, config: Config) -> None:
        head = writer.float_weights(Tiny())["lm_head.weight"]
        head[93] = 8
        as_float(tensors, "lm_head", head)

    folder = tiny("modelopt", edit=edit)
    vocabulary = {f"t{i}": i for i in range(90)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "WordLevel", "vocab": vocabulary}}))
    out = exported(folder)
    assert reader.read(out).vocab_size == 96
    for file in ("model.onnx", "mtp.onnx"):
        logits = next(value for value in oracle.graph(out, file).output if value.name == "logits")
        assert oracle.dims(logits) == ["num_tokens", 96]
    stored = oracle.read_checkpoint(folder)["lm_head.weight"]
    assert oracle.initializer(out, "lm_head.weight").tobytes() == stored.data


@pytest.mark.parametrize("name", ["sub\\model.onnx", "..\\model.onnx", "sub/model.onnx", "./model.onnx"])
@pytest.mark.parametrize("path", [("decoder",), ("mtp",)])
def test_a_file_name_with_a_separator_is_refused(tiny: TinyFactory, name: str, path: Sequence[str]) -> None:
    """What another system's tool may write; files of a package lie beside its configuration."""
    out = exported(tiny("modelopt"))
    (out / "sub").mkdir()
    (out / "sub" / "model.onnx").write_bytes((out / "model.onnx").read_bytes())
    document = json.loads((out / "genai_config.json").read_text("utf-8"))
    document["model"][path[0]]["filename"] = name
    (out / "genai_config.json").write_text(json.dumps(document))
    with pytest.raises(Refused, match="expected a graph file inside the package"):
        reader.read(out)


def convert(tensors: Tensors, config: Config) -> None:
    """What MLX converters do: convolutions as [C, K, 1], and 1 added to every norm but the gated one."""
    for name in list(tensors):
        if name.endswith("conv1d.weight"):
            tensors[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 1))
        elif "norm" in name and not name.endswith("linear_attn.norm.weight"):
            tensors[name] = tensors[name].astype(np.float32) + np.float32(1)


def test_a_converted_checkpoint_makes_the_same_initializers(tiny: TinyFactory, tmp_path: Path) -> None:
    """Case A26. Convention and layout are told by the convolutions, with a head and without."""
    for mtp in (True, False):
        plain, converted = (tmp_path / f"{name} {mtp}" for name in ("plain", "converted"))
        builder.export(tiny("modelopt", Tiny(mtp=mtp)), plain)
        report = builder.export(tiny("modelopt", Tiny(mtp=mtp), convert), converted)
        for file in [path.name for path in plain.glob("*.onnx")]:
            for one, other in zip(*(oracle.graph(at, file).initializer for at in (plain, converted)), strict=True):
                assert one.name == other.name and list(one.dims) == list(other.dims)
                assert np.array_equal(oracle.value(plain, one), oracle.value(converted, other)), one.name
        assert any("norm weights are used as they are" in line for line in report.warnings)


def test_convolutions_of_both_layouts_are_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        name = "model.layers.1.linear_attn.conv1d.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].transpose(0, 2, 1))

    with pytest.raises(Refused, match=r"layers\.1\.linear_attn\.conv1d\.weight: expected one layout"):
        builder.export(tiny("modelopt", edit=edit), tmp_path / "out")
