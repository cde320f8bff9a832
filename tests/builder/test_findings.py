"""What values tell: every figure is counted by the oracle in float64, or put there by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import builder
from builder import findings
from builder.checkpoint import Checkpoint, TensorRef
from builder.config import parse_config
from builder.findings import streaming
from builder.quant.tensors import Fp8
from builder.source import read_source
from fixtures.writer import BF16, E4M3, Config, Dialect, Tensors, Tiny
from tests.builder import oracle
from tests.conftest import TinyFactory

QKV = "model.layers.0.linear_attn.in_proj_qkv"
GATE = "model.layers.1.mlp.gate_proj"
KEYS = slice(32, 64)
"""Rows of the tiny in_proj_qkv [128, 64]: 32 of queries, 32 of keys, 64 of values."""


def packed_name(dialect: Dialect) -> str:
    return "weight" if dialect == "modelopt" else "weight_packed"


def zero_rows(found: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """ "module part" to (zero, rows)."""
    return {
        f"{entry['module']} {entry['part']}".strip(): (entry["zero"], entry["rows"]) for entry in found["zero_rows"]
    }


# --- rows of zeros


def test_dead_keys_are_found_though_most_of_the_weight_lives(tiny: TinyFactory) -> None:
    """Case A21: all keys of layer 0 flushed to zero of either sign are a quarter of in_proj_qkv's rows."""

    def flush(tensors: Tensors, _: Config) -> None:
        codes = tensors[f"{QKV}.weight"].view(np.uint8)
        codes[KEYS] = np.where(np.arange(64) % 2, 0x00, 0x80)

    found = builder.inspect(tiny(edit=flush))
    assert zero_rows(found) == {QKV: (32, 128), f"{QKV} k": (32, 32)}
    assert next(m["zero_rows"] for m in found["modules"] if m["module"] == QKV) == 0.25
    (line,) = found["warnings"]
    assert "100%" in line and f"{QKV} with 32 of 32" in line and ".N.linear_attn.in_proj_qkv k" in line


@pytest.mark.parametrize("kind", ["codes", "scales"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("rows", "flagged"), [(48, False), (49, True)])
def test_more_than_half_of_the_rows_is_flagged(
    tiny: TinyFactory, dialect: Dialect, kind: str, rows: int, flagged: bool
) -> None:
    """An NVFP4 row is zero where its codes are, and where its block scales are."""

    def flush(tensors: Tensors, _: Config) -> None:
        if kind == "codes":
            tensors[f"{GATE}.{packed_name(dialect)}"][:rows] = 0x80  # 0 and -0
        else:
            tensors[f"{GATE}.weight_scale"].view(np.uint8)[:rows] = 0

    folder = tiny(dialect, edit=flush)
    weight = oracle.weight(oracle.read_checkpoint(folder), GATE)
    found = builder.inspect(folder)
    assert zero_rows(found) == {GATE: (int((weight == 0).all(axis=1).sum()), 96)} == {GATE: (rows, 96)}
    assert any("more than half" in line for line in found["warnings"]) == flagged


def test_a_row_must_be_zero_in_every_block(tiny: TinyFactory) -> None:
    def flush(tensors: Tensors, _: Config) -> None:
        codes = tensors[f"{GATE}.weight"]
        codes[0, 8:], codes[0, :8] = 0, 0x11  # the first block alone lives
        codes[1] = 0
        codes[1, -1] = 0x10  # the last code alone lives

    assert builder.inspect(tiny(edit=flush))["zero_rows"] == []


def test_the_fractions_are_those_of_the_dequantized_weights(real_checkpoint: Path) -> None:
    tensors = oracle.read_checkpoint(real_checkpoint)
    for module in builder.inspect(real_checkpoint)["modules"]:
        weight = oracle.weight(tensors, module["module"])
        assert module["zero_rows"] == (weight == 0).all(axis=1).mean()


def test_query_and_gate_rows_are_told_apart(tiny: TinyFactory) -> None:
    """Each head of q_proj has 32 rows of query, then 32 of gate."""

    def flush(tensors: Tensors, _: Config) -> None:
        tensors["model.layers.3.self_attn.q_proj.weight"].reshape(2, 2, 32, 64)[:, 1] = 0

    name = "model.layers.3.self_attn.q_proj"
    assert zero_rows(builder.inspect(tiny(edit=flush))) == {name: (64, 128), f"{name} gate": (64, 64)}


def test_weights_that_are_no_linears_are_read_too(tiny: TinyFactory) -> None:
    def flush(tensors: Tensors, _: Config) -> None:
        tensors["model.embed_tokens.weight"][:60] = 0
        tensors["model.layers.2.linear_attn.conv1d.weight"][:3] = 0
        tensors["model.layers.2.input_layernorm.weight"][:] = 0  # where every norm starts

    found = builder.inspect(tiny(edit=flush))
    assert zero_rows(found) == {"model.embed_tokens": (60, 96), "model.layers.2.linear_attn.conv1d": (3, 128)}
    assert len(found["warnings"]) == 1 and "62%" in found["warnings"][0]


def test_chunks_change_nothing(tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor in pieces of one row, down to the last one."""

    def flush(tensors: Tensors, config: Config) -> None:
        tensors[f"{GATE}.weight"][-1] = 0
        tensors["model.embed_tokens.weight"][-1, -1] = np.nan
        config["tie_word_embeddings"] = True

    folder = tiny(edit=flush)
    whole = builder.inspect(folder)
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 1)
    assert builder.inspect(folder) == whole
    assert zero_rows(whole) == {GATE: (1, 96)} and whole["not_finite"] == {"model.embed_tokens.weight": 1}


def test_no_read_is_larger_than_a_chunk(tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not grow with the checkpoint: no piece is larger than a chunk, or than one row."""
    sizes: list[int] = []
    read = TensorRef.read
    monkeypatch.setattr(TensorRef, "read", lambda ref: (sizes.append(ref.nbytes), read(ref))[1])
    monkeypatch.setattr(streaming, "CHUNK_BYTES", 512)
    folder = tiny("compressed-tensors")
    builder.inspect(folder)
    assert max(sizes) == 512 and sum(sizes) > 100_000


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_float_weight_that_is_no_number(tiny: TinyFactory, dtype: Any, value: float) -> None:
    def spoil(tensors: Tensors, _: Config) -> None:
        weight = tensors["mtp.fc.weight"].astype(dtype)
        weight[3, 5] = weight[9, 0] = value
        weight[4, :] = np.finfo(np.float16).max if dtype == np.float16 else 3e38  # large is not infinite
        tensors["mtp.fc.weight"] = weight

    found = builder.inspect(tiny(edit=spoil))
    assert found["not_finite"] == {"mtp.fc.weight": 2}
    assert "mtp.fc.weight (2 rows)" in found["warnings"][0]


def test_an_fp8_weight_that_is_no_number(tiny: TinyFactory) -> None:
    def spoil(tensors: Tensors, _: Config) -> None:
        codes = tensors[f"{QKV}.weight"].view(np.uint8)
        codes[7, 0], codes[8, 1], codes[9] = 0x7F, 0xFF, 0xFE  # NaN, -NaN, and -448

    assert builder.inspect(tiny(edit=spoil))["not_finite"] == {f"{QKV}.weight": 2}


# --- scales


@pytest.mark.parametrize(
    ("value", "word"), [(0.0, "1 zero"), (np.nan, "1 NaN"), (-1.0, "1 negative"), (np.inf, "1 infinite")]
)
def test_a_damaged_scale_is_described_and_what_export_says_of_it(tiny: TinyFactory, value: float, word: str) -> None:
    def spoil(tensors: Tensors, _: Config) -> None:
        tensors[f"{QKV}.weight_scale"] = np.array(value, np.float32)

    found = builder.inspect(tiny(edit=spoil))
    assert [entry["tensor"] for entry in found["scales"]["odd"]] == [f"{QKV}.weight_scale"]
    assert any(word in line and f"{QKV}.weight_scale" in line for line in found["warnings"])
    assert any("export refuses 1 modules" in line and "a finite scale above 0" in line for line in found["warnings"])


def test_block_scales_are_counted(tiny: TinyFactory) -> None:
    """A 0 or NaN over zeros is harmless; over other codes it loses them, and a negative one is refused."""

    def spoil(tensors: Tensors, _: Config) -> None:
        codes, scales = tensors[f"{GATE}.weight"], tensors[f"{GATE}.weight_scale"].view(np.uint8)
        codes[:] = 0x11
        codes[0] = 0
        scales[:] = 0x38
        scales[0] = [0x00, 0x00, 0x7F, 0xFF]  # over zeros
        scales[1] = [0x00, 0x80, 0x7F, 0x81]  # over ones

    scales = builder.inspect(tiny(edit=spoil))["scales"]
    (odd,) = scales["odd"]
    assert (odd["values"], odd["zero"], odd["nan"], odd["negative"], odd["lost"]) == (96 * 4, 4, 3, 1, 3)
    assert (scales["zero"], scales["nan"]) == (4, 3)


def test_what_block_scales_are_worth_a_warning(tiny: TinyFactory) -> None:
    def zeros(tensors: Tensors, _: Config) -> None:
        tensors[f"{GATE}.weight"][0] = 0
        tensors[f"{GATE}.weight_scale"].view(np.uint8)[0] = 0

    def clamped(tensors: Tensors, config: Config) -> None:
        zeros(tensors, config)
        tensors[f"{GATE}.weight_scale"].view(np.uint8)[0, :2] = 0x7F

    def lost(tensors: Tensors, _: Config) -> None:
        tensors[f"{GATE}.weight"][0] = 0x11
        tensors[f"{GATE}.weight_scale"].view(np.uint8)[0] = 0

    assert builder.inspect(tiny(edit=zeros))["warnings"] == []
    assert [line[:35] for line in builder.inspect(tiny(edit=clamped))["warnings"]] == [
        "2 block scales are NaN over blocks "
    ]
    assert [line[:35] for line in builder.inspect(tiny(edit=lost))["warnings"]] == [
        "4 block scales are 0 or NaN over we"
    ]


def test_exponents_are_read_as_exponents(tiny: TinyFactory) -> None:
    """An MXFP4 scale byte of 0 is 2 ** -127, not 0; 255 is NaN."""

    def mxfp4(tensors: Tensors, config: Config) -> None:
        del tensors[f"{GATE}.weight_scale_2"], tensors[f"{GATE}.input_scale"]
        tensors[f"{GATE}.weight_scale"] = np.zeros((96, 2), np.uint8)
        tensors[f"{GATE}.weight_scale"][5, 1] = 255
        tensors[f"{GATE}.weight"][2] = 0
        del config["quantization_config"]

    found = builder.inspect(tiny(edit=mxfp4))
    (odd,) = found["scales"]["odd"]
    assert (odd["tensor"], odd["values"], odd["zero"], odd["nan"]) == (f"{GATE}.weight_scale", 192, 0, 1)
    assert zero_rows(found) == {GATE: (1, 96)}


# --- norms


def converted(tensors: Tensors, _: Config) -> None:
    """1 added to every norm but the plain one."""
    for name, weight in tensors.items():
        if "norm" in name and "linear_attn.norm" not in name:
            tensors[name] = (weight.astype(np.float32) + 1).astype(BF16)


def test_norm_means_are_those_of_the_stored_weights(real_checkpoint: Path) -> None:
    """Means over all layers of a role, counted again in float64; the plain norm of linear attention apart."""
    tensors = oracle.read_checkpoint(real_checkpoint)
    found = builder.inspect(real_checkpoint)["norms"]
    assert found["convention"] == "1 + w" and found["conv_layouts"] == ["C,1,K"]
    for role in ("input_layernorm", "linear_attn.norm", "self_attn.q_norm"):
        own = [raw.values() for name, raw in tensors.items() if name.endswith(f"{role}.weight") and name[:3] != "mtp"]
        assert found["means"][role] == pytest.approx(np.concatenate(own).mean(), abs=1e-12)
    assert found["means"]["mtp.norm"] == pytest.approx(tensors["mtp.norm.weight"].values().mean(), abs=1e-12)
    assert 0.8 < found["means"]["linear_attn.norm"] < 1.1


def test_trained_final_norms_are_no_sign(trained_checkpoint: Path) -> None:
    """Case A26: their mean of 1 + w lies near 1.85 and is right."""
    found = builder.inspect(trained_checkpoint)
    assert found["norms"]["means"]["norm"] > 0.8 and found["norms"]["means"]["mtp.norm"] > 0.8
    assert found["norms"]["convention"] == "1 + w" and found["warnings"] == []


@pytest.mark.parametrize("mtp", [True, False])
def test_norms_with_1_already_added_warn(tiny: TinyFactory, mtp: bool) -> None:
    """Whether there is a head says nothing; the published layout of the convolution beside them makes it unclear."""
    found = builder.inspect(tiny(options=Tiny(mtp=mtp), edit=converted))
    lines = [line for line in found["warnings"] if "1 was already added" in line]
    assert len(lines) == 1 + mtp and lines[0].startswith("the layers' norm weights")
    assert found["norms"]["convention"] == "unclear"


def test_each_group_of_norms_is_judged_by_itself(tiny: TinyFactory) -> None:
    def head_only(tensors: Tensors, config: Config) -> None:
        head = {name: array for name, array in tensors.items() if name.startswith("mtp.")}
        converted(head, config)
        tensors |= head

    found = builder.inspect(tiny(edit=head_only))
    assert [line.partition(" norm weights")[0] for line in found["warnings"]] == ["the MTP head's"]
    assert found["norms"]["convention"] == "unclear"


def test_a_converters_whole_signature(tiny: TinyFactory) -> None:
    """Convolutions [C, K, 1] and norms around 1: evidence can be asked before the shape is refused."""

    def mlx(tensors: Tensors, config: Config) -> None:
        converted(tensors, config)
        for name in [name for name in tensors if name.endswith("conv1d.weight")]:
            tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))

    evidence = findings.norm_evidence(Checkpoint(tiny(edit=mlx)))
    assert evidence.convention == "w" and evidence.conv_layouts == ["C,K,1"]
    assert len(findings.norm_warnings(Checkpoint(tiny(edit=mlx)))) == 3
    assert findings.norm_warnings(Checkpoint(tiny())) == []


def test_a_mean_that_is_no_number_is_null(tiny: TinyFactory) -> None:
    def spoil(tensors: Tensors, _: Config) -> None:
        tensors["model.norm.weight"][0] = np.nan

    found = builder.inspect(tiny(edit=spoil))
    assert found["norms"]["means"]["norm"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["not_finite"] == {"model.norm.weight": 1}


@pytest.mark.filterwarnings("error")
def test_numbers_of_any_kind_are_read_without_a_warning(tiny: TinyFactory) -> None:
    """Signalling NaN, and infinities of both signs in one sum."""

    def spoil(tensors: Tensors, config: Config) -> None:
        norm = np.zeros(64, np.float32)
        norm.view(np.uint32)[:2] = 0x7F800001, 0xFF800001
        tensors["model.norm.weight"] = norm
        tensors["mtp.norm.weight"] = np.tile(np.array([np.inf, -np.inf], np.float32), 32)
        tensors["model.layers.3.self_attn.k_scale"] = norm[:1]
        tensors["model.layers.3.self_attn.v_scale"] = norm[:2].astype(np.float16)
        config["tie_word_embeddings"] = True
        tensors["model.embed_tokens.weight"].view(np.uint16)[0, :2] = 0x7F81, 0xFF81
        del config["quantization_config"]

    with np.errstate(all="ignore"):
        folder = tiny(edit=spoil)
    found = builder.inspect(folder)
    assert found["norms"]["means"]["norm"] is None and found["norms"]["means"]["mtp.norm"] is None
    assert found["ties"]["max_difference"] is None and len(found["kv_scales"]["odd"]) == 2
    assert json.loads(json.dumps(found, allow_nan=False)) == found


# --- KV scales (case A19)


def kv(names: list[str], value: float = 0.0096, declared: bool = True) -> Any:
    def edit(tensors: Tensors, config: Config) -> None:
        for name in names:
            tensors[name] = np.array(value, np.float32)
        if declared:
            config["quantization_config"]["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}

    return edit


ATTENTION = "model.layers.3.self_attn"
MODELOPT_PAIR = [f"{ATTENTION}.k_proj.k_scale", f"{ATTENTION}.v_proj.v_scale"]
CT_PAIR = [f"{ATTENTION}.k_scale", f"{ATTENTION}.v_scale"]


@pytest.mark.parametrize(
    ("names", "spelling"), [(MODELOPT_PAIR, "self_attn.k_proj.k_scale"), (CT_PAIR, "self_attn.k_scale")]
)
def test_kv_scales_are_found_under_either_spelling(tiny: TinyFactory, names: list[str], spelling: str) -> None:
    found = builder.inspect(tiny(edit=kv(names)))
    kv_scales = found["kv_scales"]
    assert found["warnings"] == [] and found["skipped_tensors"]["kv_scales"] == 2
    assert (kv_scales["scales"], kv_scales["pairs"], kv_scales["missing"]) == (2, [3], [])
    assert kv_scales["spellings"] == [spelling] and kv_scales["declared"]["config.json"] == "float 8"
    assert kv_scales["minimum"] == kv_scales["maximum"] == float(np.float32(0.0096)) and not kv_scales["all_one"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (kv([]), "declared float 8 but no KV scales are stored"),
        (kv(CT_PAIR, declared=False), "2 KV scales are stored but no configuration declares"),
        (kv(CT_PAIR, 1.0), "all 2 KV scales are exactly 1.0"),
        (kv(CT_PAIR[:1]), "for 0 of 1 full-attention layers; not layer 3"),
        (
            kv([*CT_PAIR, "mtp.layers.0.self_attn.k_scale"]),
            "1 KV scales outside the target's full-attention layers: mtp.",
        ),
        (
            kv([*CT_PAIR, "model.layers.0.self_attn.k_scale"]),
            "outside the target's full-attention layers: model.layers.0",
        ),
        (
            kv([*CT_PAIR, f"{ATTENTION}.k_proj.v_scale"]),
            f"outside the target's full-attention layers: {ATTENTION}.k_proj",
        ),
        (kv([*CT_PAIR, *MODELOPT_PAIR]), "more than one spelling"),
        (kv(CT_PAIR, 0.0), "2 KV scales are not positive finite numbers"),
        (kv(CT_PAIR, np.nan), "2 KV scales are not positive finite numbers"),
    ],
)
def test_odd_kv_scales_are_named(tiny: TinyFactory, edit: Any, words: str) -> None:
    lines = builder.inspect(tiny(edit=edit))["warnings"]
    assert len(lines) == 1 and words in lines[0]


def test_only_hf_quant_config_may_declare_the_kv_cache(tiny: TinyFactory) -> None:
    folder = tiny(edit=kv(MODELOPT_PAIR, declared=False))
    document = json.loads((folder / "hf_quant_config.json").read_text())
    document["quantization"]["kv_cache_quant_algo"] = "FP8"
    document["quantization"].pop("kv_cache_scheme", None)
    (folder / "hf_quant_config.json").write_text(json.dumps(document))
    found = builder.inspect(folder)
    assert found["kv_scales"]["declared"] == {"hf_quant_config.json": "FP8"} and found["warnings"] == []


# --- ties (case A29)


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("head", ["float", "fp8", "fp8 rows", "fp8 blocks", "nvfp4"])
def test_a_stored_head_that_is_declared_tied(tiny: TinyFactory, dialect: Dialect, head: str) -> None:
    """The largest difference is that of the dequantized weights, in float64."""

    def tie(tensors: Tensors, config: Config) -> None:
        config["tie_word_embeddings"] = True
        for name in [name for name in tensors if name.startswith("lm_head.")]:
            if head == "float" or name != "lm_head.weight":
                del tensors[name]
        rng = np.random.default_rng(5)
        scales = {"fp8": (1,), "fp8 rows": (96, 1), "fp8 blocks": (1, 1)}
        if head == "float":
            tensors["lm_head.weight"] = rng.standard_normal((96, 64)).astype(BF16)
        elif head == "nvfp4":
            tensors["lm_head.weight"] = rng.integers(0, 256, (96, 32), np.uint8)
            tensors["lm_head.weight_scale"] = rng.uniform(0.5, 4, (96, 4)).astype(E4M3)
            tensors["lm_head.weight_scale_2"] = np.array(0.125, np.float32)
        else:
            tensors["lm_head.weight_scale"] = rng.uniform(0.5, 4, scales[head]).astype(np.float32)

    folder = tiny(dialect, edit=tie)
    tensors = oracle.read_checkpoint(folder)
    difference = np.abs(oracle.weight(tensors, "lm_head") - tensors["model.embed_tokens.weight"].values()).max()
    found = builder.inspect(folder)
    assert found["ties"]["max_difference"] == pytest.approx(difference, rel=1e-6)
    assert not found["ties"]["tied"] and found["ties"]["lm_head_stored"]
    assert any(f"differ by up to {found['ties']['max_difference']:g}" in line for line in found["warnings"])


def test_differences_are_found_past_the_first_block_of_rows(tmp_path: Path) -> None:
    """Three blocks of 128 rows and a rest, in pieces of 128 rows: each piece meets its own scales."""
    rng = np.random.default_rng(6)
    weight = rng.standard_normal((400, 256)).astype(E4M3)
    scale = rng.uniform(0.5, 2, (4, 1, 2, 1)).astype(np.float32)
    other = np.zeros((400, 256), BF16)
    other[399, 255] = 1000
    paths = {name: tmp_path / name for name in ("weight", "scale", "other")}
    for name, array in (("weight", weight), ("scale", scale), ("other", other)):
        paths[name].write_bytes(array.tobytes())
    refs = {
        "weight": TensorRef("weight", paths["weight"], "F8_E4M3", weight.shape, 0, weight.nbytes),
        "scale": TensorRef("scale", paths["scale"], "F32", scale.shape, 0, scale.nbytes),
        "other": TensorRef("other", paths["other"], "BF16", other.shape, 0, other.nbytes),
    }
    stored = oracle.Raw("F8_E4M3", weight.shape, weight.tobytes()), oracle.Raw("F32", scale.shape, scale.tobytes())
    expected = oracle.linear({"weight": stored[0], "weight_scale": stored[1]}) - other.astype(np.float64)
    fp8 = Fp8(refs["weight"], refs["scale"], (128, 128))
    seen: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "CHUNK_BYTES", 1)
        found = findings.max_difference(fp8, refs["other"], lambda task, done, total: seen.append(done))
    assert seen == [128, 256, 384, 400]
    assert found == pytest.approx(np.abs(expected).max(), rel=1e-6)
    assert findings.max_difference(fp8, refs["other"]) == found


def test_an_identical_head_differs_by_nothing(tiny: TinyFactory) -> None:
    def same(tensors: Tensors, config: Config) -> None:
        config["tie_word_embeddings"] = True
        for name in [name for name in tensors if name.startswith("lm_head.")]:
            del tensors[name]
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    assert builder.inspect(tiny(edit=same))["ties"]["max_difference"] == 0


def test_tie_flags_of_both_levels(tiny: TinyFactory) -> None:
    """Top false, text true, and no head: tied, as stored."""

    def split(_: Tensors, config: Config) -> None:
        config["tie_word_embeddings"] = False

    found = builder.inspect(tiny(options=Tiny(tied=True, vision=True), edit=split))
    assert found["ties"] == {
        "declared": {"config.json": False, "config.json text_config": True},
        "lm_head_stored": False,
        "tied": True,
        "max_difference": None,
    }
    assert [line for line in found["warnings"] if "tie_word_embeddings differs" in line]


# --- progress


def test_progress_counts_every_byte_once(tiny: TinyFactory) -> None:
    folder = tiny()
    checkpoint = Checkpoint(folder)
    source = read_source(checkpoint, "auto", read_values=False)
    seen: list[tuple[str, int, int]] = []
    builder.inspect(folder, lambda *report: seen.append(report))
    assert seen == sorted(seen, key=lambda report: report[1]) and {report[0] for report in seen} == {"reading values"}
    assert seen[-1][1] == seen[-1][2] == sum(ref.nbytes for ref in checkpoint.values())
    assert parse_config(checkpoint.config) == source.config


def test_tallies_take_any_tensor(tmp_path: Path) -> None:
    """Shapes and types nobody expects of a scale: counted, without an error."""
    cases = {
        "F64": np.array([[1e300, -1e300], [np.nan, 0]]),
        "I8": np.array([-1, 0, 5], np.int8),
        "BOOL": np.array(True),
        "F8_E5M2": np.array([np.inf, 1]).astype(ml_dtypes.float8_e5m2),
        "F32": np.zeros((0, 4), np.float32),
    }
    tallies = {}
    for dtype, array in cases.items():
        (tmp_path / dtype).write_bytes(array.tobytes())
        tallies[dtype] = findings.tally_scale(TensorRef(dtype, tmp_path / dtype, dtype, array.shape, 0, array.nbytes))
    counts = {name: (t.values, t.zero, t.negative, t.nan, t.infinite) for name, t in tallies.items()}
    assert counts == {
        "F64": (4, 1, 1, 1, 0),
        "I8": (3, 1, 1, 0, 0),
        "BOOL": (1, 0, 0, 0, 0),
        "F8_E5M2": (2, 0, 0, 0, 1),
        "F32": (0, 0, 0, 0, 0),
    }
