"""What ModelOpt's configurations declare, module by module."""

from __future__ import annotations

from typing import Any

import pytest

from builder.errors import Refused
from builder.quant.declaration import Declaration, Section
from builder.quant.modelopt import FORMATS, declared
from builder.quant.names import Names

LAYER = "model.language_model.layers.0"
ROUTER, EXPERT = f"{LAYER}.mlp.gate", f"{LAYER}.mlp.experts.3.up_proj"
SHARED, QUERY = f"{LAYER}.mlp.shared_expert.up_proj", f"{LAYER}.self_attn.q_proj"
LINEARS = (ROUTER, EXPERT, SHARED, QUERY, "lm_head", "mtp.fc", "mtp.layers.0.mlp.up_proj")


def said(**values: Any) -> Declaration:
    tensors = [f"{module}.weight" for module in LINEARS]
    declaration = declared(Section("config.json quantization_config", values), Names(tensors, LINEARS))
    assert declaration is not None
    return declaration


def quantized(**values: Any) -> set[str]:
    return {module for module, kind in said(**values).formats.items() if kind != "float"}


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        ("NVFP4", "nvfp4"),
        ("nvfp4", "nvfp4"),
        ("W4A16_NVFP4", "nvfp4"),
        ("W4A8_NVFP4_FP8", "nvfp4"),
        ("FP8", "fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN", "fp8"),
        ("fp8_pb_wo", "fp8"),
        ("FP8_BLOCK_SCALES", "fp8"),
        ("MXFP8", "mxfp8"),
        ("mxfp4", "mxfp4"),
        ("Of_2030", "of_2030"),
    ],
)
def test_one_algorithm_holds_for_every_linear_module(algorithm: str, kind: str) -> None:
    assert said(quant_algo=algorithm).formats == dict.fromkeys(LINEARS, kind)
    layers = {"lm_head": {"quant_algo": algorithm}}
    assert said(quant_algo="MIXED_PRECISION", quantized_layers=layers).formats["lm_head"] == kind


@pytest.mark.parametrize("key", ["exclude_modules", "ignore"])
@pytest.mark.parametrize(
    ("entry", "excluded"),
    [
        ("lm_head", {"lm_head"}),
        ("*lm_head*", {"lm_head"}),
        ("mtp*", {"mtp.fc", "mtp.layers.0.mlp.up_proj"}),
        ("mtp.layers.0*", {"mtp.layers.0.mlp.up_proj"}),
        ("model.layers.0.mlp.gate", {ROUTER}),
        ("mlp.gate", {ROUTER}),
        ("self_attn", {QUERY}),
        (f"{LAYER}.mlp.*", {ROUTER, EXPERT, SHARED}),
        (f"{LAYER}.mlp.experts", {EXPERT}),
    ],
)
def test_excluded_modules_are_float(key: str, entry: str, excluded: set[str]) -> None:
    assert quantized(quant_algo="FP8", **{key: [entry]}) == set(LINEARS) - excluded
    assert said(quant_algo="FP8", **{key: [entry]}).stale == ()


def test_both_lists_hold_and_what_matches_nothing_is_stale() -> None:
    declaration = said(quant_algo="FP8", exclude_modules=["lm_head", "x", "y*"], ignore=["mtp.fc", "x", "re:.*"])
    assert [module for module, kind in declaration.formats.items() if kind == "float"] == ["lm_head", "mtp.fc"]
    assert declaration.stale == ("x", "y*", "re:.*")


def test_a_layer_of_the_map_stands_for_what_it_contains_and_the_longest_speaks() -> None:
    layers = {
        f"{LAYER}.mlp": {"quant_algo": "FP8"},
        f"{LAYER}.mlp.experts": {"quant_algo": "NVFP4"},
        "model.layers.0.mlp.gate": {"quant_algo": None},
    }
    formats = said(quant_algo="MIXED_PRECISION", quantized_layers=layers).formats
    assert formats == {**dict.fromkeys(LINEARS, "float"), EXPERT: "nvfp4", SHARED: "fp8"}


def test_siblings_inherit_nothing() -> None:
    layers = {SHARED: {"quant_algo": "FP8"}, f"{LAYER}.mlp.exp": {"quant_algo": "FP8"}}
    declaration = said(quantized_layers=layers)
    assert {module for module, kind in declaration.formats.items() if kind != "float"} == {SHARED}
    assert declaration.stale == (f"{LAYER}.mlp.exp",)


def test_an_explicit_layer_holds_against_a_list_of_globs() -> None:
    layers = {"mtp.layers.0.mlp.up_proj": {"quant_algo": "FP8_PB_WO"}}
    assert quantized(quantized_layers=layers, ignore=["mtp*"]) == {"mtp.layers.0.mlp.up_proj"}


@pytest.mark.parametrize("values", [{}, {"quant_algo": None}, {"quant_algo": "MIXED_PRECISION"}, {"ignore": ["x"]}])
def test_no_algorithm_declares_nothing(values: dict[str, Any]) -> None:
    assert declared(Section("config.json", values), Names([], LINEARS)) is None


@pytest.mark.parametrize(
    "algorithm",
    [
        "NVFP4_AWQ",
        "nvfp4_awq",
        "NVFP4_SVD",
        "INT4_AWQ",
        "W4A16_AWQ",
        "W4A8_AWQ",
        "W8A16",
        "W8A8_SQ_PER_CHANNEL",
        "INT8_SQ",
    ],
)
def test_algorithms_that_are_not_carried_are_refused_by_name(algorithm: str) -> None:
    with pytest.raises(Refused, match=rf"^config\.json quantization_config\.quant_algo: .*found {algorithm}: it .*; q"):
        said(quant_algo=algorithm)
    with pytest.raises(Refused, match=r"^config\.json quantization_config\.quantized_layers\.lm_head\.quant_algo: "):
        said(quantized_layers={"lm_head": {"quant_algo": algorithm}})
    assert said(quantized_layers={"model.visual": {"quant_algo": algorithm}}).stale == ("model.visual",)


def test_every_format_is_a_kind_of_stored_weight() -> None:
    assert set(FORMATS.values()) == {"fp8", "nvfp4", "mxfp4", "mxfp8"}
