"""What configurations declare: a disagreement with the bytes is a warning, in either dialect's spelling."""

from __future__ import annotations

import json

import pytest

from builder.checkpoint import Checkpoint
from builder.errors import Refused
from builder.exporter import read_source
from builder.quant.compressed_tensors import declared_formats
from fixtures.writer import Config, Tensors
from tests.conftest import TinyFactory

QUERY = "model.language_model.layers.3.self_attn.q_proj"
FP8 = {"format": "float-quantized"}


@pytest.mark.parametrize(
    ("targets", "ignore", "module", "declared"),
    [
        (["Linear"], [], QUERY, True),
        (["Linear"], ["lm_head"], "lm_head", False),
        (["Linear"], ["lm_head"], "x.lm_head", True),
        (["Linear"], ["re:.*lm_head"], "model.lm_head", False),
        (["Linear"], ["re:^mtp.*"], "mtp.fc", False),
        (["Linear"], ["re:^mtp.*"], "model.mtp.fc", True),
        ([r"re:.*self_attn\.(q|k|v|o)_proj$"], [], QUERY, True),
        ([r"re:.*self_attn\.(q|k|v|o)_proj$"], [], f"{QUERY}.linear", False),
        ([r"re:self_attn\.q_proj"], [], QUERY, False),  # a pattern is matched from the start, it is no substring
        ([QUERY], [], QUERY, True),
        (["q_proj"], [], QUERY, False),
        ([QUERY], [QUERY], QUERY, False),  # ignore wins
    ],
)
def test_targets_and_ignore_lists_match_as_compressed_tensors_does(
    targets: list[str], ignore: list[str], module: str, declared: bool
) -> None:
    section = {"config_groups": {"group_0": {**FP8, "targets": targets}}, "ignore": ignore}
    assert declared_formats(section, [module]) == ({module: "fp8"} if declared else {})


def test_a_group_without_a_format_has_the_outer_one() -> None:
    section = {"format": "nvfp4-pack-quantized", "config_groups": {"a": {"targets": ["Linear"], "format": None}}}
    assert declared_formats(section, ["m"]) == {"m": "nvfp4"}


def test_the_first_group_that_matches_speaks() -> None:
    groups = {"a": {**FP8, "targets": ["m"]}, "b": {"format": "nvfp4-pack-quantized", "targets": ["Linear"]}}
    assert declared_formats({"config_groups": groups}, ["m", "n"]) == {"m": "fp8", "n": "nvfp4"}


def test_a_broken_pattern_is_refused(tiny: TinyFactory) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        config["quantization_config"]["ignore"] = ["re:("]

    with pytest.raises(Refused, match=r"quantization_config 're:\('"):
        read_source(Checkpoint(tiny("compressed-tensors", edit=edit)), "auto")


@pytest.mark.parametrize("section", ["text", ["list"], {"quantized_layers": ["x"]}, {"quantized_layers": "x"}])
def test_a_malformed_section_is_refused(tiny: TinyFactory, section: object) -> None:
    folder = tiny("modelopt", edit=lambda tensors, config: config.update(quantization_config=section))
    with pytest.raises(Refused, match="quantization_config"):
        read_source(Checkpoint(folder), "auto")


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_a_disagreement_is_one_line_a_kind(tiny: TinyFactory, dialect: str) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        section = config["quantization_config"]
        if dialect == "modelopt":
            section["quantized_layers"]["lm_head"] = {"quant_algo": "nvfp4"}
            section["quantized_layers"]["model.layers.3.self_attn.o_proj"] = {"quant_algo": "NVFP4"}
        else:
            fp8, nvfp4 = (section["config_groups"][f"group_{i}"]["targets"] for i in range(2))
            for module in ("lm_head", "model.layers.3.self_attn.o_proj"):
                fp8.remove(module)
                nvfp4.append(module)

    source = read_source(Checkpoint(tiny(dialect, edit=edit)), "auto")  # type: ignore[arg-type]
    assert source.warnings == [
        "2 modules are declared nvfp4 but stored as fp8 (used as stored), the first model.layers.3.self_attn.o_proj"
    ]


def test_modelopts_spellings_of_one_format_agree(tiny: TinyFactory) -> None:
    """Its enumeration is upper case in some releases and lower in others; weight-only is the same storage."""

    def edit(tensors: Tensors, config: Config) -> None:
        layers = config["quantization_config"]["quantized_layers"]
        names = ("W4A16_NVFP4", "w4a16_nvfp4", "nvfp4")
        for name, module in zip(names, [name for name in layers if ".mlp." in name], strict=False):
            layers[module] = {"quant_algo": name}

    assert read_source(Checkpoint(tiny("modelopt", edit=edit)), "auto").warnings == []


def test_modelopt_may_declare_in_its_own_file_only(tiny: TinyFactory) -> None:
    folder = tiny("modelopt", edit=lambda tensors, config: config.pop("quantization_config"))
    path = folder / "hf_quant_config.json"
    document = json.loads(path.read_text())
    document["quantization"]["quantized_layers"]["lm_head"]["quant_algo"] = "NVFP4"
    path.write_text(json.dumps(document))
    source = read_source(Checkpoint(folder), "auto")
    assert source.warnings == ["1 modules are declared nvfp4 but stored as fp8 (used as stored), the first lm_head"]
