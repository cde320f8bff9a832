"""What configurations declare: a disagreement with the bytes is a warning, in every dialect's spelling and nesting."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.checkpoint import Checkpoint, TensorRef
from builder.errors import Refused
from builder.exporter import read_source
from builder.quant import names as matching
from builder.quant.crosscheck import declared_disagreements, kv_cache_format
from builder.quant.linear import read_linear
from builder.quant.tensors import Nvfp4
from fixtures.writer import Config, Dialect, Tensors, Tiny
from tests.conftest import CHECKPOINTS, NAMES, TinyFactory

FP8, NVFP4, FLOAT = "model.layers.3.self_attn.o_proj", "model.layers.0.mlp.gate_proj", "mtp.fc"
KINDS = {"lm_head": "float", FP8: "fp8", "model.layers.3.self_attn.q_proj": "float", NVFP4: "nvfp4", FLOAT: "float"}
MIXED = {"quantized_layers": {FP8: {"quant_algo": "FP8"}, NVFP4: {"quant_algo": "NVFP4", "group_size": 16}}}
GROUPS = {
    "group_0": {"format": "float-quantized", "targets": [r"re:.*self_attn\.o_proj$"]},
    "group_1": {"format": "nvfp4-pack-quantized", "targets": [r"re:.*\.mlp\..*"]},
}


@dataclass(frozen=True)
class Weight:
    """As much of a QuantTensor as the cross-check sees."""

    kind: str


class Folder(dict[str, None]):
    """As much of a Checkpoint as the cross-check sees: tensor names, config.json and hf_quant_config.json."""

    def __init__(self, section: Any = None, hf: Any = None, kinds: dict[str, str] = KINDS) -> None:
        super().__init__({f"{module}.weight": None for module in kinds})
        self["model.embed_tokens.weight"] = None
        self.config: dict[str, Any] = {} if section is None else {"quantization_config": section}
        self.hf = hf
        self.kinds = kinds

    def json(self, name: str) -> Any:
        return self.hf if name == "hf_quant_config.json" else None

    def warnings(self) -> list[str]:
        linears = {module: Weight(kind) for module, kind in self.kinds.items()}
        return declared_disagreements(self, linears)  # type: ignore[arg-type]

    def refusal(self) -> str:
        with pytest.raises(Refused) as caught:
            self.warnings()
        return str(caught.value)


DECLARATIONS: dict[str, Folder] = {
    "config.json": Folder({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", **MIXED}),
    "without a method": Folder({"quant_algo": "mixed_precision", **MIXED}),
    "nested": Folder({"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION", **MIXED}}),
    "nested twice": Folder({"quantization_config": {"quantization": MIXED}}),
    "hf_quant_config.json": Folder(hf={"producer": {}, "quantization": {"quant_algo": "MIXED_PRECISION", **MIXED}}),
    "hf_quant_config.json nested twice": Folder(hf={"quantization": {"quantization": MIXED}}),
    "hf_quant_config.json without nesting": Folder(hf=MIXED),
    "a section without the map beside it": Folder(
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, {"quantization": MIXED}
    ),
    "compressed-tensors": Folder({"quant_method": "compressed-tensors", "config_groups": GROUPS}),
    "groups without a method": Folder({"config_groups": GROUPS}),
}


@pytest.mark.parametrize("place", DECLARATIONS)
def test_every_place_and_nesting_declares_the_same(place: str) -> None:
    """Case A15. One module stored otherwise shows that the declaration was found."""
    folder = DECLARATIONS[place]
    assert folder.warnings() == []
    other = Folder(folder.config.get("quantization_config"), folder.hf, {**KINDS, FP8: "float"})
    assert other.warnings() == [f"1 modules are declared fp8 but stored as float (used as stored), the first {FP8}"]


def test_the_text_models_section_is_found() -> None:
    folder = Folder(kinds={**KINDS, FP8: "float"})
    folder.config = {"text_config": {"quantization_config": {"quant_method": "modelopt", **MIXED}}}
    assert folder.warnings() == [f"1 modules are declared fp8 but stored as float (used as stored), the first {FP8}"]


def halve_scales(module: str) -> Callable[[Tensors, Config], None]:
    def edit(tensors: Tensors, config: Config) -> None:
        tensors[f"{module}.weight_scale"] = np.ascontiguousarray(tensors[f"{module}.weight_scale"][:, ::2])

    return edit


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_scales_of_half_the_declared_width_are_refused(tiny: TinyFactory, dialect: Dialect) -> None:
    """Case A09. As blocks of 32 they would load, and mean something else."""
    folder = tiny(dialect, edit=halve_scales(NVFP4))
    with pytest.raises(Refused) as caught:
        read_source(Checkpoint(folder), "auto")
    said = str(caught.value)
    assert f"tensor {NVFP4}.weight_scale: expected [96, 4] for the group_size 16 of config.json" in said
    assert "found [96, 2], blocks of 32; mend the file that is wrong" in said


def test_blocks_of_32_that_nobody_contradicts_are_read(tiny: TinyFactory) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        halve_scales(NVFP4)(tensors, config)
        del config["quantization_config"]

    folder = tiny("compressed-tensors", edit=edit)
    found = read_source(Checkpoint(folder), "auto").linears[NVFP4]
    assert isinstance(found, Nvfp4) and found.block_size == 32


@pytest.mark.parametrize(
    ("section", "hf", "said"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, None, 16),
        (None, {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}, 16),
        ({"quant_algo": "NVFP4", "config_groups": {"group_0": {"weights": {"group_size": 16}}}}, None, 16),
        ({"quant_algo": "NVFP4", "quant_method": "modelopt", "group_size": 32}, None, None),
        ({"quant_algo": "NVFP4", "quant_method": "modelopt", "group_size": None}, None, None),
        ({"quant_algo": "NVFP4", "quant_method": "modelopt", "group_size": 0}, None, None),
        ({"quant_algo": "NVFP4", "quant_method": "modelopt", "group_size": "16"}, None, "a number, found 16"),
        ({"quantized_layers": {NVFP4: {"quant_algo": "NVFP4", "group_size": 16}}}, None, 16),
        ({"quantized_layers": {"lm_head": {"quant_algo": "NVFP4", "group_size": 16}}}, None, None),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}},
            None,
            16,
        ),
        (
            {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": -1}}}},
            None,
            None,
        ),
        ({"config_groups": {"group_0": {"targets": ["Embedding"], "weights": {"group_size": 16}}}}, None, None),
    ],
)
def test_a_group_size_is_compared_wherever_it_stands(tmp_path: Path, section: Any, hf: Any, said: int | str) -> None:
    refs = {
        "weight": TensorRef(f"{NVFP4}.weight", tmp_path, "U8", (96, 32), 0, 96 * 32),
        "weight_scale": TensorRef(f"{NVFP4}.weight_scale", tmp_path, "F8_E4M3", (96, 2), 0, 96 * 2),
        "weight_scale_2": TensorRef(f"{NVFP4}.weight_scale_2", tmp_path, "F32", (), 0, 4),
    }
    linears = {NVFP4: read_linear(NVFP4, refs, (96, 64))}
    folder = Folder(section, hf, {NVFP4: "nvfp4"})
    if said is None:
        declared_disagreements(folder, linears)  # type: ignore[arg-type]
        return
    with pytest.raises(
        Refused, match=str(said) if isinstance(said, str) else rf"\[96, 4\] for the group_size {said} of"
    ):
        declared_disagreements(folder, linears)  # type: ignore[arg-type]


def test_nothing_declared_and_nothing_quantized_is_nothing_to_say() -> None:
    assert Folder(kinds=dict.fromkeys(KINDS, "float")).warnings() == []
    assert Folder({}, {}, dict.fromkeys(KINDS, "float")).warnings() == []


@pytest.mark.parametrize("section", [None, {}, {"quant_method": "modelopt"}, {"quant_method": "compressed-tensors"}])
def test_quantized_modules_that_nobody_declares_are_one_line_a_kind(section: object) -> None:
    assert Folder(section).warnings() == [
        f"1 modules are declared nowhere but stored as fp8 (used as stored), the first {FP8}",
        f"1 modules are declared nowhere but stored as nvfp4 (used as stored), the first {NVFP4}",
    ]


def test_a_method_of_another_family_is_named_and_not_compared() -> None:
    assert Folder({"quant_method": "gptq", "bits": 4}).warnings() == [
        "config.json quantization_config has the quant_method gptq, which is not known here: its word was not compared"
    ]


def test_two_files_that_differ_are_both_named_and_config_json_is_compared() -> None:
    hf = {"quantization": {"quantized_layers": {**MIXED["quantized_layers"], FP8: {"quant_algo": "NVFP4"}}}}
    assert Folder({"quant_method": "modelopt", **MIXED}, hf).warnings() == [
        "1 modules are declared fp8 in config.json quantization_config but nvfp4 in "
        f"hf_quant_config.json quantization (the first was compared), the first {FP8}"
    ]


@pytest.mark.parametrize(
    ("section", "hf", "expected"),
    [
        (None, None, None),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, None, "fp8"),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, None, "nvfp4"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, None, "int8"),
        ({"kv_cache_scheme": "NVFP4"}, None, "nvfp4"),
        ({"kv_cache_scheme": "FP8", "quantization": MIXED}, None, "fp8"),
        ({"kv_cache_scheme": None}, None, None),
        (None, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        ({"quant_method": "modelopt"}, {"quantization": {"kv_cache_quant_algo": "FP8"}}, "fp8"),
        (None, {"quantization": {"quantization": {"kv_cache_quant_algo": "fp8"}}}, "fp8"),
        (None, {"quantization": {"kv_cache_quant_algo": None}}, None),
        (None, {"quantization": {"kv_cache_quant_algo": "none"}}, None),
        ({"kv_cache_scheme": "FP8"}, {"quantization": {"kv_cache_quant_algo": "NVFP4"}}, "nvfp4"),
        ({"kv_cache_scheme": "FP8"}, {"quantization": {"kv_cache_quant_algo": None}}, None),
        ({"kv_cache_scheme": "FP8"}, {"quantization": {}}, "fp8"),
    ],
)
def test_the_kv_cache_is_declared_in_either_file_and_modelopts_own_wins(
    section: object, hf: object, expected: str | None
) -> None:
    assert kv_cache_format(Folder(section, hf)) == expected  # type: ignore[arg-type]


def test_two_words_on_the_kv_cache_are_both_named() -> None:
    folder = Folder(
        {**MIXED, "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quantization": {**MIXED, "kv_cache_quant_algo": None}},
    )
    assert folder.warnings() == [
        "hf_quant_config.json quantization declares a KV cache of unquantized numbers but config.json "
        "quantization_config one of fp8 (the first is believed)"
    ]


def test_entries_that_match_nothing_are_one_line_with_the_nearest_names() -> None:
    """Case A13. Both files carry the same list; it is reported once."""
    stale = ["model.layers.3.self_attn.oproj", "model.visual*", *(f"model.visual.blocks.{i}.x" for i in range(38))]
    section = {**MIXED, "ignore": ["lm_head", "mtp*", *stale]}
    hf = {"quantization": {**MIXED, "exclude_modules": ["mtp*", *stale]}}
    assert Folder(section, hf).warnings() == [
        "40 entries of the quantization's lists match nothing in the checkpoint: model.layers.3.self_attn.oproj "
        "(nearest: model.layers.3.self_attn.o_proj, model.layers.3.self_attn.q_proj), model.visual*, "
        "model.visual.blocks.0.x and 37 more"
    ]


def test_what_a_configuration_says_stays_on_its_line() -> None:
    (line,) = Folder({**MIXED, "ignore": ["a\nb\x1b[31m", "\ud800", "x" * 9999]}).warnings()
    assert line.isprintable() and len(line) < 700 and r"a\nb\x1b[31m, \ud800" in line


@pytest.mark.parametrize(
    ("section", "subject"),
    [
        ("text", "config.json quantization_config: expected an object, found text"),
        (["list"], "config.json quantization_config: expected an object, found list"),
        ({"quantization": 3}, "config.json quantization_config.quantization: expected an object, found int"),
        ({"quantized_layers": ["x"]}, "config.json quantization_config.quantized_layers: "),
        ({"quantized_layers": {"x": "FP8"}}, "config.json quantization_config.quantized_layers.x: "),
        ({"quantized_layers": {NVFP4: {"quant_algo": 8}}}, f"quantized_layers.{NVFP4}.quant_algo: expected text"),
        ({"quant_algo": ["FP8"]}, "config.json quantization_config.quant_algo: "),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "config.json quantization_config.ignore: expected a list"),
        ({"quant_algo": "FP8", "exclude_modules": ["a", 1, None]}, "expected a list of names, found NoneType, int in"),
        ({"quant_method": 8}, "config.json quantization_config.quant_method: "),
        ({"config_groups": {"a": []}}, "config.json quantization_config.config_groups.a: "),
        ({"config_groups": {"a": {"targets": "Linear"}}}, "config_groups.a.targets: expected a list of names"),
        ({"config_groups": {"a": {"weights": 8}}}, "config_groups.a.weights: expected an object, found int"),
        ({"format": {}}, "config.json quantization_config.format: "),
        ({"kv_cache_scheme": 8}, "config.json quantization_config.kv_cache_scheme: "),
        ({"kv_cache_scheme": {"num_bits": "8"}}, "kv_cache_scheme: expected a scheme with type and num_bits"),
        ({"modules_to_not_convert": {}}, "config.json quantization_config.modules_to_not_convert: "),
    ],
)
def test_a_wrong_type_is_refused_by_its_key(section: object, subject: str) -> None:
    assert subject in Folder(section).refusal()


def test_a_wrong_type_in_modelopts_own_file_names_that_file() -> None:
    assert Folder(hf={"quantization": "FP8"}).refusal().startswith("hf_quant_config.json quantization: ")


def test_lists_that_take_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "PATIENCE", -1.0)
    for section in ({**MIXED, "ignore": ["mtp*"]}, {**MIXED, "ignore": ["visual"]}):
        assert "too many or too slow entries" in Folder(section).refusal()


WORDS = st.sampled_from([*KINDS, "Linear", "re:(", "re:.*", "mtp*", "[", "fp8", "FP8", "NVFP4", "modelopt", "int", ""])
KEYS = st.sampled_from(
    [
        "quantization_config",
        "quantization",
        "quant_method",
        "quant_algo",
        "quantized_layers",
        "exclude_modules",
        "ignore",
        "config_groups",
        "format",
        "targets",
        "weights",
        "type",
        "num_bits",
        "group_size",
        "modules_to_not_convert",
        "ignored_layers",
        "weight_block_size",
        "kv_cache_scheme",
        "kv_cache_quant_algo",
        "transform_config",
        "sparsity_config",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | WORDS, inner, max_size=5),
    max_leaves=12,
)
METHODS = st.sampled_from([None, "modelopt", "compressed-tensors", "fp8", "mxfp4", "awq"])


@settings(max_examples=300, deadline=None)
@given(METHODS, st.dictionaries(KEYS, JSON, max_size=6), st.none() | st.dictionaries(KEYS, JSON, max_size=3))
def test_whatever_is_written_ends_in_lines_or_a_refusal(method: str | None, section: Config, hf: object) -> None:
    folder = Folder({"quant_method": method, **section}, hf)
    try:
        lines = folder.warnings()
        kv_cache_format(folder)  # type: ignore[arg-type]
    except Refused as error:
        assert "config.json" in str(error)
    else:
        assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_what_the_libraries_wrote_agrees_with_itself(name: str) -> None:
    """Every list of the real exports matches, every module is stored as declared."""
    assert read_source(Checkpoint(CHECKPOINTS / name), "auto").warnings == []


@pytest.mark.parametrize("name", [name for name in NAMES if "_bf16" not in name])
def test_what_the_libraries_wrote_is_what_is_compared(name: str) -> None:
    """Declared kinds of every module, seen by asking for none of them."""
    checkpoint = Checkpoint(CHECKPOINTS / name)
    linears = read_source(checkpoint, "auto").linears
    lines = declared_disagreements(checkpoint, {module: Weight("?") for module in linears})  # type: ignore[arg-type]
    kinds = [tensor.kind for tensor in linears.values()]
    assert {(int(line.split()[0]), line.split()[4]) for line in lines} == {(kinds.count(k), k) for k in set(kinds)}


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
    rewrite(folder, lambda section: section["quantized_layers"]["lm_head"].update(quant_algo="NVFP4"))
    source = read_source(Checkpoint(folder), "auto")
    assert source.warnings == ["1 modules are declared nvfp4 but stored as fp8 (used as stored), the first lm_head"]


def test_an_exclude_list_that_forgets_the_heads_projection_is_one_line(tiny: TinyFactory) -> None:
    """Case A10: mtp.fc is BF16, the list only names the head's layer."""
    folder = tiny("modelopt", edit=lambda tensors, config: config.pop("quantization_config"))
    listed = ["lm_head", "mtp.layers.0*", "*.self_attn.*", "*.linear_attn.*"]
    rewrite(folder, lambda section: [section.clear(), section.update(quant_algo="NVFP4", exclude_modules=listed)])
    assert read_source(Checkpoint(folder), "auto").warnings == [
        "14 modules are declared float but stored as fp8 (used as stored), the first "
        "model.layers.0.linear_attn.in_proj_qkv",
        "1 modules are declared nvfp4 but stored as float (used as stored), the first mtp.fc",
    ]


def test_a_list_for_a_head_that_is_not_there_is_one_line(tiny: TinyFactory) -> None:
    folder = tiny("compressed-tensors", Tiny(mtp=False))
    (line,) = [line for line in read_source(Checkpoint(folder), "auto").warnings if "entries" in line]
    assert line == "1 entries of the quantization's lists match nothing in the checkpoint: re:^mtp.*"


def test_a_broken_pattern_is_refused(tiny: TinyFactory) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        config["quantization_config"]["ignore"] = ["re:("]

    with pytest.raises(Refused, match=r"config.json quantization_config.ignore '\('"):
        read_source(Checkpoint(tiny("compressed-tensors", edit=edit)), "auto")


def rewrite(folder: Path, change: Callable[[Config], object]) -> None:
    """Changes the section of hf_quant_config.json."""
    path = folder / "hf_quant_config.json"
    document = json.loads(path.read_text())
    change(document["quantization"])
    path.write_text(json.dumps(document))
