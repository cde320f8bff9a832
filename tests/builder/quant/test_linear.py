"""The bytes decide a module's format; what no op can take is refused by tensor name, before anything is written."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import builder
from builder.checkpoint import Checkpoint
from builder.errors import Refused
from builder.quant.tensors import dequantize
from builder.source import read_source
from fixtures.writer import BF16, E4M3, Config, Dialect, Edit, Kind, Tensors, Tiny
from tests.builder import oracle
from tests.conftest import TinyFactory

GATE = "model.layers.1.mlp.gate_proj"
QUERY = "model.layers.3.self_attn.q_proj"
DECAY = "model.layers.0.linear_attn.in_proj_a"


def refusal(folder: Path) -> str:
    """What export says about the checkpoint; no output may appear, not even for a moment's failure."""
    out = folder.parent / "package"
    with pytest.raises(Refused) as caught:
        builder.export(folder, out)
    assert not out.exists()
    assert not list(folder.parent.glob(".partial-*"))
    return str(caught.value)


def setting(name: str, value: object, index: int | None = None) -> Edit:
    """Sets one element of a tensor, or all of them."""

    def edit(tensors: Tensors, config: Config) -> None:
        tensors[name].reshape(-1)[slice(None) if index is None else index] = value

    return edit


def replacing(name: str, array: np.ndarray) -> Edit:
    return lambda tensors, config: tensors.update({name: array})


BAD_SCALES = [0.0, -1.0, np.inf, -np.inf, np.nan]


@pytest.mark.parametrize("value", BAD_SCALES)
@pytest.mark.parametrize(
    ("dialect", "options", "name", "index"),
    [
        ("compressed-tensors", Tiny(), f"{GATE}.weight_global_scale", 0),
        ("modelopt", Tiny(), f"{GATE}.weight_scale_2", 0),
        ("modelopt", Tiny(), f"{QUERY}.weight_scale", 0),
        ("modelopt", Tiny(fp8_per_channel=True), f"{QUERY}.weight_scale", 77),
        ("compressed-tensors", Tiny(fp8_per_channel=True), f"{QUERY}.weight_scale", 127),
        ("compressed-tensors", Tiny(), "lm_head.weight_scale", 0),
        ("modelopt", Tiny(gates="fp8"), f"{DECAY}.weight_scale", 0),
    ],
)
def test_a_scale_that_is_not_a_positive_number_is_refused(
    tiny: TinyFactory, dialect: Dialect, options: Tiny, name: str, index: int, value: float
) -> None:
    message = refusal(tiny(dialect, options, setting(name, value, index)))
    assert f"tensor {name} at {index}:" in message
    assert f"found {value}" in message


def test_a_divisor_whose_reciprocal_overflows_is_refused(tiny: TinyFactory) -> None:
    message = refusal(tiny("compressed-tensors", edit=setting(f"{GATE}.weight_global_scale", 1e-40)))
    assert f"tensor {GATE}.weight_global_scale at 0: expected a divisor with a finite reciprocal" in message


@pytest.mark.parametrize(("byte", "found"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0xFE, "negative")])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_bad_block_scale_is_named_by_row_and_block(
    tiny: TinyFactory, dialect: Dialect, byte: int, found: str
) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        tensors[f"{GATE}.weight_scale"].view(np.uint8)[41, 2] = byte

    message = refusal(tiny(dialect, edit=edit))
    assert f"tensor {GATE}.weight_scale at [41, 2]:" in message and found in message


def test_a_zero_block_scale_is_a_zero_block(tiny: TinyFactory) -> None:
    folder = tiny("modelopt", edit=setting(f"{GATE}.weight_scale", 0, 5))
    assert read_source(Checkpoint(folder), "auto").warnings == []


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        # A quarter of the width; half of it is a block of 32.
        (f"{GATE}.weight_scale", np.ones((96, 1), E4M3), "F8_E4M3 [96, 4], found F8_E4M3 [96, 1]"),
        (f"{GATE}.weight_scale", np.ones((96, 3), E4M3), "F8_E4M3 [96, 4], found F8_E4M3 [96, 3]"),
        (f"{GATE}.weight_scale", np.ones((96, 8), E4M3), "F8_E4M3 [96, 4], found F8_E4M3 [96, 8]"),
        (f"{GATE}.weight_scale", np.ones((96, 4), np.uint8), "U8 or F8_E8M0 [96, 2], found U8 [96, 4]"),
        (f"{GATE}.weight_scale", np.ones((96, 4), np.float32), "F8_E4M3 [96, 4], found F32 [96, 4]"),
        (f"{GATE}.weight_scale_2", np.ones(2, np.float32), "F32 [] or [1], found F32 [2]"),
        (f"{GATE}.weight_scale_2", np.ones((), BF16), "F32 [] or [1], found BF16 []"),
        (f"{GATE}.weight", np.ones((96, 64), np.uint8), "U8 [96, 32], found U8 [96, 64]"),
        (f"{QUERY}.weight_scale", np.ones((2, 1), np.float32), "found F32 [2, 1]"),
        (f"{QUERY}.weight_scale", np.ones((1, 128), np.float32), "found F32 [1, 128]"),
        (f"{QUERY}.weight_scale", np.ones((1, 1, 2, 1), np.float32), "found F32 [1, 1, 2, 1]"),
        (f"{QUERY}.weight_scale", np.ones((128, 2), np.float32), "BF16 or F16 or F32 [1, 1]"),
        (f"{QUERY}.weight_scale", np.ones((), np.int8), "BF16 or F16 or F32"),
        # Exponents stand for blocks: one for a row is MXFP8 that lost the others.
        (f"{QUERY}.weight_scale", np.ones((), np.uint8), "[128, 2], found U8 []"),
        (f"{QUERY}.weight_scale", np.ones((128,), np.uint8), "[128, 2], found U8 [128]"),
        (f"{QUERY}.weight_scale", np.ones((128, 1), np.uint8), "[128, 2], found U8 [128, 1]"),
        (f"{QUERY}.weight_scale", np.ones((128, 3), np.uint8), "[128, 2], found U8 [128, 3]"),
        (f"{QUERY}.weight", np.ones((64, 128), E4M3), "F8_E4M3 [128, 64], found F8_E4M3 [64, 128]"),
        (f"{DECAY}.weight", np.ones((4, 32), BF16), "[4, 64], found BF16 [4, 32]"),
        (f"{DECAY}.weight", np.ones((4, 64), np.int8), "BF16 or F16 or F32 [4, 64], found I8 [4, 64]"),
        ("model.embed_tokens.weight", np.ones((95, 64), BF16), "[96, 64], found BF16 [95, 64]"),
        ("model.layers.2.linear_attn.A_log", np.ones(8, BF16), "[4], found BF16 [8]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_shape_or_type_is_refused(tiny: TinyFactory, name: str, array: np.ndarray, expected: str) -> None:
    message = refusal(tiny("modelopt", edit=replacing(name, array)))
    assert f"tensor {name}: " in message and expected in message


@pytest.mark.parametrize(
    ("dialect", "name"),
    [
        ("modelopt", f"{GATE}.weight"),
        ("modelopt", f"{GATE}.weight_scale"),
        ("modelopt", f"{GATE}.weight_scale_2"),
        ("compressed-tensors", f"{GATE}.weight_scale"),
        ("compressed-tensors", f"{GATE}.weight_global_scale"),
        ("modelopt", f"{QUERY}.weight_scale"),
        ("modelopt", "model.layers.0.input_layernorm.weight"),
        ("modelopt", "model.layers.3.self_attn.k_norm.weight"),
        ("modelopt", "model.layers.1.linear_attn.dt_bias"),
        ("modelopt", "model.norm.weight"),
        ("modelopt", "lm_head.weight"),
    ],
)
def test_a_missing_tensor_is_named(tiny: TinyFactory, dialect: Dialect, name: str) -> None:
    message = refusal(tiny(dialect, edit=lambda tensors, config: tensors.pop(name)))
    assert f"tensor {name}: " in message


@pytest.mark.parametrize("blocks", [3, 4])
def test_packed_rows_that_end_in_the_middle_of_a_block_are_refused(tiny: TinyFactory, blocks: int) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        config["intermediate_size"] = 60  # of which a row of scales has four, or three where it was rounded down
        for part in ("gate", "up"):
            module = f"model.layers.0.mlp.{part}_proj"
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"][:60].copy()
            tensors[f"{module}.weight_scale"] = tensors[f"{module}.weight_scale"][:60].copy()
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((64, 30), np.uint8)
        tensors["model.layers.0.mlp.down_proj.weight_scale"] = np.ones((64, blocks), E4M3)

    message = refusal(tiny("modelopt", edit=edit))
    assert "tensor model.layers.0.mlp.down_proj.weight: expected a multiple of 16 columns, found 60" in message


@pytest.mark.parametrize("leaf", ["pre_quant_scale", "svdquant_lora_a", "weight_zero_point"])
def test_weights_that_need_their_input_transformed_are_refused(tiny: TinyFactory, leaf: str) -> None:
    message = refusal(tiny("modelopt", edit=replacing(f"{GATE}.{leaf}", np.ones(64, BF16))))
    assert f"tensor {GATE}.{leaf}: " in message


@pytest.mark.parametrize(
    ("kind", "leaf"),
    [
        ("fp8", "weight_scale_2"),
        ("fp8", "weight_shape"),
        ("mxfp8", "weight_global_scale"),
        ("nvfp4", "weight_scale_inv"),
        ("nvfp4", "weight_global_scale"),
        ("mxfp4", "weight_scale_2"),
        ("float", "weight_scale"),
    ],
)
def test_a_tensor_beside_a_weight_that_cannot_belong_there_is_refused(tiny: TinyFactory, kind: Kind, leaf: str) -> None:
    """A second scale that went unread would leave every weight off by it."""
    message = refusal(tiny("modelopt", Tiny(projections=kind), replacing(f"{QUERY}.{leaf}", np.ones(1, np.float32))))
    assert f"tensor {QUERY}.{leaf}: expected no such tensor beside a {kind} weight, found one" in message


def test_a_packed_and_a_plain_weight_of_one_module_are_refused(tiny: TinyFactory) -> None:
    edit = replacing(f"{GATE}.weight", np.ones((96, 64), BF16))
    assert f"tensor {GATE}.weight: expected no such tensor" in refusal(tiny("compressed-tensors", edit=edit))


def test_two_scales_of_one_weight_are_refused(tiny: TinyFactory) -> None:
    message = refusal(tiny("modelopt", edit=replacing(f"{QUERY}.weight_scale_inv", np.ones((1, 1), np.float32))))
    assert f"tensor {QUERY}.weight_scale_inv: expected one scale, found weight_scale as well" in message


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("weight_scale", np.ones((128, 3), np.uint8), "[128, 2], found U8 [128, 3]"),
        ("weight_scale", np.ones((128, 2), E4M3), "found F8_E4M3 [128, 2]"),
        ("weight", np.ones((128, 64), np.uint8), "U8 [128, 32], found U8 [128, 64]"),
    ],
)
def test_a_wrong_shape_of_mxfp4_is_refused(tiny: TinyFactory, name: str, array: np.ndarray, expected: str) -> None:
    """E4M3 scales without a global one are no format at all."""
    folder = tiny("modelopt", Tiny(projections="mxfp4"), replacing(f"{QUERY}.{name}", array))
    message = refusal(folder)
    if array.dtype == E4M3:
        assert f"tensor {QUERY}.weight_scale_2: " in message
    else:
        assert f"tensor {QUERY}.{name}: " in message and expected in message


@pytest.mark.parametrize("kind", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("dtype", [np.uint8, ml_dtypes.float8_e8m0fnu], ids=["U8", "F8_E8M0"])
def test_exponent_255_is_refused_by_row_and_block_and_0_is_legal(tiny: TinyFactory, kind: Kind, dtype: type) -> None:
    name = f"{QUERY}.weight_scale"

    def edit(exponent: int) -> Edit:
        def change(tensors: Tensors, config: Config) -> None:
            tensors[name][41, 1] = exponent
            tensors[name] = tensors[name].view(dtype)

        return change

    message = refusal(tiny("modelopt", Tiny(projections=kind), edit(255)))
    assert f"tensor {name} at [41, 1]: expected a finite scale above 0, found nan" in message
    folder = tiny("modelopt", Tiny(projections=kind), edit(0))
    linears = read_source(Checkpoint(folder), "auto").linears
    expected = oracle.weight(oracle.read_checkpoint(folder), QUERY)
    assert np.array_equal(dequantize(linears[QUERY]), expected.astype(np.float32))
    assert 0 < np.abs(expected[41, 32:]).max() < 2.0**-100


def test_the_bytes_decide_and_the_method_name_does_not(tiny: TinyFactory) -> None:
    """The same layout under the other dialect's name, and under none, is read alike."""

    def renamed(tensors: Tensors, config: Config) -> None:
        config["quantization_config"] = {"quant_method": "compressed-tensors"}

    for edit in (renamed, lambda tensors, config: config.pop("quantization_config")):
        folder = tiny("modelopt", edit=edit)
        kinds = {module: tensor.kind for module, tensor in read_source(Checkpoint(folder), "auto").linears.items()}
        assert kinds[GATE] == "nvfp4" and kinds[QUERY] == "fp8" and kinds[DECAY] == "float"


def test_a_plain_weight_is_float_whatever_is_declared(tiny: TinyFactory) -> None:
    """mtp.fc is BF16 on disk in exports whose exclude list names the head's layer only."""

    def edit(tensors: Tensors, config: Config) -> None:
        config["quantization_config"]["quantized_layers"]["mtp.fc"] = {"quant_algo": "NVFP4"}

    source = read_source(Checkpoint(tiny("modelopt", edit=edit)), "auto")
    assert source.linears["mtp.fc"].kind == "float"
    assert source.warnings == ["1 modules are declared nvfp4 but stored as float (used as stored), the first mtp.fc"]


def test_any_linear_may_be_quantized(tiny: TinyFactory) -> None:
    """Community files pack the LM head, the gates or the head's own projections."""

    def edit(tensors: Tensors, config: Config) -> None:
        for module, other in (("lm_head", GATE), ("mtp.layers.0.mlp.up_proj", GATE), ("mtp.fc", None)):
            if other is None:
                tensors[f"{module}.weight"] = np.ones((64, 128), E4M3)
                tensors[f"{module}.weight_scale"] = np.ones((64,), np.float32)
            else:
                tensors |= {f"{module}.{leaf}": tensors[f"{other}.{leaf}"] for leaf in ("weight", "weight_scale")}
                tensors[f"{module}.weight_scale_2"] = tensors[f"{other}.weight_scale_2"]

    folder = tiny("modelopt", edit=edit)
    linears = read_source(Checkpoint(folder), "auto").linears
    assert [linears[name].kind for name in ("lm_head", "mtp.layers.0.mlp.up_proj", "mtp.fc")] == [
        "nvfp4",
        "nvfp4",
        "fp8",
    ]


def test_activation_scales_are_claimed_and_nothing_is_left_over(tiny: TinyFactory, real_checkpoint: Path) -> None:
    for folder in (tiny("modelopt"), tiny("compressed-tensors"), real_checkpoint):
        source = read_source(Checkpoint(folder), "auto")
        names = list(oracle.read_checkpoint(folder))
        inputs = [name for name in names if name.endswith(("input_scale", "input_global_scale"))]
        vision = [name for name in names if "visual" in name]
        assert source.skipped_counts == {
            "vision": len(vision),
            "activation_scales": len(inputs),
            "kv_scales": 0,
            "mtp": 0,
            "unclaimed": 0,
        }
        assert source.warnings == []


def test_a_tensor_of_no_module_is_reported(tiny: TinyFactory) -> None:
    name = f"{GATE}.weight_quantizer._double_scale"
    source = read_source(Checkpoint(tiny("modelopt", edit=replacing(name, np.ones(3, np.float32)))), "auto")
    assert source.skipped["unclaimed"] == [name]
    assert source.warnings == [f"1 tensors belong to no module and were left out, the first {name}"]


def test_float16_and_float32_weights_are_float_linears(tiny: TinyFactory) -> None:
    for dtype in (np.float16, np.float32, ml_dtypes.bfloat16):
        weight = np.ones((4, 64), dtype)
        source = read_source(Checkpoint(tiny("modelopt", edit=replacing(f"{DECAY}.weight", weight))), "auto")
        assert source.linears[DECAY].kind == "float"
