"""audit(): whatever is changed in a package, some check names it, and an untouched package passes all of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from safetensors import deserialize

import builder
from builder import digests
from builder.audit import audit
from builder.checks import Check
from builder.errors import Refused
from builder.exporter import ExportOptions
from fixtures.writer import Tiny
from tests.conftest import TinyFactory

Damage = Callable[[Path], None]


def failed(folder: Path, *, deep: bool = False) -> dict[str, str]:
    return {check.name: check.detail for check in audit(folder, deep=deep) if not check.ok}


@pytest.fixture
def package(packages: Mapping[str, Path], tmp_path: Path) -> Path:
    """A copied package of the tiny checkpoint that a test may damage."""
    return Path(shutil.copytree(packages["tiny"], tmp_path / "package"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def forge(folder: Path) -> None:
    """Records the present files' digests and sizes, as somebody would who hides a change: only meaning can tell."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text("utf-8"))
    for name, record in manifest["files"].items():
        file = folder / name
        record |= {"size": file.stat().st_size, "digest": digests.of_file(file, record["digest"].partition(":")[0])}
    path.write_text(json.dumps(manifest), "utf-8")
    (folder / "build.json").unlink()


def edit_graph(name: str, edit: Callable[[onnx.GraphProto], None]) -> Damage:
    def damage(folder: Path) -> None:
        model = onnx.load(folder / name, load_external_data=False)
        edit(model.graph)
        (folder / name).write_bytes(model.SerializeToString())

    return damage


def edit_json(name: str, *keys: str, value: Any) -> Damage:
    def damage(folder: Path) -> None:
        document = json.loads((folder / name).read_text("utf-8"))
        inner = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value
        (folder / name).write_text(json.dumps(document), "utf-8")

    return damage


def test_an_untouched_package_passes(package_folder: Path) -> None:
    checks = audit(package_folder, deep=True)
    assert [check for check in checks if not check.ok and "content not checked" not in check.detail] == []
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    graphs = sorted(path.name for path in package_folder.glob("*.onnx"))
    for kind in ("interface", "operators", "aliasing", "initializers", "file"):
        assert [name for name in names if name.split()[0] == kind and name.endswith(".onnx")] == [
            f"{kind} {graph}" for graph in graphs
        ]


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="a package folder"):
        audit(tmp_path)


def test_one_flipped_byte_is_named_in_every_file(package: Path) -> None:
    files = sorted(path for path in package.rglob("*") if path.is_file() and path.name != "build.json")
    assert len(files) >= 8
    for path in files:
        name = path.relative_to(package).as_posix()
        for position in (0, path.stat().st_size // 2, path.stat().st_size - 1):
            flip(path, position)
            wrong = failed(package, deep=True)
            assert ("manifest" if name == "manifest.json" else f"file {name}") in wrong, (name, position, wrong)
            flip(path, position)
    assert failed(package, deep=True) == {}


@pytest.mark.parametrize("name", ["weights.data", "model.onnx", "genai_config.json", "overlays/plain.json"])
def test_a_truncated_missing_or_linked_file_is_named(package: Path, name: str) -> None:
    content = (package / name).read_bytes()
    os.truncate(package / name, len(content) - 1)
    assert f"expected {len(content):,} bytes, found {len(content) - 1:,}" in failed(package)[f"file {name}"]
    (package / name).unlink()
    if name != "genai_config.json":
        assert f"expected a file of {len(content):,} bytes, found none" in failed(package)[f"file {name}"]
    (package.parent / "elsewhere").write_bytes(content)
    (package / name).symlink_to(package.parent / "elsewhere")
    assert "found none" in failed(package)[f"file {name}"]


def test_what_somebody_put_beside_the_files_is_listed(package: Path) -> None:
    (package / "overlays" / "mine.json").write_text("{}")
    (package / "hook.py").write_text("raise SystemExit")
    (check,) = (check for check in audit(package) if check.name == "other files")
    assert check == Check("other files", True, "not the package's: hook.py, overlays/mine.json")


# Linked shards


def shard(tensors: Mapping[str, Any]) -> bytes:
    """A safetensors file of what the library read from another one."""
    header, end = {}, 0
    for name, entry in tensors.items():
        offsets = [end, end + len(entry["data"])]
        header[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "data_offsets": offsets}
        end = offsets[1]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(bytes(entry["data"]) for entry in tensors.values())


def two_shards(folder: Path) -> Path:
    """The checkpoint's tensors in two shards of equal size in bytes."""
    stored = dict(deserialize((folder / "model.safetensors").read_bytes()))
    (folder / "model.safetensors").unlink()
    names = sorted(stored)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, own in parts.items():
        (folder / part).write_bytes(shard({name: stored[name] for name in own}))
    longest = max((folder / part).stat().st_size for part in parts)
    for part in parts:
        os.truncate(folder / part, longest)
    index = {"weight_map": {name: part for part, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def linked(tiny: TinyFactory, out: Path, *, hash: bool = False) -> Path:
    """A linked package whose shards are its own all the same, so that a test may damage them."""
    checkpoint = two_shards(tiny("modelopt"))
    builder.export(checkpoint, out / "linked", ExportOptions(weights="link", hash=hash))
    return Path(shutil.copytree(out / "linked", out / "package"))


def test_a_linked_shard_without_a_digest_is_listed_and_fails_when_asked_for(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = linked(tiny, tmp_path)
    shallow = {check.name: check for check in audit(folder)}
    assert all(check.ok for check in shallow.values())
    assert "content not checked" in shallow["file a.safetensors"].detail
    assert failed(folder, deep=True).keys() == {"file a.safetensors", "file b.safetensors"}
    assert all("content not checked" in detail for detail in failed(folder, deep=True).values())


def test_a_hashed_linked_shard_is_checked_to_the_byte(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = linked(tiny, tmp_path, hash=True)
    assert failed(folder, deep=True) == {}
    flip(folder / "b.safetensors", (folder / "b.safetensors").stat().st_size - 1)
    assert failed(folder, deep=True).keys() == {"file b.safetensors"}


def test_swapped_shards_are_named_by_their_headers(tiny: TinyFactory, tmp_path: Path) -> None:
    """Sizes are equal and nothing was hashed: the header alone tells, without --deep."""
    folder = linked(tiny, tmp_path)
    os.rename(folder / "a.safetensors", folder / "x")
    os.rename(folder / "b.safetensors", folder / "a.safetensors")
    os.rename(folder / "x", folder / "b.safetensors")
    wrong = failed(folder)
    assert wrong.keys() == {"file a.safetensors", "file b.safetensors"}
    assert all("header: expected sha256:" in detail for detail in wrong.values())


def test_a_digest_known_from_the_hubs_cache_is_checked(tiny: TinyFactory, tmp_path: Path) -> None:
    """The cache's blob is named by its SHA-256; an export takes its word, and deep verification does not."""
    checkpoint = tiny("modelopt")
    blobs = checkpoint.parent.parent / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    digest = digests.of_file(checkpoint / "model.safetensors", "sha256").partition(":")[2]
    for name, blob in (("right", digest), ("wrong", "f" * 64)):
        shutil.copy(checkpoint / "model.safetensors", blobs / blob)
        folder = tmp_path / "snapshots" / name
        shutil.copytree(checkpoint, folder)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").symlink_to(blobs / blob)
        builder.export(folder, tmp_path / name, ExportOptions(weights="link"))
    assert failed(tmp_path / "right", deep=True) == {}
    wrong = failed(tmp_path / "wrong", deep=True)
    assert f"expected sha256:{'f' * 64}, found sha256:{digest}" in wrong["file model.safetensors"]


# Meaning, where digests were forged


def rename_input(graph: onnx.GraphProto) -> None:
    value = next(value for value in graph.input if value.name == "past.0.conv")
    value.name = "past.0.convolution"
    for node in graph.node:
        node.input[:] = ["past.0.convolution" if name == "past.0.conv" else name for name in node.input]


def retype_input(graph: onnx.GraphProto) -> None:
    value = next(value for value in graph.input if value.name == "past.1.recurrent")
    value.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16


def reshape_output(graph: onnx.GraphProto) -> None:
    value = next(value for value in graph.output if value.name == "state_update.0.conv_value")
    value.type.tensor_type.shape.dim.add().dim_value = 1


def swap_outputs(first: str, second: str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        names = {first: second, second: first}
        for node in graph.node:
            node.output[:] = [names.get(name, name) for name in node.output]

    return edit


def swap_inputs(first: str, second: str) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        names = {first: second, second: first}
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]

    return edit


def unknown_attribute(graph: onnx.GraphProto) -> None:
    node = next(node for node in graph.node if node.op_type == "GatedDeltaNet")
    node.attribute.append(onnx.helper.make_attribute("state_checkpoints", 4))


def retired_op(graph: onnx.GraphProto) -> None:
    next(node for node in graph.node if node.op_type == "GatedDeltaNet").op_type = "LinearAttention"


def extra_op(graph: onnx.GraphProto) -> None:
    graph.node.append(onnx.helper.make_node("Identity", ["logits"], ["unused"]))


def move(name: str, key: str, by: int) -> Callable[[onnx.GraphProto], None]:
    def edit(graph: onnx.GraphProto) -> None:
        tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
        entry = next(entry for entry in tensor.external_data if entry.key == key)
        entry.value = str(int(entry.value) + by)

    return edit


def append(folder: Path) -> None:
    """Bytes that no graph refers to, as an old package's leftovers would be."""
    with (folder / "weights.data").open("ab") as file:
        file.write(bytes(512))


NORM = "model.norm.weight"
FORGERIES: Mapping[str, tuple[Damage, str, str]] = {
    "renamed input": (edit_graph("model.onnx", rename_input), "configuration", "past.0.conv"),
    "retyped input": (
        edit_graph("model.onnx", retype_input),
        "interface model.onnx",
        "input past.1.recurrent: expected float32 [batch_size, 4, 16, 16], found float16",
    ),
    "reshaped output": (
        edit_graph("model.onnx", reshape_output),
        "interface model.onnx",
        "conv_value: expected float16 [batch_size, 4, 128], found float16 [batch_size, 4, 128, 1]",
    ),
    "states of two layers exchanged": (
        edit_graph("model.onnx", swap_outputs("present.0.recurrent", "present.1.recurrent")),
        "aliasing model.onnx",
        "present.0.recurrent",
    ),
    "key for value": (
        edit_graph("mtp.onnx", swap_inputs("past_key_values.0.key", "past_key_values.0.value")),
        "aliasing mtp.onnx",
        "present.0.key",
    ),
    "an attribute of an unreleased op": (
        edit_graph("model.onnx", unknown_attribute),
        "operators model.onnx",
        "state_checkpoints",
    ),
    "a retired op": (edit_graph("model.onnx", retired_op), "operators model.onnx", "found LinearAttention"),
    "an op the manifest does not name": (edit_graph("mtp.onnx", extra_op), "operators mtp.onnx", "Identity"),
    "a weight elsewhere": (edit_graph("model.onnx", move(NORM, "offset", 256)), "initializers model.onnx", NORM),
    "a weight cut short": (edit_graph("model.onnx", move(NORM, "length", -4)), "data", NORM),
    "orphaned bytes": (append, "data", "bytes that no graph uses"),
    "context": (
        edit_json("genai_config.json", "model", "context_length", value=64),
        "options",
        "context_length: expected 512 (manifest.json), found 64",
    ),
    "drafts": (
        edit_json("genai_config.json", "speculative", "max_draft_tokens", value=2),
        "options",
        "max_draft_tokens: expected 3 (manifest.json), found 2",
    ),
    "heads": (
        edit_json("genai_config.json", "model", "decoder", "num_key_value_heads", value=2),
        "interface model.onnx",
        "past_key_values.3.key: expected float16 [num_blocks, block_size, 2, 32]",
    ),
    "hidden size": (
        edit_json("genai_config.json", "model", "decoder", "hidden_size", value=128),
        "interface model.onnx",
        "hidden_states",
    ),
    "shared": (
        edit_json("genai_config.json", "model", "mtp", "shared_initializers", 0, "offset", value="512"),  # type: ignore[arg-type]
        "shared initializers",
        "model.embed_tokens.weight",
    ),
    "another contract": (
        edit_json("manifest.json", "contract_version", value=2),
        "configuration",
        "contract_version: expected 1, found 2",
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_change_is_named_although_all_digests_agree(package: Path, name: str) -> None:
    damage, check, words = FORGERIES[name]
    damage(package)
    forge(package)
    wrong = failed(package, deep=True)
    assert not any(name.startswith("file ") for name in wrong), wrong
    assert check in wrong and words in wrong[check], wrong


def test_overlapping_weights_are_named(package: Path) -> None:
    """Two initializers that share some bytes, but not all, cannot both be right."""
    data = [entry for entry in audit(package) if entry.name == "data"]
    assert data[0].ok
    model = onnx.load(package / "model.onnx", load_external_data=False)
    sized = {tensor.name: tensor for tensor in model.graph.initializer if int(np.prod(tensor.dims)) == 64}
    first = min(sized.values(), key=lambda tensor: int(tensor.external_data[1].value))
    next(entry for entry in first.external_data if entry.key == "offset").value = str(
        int(next(entry.value for entry in first.external_data if entry.key == "offset")) + 128
    )
    (package / "model.onnx").write_bytes(model.SerializeToString())
    assert {"data", "initializers model.onnx"} <= failed(package).keys()


def test_every_check_is_made_behind_a_failed_one(package: Path) -> None:
    before = [check.name for check in audit(package)]
    flip(package / "tokenizer.json" if (package / "tokenizer.json").exists() else package / "README.md", 0)
    assert [check.name for check in audit(package)] == before


def test_a_package_without_a_manifest_says_so_and_is_judged_by_its_graphs(package: Path) -> None:
    (package / "manifest.json").unlink()
    wrong = failed(package)
    assert wrong.keys() == {"manifest"} and "expected a manifest, found none" in wrong["manifest"]


def test_a_path_that_leaves_the_package_is_never_opened(package: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    manifest = json.loads((package / "manifest.json").read_text("utf-8"))
    manifest["files"]["../secret"] = {"size": 1, "digest": digests.of_bytes(b"x"), "header": None}
    (package / "manifest.json").write_text(json.dumps(manifest))
    (package / "build.json").unlink()
    assert "found none" in failed(package)["file ../secret"]


def test_a_headless_package_has_no_head_to_check(tiny: TinyFactory, tmp_path: Path) -> None:
    builder.export(tiny("modelopt", Tiny(mtp=False)), tmp_path / "out", ExportOptions(weights="copy"))
    names = [check.name for check in audit(tmp_path / "out", deep=True)]
    assert "shared initializers" not in names and not any("mtp" in name for name in names)
