"""read_source(): every tensor is used, skipped for a reason, or said to be nobody's; and what becomes of the head."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import builder
from builder import source as source_module
from builder.checkpoint import INDEX_NAME, Checkpoint, TensorRef
from builder.errors import MachineError, Refused
from builder.exporter import ExportOptions
from builder.models.mtp import MtpHead
from builder.source import Source, read_source
from fixtures.writer import BF16, Config, Dialect, Edit, Tensors, Tiny
from tests.builder import oracle
from tests.builder.test_package import COPY, substance
from tests.conftest import TinyFactory

REASONS = ("vision", "activation_scales", "kv_scales", "mtp", "unclaimed")
STRAY = "model.layers.1.mlp.gate_proj.weight_quantizer._double_scale"
NO_HEAD = "exported without an MTP head: "


def read(folder: Path, mtp: str = "auto", *, strict: bool = False) -> Source:
    return read_source(Checkpoint(folder), mtp, strict=strict)


def about_the_head(folder: Path, mtp: str = "auto") -> list[str]:
    """Warnings of an export without it; a list of modules may also name what is gone."""
    return [line for line in read(folder, mtp).warnings if line.startswith(NO_HEAD)]


def adding(**tensors: np.ndarray) -> Edit:
    return lambda stored, config: stored.update({name.replace("__", "."): array for name, array in tensors.items()})


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


# Accounting


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("mtp", ["auto", "off"])
def test_every_tensor_is_used_or_skipped_for_a_reason(tiny: TinyFactory, dialect: Dialect, mtp: str) -> None:
    """By the names in the file: those of no reason are exactly those that some module took."""
    folder = tiny(dialect, Tiny(vision=True))
    source, names = read(folder, mtp), set(oracle.read_checkpoint(folder))
    assert tuple(source.skipped) == REASONS
    expected = {
        "vision": {name for name in names if name.startswith("model.visual.")},
        "mtp": {name for name in names if name.startswith("mtp.")} if mtp == "off" else set(),
        "activation_scales": {name for name in names if name.endswith(("input_scale", "input_global_scale"))},
        "kv_scales": set(),
        "unclaimed": set(),
    }
    assert {reason: set(found) for reason, found in source.skipped.items()} == expected
    assert source.skipped_counts == {reason: len(found) for reason, found in expected.items()}
    assert len(expected["vision"]) == 2 and len(expected["activation_scales"]) >= 12
    used = {ref.name for linear in source.linears.values() for ref in linear.refs}
    assert used and used.isdisjoint(set().union(*expected.values()))


def test_real_checkpoints_leave_nothing_over(real_checkpoint: Path) -> None:
    source, names = read(real_checkpoint, "require", strict=True), oracle.read_checkpoint(real_checkpoint)
    skipped = {name for found in source.skipped.values() for name in found}
    assert source.skipped["unclaimed"] == [] and source.skipped["mtp"] == [] and source.mtp is not None
    assert {name for name in names if "visual" in name} == set(source.skipped["vision"])
    assert skipped == {name for name in names if "visual" in name or "input" in name.rpartition(".")[2]}


@pytest.mark.parametrize("prefix", ["model.visual.", "visual."])
def test_an_image_tower_is_skipped_at_either_place(tiny: TinyFactory, prefix: str) -> None:
    name = f"{prefix}blocks.0.attn.qkv.weight"
    source = read(tiny("modelopt", edit=lambda tensors, config: tensors.update({name: ones(4, 4)})), strict=True)
    assert source.skipped["vision"] == [name]


@pytest.mark.parametrize(
    "spelling", ["self_attn.k_scale self_attn.v_scale", "self_attn.k_proj.k_scale self_attn.v_proj.v_scale"]
)
@pytest.mark.parametrize("value", [0.5, 1.0])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_kv_scales_of_either_spelling_are_counted_and_change_nothing(
    tiny: TinyFactory, tmp_path: Path, dialect: Dialect, spelling: str, value: float
) -> None:
    """Our caches have the activation type, so one of a scale that was never calibrated does no harm either."""
    names = [f"model.layers.3.{name}" for name in spelling.split()]
    folder = tiny(dialect, edit=lambda tensors, config: tensors.update(dict.fromkeys(names, ones(1) * value)))
    source = read(folder, strict=True)
    assert sorted(source.skipped["kv_scales"]) == names and source.skipped["unclaimed"] == []
    builder.export(folder, tmp_path / "scaled", COPY)
    builder.export(tiny(dialect), tmp_path / "plain", COPY)
    assert substance(tmp_path / "scaled") == substance(tmp_path / "plain")


@pytest.mark.parametrize("name", [STRAY, "model.layers.4.mlp.up_proj.weight", "extra", "mtp.layers.1.norm.weight"])
def test_strict_refuses_what_no_module_uses(tiny: TinyFactory, tmp_path: Path, name: str) -> None:
    """A quantizer's leftovers, a layer too many, a name without a module, a second layer of the head."""
    folder = tiny("modelopt", edit=lambda tensors, config: tensors.update({name: ones(3)}))
    source = read(folder)
    assert source.skipped["unclaimed"] == [name]
    assert source.warnings == [f"1 tensors belong to no module and were left out, the first {name}"]
    assert builder.export(folder, tmp_path / "out").skipped_tensors["unclaimed"] == 1
    with pytest.raises(Refused) as caught:
        builder.export(folder, tmp_path / "strict", ExportOptions(strict=True))
    assert f"tensor {name}: expected a module that uses it (--strict), found 1 tensors" in str(caught.value)
    assert not (tmp_path / "strict").exists()


def test_strict_is_about_tensors_alone(tiny: TinyFactory) -> None:
    """A warning of another kind stays one."""
    folder = tiny("modelopt", edit=lambda tensors, config: config.update(tie_word_embeddings=True))
    assert len(read(folder, strict=True).warnings) == 1


@pytest.mark.parametrize("leaf", ["weight_double_scale", "bias", "zero_point"])
def test_a_tensor_beside_a_weight_is_refused_with_or_without_strict(tiny: TinyFactory, leaf: str) -> None:
    """It may change what the weight means, unlike one under a name of its own."""
    name = f"model.layers.1.mlp.gate_proj.{leaf}"
    folder = tiny("modelopt", edit=lambda tensors, config: tensors.update({name: ones(3)}))
    for strict in (True, False):
        with pytest.raises(Refused, match=f"tensor {name}: "):
            read(folder, strict=strict)


def test_lost_input_scales_of_each_format_are_counted_apart(tiny: TinyFactory) -> None:
    """A format that never has any, like weight-only NVFP4 beside static FP8, is no loss."""

    def drop(tensors: Tensors, *parts: str) -> None:
        for name in [name for name in tensors if name.endswith("input_scale") and any(part in name for part in parts)]:
            del tensors[name]

    whole_format = tiny("modelopt", edit=lambda tensors, config: drop(tensors, ".mlp."))
    assert read(whole_format).warnings == []
    some = tiny("modelopt", edit=lambda tensors, config: drop(tensors, "layers.0.mlp.", "layers.2.mlp.", "k_proj"))
    mlp = [f"model.layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")]
    assert sorted(read(some).warnings) == [
        "1 of 14 fp8 modules have no input scale (none is used here): model.layers.3.self_attn.k_proj",
        f"6 of 12 nvfp4 modules have no input scale (none is used here): {', '.join(mlp)}",
    ]


# The head


def test_off_leaves_the_head_to_itself(tiny: TinyFactory) -> None:
    """Skipped for that reason, whole or half, and its scales with it."""

    def half(tensors: Tensors, config: Config) -> None:
        del tensors["mtp.fc.weight"]
        tensors["mtp.layers.0.mlp.up_proj.input_scale"] = ones()

    for folder in (tiny("modelopt"), tiny("modelopt", edit=half)):
        source = read(folder, "off", strict=True)
        head = [name for name in oracle.read_checkpoint(folder) if name.startswith("mtp.")]
        assert source.mtp is None and sorted(source.skipped["mtp"]) == sorted(head) and source.warnings == []
        assert not any(name.startswith("mtp.") for name in source.linears)


def test_an_absent_head_is_said_where_it_was_promised(tiny: TinyFactory) -> None:
    promised = tiny("modelopt", Tiny(mtp=False))
    assert about_the_head(promised) == [f"{NO_HEAD}config.json promises one but no mtp.* tensor is there"]
    assert about_the_head(promised, "off") == []
    never = tiny("modelopt", Tiny(mtp=False), lambda tensors, config: config.update(mtp_num_hidden_layers=0))
    assert about_the_head(never) == []
    for folder in (promised, never):
        with pytest.raises(Refused, match=r"tensor mtp\.fc\.weight: .*--mtp require.*found no mtp\.\* tensor; "):
            read(folder, "require")


@pytest.mark.parametrize("mtp", ["auto", "require"])
@pytest.mark.parametrize("kept", [1, 7, 14], ids=lambda count: f"{count} of 15")
def test_half_a_head_is_refused_with_all_that_is_missing(tiny: TinyFactory, mtp: str, kept: int) -> None:
    """In one line that is not cut short, so that what to fetch again is known at once."""
    modules = [f"mtp.{module}" for module in (*MtpHead.MODULES, *MtpHead.MLP)]
    assert len(modules) == 15

    def edit(tensors: Tensors, config: Config) -> None:
        for module in modules[kept:]:
            del tensors[f"{module}.weight"]

    with pytest.raises(Refused) as caught:
        read(tiny("modelopt", edit=edit), mtp)
    message = str(caught.value)
    assert "MTP head: expected all of it, found half of it, without " in message and "--mtp off" in message
    assert "..." not in message
    words = message.replace(",", " ").replace(";", " ").split()
    for module in modules[kept:]:
        leaf = module.removeprefix("mtp.").removeprefix("layers.0.")
        assert f"{module}.weight" in words or leaf in words, module
    for module in modules[:kept]:
        leaf = module.removeprefix("mtp.").removeprefix("layers.0.")
        assert f"{module}.weight" not in words and leaf not in words, module


def load(folder: Path) -> Tensors:
    """Tensors of a folder; the library's own loader does not know FP8."""
    return {name: ref.read() for name, ref in Checkpoint(folder).items()}


def split_off_head(folder: Path, *, listed: bool) -> Path:
    """Moves the head into a shard of its own, as quantizers that do not know it do; the index may forget it."""
    tensors = load(folder)
    head = {name: array for name, array in tensors.items() if name.startswith("mtp.")}
    rest = {name: array for name, array in tensors.items() if name not in head}
    save_file(rest, folder / "model.safetensors")
    save_file(head, folder / "model_mtp.safetensors")
    shards: Mapping[str, str] = dict.fromkeys(rest, "model.safetensors")
    if listed:
        shards = {**shards, **dict.fromkeys(head, "model_mtp.safetensors")}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": shards}))
    return folder


def test_a_head_in_a_shard_of_its_own_is_read_by_the_index(tiny: TinyFactory, tmp_path: Path) -> None:
    apart = split_off_head(tiny("modelopt"), listed=True)
    assert read(apart, "require").warnings == []
    builder.export(apart, tmp_path / "apart", ExportOptions(weights="copy", mtp="require"))
    builder.export(tiny("modelopt"), tmp_path / "one file", COPY)
    assert substance(tmp_path / "apart") == substance(tmp_path / "one file")


def test_a_head_in_a_shard_that_the_index_forgot_is_said(tiny: TinyFactory, tmp_path: Path) -> None:
    """Not read, because an index is an allow-list; but whoever misses the head learns where it lies."""
    folder = split_off_head(tiny("modelopt"), listed=False)
    found = "model_mtp.safetensors holds 15 mtp.* tensors that the index does not list"
    assert about_the_head(folder) == [f"{NO_HEAD}{found}"]
    report = builder.export(folder, tmp_path / "out")
    assert report.graphs["mtp"] is None and f"{NO_HEAD}{found}" in report.warnings
    assert about_the_head(folder, "off") == []
    with pytest.raises(Refused) as caught:
        read(folder, "require")
    assert f"expected an MTP head (--mtp require), found {found}; " in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"no header", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_a_stray_shard_that_is_damaged_is_nobodys_business(tiny: TinyFactory, content: bytes) -> None:
    folder = split_off_head(tiny("modelopt"), listed=False)
    (folder / "model_mtp.safetensors").write_bytes(content)
    assert about_the_head(folder) == [f"{NO_HEAD}config.json promises one but no mtp.* tensor is there"]


def test_a_stray_shard_that_cannot_be_read_is_nobodys_business(
    tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = split_off_head(tiny("modelopt"), listed=False)

    def fail(path: Path) -> Mapping[str, TensorRef]:
        raise OSError(13, "Permission denied", str(path))

    monkeypatch.setattr(source_module, "read_header", fail)
    assert about_the_head(folder) == [f"{NO_HEAD}config.json promises one but no mtp.* tensor is there"]

    def fail_kindly(path: Path) -> Mapping[str, TensorRef]:
        raise MachineError("withheld")

    monkeypatch.setattr(source_module, "read_header", fail_kindly)
    assert len(about_the_head(folder)) == 1


def test_the_index_decides_between_two_copies_of_a_head(tiny: TinyFactory) -> None:
    """A stale copy in a shard beside it is neither read nor mentioned."""
    folder = split_off_head(tiny("modelopt"), listed=True)
    stale = {name: np.zeros_like(array) for name, array in load(folder).items() if name.startswith("mtp.")}
    save_file(stale, folder / "old_mtp.safetensors")
    source = read(folder, "require")
    assert source.warnings == []
    assert {ref.file.name for ref in source.linears["mtp.fc"].refs} == {"model_mtp.safetensors"}


# Values


def test_without_values_nothing_but_headers_is_read(tiny: TinyFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny("modelopt", edit=lambda tensors, config: tensors["lm_head.weight_scale"].fill(np.nan))
    with pytest.raises(Refused, match=r"tensor lm_head\.weight_scale at 0"):
        read(folder)

    def fail(ref: TensorRef) -> None:
        raise AssertionError(f"{ref.name} was read")

    monkeypatch.setattr(TensorRef, "read", fail)
    source = read_source(Checkpoint(folder), "auto", read_values=False)
    assert source.warnings == [] and len(source.linears) == 12 + 13 + 6 + 1 + 8
    with pytest.raises(AssertionError, match="was read"):
        read(folder)


def test_a_module_of_its_own_is_no_stray(tiny: TinyFactory) -> None:
    """Names decide by module: a new leaf under a known parent is another module's tensor."""
    folder = tiny("modelopt", edit=adding(model__layers__0__mlp__router__weight=np.ones((2, 64), BF16)))
    assert read(folder).skipped["unclaimed"] == ["model.layers.0.mlp.router.weight"]
