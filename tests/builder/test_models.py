"""What the modules make of a checkpoint: the stored numbers, and the answers of the whole graphs.

Answers come from running packages on the CPU, where half precision is widened to float32, so differences are those of
float32 sums taken in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import builder
import runtime
from builder.checkpoint import Checkpoint
from builder.config import parse_config
from builder.errors import Refused
from builder.exporter import ExportOptions
from builder.models.step import ROWS_AT_ONCE, rotary_table
from fixtures.writer import BF16, CONFIG, Config, Dialect, Edit, Tensors, Tiny
from runtime.recording import dump
from tests.builder import oracle
from tests.conftest import TinyFactory

Answers = Mapping[str, NDArray[Any]]
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28]
SUM_NOISE = 2e-5
"""Sums of float32 products in another order, on logits around 3."""


def answers(folder: Path, token_ids: Sequence[int] = PROMPT, draft_tokens: int = 3) -> Answers:
    """Logits, hidden states and drafts of a prompt, by the engine."""
    return dump(runtime.load(folder), token_ids, draft_tokens, runtime.EngineOptions(num_blocks=16, block_size=16))


@pytest.fixture
def export_of(tiny: TinyFactory, tmp_path: Path) -> Callable[..., Path]:
    """Exports a tiny checkpoint, edited; returns the package."""

    def make(
        dialect: Dialect = "modelopt",
        options: Tiny | None = None,
        edit: Edit | None = None,
        export: ExportOptions | None = None,
    ) -> Path:
        folder = tiny(dialect, options, edit)
        builder.export(folder, tmp_path / f"package {folder.name}", export)
        return tmp_path / f"package {folder.name}"

    return make


# The whole


def test_real_checkpoints_answer_as_transformers_does(real_checkpoint: Path, tmp_path: Path) -> None:
    """reference.npz holds transformers' own float32 answers; 1 + w rounded to bfloat16 would be off by 0.04."""
    builder.export(real_checkpoint, tmp_path / "out")
    reference = np.load(real_checkpoint / "reference.npz")
    trained = "prompt_1" in reference
    suffix = "_1" if trained else ""
    prompt = reference["prompt_1"] if trained else reference["input_ids"][0]
    ours = answers(tmp_path / "out", prompt.tolist())
    expected = {
        "logits": reference[f"logits{suffix}"][0],
        "hidden_states": reference["hidden_1" if trained else "last_hidden_state"][0],
        "mtp_logits": reference[f"mtp_logits{suffix}"].reshape(-1, ours["logits"].shape[1]),
        "mtp_draft_logits": reference[f"mtp_draft_logits{suffix}"],
    }
    for name, values in expected.items():
        assert ours[name].shape == values.shape
        assert np.abs(ours[name] - values).max() < 5e-4, name
    assert ours["mtp_draft_tokens"].tolist() == reference[f"mtp_draft_tokens{suffix}"].tolist()


@pytest.mark.parametrize(
    "options", [Tiny(), Tiny(fp8_per_channel=True, vision=True, gates="nvfp4", tied=True)], ids=["plain", "varied"]
)
def test_both_dialects_answer_bit_identically(export_of: Callable[..., Path], options: Tiny) -> None:
    one, other = (answers(export_of(dialect, options)) for dialect in ("modelopt", "compressed-tensors"))
    assert set(one) == {"logits", "hidden_states", "mtp_logits", "mtp_draft_logits", "mtp_draft_tokens"}
    for name, values in one.items():
        assert np.isfinite(values).all() and values.std() > 0.1
        assert np.array_equal(values, other[name]), name


def test_packaged_bytes_are_the_checkpoints(tiny: TinyFactory, tmp_path: Path) -> None:
    """Every weight that is not transformed, in both dialects."""
    for dialect in ("modelopt", "compressed-tensors"):
        folder, out = tiny(dialect, Tiny(fp8_per_channel=True)), tmp_path / dialect  # type: ignore[arg-type]
        builder.export(folder, out)
        stored = oracle.read_checkpoint(folder)
        packed = "weight" if dialect == "modelopt" else "weight_packed"
        layer = "model.layers.3"
        for initializer, tensor in {
            f"{layer}.mlp.up_proj.nvfp4_weight": f"{layer}.mlp.up_proj.{packed}",
            f"{layer}.mlp.up_proj.nvfp4_weight_scale": f"{layer}.mlp.up_proj.weight_scale",
            f"{layer}.self_attn.q_proj.fp8_weight": f"{layer}.self_attn.q_proj.weight",
            "lm_head.fp8_weight": "lm_head.weight",
            "model.embed_tokens.weight": "model.embed_tokens.weight",
            "model.layers.0.linear_attn.norm.weight": "model.layers.0.linear_attn.norm.weight",
            "model.layers.0.linear_attn.conv1d.weight": "model.layers.0.linear_attn.conv1d.weight",
            "model.layers.0.linear_attn.in_proj_a.weight": "model.layers.0.linear_attn.in_proj_a.weight",
        }.items():
            value = oracle.initializer(out, initializer)
            assert value.tobytes() == stored[tensor].data and value.shape == stored[tensor].shape, initializer
        fc = oracle.initializer(out, "mtp.fc.weight", "mtp.onnx")
        assert fc.tobytes() == stored["mtp.fc.weight"].data and fc.dtype == BF16


# Norms, decays, scales


def test_norms_are_one_plus_w_in_float32_and_the_gated_norm_is_plain(real_checkpoint: Path, tmp_path: Path) -> None:
    builder.export(real_checkpoint, tmp_path / "out")
    stored = oracle.read_checkpoint(real_checkpoint)
    kinds = {"model.onnx": ("model.",), "mtp.onnx": ("mtp.",)}
    seen = 0
    for file, prefixes in kinds.items():
        for name, raw in stored.items():
            if "norm" not in name or "visual" in name or not name.startswith(prefixes):
                continue
            value = oracle.initializer(tmp_path / "out", name, file)
            if name.endswith("linear_attn.norm.weight"):
                assert value.tobytes() == raw.data and value.dtype == BF16
            else:  # rounded once, from the exact sum
                assert value.dtype == np.float32
                assert np.array_equal(value, (1 + raw.values()).astype(np.float32)), name
            seen += 1
    layers = parse_config(Checkpoint(real_checkpoint).config).layer_types
    per_layer = {"linear_attention": 3, "full_attention": 4}
    assert seen == sum(per_layer[kind] for kind in layers) + 1 + 7  # the final norm, and the head's


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32, np.float16], ids=["BF16", "F32", "F16"])
def test_decay_parameters_are_float32_whatever_they_are_stored_as(export_of: Callable[..., Path], dtype: type) -> None:
    """Published checkpoints store A_log and the gated norm in F32 or in BF16."""
    names = [f"model.layers.1.linear_attn.{leaf}" for leaf in ("A_log", "dt_bias", "norm.weight")]
    kept: Tensors = {}

    def edit(tensors: Tensors, config: Config) -> None:
        for name in names:
            tensors[name] = kept[name] = (tensors[name].astype(np.float32) * 1.001).astype(dtype)

    out = export_of(edit=edit)
    for name in names[:2]:
        value = oracle.initializer(out, name)
        assert value.dtype == np.float32 and np.array_equal(value, kept[name].astype(np.float32))
    assert oracle.initializer(out, names[2]).tobytes() == kept[names[2]].tobytes()


def test_scales_are_multipliers_in_float32(trained_package: Path, trained_checkpoint: Path) -> None:
    """Of a compressed-tensors checkpoint: bfloat16 channel scales and float32 divisors."""
    stored = oracle.read_checkpoint(trained_checkpoint)
    tensors = [tensor.name for tensor in oracle.graph(trained_package).initializer]
    channels = [name for name in tensors if name.endswith(".fp8_weight_scale")]
    globals_ = [name for name in tensors if name.endswith(".nvfp4_weight_scale_2")]
    assert (len(channels), len(globals_)) == (30, 21)
    for name in channels:
        value = oracle.initializer(trained_package, name)
        raw = stored[name.replace("fp8_weight_scale", "weight_scale")]
        assert value.dtype == np.float32 and np.array_equal(value, raw.values()) and value.shape == (raw.shape[0], 1)
    for name in globals_:
        value = oracle.initializer(trained_package, name)
        divisor = stored[name.replace("nvfp4_weight_scale_2", "weight_global_scale")].values()
        assert value.dtype == np.float32 and np.array_equal(value, (1 / divisor).astype(np.float32))


def test_a_tensors_scale_is_repeated_for_every_channel(export_of: Callable[..., Path], tiny: TinyFactory) -> None:
    for dialect in ("modelopt", "compressed-tensors"):
        scale = oracle.initializer(export_of(dialect), "model.layers.3.self_attn.k_proj.fp8_weight_scale")
        stored = oracle.read_checkpoint(tiny(dialect))["model.layers.3.self_attn.k_proj.weight_scale"]  # type: ignore[arg-type]
        assert scale.dtype == np.float32 and scale.shape == (32, 1) and np.all(scale == stored.values().reshape(()))


def test_the_missing_convolution_bias_is_zero(packages: Mapping[str, Path]) -> None:
    bias = oracle.initializer(packages["tiny"], "conv1d.bias")
    assert bias.shape == (128,) and not bias.any()


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_quantized_gates_are_dequantized(
    export_of: Callable[..., Path], tiny: TinyFactory, dialect: Dialect, kind: str
) -> None:
    """A decay is exponentiated, so its projection stays float; the checkpoint's other formats stay as they are."""
    options = Tiny(gates=kind)  # type: ignore[arg-type]
    stored = oracle.read_checkpoint(tiny(dialect, options))
    out = export_of(dialect, options)
    modules = [f"model.layers.{layer}.linear_attn.in_proj_{gate}" for layer in range(3) for gate in "ab"]
    for module in modules:
        value = oracle.initializer(out, f"{module}.weight")
        assert value.dtype == np.float32 and np.array_equal(value, oracle.weight(stored, module))
    assert not [t.name for t in oracle.graph(out).initializer if "in_proj_a." in t.name and "scale" in t.name]

    def plain(tensors: Tensors, config: Config) -> None:
        for module in modules:
            tensors[f"{module}.weight"] = oracle.weight(stored, module).astype(np.float32)

    expected = answers(export_of(dialect, edit=plain))
    for name, values in answers(out).items():
        assert np.array_equal(values, expected[name]), name


def test_rotary_tables() -> None:
    """Against float64; inverse frequencies and angles are rounded to float32 as in training."""
    config = parse_config({**CONFIG, "rope_parameters": {**CONFIG["rope_parameters"], "rope_theta": 1e6}})
    cos, sin = rotary_table(config, 2000, np.cos), rotary_table(config, 2000, np.sin)
    angle = np.arange(2000)[:, None] * 1e6 ** (-np.arange(0, 8, 2) / 8)
    rounding = 2.0**-24 + angle * 3 * 2.0**-24
    for table, expected in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        assert table.dtype == np.float32 and table.shape == (2000, 4)
        assert np.all(np.abs(table - expected) <= rounding)


def test_rotary_tables_made_in_pieces_have_no_seams() -> None:
    """A table is made some rows at a time. In float64, with the bound of the rounding that training had."""
    config = parse_config({**CONFIG, "rope_parameters": {**CONFIG["rope_parameters"], "rope_theta": 1e6}})
    rows = np.array([ROWS_AT_ONCE - 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 2])
    table = rotary_table(config, ROWS_AT_ONCE + 3, np.cos)
    assert table.shape == (ROWS_AT_ONCE + 3, 4)
    angle = rows[:, None] * 1e6 ** (-np.arange(0, 8, 2) / 8)
    assert np.all(np.abs(table[rows] - np.cos(angle)) <= 2.0**-24 + angle * 3 * 2.0**-24)


def test_rotary_tables_have_a_row_for_every_position(packages: Mapping[str, Path]) -> None:
    for name, positions in (("tiny", 512), ("headless", 100)):
        for table in ("cos_cache", "sin_cache"):
            value = oracle.initializer(packages[name], table)
            assert value.dtype == np.float32 and value.shape == (positions, 4)


# LM head and embedding


def test_a_tied_head_answers_like_its_copy(export_of: Callable[..., Path]) -> None:
    def copied(tensors: Tensors, config: Config) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    tied = answers(export_of(options=Tiny(tied=True)))
    untied = answers(export_of(options=Tiny(tied=True), edit=copied))
    for name, values in tied.items():
        assert np.array_equal(values, untied[name]), name


def test_a_stored_head_is_used_whatever_the_tie_flag_says(
    tiny: TinyFactory, export_of: Callable[..., Path], tmp_path: Path
) -> None:
    def flagged(tensors: Tensors, config: Config) -> None:
        config["tie_word_embeddings"] = True

    report = builder.export(tiny("modelopt", edit=flagged), tmp_path / "flagged")
    assert report.warnings == ["config.json ties the LM head to the embedding but lm_head is stored: used as stored"]
    expected = answers(export_of())
    for name, values in answers(tmp_path / "flagged").items():
        assert np.array_equal(values, expected[name]), name


def test_no_head_without_the_tie_flag_is_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt", Tiny(tied=True), lambda tensors, config: config.update(tie_word_embeddings=False))
    with pytest.raises(Refused, match=r"tensor lm_head\.weight: expected a weight, found none"):
        builder.export(folder, tmp_path / "out")


# How rows are divided among heads: symmetries of the model hold only if every part is split where it should be

LAYER = "model.layers.3.self_attn."
PER_CHANNEL = Tiny(fp8_per_channel=True)


def swapped(array: NDArray[Any], axis: int, *blocks: tuple[slice, slice]) -> NDArray[Any]:
    """A copy with pairs of equally long ranges of an axis exchanged."""
    moved, source = np.moveaxis(array.copy(), axis, 0), np.moveaxis(array, axis, 0)
    for one, other in blocks:
        moved[one], moved[other] = source[other], source[one]
    return np.ascontiguousarray(np.moveaxis(moved, 0, axis))


def assert_same(ours: Answers, expected: Answers) -> None:
    for name in ("logits", "hidden_states"):
        assert np.abs(ours[name] - expected[name]).max() < SUM_NOISE, name


def assert_different(ours: Answers, expected: Answers) -> None:
    """By far more than rounding: the symmetry tests are not blind to what they move."""
    assert np.abs(ours["logits"] - expected["logits"]).max() > 1e-2


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_query_and_gate_lie_side_by_side_for_each_head(export_of: Callable[..., Path], dialect: Dialect) -> None:
    """Heads exchanged with their [query | gate] rows, scales and o_proj columns: nothing changes.

    Were all queries to come first, rows of one head would meet gates of another.
    """
    heads = (slice(0, 64), slice(64, 128))
    columns = (slice(0, 32), slice(32, 64))

    def rows(tensors: Tensors, config: Config) -> None:
        for leaf in ("weight", "weight_scale"):
            tensors[f"{LAYER}q_proj.{leaf}"] = swapped(tensors[f"{LAYER}q_proj.{leaf}"], 0, heads)

    def whole_heads(tensors: Tensors, config: Config) -> None:
        rows(tensors, config)
        tensors[f"{LAYER}o_proj.weight"] = swapped(tensors[f"{LAYER}o_proj.weight"], 1, columns)

    expected = answers(export_of(dialect, PER_CHANNEL))
    assert_same(answers(export_of(dialect, PER_CHANNEL, whole_heads)), expected)
    assert_different(answers(export_of(dialect, PER_CHANNEL, rows)), expected)


def test_the_query_comes_first_and_the_gate_second(export_of: Callable[..., Path]) -> None:
    """Queries are normalized, so doubling their rows changes nothing; doubling a gate does."""

    def doubled(*rows: slice) -> Edit:
        def edit(tensors: Tensors, config: Config) -> None:
            for part in rows:
                tensors[f"{LAYER}q_proj.weight_scale"][part] *= 2

        return edit

    expected = answers(export_of(options=PER_CHANNEL))
    assert_same(answers(export_of("modelopt", PER_CHANNEL, doubled(slice(0, 32), slice(64, 96)))), expected)
    assert_different(answers(export_of("modelopt", PER_CHANNEL, doubled(slice(32, 64)))), expected)
    assert_different(answers(export_of("modelopt", PER_CHANNEL, doubled(slice(96, 128)))), expected)


def test_value_heads_follow_their_key_head_in_groups(export_of: Callable[..., Path]) -> None:
    """Key heads 0 and 1 exchanged together with value heads 0, 1 and 2, 3: nothing changes.

    Were value head h to read key head h modulo 2, the pairs would part.
    """
    layer = "model.layers.1.linear_attn."
    queries, keys, values = ((slice(a, a + n), slice(a + n, a + 2 * n)) for a, n in ((0, 16), (32, 16), (64, 32)))
    own, heads = (slice(0, 32), slice(32, 64)), (slice(0, 2), slice(2, 4))

    def move(tensors: Tensors, *qkv: tuple[slice, slice]) -> None:
        for name in ("in_proj_qkv.weight", "in_proj_qkv.weight_scale", "conv1d.weight"):
            tensors[f"{layer}{name}"] = swapped(tensors[f"{layer}{name}"], 0, *qkv)

    def groups(tensors: Tensors, config: Config) -> None:
        move(tensors, queries, keys, values)
        for name in ("in_proj_z.weight", "in_proj_z.weight_scale"):
            tensors[f"{layer}{name}"] = swapped(tensors[f"{layer}{name}"], 0, own)
        for name in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
            tensors[f"{layer}{name}"] = swapped(tensors[f"{layer}{name}"], 0, heads)
        tensors[f"{layer}out_proj.weight"] = swapped(tensors[f"{layer}out_proj.weight"], 1, own)

    expected = answers(export_of(options=PER_CHANNEL))
    assert_same(answers(export_of("modelopt", PER_CHANNEL, groups)), expected)
    assert_different(
        answers(export_of("modelopt", PER_CHANNEL, lambda tensors, config: move(tensors, queries, keys))), expected
    )


def test_the_heads_input_is_the_embedding_then_the_hidden_state(export_of: Callable[..., Path]) -> None:
    """With the right half of fc at zero the head sees tokens alone, however different the target's hidden states."""

    def blind(tensors: Tensors, config: Config) -> None:
        tensors["mtp.fc.weight"][:, 64:] = 0

    def other_target(tensors: Tensors, config: Config) -> None:
        blind(tensors, config)
        tensors["model.layers.2.linear_attn.dt_bias"] += BF16.type(3)

    one, other = (answers(export_of(edit=edit)) for edit in (blind, other_target))
    assert_different(one, other)
    # The last row is left out: its token is the target's first answer.
    assert np.array_equal(one["mtp_logits"][:-1], other["mtp_logits"][:-1])
    assert one["mtp_logits"].std() > 0.1


def test_only_the_first_quarter_of_each_head_is_rotated(export_of: Callable[..., Path]) -> None:
    """Channels behind the rotated ones may be exchanged, in queries, keys and their norms; a rotated one may not."""

    def exchange(first: int, second: int) -> Edit:
        def edit(tensors: Tensors, config: Config) -> None:
            channel = (slice(first, first + 1), slice(second, second + 1))
            for leaf in ("weight", "weight_scale"):
                name = f"{LAYER}k_proj.{leaf}"
                tensors[name] = swapped(tensors[name], 0, channel)
                name = f"{LAYER}q_proj.{leaf}"
                both = [tuple(slice(s.start + h, s.stop + h) for s in channel) for h in (0, 64)]
                tensors[name] = swapped(tensors[name], 0, *both)  # type: ignore[arg-type]
            for name in ("q_norm.weight", "k_norm.weight"):
                tensors[f"{LAYER}{name}"] = swapped(tensors[f"{LAYER}{name}"], 0, channel)

        return edit

    expected = answers(export_of(options=PER_CHANNEL))
    assert_same(answers(export_of("modelopt", PER_CHANNEL, exchange(8, 31))), expected)
    moved = answers(export_of("modelopt", PER_CHANNEL, exchange(0, 8)))
    assert np.abs(moved["logits"] - expected["logits"]).max() > 100 * SUM_NOISE
