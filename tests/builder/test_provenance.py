"""manifest.json and build.json against what hashlib, xxhash, onnx and the safetensors library say of the same files."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import shutil
import struct
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import xxhash
from numpy.typing import NDArray

import builder
from builder.exporter import ExportOptions
from fixtures.writer import Config, Tensors, Tiny
from tests.builder import oracle
from tests.builder.conftest import PACKAGE_NAMES
from tests.builder.test_package import COPY, LINK, contents, external, lasting
from tests.conftest import TinyFactory

REPOSITORY = Path(__file__).parents[2]
TABLES = {"zeros", "cos", "sin"}
"""Transforms of nothing: what they make follows from the configuration."""


@pytest.fixture(scope="module", params=PACKAGE_NAMES)
def pair(request: pytest.FixtureRequest, packages: Mapping[str, Path], trained_checkpoint: Path) -> tuple[Path, Path]:
    """A checkpoint and its package."""
    folder = packages[str(request.param)]
    own = folder.parent / f"{folder.name} checkpoint"
    return (own if own.is_dir() else trained_checkpoint), folder


def manifest(package: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((package / "manifest.json").read_text("utf-8"))
    return document


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def header_digest(path: Path) -> str:
    """Of the 8 bytes of length and the JSON after them."""
    data = path.read_bytes()
    return sha256(data[: 8 + struct.unpack("<Q", data[:8])[0]])


# Files


def test_every_file_is_recorded_as_it_is(pair: tuple[Path, Path]) -> None:
    _, package = pair
    recorded, made = manifest(package)["files"], contents(package)
    assert recorded.keys() == made.keys() - {"manifest.json", "build.json"} and list(recorded) == sorted(recorded)
    for name, record in recorded.items():
        data = made[name]
        assert record["size"] == len(data)
        if name.endswith(".safetensors"):
            assert record["header"] == header_digest(package / name) and record["digest"] is None
            continue
        bulk = name.endswith(".data")
        assert record["digest"] == (f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}" if bulk else sha256(data)), name
        assert record["header"] is None
    assert recorded.keys() >= {"model.onnx", "genai_config.json", "README.md", "overlays/latency.json"}


def test_the_build_record_names_the_manifest_and_this_run(pair: tuple[Path, Path]) -> None:
    checkpoint, package = pair
    record = json.loads((package / "build.json").read_text("utf-8"))
    assert record["manifest"] == sha256((package / "manifest.json").read_bytes())
    created = datetime.datetime.fromisoformat(record["created"])
    age = datetime.datetime.now(datetime.UTC) - created
    assert created.utcoffset() == datetime.timedelta(0) and datetime.timedelta(0) <= age < datetime.timedelta(hours=1)
    assert record["source"] == str(checkpoint) and record["python"] == platform.python_version()
    assert set(record["shards"]) == {path.name for path in package.glob("*.safetensors")}


def test_nothing_of_a_run_is_outside_its_record(pair: tuple[Path, Path]) -> None:
    """Neither places nor times, which two exports would not agree on."""
    checkpoint, package = pair
    for name, data in lasting(package).items():
        if not name.endswith((".safetensors", ".data", "tokenizer.json")):
            assert str(checkpoint.parent).encode() not in data and str(package.parent).encode() not in data, name
            assert datetime.datetime.now().strftime("%Y-%m").encode() not in data, name


def test_the_card_lists_the_files(pair: tuple[Path, Path]) -> None:
    """With sizes and digests, so that a person can compare them by hand."""
    _, package = pair
    card = (package / "README.md").read_text("utf-8")
    for name, record in manifest(package)["files"].items():
        if name != "README.md":
            assert f"| {name} | {record['size']:,} | {record['digest'] or 'not read'} |" in card


# Initializers


def safetensors_origin(checkpoint: Path, origin: Mapping[str, Any], stored: Mapping[str, oracle.Raw]) -> oracle.Raw:
    """The tensor of an origin; its bytes by shard, offset and length are those that the library reads."""
    with (checkpoint / origin["shard"]).open("rb") as file:
        file.seek(origin["offset"])
        assert file.read(origin["length"]) == stored[origin["tensor"]].data
    return stored[origin["tensor"]]


def test_every_initializers_place_is_the_graphs(pair: tuple[Path, Path]) -> None:
    _, package = pair
    found = manifest(package)["initializers"]
    assert found.keys() == {path.name for path in package.glob("*.onnx")}
    for file, records in found.items():
        tensors = {tensor.name: tensor for tensor in oracle.graph(package, file).initializer}
        places = external(package, file)
        assert records.keys() == places.keys()
        for name, record in records.items():
            assert (record["file"], record["offset"], record["length"]) == places[name]
            kind = onnx.TensorProto.DataType.Name(tensors[name].data_type).lower()
            assert record["dtype"] == kind and record["shape"] == list(tensors[name].dims), name


def test_every_initializers_origin_is_the_checkpoints(pair: tuple[Path, Path]) -> None:
    """Untransformed: its bytes. Transformed by a name: what that name means, in float64 and rounded once."""
    checkpoint, package = pair
    stored = oracle.read_checkpoint(checkpoint)
    seen = set()
    for file, records in manifest(package)["initializers"].items():
        for name, record in records.items():
            sources = [safetensors_origin(checkpoint, origin, stored) for origin in record["origin"]]
            value = oracle.initializer(package, name, file)
            seen.add(record["transform"])
            if record["transform"] is None:
                assert len(sources) == 1 and value.tobytes() == sources[0].data, name
                continue
            assert bool(sources) == (record["transform"] not in TABLES), name
            expected = transformed(record, sources, value, stored)
            if expected is not None:
                assert value.dtype == np.float32 and np.array_equal(value, expected.astype(np.float32)), name
    assert seen >= {None, "plus_one", "float32", "zeros", "cos", "sin", "row_scales"}
    assert ("dequantize" in seen) == (package.name == "no capture")


def transformed(
    record: Mapping[str, Any], sources: list[oracle.Raw], value: NDArray[Any], stored: dict[str, oracle.Raw]
) -> NDArray[np.float64] | None:
    """What a transform makes of its origin. Rotary tables are compared in tests/builder/test_models.py."""
    kind = record["transform"]
    if kind in ("cos", "sin"):
        return None
    if kind == "zeros":
        return np.zeros(record["shape"])
    if kind == "dequantize":
        return oracle.weight(stored, record["origin"][0]["tensor"].rpartition(".")[0])
    (source,) = sources
    if kind == "row_scales":  # of these checkpoints' tensors and channels
        return np.broadcast_to(source.values().reshape(-1, 1), record["shape"])
    simple = {"plus_one": lambda x: 1 + x, "float32": lambda x: x, "reciprocal": lambda x: (1 / x).reshape(1)}
    found: NDArray[np.float64] = simple[kind](source.values())
    return found


@pytest.mark.parametrize(
    ("options", "edit", "transform", "module"),
    [
        (Tiny(projections="mxfp4"), None, "e8m0_as_e4m3", "model.layers.0.mlp.up_proj"),
        (Tiny(projections="mxfp4"), None, "power", "model.layers.0.mlp.up_proj"),
        (Tiny(projections="mxfp8"), None, "row_scales", "model.layers.0.mlp.up_proj"),
        (Tiny(gates="fp8"), None, "dequantize", "model.layers.1.linear_attn.in_proj_a"),
        (Tiny(), "nan", "clamp_nan", "model.layers.0.mlp.up_proj"),
    ],
)
def test_rarer_transforms_are_named(
    tiny: TinyFactory, tmp_path: Path, options: Tiny, edit: str | None, transform: str, module: str
) -> None:
    """With every tensor that went into them: a weight and its scales where a whole weight was dequantized."""

    def nan(tensors: Tensors, config: Config) -> None:
        tensors[f"{module}.weight"][3, :8] = 0
        tensors[f"{module}.weight_scale"].view(np.uint8)[3, 0] = 0x7F

    folder = tiny("modelopt", options, nan if edit else None)
    builder.export(folder, tmp_path / "out")
    records = manifest(tmp_path / "out")["initializers"]["model.onnx"].values()
    own = [
        record
        for record in records
        if record["transform"] == transform and record["origin"][0]["tensor"].startswith(f"{module}.")
    ]
    assert len(own) == 1
    leaves = {"weight", "weight_scale"} if transform == "dequantize" else {"weight_scale"}
    assert {origin["tensor"] for origin in own[0]["origin"]} == {f"{module}.{leaf}" for leaf in leaves}
    stored = oracle.read_checkpoint(folder)
    for origin in own[0]["origin"]:
        safetensors_origin(folder, origin, stored)


# Graphs


def test_required_ops_are_those_of_the_graphs(pair: tuple[Path, Path]) -> None:
    """Each operator once, with every attribute that any of its nodes has."""
    _, package = pair
    for file, record in manifest(package)["graphs"].items():
        model = onnx.load(package / file, load_external_data=False)
        found: dict[tuple[str, str], set[str]] = {}
        for node in oracle.nodes(model.graph):
            attributes = {attribute.name for attribute in node.attribute}
            found.setdefault((node.domain or "ai.onnx", node.op_type), set()).update(attributes)
        listed = {(op["domain"], op["op"]): op["attributes"] for op in record["required_ops"]}
        assert listed == {key: sorted(attributes) for key, attributes in found.items()}
        assert len(listed) == len(record["required_ops"])
        assert record["opsets"] == {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
        assert record["digest"] == sha256((package / file).read_bytes())
        assert record["minimum_onnxruntime"] == "1.30"  # the lowest that has GatedDeltaNet with these attributes
    assert ("com.microsoft", "GatedDeltaNet") in {
        (op["domain"], op["op"]) for op in manifest(package)["graphs"]["model.onnx"]["required_ops"]
    }


def test_checkpoints_are_recorded_by_group_in_the_words_of_the_first_design(packages: Mapping[str, Path]) -> None:
    """Convolutions from the left, recurrences from the right; nothing of a package without them."""
    for name, count in (("dense", 4), ("dense bfloat16", 2)):
        assert manifest(packages[name])["state_groups"] == [
            {
                "kind": "fixed",
                "layer_ids": [0, 1, 2],
                "bindings": {
                    "state": {
                        "input": f"past.%d.{kind}",
                        "output": f"present.%d.{kind}",
                        "checkpoints": f"present_checkpoints.%d.{kind}",
                    }
                },
                "checkpoint_count": count,
                "checkpoint_alignment": alignment,
            }
            for kind, alignment in (("conv", "left"), ("recurrent", "right"))
        ]
        assert manifest(packages[name])["options"]["checkpoints"] == "dense"
        assert f"| checkpoints | {count} states a request |" in (packages[name] / "README.md").read_text("utf-8")
    for name in ("tiny", "no capture"):
        assert manifest(packages[name])["state_groups"] == []
        assert "| checkpoints |" not in (packages[name] / "README.md").read_text("utf-8")


def test_the_producer_is_what_is_installed(pair: tuple[Path, Path]) -> None:
    _, package = pair
    producer = manifest(package)["producer"]
    assert producer.pop("draftsmith") == builder.__version__
    assert producer.keys() == {"ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxscript"}
    assert all(version == metadata.version(name) for name, version in producer.items())


def test_options_are_recorded_as_they_were_resolved(tiny: TinyFactory, tmp_path: Path) -> None:
    """Not how weights came: linked or copied, it is the same package."""
    folder = tiny("modelopt")
    builder.export(folder, tmp_path / "default")
    defaults = {
        "dtype": "float16",
        "mtp": "auto",
        "checkpoints": "compact",
        "context_length": 512,
        "max_draft_tokens": 3,
        "block_size": 256,
        "max_batch_size": 100,
    }
    assert manifest(tmp_path / "default")["options"] == defaults
    other = ExportOptions(
        weights="copy",
        dtype="bfloat16",
        mtp="require",
        max_draft_tokens=5,
        block_size=16,
        max_batch_size=7,
        context_length=99,
    )
    builder.export(folder, tmp_path / "other", other)
    changed = {"dtype": "bfloat16", "mtp": "require", "context_length": 99, "max_draft_tokens": 5}
    assert manifest(tmp_path / "other")["options"] == {**defaults, **changed, "block_size": 16, "max_batch_size": 7}


# The source


def test_a_folder_as_a_source(pair: tuple[Path, Path]) -> None:
    checkpoint, package = pair
    source = manifest(package)["source"]
    texts = ("config.json", "hf_quant_config.json", "generation_config.json", "model.safetensors.index.json")
    there = [checkpoint / name for name in texts if (checkpoint / name).is_file()]
    assert source == {
        "name": checkpoint.name,
        "kind": "folder",
        "revision": None,
        "files": {path.name: sha256(path.read_bytes()) for path in there},
        "shards": {
            path.name: {"size": path.stat().st_size, "digest": None, "header": header_digest(path)}
            for path in checkpoint.glob("*.safetensors")
        },
    }


def snapshot_of(folder: Path, cache: Path, repository: str = "models--some-owner--A-Name--2B") -> Path:
    """A folder as huggingface_hub keeps it: small files by their Git hash, large ones by SHA-256."""
    blobs, snapshot = cache / repository / "blobs", cache / repository / "snapshots" / ("0123456789" * 4)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        data = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        blob = hashlib.sha256(data).hexdigest() if path.suffix == ".safetensors" else git
        (blobs / blob).write_bytes(data)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    return snapshot


@pytest.mark.parametrize("options", [COPY, LINK], ids=["copy", "link"])
@pytest.mark.parametrize("way", ["snapshot", "link to it"])
def test_a_snapshot_of_the_hubs_cache_as_a_source(
    tiny: TinyFactory, tmp_path: Path, options: ExportOptions, way: str
) -> None:
    """Where it came from is in its path, and so are its digests."""
    folder = tiny("modelopt")
    snapshot = snapshot_of(folder, tmp_path / "hub")
    if way != "snapshot":
        (tmp_path / "shortcut").symlink_to(snapshot)
        snapshot = tmp_path / "shortcut"
    builder.export(snapshot, tmp_path / "out", options)
    source = manifest(tmp_path / "out")["source"]
    assert (source["kind"], source["name"], source["revision"]) == ("hub", "some-owner/A-Name--2B", "0123456789" * 4)
    assert set(source["files"]) == {"config.json", "hf_quant_config.json"}
    data = (folder / "model.safetensors").read_bytes()
    header = header_digest(folder / "model.safetensors")
    record = {"size": len(data), "digest": sha256(data), "header": header}
    assert source["shards"] == {"model.safetensors": record}
    if options == LINK:
        assert manifest(tmp_path / "out")["files"]["model.safetensors"] == record
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "# A-Name--2B for ONNX Runtime" in card and f"some-owner/A-Name--2B at revision {'0123456789' * 4}" in card


@pytest.mark.parametrize(
    "place", ["models--a--b/snapshots/main", "models--a--b/files", "datasets--a--b/snapshots/" + "0" * 40]
)
def test_a_path_that_only_looks_like_the_cache_is_a_folder(tiny: TinyFactory, tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    folder.parent.mkdir(parents=True)
    shutil.move(tiny("modelopt"), folder)
    builder.export(folder, tmp_path / "out")
    source = manifest(tmp_path / "out")["source"]
    assert (source["kind"], source["name"], source["revision"]) == ("folder", folder.name, None)


# The same again


@pytest.mark.parametrize("weights", ["link", "copy"])
def test_two_processes_write_the_same_bytes(tiny: TinyFactory, tmp_path: Path, weights: str) -> None:
    """Under different hash seeds, locales and places, and later: all but build.json, which tells them apart."""
    folder = tiny("compressed-tensors", Tiny(gates="nvfp4", vision=True))
    script = (
        f"import sys, builder\nbuilder.export({str(folder)!r}, sys.argv[1], builder.ExportOptions(weights={weights!r}))"
    )
    outs = [tmp_path / name for name in ("one", "another place/two")]
    for out, seed, zone in zip(outs, ("1", "4242"), ("UTC", "Asia/Tokyo"), strict=True):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "LC_ALL": "C"}
        subprocess.run([sys.executable, "-c", script, str(out)], check=True, cwd=REPOSITORY, env=environment)
    assert lasting(outs[0]) == lasting(outs[1])
    assert len({sha256((out / "manifest.json").read_bytes()) for out in outs}) == 1
