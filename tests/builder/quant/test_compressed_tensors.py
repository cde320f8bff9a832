"""What compressed-tensors' configurations declare, module by module."""

from __future__ import annotations

from typing import Any

import pytest

from builder.errors import Refused
from builder.quant.compressed_tensors import declared
from builder.quant.declaration import Declaration, Section
from builder.quant.names import Names

QUERY = "model.language_model.layers.3.self_attn.q_proj"
FP8 = {"format": "float-quantized"}
WEIGHTS = {"type": "float", "num_bits": 4, "group_size": 16}


def said(modules: list[str], **values: Any) -> Declaration:
    declaration = declared(Section("config.json quantization_config", values), Names([], modules))
    assert declaration is not None
    return declaration


@pytest.mark.parametrize(
    ("targets", "ignore", "module", "is_fp8"),
    [
        (["Linear"], [], QUERY, True),
        (["Linear"], ["lm_head"], "lm_head", False),
        (["Linear"], ["lm_head"], "x.lm_head", True),
        (["Linear"], ["re:.*lm_head"], "model.lm_head", False),
        (["Linear"], ["re:^mtp.*"], "mtp.fc", False),
        (["Linear"], ["re:^mtp.*"], "model.mtp.fc", True),
        (["Linear"], [f"{QUERY}.linear"], QUERY, False),
        (["Linear"], ["model.layers.3.self_attn.q_proj"], QUERY, False),
        (["Linear"], ["model.layers.3.self_attn.qkv_proj"], QUERY, False),
        (["Linear"], ["model.layers.3.self_attn"], QUERY, True),  # a container stands for itself
        (["Linear"], ["*q_proj"], QUERY, True),  # no globs here
        (["Linear"], ["Linear"], QUERY, False),
        (["Conv1d"], [], QUERY, False),
        ([r"re:.*self_attn\.(q|k|v|o)_proj$"], [], QUERY, True),
        ([r"re:model\.layers\.3\.self_attn\.q_proj"], [], QUERY, True),
        ([r"re:.*self_attn\.(q|k|v|o)_proj$"], [], f"{QUERY}.x", False),
        ([r"re:self_attn\.q_proj"], [], QUERY, False),  # a pattern is matched from the start, it is no substring
        ([QUERY], [], QUERY, True),
        (["q_proj"], [], QUERY, False),
        ([QUERY], [QUERY], QUERY, False),  # ignore wins
    ],
)
def test_targets_and_ignore_lists_match_as_compressed_tensors_does(
    targets: list[str], ignore: list[str], module: str, is_fp8: bool
) -> None:
    groups = {"group_0": {**FP8, "targets": targets}}
    assert said([module], config_groups=groups, ignore=ignore).formats == {module: "fp8" if is_fp8 else "float"}


@pytest.mark.parametrize(
    ("group", "outer", "kind"),
    [
        ({"format": "float-quantized"}, "mixed-precision", "fp8"),
        ({"format": None}, "nvfp4-pack-quantized", "nvfp4"),
        ({}, "mxfp4-pack-quantized", "mxfp4"),
        ({}, "mxfp8-quantized", "mxfp8"),
        ({}, "naive-quantized", "fp8"),
        ({}, "dense", "float"),
        ({}, "of-2030", "of-2030"),
        ({"weights": {"type": "int", "num_bits": 4}}, "naive-quantized", "int"),
        ({"weights": WEIGHTS}, None, "nvfp4"),
        ({"weights": WEIGHTS}, "mixed-precision", "nvfp4"),
        ({"weights": {**WEIGHTS, "group_size": 32}}, None, "mxfp4"),
        ({"weights": {**WEIGHTS, "num_bits": 8, "group_size": None}}, None, "fp8"),
        ({"weights": {**WEIGHTS, "num_bits": 8, "group_size": 32}}, None, "mxfp8"),
        ({"weights": {**WEIGHTS, "num_bits": "4"}}, None, "an unnamed format"),
        ({"weights": None}, None, "float"),
    ],
)
def test_a_groups_format_is_its_own_the_outer_one_or_that_of_its_weights(
    group: dict[str, Any], outer: str | None, kind: str
) -> None:
    assert said(["m"], config_groups={"a": {**group, "targets": ["Linear"]}}, format=outer).formats == {"m": kind}


def test_the_most_specific_target_speaks_whatever_its_group() -> None:
    names = ["re:m.*", "Linear", "m"]
    formats = ["nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized"]
    groups = {str(i): {"targets": [name], "format": formats[i]} for i, name in enumerate(names)}
    assert said(["m", "mm", "n"], config_groups=groups).formats == {"m": "fp8", "mm": "nvfp4", "n": "mxfp4"}


def test_without_groups_the_format_is_every_modules() -> None:
    """Case A16."""
    declaration = said(["m", "n"], format="nvfp4-pack-quantized", ignore=["n", "o"])
    assert declaration.formats == {"m": "nvfp4", "n": "float"} and declaration.stale == ("o",)


@pytest.mark.parametrize("values", [{}, {"format": "mixed-precision"}, {"config_groups": {}}, {"ignore": ["x"]}])
def test_no_format_declares_nothing(values: dict[str, Any]) -> None:
    assert declared(Section("config.json", values), Names([], ["m"])) is None


def test_targets_and_ignored_names_that_match_nothing_are_stale() -> None:
    groups = {"a": {**FP8, "targets": ["m", "x", "re:^y", "Conv1d"]}}
    assert said(["m"], config_groups=groups, ignore=["re:^mtp.*", "x", "Embedding"]).stale == (
        "x",
        "re:^y",
        "re:^mtp.*",
    )


@pytest.mark.parametrize(
    "values",
    [
        {"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
        {"moe_sparsity_config": {"a": 1}},
    ],
)
def test_transforms_and_sparsity_are_refused_by_name(values: dict[str, Any]) -> None:
    (key,) = values
    with pytest.raises(Refused, match=rf"^config\.json quantization_config\.{key}: expected nothing, found .*\("):
        said(["m"], **values)


def test_empty_transforms_and_dense_sparsity_are_nothing() -> None:
    empty = {"transform_config": {"config_groups": {}}, "sparsity_config": {"format": "dense", "ignore": ["m"]}}
    assert said(["m"], format="float-quantized", **empty).formats == {"m": "fp8"}
