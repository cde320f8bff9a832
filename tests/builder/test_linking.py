"""Shards in a package: how they come, that graphs read them in place, and that nobody else's bytes are touched."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from onnxruntime_genai import Config as GenaiConfig

import builder
import runtime
from builder import linking
from builder.errors import Refused
from builder.exporter import ExportOptions
from builder.linking import Brought, bring
from builder.progress import silent
from builder.weights import Placement, Stored
from fixtures import lookalike
from fixtures.writer import Config, Dialect, Tensors, Tiny
from tests.builder import oracle
from tests.builder.test_models import answers
from tests.builder.test_package import COPY, LINK, contents, external, lasting, substance
from tests.conftest import TinyFactory

MEGABYTE = 1 << 20
SHARED_MEMORY = Path("/dev/shm")
"""On Linux a file system of its own, to which nothing can be linked."""


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    """A file larger than one piece of a copy, in a folder of its own."""
    path = tmp_path / "checkpoint" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(np.random.default_rng(0).bytes(17 * MEGABYTE))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    folder.mkdir()
    return folder / "model.safetensors"


# File systems of all kinds


Patch = Callable[[pytest.MonkeyPatch], None]


def failing(owner: Any, name: str, code: int, after: int = 0) -> Patch:
    """A call that works `after` times and then raises an OSError."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        real, calls = getattr(owner, name), []

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            if len(calls) > after:
                raise OSError(code, os.strerror(code))
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    return apply


no_reflinks = failing(fcntl, "ioctl", errno.EOPNOTSUPP)


def reflinks(patch: pytest.MonkeyPatch) -> None:
    """As on XFS or Btrfs, except that the bytes are copied."""
    write_int = 1 << 30  # _IOW('\x94', 9, int) of Linux's include/uapi/linux/fs.h and asm-generic/ioctl.h
    ficlone = write_int | 4 << 16 | 0x94 << 8 | 9

    def ioctl(target: Any, request: int, source: int) -> int:
        assert request == ficlone and os.fstat(target.fileno()).st_size == 0
        os.sendfile(target.fileno(), source, 0, os.fstat(source).st_size)
        return 0

    patch.setattr(fcntl, "ioctl", ioctl)


def no_links(code: int = errno.EXDEV, after: int = 0) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        no_reflinks(patch)
        failing(os, "link", code, after)(patch)

    return apply


# One shard


def test_a_reflink_is_a_file_of_its_own(shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a simulated clone: whoever changes one of both later leaves the other alone."""
    reflinks(monkeypatch)
    assert bring(shard, target, silent) == Brought("reflink")
    assert target.read_bytes() == shard.read_bytes() and not target.samefile(shard)


def test_without_reflinks_a_hard_link_is_the_same_file(
    shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reflinks(monkeypatch)
    assert bring(shard, target, silent) == Brought("hardlink", "no reflink: Operation not supported")
    assert target.samefile(shard) and shard.stat().st_nlink == 2


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EPERM, errno.EMLINK], ids=errno.errorcode.get)
def test_what_cannot_be_linked_is_copied_and_says_why(
    shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The digest is of the very bytes that were written."""
    no_links(code)(monkeypatch)
    steps: list[tuple[str, int, int]] = []
    found = bring(shard, target, lambda *step: steps.append(step))
    assert found is not None and found.how == "copy" and not found.linked
    assert found.reason == f"no reflink: Operation not supported; no hard link: {os.strerror(code)}"
    assert target.read_bytes() == shard.read_bytes() and not target.samefile(shard) and shard.stat().st_nlink == 1
    assert found.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(shard.read_bytes())}"
    assert {(task, total) for task, _, total in steps} == {("copying model.safetensors", 17 * MEGABYTE)}
    done = [step[1] for step in steps]
    assert done == sorted(set(done)) and done[0] > 0 and done[-1] == 17 * MEGABYTE


def test_where_a_copy_is_not_wanted_nothing_is_left(shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_links()(monkeypatch)
    assert bring(shard, target, silent, may_copy=False) is None
    assert list(target.parent.iterdir()) == []


def test_a_system_that_knows_no_reflinks(shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "fcntl", None)
    assert bring(shard, target, silent) == Brought("hardlink", "no reflink: not on this system")
    assert target.samefile(shard)


def test_a_copy_that_fails_is_an_error(shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_links()(monkeypatch)
    failing(os, "copy_file_range", errno.ENOSPC)(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        bring(shard, target, silent)


def in_blobs(path: Path, name: str | None = None) -> Path:
    """Moves a file into a cache's blobs and leaves a link in a snapshot, as huggingface_hub does. Returns the link."""
    home = path.parent / "models--owner--name"
    snapshot = home / "snapshots" / ("ab" * 20)
    for folder in (home / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    name = name or hashlib.sha256(path.read_bytes()).hexdigest()
    path.rename(home / "blobs" / name)
    (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot / path.name


@pytest.mark.parametrize("system", [no_reflinks, reflinks], ids=["hard link", "reflink"])
def test_a_link_into_a_cache_is_resolved_and_its_name_is_the_digest(
    shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch, system: Patch
) -> None:
    data = shard.read_bytes()
    system(monkeypatch)
    link = in_blobs(shard)
    found = bring(link, target, silent)
    assert found is not None and found.linked and found.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert not target.is_symlink() and target.read_bytes() == data
    assert target.samefile(link) == (system is no_reflinks)


@pytest.mark.parametrize("name", ["ab" * 20, "AB" * 32, "ab" * 32 + ".incomplete"])
def test_another_name_in_a_cache_is_no_digest(
    shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Small files are named by their Git hash; what is named otherwise was never checked."""
    no_reflinks(monkeypatch)
    found = bring(in_blobs(shard, name), target, silent)
    assert found is not None and found.digest is None


def test_a_digest_for_a_name_outside_a_cache_is_not_believed(
    shard: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reflinks(monkeypatch)
    named = shard.rename(shard.parent / hashlib.sha256(b"another").hexdigest())
    found = bring(named, target, silent)
    assert found is not None and found.how == "hardlink" and found.digest is None


def test_a_dangling_link_is_an_error(target: Path, tmp_path: Path) -> None:
    (tmp_path / "link.safetensors").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError):
        bring(tmp_path / "link.safetensors", target, silent)


# A package of linked shards


def header(path: Path) -> tuple[int, Mapping[str, Any]]:
    """Where the data of a safetensors file begins, and its header: 8 bytes of length, JSON, data."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return 8 + length, json.loads(file.read(length))


def tensors_by_range(folder: Path) -> dict[tuple[str, int, int], tuple[str, str, list[int]]]:
    """Name, type and shape of each tensor of a checkpoint by shard, offset and length."""
    found = {}
    for path in folder.glob("*.safetensors"):
        start, entries = header(path)
        for name, entry in entries.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[path.name, start + begin, end - begin] = name, entry["dtype"], entry["shape"]
    return found


@pytest.fixture(params=["float16", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


READ_AS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": "float8_e4m3fn", "U8": "uint8"}


def check_in_place(checkpoint: Path, package: Path) -> None:
    """Every initializer is a tensor of a shard, whole and as the safetensors library reads it, or is in our own file.

    In our own file is nothing that stands in a shard as it is.
    """
    stored, by_range = oracle.read_checkpoint(checkpoint), tensors_by_range(checkpoint)
    everything = {raw.data for raw in stored.values()}
    seen = set()
    for file in package.glob("*.onnx"):
        for tensor in oracle.graph(package, file.name).initializer:
            place = external(package, file.name).get(tensor.name)
            if place is None:
                continue  # a constant of a few bytes, in the graph itself
            value = oracle.value(package, tensor)
            if place[0] == "transformed.data":
                assert value.nbytes <= 4 or value.tobytes() not in everything, tensor.name
                continue
            name, kind, shape = by_range[place]
            raw = stored[name]
            assert value.tobytes() == raw.data and value.size == int(np.prod(shape)), name
            scale = value.dtype == np.uint8 and kind == "F8_E4M3"  # NVFP4's, which the op takes as bytes
            assert scale or str(value.dtype) == READ_AS[kind], name
            seen.add(name)
    assert len(seen) > 30


def check_linked(checkpoint: Path, package: Path) -> None:
    """The shards are those of the checkpoint, and our own file holds what is transformed and nothing else."""
    shards = {file for file, _, _ in tensors_by_range(checkpoint)}
    assert shards == {path.name for path in package.glob("*.safetensors")}
    assert all((package / name).samefile(checkpoint / name) for name in shards)
    assert {path.name for path in package.glob("*.data")} == {"transformed.data"}


def test_real_checkpoints_are_read_in_place(
    real_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    no_reflinks(monkeypatch)
    report = builder.export(real_checkpoint, tmp_path / "out", replace(LINK, dtype=dtype))
    check_linked(real_checkpoint, tmp_path / "out")
    check_in_place(real_checkpoint, tmp_path / "out")
    assert report.warnings == []


@pytest.mark.parametrize("projections", ["fp8", "fp8 block", "mxfp8", "nvfp4", "nvfp4 32", "mxfp4"])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_every_format_is_read_in_place(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: Dialect, projections: Any
) -> None:
    no_reflinks(monkeypatch)
    folder = tiny(dialect, Tiny(projections=projections, vision=True, fp8_per_channel=True))
    builder.export(folder, tmp_path / "out", LINK)
    check_linked(folder, tmp_path / "out")
    check_in_place(folder, tmp_path / "out")


@pytest.mark.parametrize("fault", [{"offset": 8}, {"file": "transformed.data", "offset": 0}], ids=["offset", "file"])
def test_a_fault_in_place_would_be_found(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: dict[str, Any]
) -> None:
    folder = tiny("modelopt")
    right: Callable[[Stored], Placement] = Stored.in_place.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(Stored, "in_place", property(lambda weight: replace(right(weight), **fault)))
    with pytest.raises((AssertionError, KeyError)):  # the export's own checks find the coarser ones
        builder.export(folder, tmp_path / "out", LINK)
        check_in_place(folder, tmp_path / "out")


def test_the_graphs_of_both_layouts_differ_in_places_only(tiny: TinyFactory, tmp_path: Path) -> None:
    """Nodes, names, types and every initializer's value are the same."""
    folder = tiny("compressed-tensors", Tiny(gates="nvfp4"))
    for name, options in (("copied", COPY), ("linked", LINK)):
        builder.export(folder, tmp_path / name, options)
    for file in ("model.onnx", "mtp.onnx"):
        copied, linked = (oracle.graph(tmp_path / name, file) for name in ("copied", "linked"))
        for one, other in zip(copied.initializer, linked.initializer, strict=True):
            values = [oracle.value(tmp_path / name, tensor) for name, tensor in (("copied", one), ("linked", other))]
            assert one.name == other.name and values[0].dtype == values[1].dtype
            assert values[0].tobytes() == values[1].tobytes() and values[0].shape == values[1].shape
            del one.external_data[:], other.external_data[:]
        assert copied == linked


def test_shared_weights_are_listed_where_they_lie(trained_checkpoint: Path, tmp_path: Path) -> None:
    """The engine loads them once, from the shard: embedding and LM head as the safetensors library reads them."""
    builder.export(trained_checkpoint, tmp_path / "out", LINK)
    stored, by_range = oracle.read_checkpoint(trained_checkpoint), tensors_by_range(trained_checkpoint)
    config = json.loads((tmp_path / "out" / "genai_config.json").read_text("utf-8"))["model"]
    entries = {entry["name"]: entry for entry in config["decoder"]["shared_initializers"]}
    assert config["mtp"]["shared_initializers"] == config["decoder"]["shared_initializers"]
    for initializer, tensor in (
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("lm_head.fp8_weight", "lm_head.weight"),
    ):
        entry = entries[initializer]
        place = entry["data_file"], int(entry["offset"]), int(entry["length"])
        name, _, shape = by_range[place]
        assert name == tensor and entry["shape"] == shape and place[2] == len(stored[tensor].data)


def test_offsets_beyond_four_gigabytes_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the graphs, the manifest and the configuration, for one shard of 6 GB, most of it holes."""
    no_reflinks(monkeypatch)
    folder, out = tmp_path / "large", tmp_path / "out"
    lookalike.write(folder, lookalike.Geometry(layers=8), shard_bytes=1 << 40)
    builder.export(folder, out, LINK)
    by_range = tensors_by_range(folder)
    manifest = json.loads((out / "manifest.json").read_text("utf-8"))["initializers"]
    last = 0
    for file in ("model.onnx", "mtp.onnx"):
        for name, place in external(out, file).items():
            record = manifest[file][name]
            assert place == (record["file"], record["offset"], record["length"])
            assert place[0] == "transformed.data" or by_range[place][0] == record["origin"][0]["tensor"]
            last = max(last, place[1])
    assert last > 1 << 32
    config = json.loads((out / "genai_config.json").read_text("utf-8"))["model"]["decoder"]
    for entry in config["shared_initializers"]:
        place = entry["data_file"], int(entry["offset"]), int(entry["length"])
        assert place == external(out, "model.onnx")[entry["name"]]
    assert sum(path.stat().st_blocks * 512 for path in out.iterdir()) < 200 * MEGABYTE


# Which way is taken


def shards_of(package: Path) -> dict[str, Any]:
    """How each shard came, as build.json tells."""
    found: dict[str, Any] = json.loads((package / "build.json").read_text("utf-8"))["shards"]
    return found


def test_by_default_shards_of_the_same_file_system_are_linked(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reflinks(monkeypatch)
    folder = tiny("modelopt")
    assert builder.export(folder, tmp_path / "out").warnings == []
    check_linked(folder, tmp_path / "out")
    how = {"how": "hardlink", "why_not_better": "no reflink: Operation not supported"}
    assert shards_of(tmp_path / "out") == {"model.safetensors": how}


def test_reflinked_packages_are_like_hard_linked_ones(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny("modelopt")
    for name, system in (("hardlink", no_reflinks), ("reflink", reflinks)):
        with monkeypatch.context() as patch:
            system(patch)
            report = builder.export(folder, tmp_path / name)
            assert report.warnings == [] and report.weights["linked_bytes"] > 0
        assert shards_of(tmp_path / name)["model.safetensors"]["how"] == name
    assert lasting(tmp_path / "hardlink") == lasting(tmp_path / "reflink")
    assert not (tmp_path / "reflink" / "model.safetensors").samefile(folder / "model.safetensors")


@pytest.mark.parametrize("linkable", [0, 1], ids=["none", "the first"])
def test_by_default_weights_are_copied_where_links_turn_out_impossible(
    trained_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linkable: int
) -> None:
    """Every shard or none: the one that was linked already goes again, and the package is that of --weights copy."""
    with monkeypatch.context() as patch:
        no_links(errno.EPERM, after=linkable)(patch)
        report = builder.export(trained_checkpoint, tmp_path / "out")
    name = ("model_backbone", "model_mtp")[linkable]
    assert report.warnings == [f"weights were copied: {name}.safetensors cannot be linked here"]
    assert report.weights["linked_bytes"] == 0 and shards_of(tmp_path / "out") == {}
    builder.export(trained_checkpoint, tmp_path / "copied", COPY)
    assert lasting(tmp_path / "out") == lasting(tmp_path / "copied")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_where_links_are_asked_for_shards_are_copied_whole_if_need_be(
    trained_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two: the layout is the same, and so are the graphs; the copied one has a digest."""
    with monkeypatch.context() as patch:
        no_links(errno.EPERM, after=1)(patch)
        report = builder.export(trained_checkpoint, tmp_path / "out", LINK)
    why = "no reflink: Operation not supported; no hard link: Operation not permitted"
    assert report.warnings == [f"model_mtp.safetensors was copied whole: {why}"]
    assert {name: shard["how"] for name, shard in shards_of(tmp_path / "out").items()} == {
        "model_backbone.safetensors": "hardlink",
        "model_mtp.safetensors": "copy",
    }
    assert shards_of(tmp_path / "out")["model_mtp.safetensors"]["why_not_better"] == why
    builder.export(trained_checkpoint, tmp_path / "linked", LINK)
    assert substance(tmp_path / "out") == substance(tmp_path / "linked")
    head = external(tmp_path / "out", "mtp.onnx")
    copied = {place for place in head.values() if place[0] == "model_mtp.safetensors"}
    places = copied | set(external(tmp_path / "out", "model.onnx").values()) | set(head.values())
    assert report.weights == {
        "linked_bytes": sum(length for file, _, length in places if file == "model_backbone.safetensors"),
        "copied_bytes": sum(length for file, _, length in places if file != "model_backbone.safetensors"),
        "shared_bytes": report.weights["shared_bytes"],
    }
    files = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["files"]
    data = (tmp_path / "out" / "model_mtp.safetensors").read_bytes()
    assert files["model_mtp.safetensors"]["digest"] == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    assert files["model_backbone.safetensors"]["digest"] is None


@pytest.mark.skipif(not os.access(SHARED_MEMORY, os.W_OK), reason="needs a second file system")
def test_another_file_system_is_copied_to_and_that_is_said(tiny: TinyFactory) -> None:
    """As one data file by default, shard by shard where links were asked for."""
    folder = tiny("modelopt")
    home = SHARED_MEMORY / f"draftsmith-test-{os.getpid()}"
    try:
        if SHARED_MEMORY.stat().st_dev == folder.stat().st_dev:
            pytest.skip("the tests themselves are there")
        said = builder.export(folder, home / "auto").warnings
        assert said == ["weights were copied: the checkpoint is on another file system"]
        assert (home / "auto" / "weights.data").is_file() and not list((home / "auto").glob("*.safetensors"))
        (warning,) = builder.export(folder, home / "link", LINK).warnings
        assert warning.startswith("model.safetensors was copied whole: no reflink: ")
        assert warning.endswith("; no hard link: Invalid cross-device link")
        assert (home / "link" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    finally:
        shutil.rmtree(home, ignore_errors=True)


def test_a_cache_of_links_is_linked_to_its_blobs(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reflinks(monkeypatch)
    plain = tiny("modelopt")
    builder.export(plain, tmp_path / "plain", LINK)
    digest = hashlib.sha256((plain / "model.safetensors").read_bytes()).hexdigest()
    for name in ("config.json", "hf_quant_config.json"):
        in_blobs(plain / name, hashlib.sha1((plain / name).read_bytes()).hexdigest())
    link = in_blobs(plain / "model.safetensors")
    builder.export(link.parent, tmp_path / "out")
    made = tmp_path / "out" / "model.safetensors"
    assert made.samefile(link.parent / ".." / ".." / "blobs" / digest) and not made.is_symlink()
    files = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["files"]
    assert files["model.safetensors"]["digest"] == f"sha256:{digest}"
    assert substance(tmp_path / "out") == substance(tmp_path / "plain")


def test_replacing_and_deleting_a_package_leaves_the_checkpoint_alone(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes is a name, not the file."""
    no_reflinks(monkeypatch)
    folder = tiny("modelopt")
    before = contents(folder)
    builder.export(folder, tmp_path / "out")
    builder.export(folder, tmp_path / "out", ExportOptions(force=True))
    builder.export(folder, tmp_path / "out", ExportOptions(weights="copy", force=True))
    builder.export(folder, tmp_path / "out", ExportOptions(weights="link", force=True))
    assert (folder / "model.safetensors").stat().st_nlink == 2
    shutil.rmtree(tmp_path / "out")
    assert contents(folder) == before


# What is read of linked weights


def test_a_linked_value_beyond_float16_is_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    """Of a tensor that the graph casts; in bfloat16 nothing is cast, and nothing is wrong."""
    name = "model.layers.1.linear_attn.in_proj_b.weight"

    def edit(tensors: Tensors, config: Config) -> None:
        tensors[name][2, 5] = 131072.0

    folder = tiny("modelopt", edit=edit)
    with pytest.raises(Refused, match=rf"tensor {name}: expected values within 65504 .*found 131072.*bfloat16"):
        builder.export(folder, tmp_path / "out", LINK)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    builder.export(folder, tmp_path / "out", replace(LINK, dtype="bfloat16"))


def test_lost_small_values_are_counted_alike_in_both_layouts(tiny: TinyFactory, tmp_path: Path) -> None:
    def edit(tensors: Tensors, config: Config) -> None:
        tensors["mtp.fc.weight"][:8] = 1e-9

    folder = tiny("modelopt", edit=edit)
    copied, linked = (builder.export(folder, tmp_path / name, o).warnings for name, o in (("c", COPY), ("l", LINK)))
    (line,) = linked
    assert copied == linked and line.startswith("1024 of 8192 values of mtp.fc.weight are too small for float16")


@pytest.mark.parametrize("hidden", ["lm_head.weight", "model.layers.2.linear_attn.norm.weight"])
def test_nan_in_a_linked_weight_is_found_by_hash(tiny: TinyFactory, tmp_path: Path, hidden: str) -> None:
    """What no cast goes through is read when somebody asks: FP8, and floats that stay float32 in the graph."""

    def edit(tensors: Tensors, config: Config) -> None:
        if hidden.startswith("lm_head"):
            tensors[hidden].view(np.uint8)[7, 11] = 0x7F
        else:
            tensors[hidden] = tensors[hidden].astype(np.float16)
            tensors[hidden][3] = np.nan

    folder = tiny("modelopt", edit=edit)
    message = rf"tensor {hidden}: expected finite numbers, found NaN"
    for options in (COPY, replace(LINK, hash=True)):
        with pytest.raises(Refused, match=message):
            builder.export(folder, tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
    builder.export(folder, tmp_path / "out", LINK)


def test_hash_reads_linked_shards_for_their_digest(trained_checkpoint: Path, tmp_path: Path) -> None:
    builder.export(trained_checkpoint, tmp_path / "out", replace(LINK, hash=True))
    files = json.loads((tmp_path / "out" / "manifest.json").read_text("utf-8"))["files"]
    for name in ("model_backbone.safetensors", "model_mtp.safetensors"):
        data = (trained_checkpoint / name).read_bytes()
        assert files[name]["digest"] == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"


def test_a_sparse_shard_means_zeros(tiny: TinyFactory, tmp_path: Path) -> None:
    """Holes come through a copy as zeros, a link has them still, and both packages' values are the file's bytes."""
    folder = tiny("modelopt", edit=lambda tensors, config: tensors["model.embed_tokens.weight"].fill(0))
    path = folder / "model.safetensors"
    data = path.read_bytes()
    with path.open("r+b") as file:  # blocks of zeros are given back to the disk
        file.truncate(0)
        for start in range(0, len(data), 4096):
            if any(data[start : start + 4096]):
                file.seek(start)
                file.write(data[start : start + 4096])
        file.truncate(len(data))
    if path.stat().st_blocks * 512 >= len(data):
        pytest.skip("the file system has no sparse files")
    for name, options in (("copied", COPY), ("linked", LINK)):
        builder.export(folder, tmp_path / name, options)
        embedding = oracle.initializer(tmp_path / name, "model.embed_tokens.weight")
        assert embedding.shape == (96, 64) and not embedding.any()
        value = oracle.initializer(tmp_path / name, "lm_head.fp8_weight")
        assert value.tobytes() == oracle.read_checkpoint(folder)["lm_head.weight"].data


# Who uses the package


@pytest.mark.parametrize("options", [COPY, LINK], ids=["copied", "linked"])
@pytest.mark.parametrize("head", [True, False], ids=["with a head", "headless"])
def test_the_engine_accepts_the_package_and_every_overlay(
    tiny: TinyFactory, tmp_path: Path, options: ExportOptions, head: bool
) -> None:
    builder.export(tiny("modelopt", Tiny(mtp=head)), tmp_path / "out", options)
    overlays = sorted((tmp_path / "out" / "overlays").iterdir())
    assert [path.name for path in overlays] == ["latency.json", *(["plain.json"] if head else [])]
    for path in overlays:
        GenaiConfig(str(tmp_path / "out")).overlay(path.read_text("utf-8"))
    with pytest.raises(Exception, match="bogus"):  # it does not take just anything
        GenaiConfig(str(tmp_path / "out")).overlay('{"model": {"bogus": 1}}')


@pytest.mark.parametrize("start", [5, 6, 8])
def test_tensors_at_odd_offsets_mean_the_same(tiny: TinyFactory, tmp_path: Path, start: int) -> None:
    """Not every writer pads its header or begins with the widest values; what is linked stays where it is."""
    folder = tiny("modelopt")
    path = folder / "model.safetensors"
    stored = sorted(oracle.read_checkpoint(folder).items())
    header, body = {}, b""
    for name, raw in [("a", oracle.Raw("U8", (3,), b"odd")), *stored]:
        end = len(body) + len(raw.data)
        header[name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [len(body), end]}
        body += raw.data
    text = json.dumps(header).encode()
    text += b" " * ((start - len(text)) % 8)
    path.unlink()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    for name, options in (("copied", COPY), ("linked", LINK)):
        builder.export(folder, tmp_path / name, options)
    check_in_place(folder, tmp_path / "linked")
    assert {offset % 4 for file, offset, _ in external(tmp_path / "linked", "model.onnx").values()} >= {(start + 3) % 4}
    copied, linked = (answers(tmp_path / name) for name in ("copied", "linked"))
    for name, values in copied.items():
        assert np.isfinite(values).all() and np.array_equal(values, linked[name]), name


def test_a_linked_package_gives_the_tokens_of_a_copied_one(
    trained_checkpoint: Path, trained_package: Path, tmp_path: Path
) -> None:
    """And transformers', plain and with drafts."""
    builder.export(trained_checkpoint, tmp_path / "linked", LINK)
    reference = np.load(trained_checkpoint / "reference.npz")
    prompt, expected = reference["prompt_2"].tolist(), reference["greedy_2"].tolist()[:24]
    for folder in (trained_package, tmp_path / "linked"):
        package = runtime.load(folder)
        for drafts in (0, 3):
            engine = runtime.Engine(package, runtime.EngineOptions(num_blocks=4))
            request = engine.submit(prompt, max_new_tokens=24, draft_tokens=drafts)
            while engine.has_work:
                engine.step()
            assert list(request.token_ids)[-24:] == expected
