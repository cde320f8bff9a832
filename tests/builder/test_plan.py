"""builder.plan(): what it says is what an export does, from headers alone."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import builder
from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.exporter import ExportOptions
from fixtures.writer import Config, Dialect, Edit, Tensors, Tiny
from tests.builder import oracle
from tests.builder.test_package import COPY, LINK, contents
from tests.conftest import TinyFactory

REPOSITORY = Path(__file__).parents[2]
MEGABYTE = 10**6


def test_the_api_can_be_used_again() -> None:
    """Neither a first use nor an import of its module puts something else in the function's place."""
    script = (
        "import builder\nfirst = builder.plan\n"
        "import importlib\nimportlib.import_module(first.__module__)\n"
        "assert callable(builder.plan) and builder.plan is first"
    )
    run = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


# Against an export


@pytest.mark.parametrize(
    ("tiny_options", "options"),
    [
        (Tiny(), ExportOptions()),
        (Tiny(gates="nvfp4", vision=True, fp8_per_channel=True), ExportOptions(dtype="bfloat16", max_draft_tokens=7)),
        (Tiny(mtp=False, tied=True), ExportOptions(context_length=100)),
        (Tiny(tied=True), ExportOptions(checkpoints="off", block_size=16)),
        (Tiny(), ExportOptions(mtp="off")),
        (Tiny(), ExportOptions(checkpoints="dense")),
    ],
    ids=["plain", "varied", "headless", "tied", "off", "dense"],
)
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_bytes_are_those_that_an_export_writes(
    tiny: TinyFactory, tmp_path: Path, dialect: Dialect, tiny_options: Tiny, options: ExportOptions
) -> None:
    folder = tiny(dialect, tiny_options)
    planned = builder.plan(folder, options)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    linkable, transformed = planned.weights["linkable_bytes"], planned.weights["transformed_bytes"]
    assert linkable + transformed == planned.memory["weights"] and planned.source == str(folder)
    for weights, expected in (("copy", (0, linkable + transformed)), ("link", (linkable, transformed))):
        report = builder.export(folder, tmp_path / weights, replace(options, weights=weights))  # type: ignore[arg-type]
        assert planned.graphs == report.graphs
        assert (report.weights["linked_bytes"], report.weights["copied_bytes"]) == expected
        assert planned.weights["shared_bytes"] == report.weights["shared_bytes"]
        assert planned.skipped_tensors == report.skipped_tensors
        assert planned.warnings == report.warnings


def test_real_checkpoints_plan_as_they_are_exported(real_checkpoint: Path, tmp_path: Path) -> None:
    """An MXFP4 weight is taken to fit, which theirs does."""
    planned = builder.plan(real_checkpoint)
    linkable, transformed = planned.weights["linkable_bytes"], planned.weights["transformed_bytes"]
    for options, expected in ((COPY, (0, linkable + transformed)), (LINK, (linkable, transformed))):
        report = builder.export(real_checkpoint, tmp_path / options.weights, options)
        assert planned.graphs == report.graphs and planned.warnings == report.warnings == []
        assert planned.skipped_tensors == report.skipped_tensors
        assert (report.weights["linked_bytes"], report.weights["copied_bytes"]) == expected


def test_the_trained_checkpoints_counts(trained_checkpoint: Path) -> None:
    """NVFP4: 7 MLPs. FP8: 6 * 3 + 2 * 4 in mixers, the last MLP, the LM head. Float: 6 * 2 gates, and 8 in the head."""
    found = builder.plan(trained_checkpoint)
    assert found.graphs["target"].matmuls == {"nvfp4": 21, "fp8": 30, "float": 12}
    assert found.graphs["mtp"].matmuls == {"nvfp4": 0, "fp8": 1, "float": 8}
    assert found.graphs["target"].layers == {"full_attention": 2, "linear_attention": 6}
    assert found.weights["shared_bytes"] == 2048 * 256 * 2 + 2048 * 256 + 2048 * 4


def test_bytes_are_linked_or_transformed_by_kind(tiny: TinyFactory) -> None:
    """Reckoned from the tensors' names: what is stored as the graph wants it can be used in place."""
    folder = tiny("modelopt", Tiny(vision=True))
    linked, transformed = 0, 2 * 512 * 4 * 4 + 128 * 4  # rotary tables; the convolutions' bias of zeros
    for name, raw in oracle.read_checkpoint(folder).items():
        module, _, leaf = name.rpartition(".")
        if leaf == "input_scale" or "visual" in name:
            continue
        if leaf in ("A_log", "dt_bias") or ("norm" in module and "linear_attn" not in module):
            transformed += 4 * int(np.prod(raw.shape))  # widened, and norms plus one
        elif leaf == "weight_scale" and raw.dtype == "F32":  # of a tensor, spelled out for its rows
            transformed += 4 * oracle.weight(oracle.read_checkpoint(folder), module).shape[0]
        else:
            linked += len(raw.data)
    weights = builder.plan(folder).weights
    assert weights["linkable_bytes"] == linked and weights["transformed_bytes"] == transformed
    assert weights["shared_bytes"] == 96 * 64 * 2 + 96 * 64 + 96 * 4


def test_spellings_of_one_checkpoint_are_one_plan(tiny: TinyFactory) -> None:
    """`architectures` is null as written; the text class's own keys may stand over nested tensor names."""

    def flat(tensors: Tensors, config: Config) -> None:
        config.update(config.pop("text_config"))
        config["model_type"] = "qwen3_5_text"

    def without(*leaves: str) -> Edit:
        return lambda tensors, config: [tensors.pop(name) for name in list(tensors) if name.startswith(leaves)]

    spellings: list[Edit | None] = [
        None,
        lambda tensors, config: config.pop("architectures"),
        lambda tensors, config: config.update(architectures=["Qwen3_5ForConditionalGeneration"]),
        flat,
        lambda tensors, config: (flat(tensors, config), config.update(architectures=["Qwen3_5ForCausalLM"])),
        without("model.visual."),
    ]
    plans = [builder.plan(tiny("modelopt", Tiny(vision=True), edit)).to_json() for edit in spellings]
    for found in plans:
        assert found.pop("source")
    assert [found["skipped_tensors"].pop("vision") for found in plans] == [2, 2, 2, 2, 2, 0]
    assert all(found == plans[0] for found in plans)
    plain = builder.plan(tiny("modelopt")).to_json()  # the same tensors without the nesting
    assert {**plain, "source": 0, "skipped_tensors": 0} == {**plans[0], "source": 0, "skipped_tensors": 0}


def test_a_prefix_of_another_class_is_refused_by_name(tiny: TinyFactory) -> None:
    def renamed(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[f"language_model.{name}"] = tensors.pop(name)

    with pytest.raises(Refused, match=r"model\.embed_tokens\.weight: expected an embedding under model\. or"):
        builder.plan(tiny("modelopt", edit=renamed))


# Without values


def test_no_value_is_read(tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage that an export refuses does not matter here, and reading anything is an error."""

    def damaged(tensors: Tensors, config: Config) -> None:
        tensors["lm_head.weight_scale"].fill(np.nan)
        tensors["model.layers.1.mlp.gate_proj.weight_scale"].view(np.uint8)[:] = 0x7F
        tensors["model.layers.2.mlp.up_proj.weight_scale_2"] = np.array(-1, np.float32)
        tensors["model.norm.weight"].fill(np.inf)

    folder, whole = tiny("modelopt", edit=damaged), tiny("modelopt")
    with pytest.raises(Refused, match=r"weight_scale"):
        builder.export(folder, tmp_path / "out")

    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("a value was read")

    monkeypatch.setattr(TensorRef, "read", fail)
    monkeypatch.setattr(TensorRef, "opened", fail)
    assert {**builder.plan(folder).to_json(), "source": 0} == {**builder.plan(whole).to_json(), "source": 0}


def test_nothing_is_written(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("compressed-tensors")
    before = contents(tmp_path)
    builder.plan(folder)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (ExportOptions(block_size=48), "--block-size: expected a power of two"),
        (ExportOptions(context_length=513), "--context-length: expected 1 to 512"),
        (ExportOptions(max_draft_tokens=8), "--max-draft-tokens: expected 1 to 7"),
        (ExportOptions(weights="move"), "--weights: expected auto or link or copy"),  # type: ignore[arg-type]
    ],
    ids=str,
)
def test_options_are_checked_as_for_an_export(tiny: TinyFactory, options: ExportOptions, expected: str) -> None:
    with pytest.raises(Refused) as caught:
        builder.plan(tiny("modelopt"), options)
    assert expected in str(caught.value)


def test_strict_and_the_head_are_as_for_an_export(tiny: TinyFactory) -> None:
    stray = tiny("modelopt", edit=lambda tensors, config: tensors.update(stray=np.ones(3, np.float32)))
    assert builder.plan(stray).skipped_tensors["unclaimed"] == 1
    with pytest.raises(Refused, match=r"tensor stray: expected a module that uses it \(--strict\)"):
        builder.plan(stray, ExportOptions(strict=True))
    with pytest.raises(Refused, match="--mtp require"):
        builder.plan(tiny("modelopt", Tiny(mtp=False)), ExportOptions(mtp="require"))
    assert builder.plan(tiny("modelopt", Tiny(mtp=False))).graphs["mtp"] is None


def test_what_is_not_carried_as_stored_is_named(tiny: TinyFactory) -> None:
    found = builder.plan(tiny("modelopt", Tiny(gates="fp8"))).graphs["target"].dequantized
    assert set(found) == {f"model.layers.{i}.linear_attn.in_proj_{gate}" for i in range(3) for gate in "ab"}
    assert set(found.values()) == {"the decay it computes is exponentiated"}
    assert builder.plan(tiny("modelopt")).graphs["target"].dequantized == {}


# Memory


def test_memory_is_what_the_hand_reckons(tiny: TinyFactory) -> None:
    """Two requests of 300 tokens on blocks of 256, 3 drafts, an attention layer and the head's, 3 linear layers."""
    found = builder.plan(tiny("modelopt"), ExportOptions(context_length=300), 2)
    memory = dict(found.memory)
    assert (memory.pop("context_length"), memory.pop("batch_size")) == (300, 2)
    assert memory.pop("weights") == found.weights["linkable_bytes"] + found.weights["transformed_bytes"]
    # 2 layers * 2 requests * 2 blocks * 256 tokens * (key and value of one head of 32 in two bytes)
    assert memory.pop("kv_blocks") == 2 * 2 * 2 * 256 * 128
    # 2 banks * 2 requests * 3 layers * (128 channels * 3 rows in two bytes, 4 heads of 16 x 16 in four)
    assert memory.pop("states") == 2 * 2 * 3 * (768 + 4096)
    # 2 requests * 4 rows * 3 layers * (128 channels in two bytes, 4 decays + 32 of keys + 64 of deltas in four),
    # and 2 requests * 4 rows of 96 logits in four
    assert memory.pop("verify_staging") == 2 * 4 * 3 * (256 + 400) + 2 * 4 * 384
    # with dense checkpoints 4 states more of each of 3 layers for each of 2 requests, of one bank's size
    dense = builder.plan(tiny("modelopt"), ExportOptions(context_length=300, checkpoints="dense"), 2).memory
    assert dense["total"] - found.memory["total"] == 2 * 4 * 3 * (768 + 4096)
    assert dense["verify_staging"] - found.memory["verify_staging"] == 2 * 4 * 3 * (768 + 4096)
    assert sum(memory.values()) - 2 * memory["total"] == -memory["total"] and set(memory) == {"total"}
    assert memory["total"] == found.memory["weights"] + 262144 + 58368 + 18816


def test_memory_follows_what_is_asked_for(tiny: TinyFactory) -> None:
    folder = tiny("modelopt")
    plain = builder.plan(folder).memory
    assert plain["context_length"] == 512 and plain["kv_blocks"] == 2 * 2 * 256 * 128
    headless = builder.plan(folder, ExportOptions(mtp="off")).memory
    assert 2 * headless["kv_blocks"] == plain["kv_blocks"] and headless["weights"] < plain["weights"]
    # Without capture a step verifies nothing: one row of logits a request.
    assert builder.plan(folder, ExportOptions(checkpoints="off"), 3).memory["verify_staging"] == 3 * 384
    for part in ("kv_blocks", "states", "verify_staging"):
        assert builder.plan(folder, None, 5).memory[part] == 5 * plain[part]
    blocks = builder.plan(folder, ExportOptions(block_size=16, context_length=17)).memory["kv_blocks"]
    assert blocks == 2 * 2 * 16 * 128


# A large one


HIDDEN, INNER, VOCAB, LAYERS = 5120, 17408, 248320, 64
KEY_WIDTH, VALUE_WIDTH, CHANNELS = 16 * 128, 48 * 128, 2 * 16 * 128 + 48 * 128
Entry = tuple[str, str, tuple[int, ...]]
SIZES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}


def lookalike(folder: Path) -> Path:
    """A checkpoint of the geometry of Qwen3.8-27B in compressed-tensors' layout, as sparse files that hold no value.

    FP8 with a scale a channel: mixers, LM head, the last 8 MLPs. NVFP4: the other MLPs. The rest is BF16.
    """
    folder.mkdir()
    entries = list(_large_tensors())
    half = len(entries) // 2
    shards = {"a.safetensors": entries[:half], "b.safetensors": entries[half:]}
    for name, tensors in shards.items():
        _write_sparse(folder / name, tensors)
    weight_map = {tensor: name for name, tensors in shards.items() for tensor, _, _ in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(_large_config()))
    return folder


def _write_sparse(path: Path, tensors: list[Entry]) -> None:
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + SIZES[dtype] * int(np.prod(shape))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw)
    os.truncate(path, 8 + len(raw) + end)


def _large_tensors() -> Iterator[Entry]:
    def plain(name: str, *shape: int) -> Iterator[Entry]:
        yield f"{name}.weight", "BF16", shape

    def fp8(name: str, rows: int, columns: int) -> Iterator[Entry]:
        yield f"{name}.weight", "F8_E4M3", (rows, columns)
        yield f"{name}.weight_scale", "BF16", (rows, 1)

    def nvfp4(name: str, rows: int, columns: int) -> Iterator[Entry]:
        yield f"{name}.weight_packed", "U8", (rows, columns // 2)
        yield f"{name}.weight_scale", "F8_E4M3", (rows, columns // 16)
        yield f"{name}.weight_global_scale", "F32", (1,)
        yield f"{name}.input_global_scale", "F32", (1,)

    def layer(name: str, attention: bool, linear: Any, mlp: Any) -> Iterator[Entry]:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield from plain(f"{name}.{norm}", HIDDEN)
        for part, rows, columns in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            yield from mlp(f"{name}.mlp.{part}_proj", rows, columns)
        if attention:
            for part, rows in (("q", 2 * 24 * 256), ("k", 4 * 256), ("v", 4 * 256)):
                yield from linear(f"{name}.self_attn.{part}_proj", rows, HIDDEN)
                if part != "v":
                    yield from plain(f"{name}.self_attn.{part}_norm", 256)
            yield from linear(f"{name}.self_attn.o_proj", HIDDEN, 24 * 256)
            return
        yield from linear(f"{name}.linear_attn.in_proj_qkv", CHANNELS, HIDDEN)
        yield from linear(f"{name}.linear_attn.in_proj_z", VALUE_WIDTH, HIDDEN)
        yield from linear(f"{name}.linear_attn.out_proj", HIDDEN, VALUE_WIDTH)
        for gate in "ab":
            yield from plain(f"{name}.linear_attn.in_proj_{gate}", 48, HIDDEN)
            yield f"{name}.linear_attn.{'A_log' if gate == 'a' else 'dt_bias'}", "BF16", (48,)
        yield from plain(f"{name}.linear_attn.conv1d", CHANNELS, 1, 4)
        yield from plain(f"{name}.linear_attn.norm", 128)

    text = "model.language_model"
    yield from plain(f"{text}.embed_tokens", VOCAB, HIDDEN)
    for i in range(LAYERS):
        yield from layer(f"{text}.layers.{i}", i % 4 == 3, fp8, fp8 if i >= LAYERS - 8 else nvfp4)
    yield from plain(f"{text}.norm", HIDDEN)
    yield from fp8("lm_head", VOCAB, HIDDEN)
    yield from plain("mtp.fc", HIDDEN, 2 * HIDDEN)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield from plain(f"mtp.{norm}", HIDDEN)
    yield from layer("mtp.layers.0", True, plain, plain)


def _large_config() -> Config:
    last = "|".join(map(str, range(LAYERS - 8, LAYERS)))
    mixers = r"re:.*(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj))$"
    groups = {
        "group_0": {
            "format": "float-quantized",
            "targets": [mixers, "lm_head", rf"re:.*layers\.({last})\.mlp\.\w+_proj$"],
        },
        "group_1": {
            "format": "nvfp4-pack-quantized",
            "targets": [rf"re:.*layers\.(?!({last})\.)\d+\.mlp\.\w+_proj$"],
        },
    }
    text = {
        "model_type": "qwen3_5_text",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "vocab_size": VOCAB,
        "num_hidden_layers": LAYERS,
        "full_attention_interval": 4,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    }
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    ignore = [r"re:.*in_proj_[ab]$", r"re:^mtp\..*"]
    return {"model_type": "qwen3_5", "text_config": text, "quantization_config": {**section, "ignore": ignore}}


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lookalike(tmp_path_factory.mktemp("large") / "27b")


def test_a_large_checkpoints_plan(large: Path) -> None:
    assert sum(path.stat().st_size for path in large.iterdir()) > 22 * 10**9
    assert sum(path.stat().st_blocks * 512 for path in large.iterdir()) < 10 * MEGABYTE
    found = builder.plan(large)
    assert found.graphs["target"].matmuls == {"nvfp4": 168, "fp8": 233, "float": 96}
    assert found.graphs["target"].layers == {"full_attention": 16, "linear_attention": 48}
    assert found.graphs["mtp"].matmuls == {"nvfp4": 0, "fp8": 1, "float": 8}
    assert found.graphs["target"].dequantized == {} and found.warnings == []
    assert found.skipped_tensors == {"vision": 0, "activation_scales": 168, "kv_scales": 0, "mtp": 0, "unclaimed": 0}
    # Embedding in two bytes, LM head in one, its channels' scales as float32.
    shared = VOCAB * HIDDEN * 3 + VOCAB * 4
    assert found.weights["shared_bytes"] == shared and abs(shared - 3815 * MEGABYTE) < 2 * MEGABYTE


def test_a_large_models_memory(large: Path) -> None:
    """Eight requests of 32,768 tokens."""
    memory = builder.plan(large, ExportOptions(context_length=32768), 8).memory
    # 16 layers and the head's * 8 * 32,768 tokens * (key and value of 4 heads of 256 in two bytes)
    assert memory["kv_blocks"] == 17 * 8 * 32768 * 2 * 4 * 256 * 2
    assert memory["states"] == 2 * 8 * 48 * (CHANNELS * 3 * 2 + 48 * 128 * 128 * 4)
    captured = CHANNELS * 2 + (48 + KEY_WIDTH + VALUE_WIDTH) * 4
    assert memory["verify_staging"] == 8 * 4 * 48 * captured + 8 * 4 * VOCAB * 4
    stored = sum(SIZES[dtype] * int(np.prod(shape)) for name, dtype, shape in _large_tensors() if "input_" not in name)
    # What is transformed grows: norms, decays and channel scales to float32; and there are rotary tables.
    assert stored < memory["weights"] < stored + 40 * MEGABYTE


MEASURED = """
import json, re, sys, time
import builder
builder.plan(sys.argv[1])
peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1])
print(json.dumps([time.process_time(), peak / 1000]))
"""
"""The peak that getrusage gives is also that of the process it was started from."""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak is read from /proc")
def test_a_large_plan_is_quick_and_small(large: Path) -> None:
    """Under 2 seconds and 300 MB for 22 GB, imports included; of processor time, as machines of tests are shared."""
    arguments = [sys.executable, "-c", MEASURED, str(large)]
    run = subprocess.run(arguments, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    seconds, megabytes = json.loads(run.stdout)
    assert 0 < seconds < 2 and 10 < megabytes < 300
