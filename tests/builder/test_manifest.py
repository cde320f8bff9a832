"""manifest.read(): another version is refused as such, and damage by its key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from builder import manifest, reader
from builder.errors import Refused

Document = dict[str, Any]
COUNT = "initializers.model.onnx.model.embed_tokens.weight"


@pytest.fixture
def package(packages: Mapping[str, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    shutil.copytree(packages["tiny"], folder)
    return folder


def rewrite(folder: Path, change: Callable[[Document], object]) -> None:
    document = json.loads((folder / "manifest.json").read_text("utf-8"))
    change(document)
    (folder / "manifest.json").write_text(json.dumps(document), "utf-8")


def test_a_manifest_reads_as_it_is_written(package_folder: Path) -> None:
    document = json.loads((package_folder / "manifest.json").read_text("utf-8"))
    found = manifest.read(package_folder)
    assert found is not None
    named = {"format": "draftsmith package", "version": 1, "contract_version": 1}
    assert found.model_dump() | named == document


def test_a_package_may_have_none(package: Path) -> None:
    """As before there were any, or from another exporter."""
    (package / "manifest.json").unlink()
    assert manifest.read(package) is None
    assert reader.read(package).vocab_size == 96


@pytest.mark.parametrize("key", ["format", "version", "contract_version"])
@pytest.mark.parametrize("value", [0, 2, "1", True, 1.0, None, [1], "something else", ...], ids=repr)
def test_another_version_is_refused(package: Path, key: str, value: object) -> None:
    """Also by whoever wants to run the package: graphs may mean something else in it."""
    rewrite(package, lambda document: document.pop(key) if value is ... else document.update({key: value}))
    expected = "draftsmith package" if key == "format" else "1"
    for reading in (manifest.read, reader.read):
        with pytest.raises(Refused) as caught:
            reading(package)
        text = str(caught.value)
        assert f"manifest.json {key}: expected {expected}, found {None if value is ... else value}" in text
        assert "use the version of draftsmith that made it" in text


DAMAGE: Mapping[str, tuple[Callable[[Document], object], str]] = {
    "a size as text": (lambda d: d["files"]["model.onnx"].update(size="12"), "files.model.onnx.size"),
    "a negative size": (lambda d: d["files"]["model.onnx"].update(size=-1), "files.model.onnx.size"),
    "a size that is true": (lambda d: d["files"]["model.onnx"].update(size=True), "files.model.onnx.size"),
    "no digest": (lambda d: d["files"]["model.onnx"].pop("digest"), "files.model.onnx.digest"),
    "a file that is none": (lambda d: d["files"].update({"mtp.onnx": None}), "files.mtp.onnx"),
    "no files": (lambda d: d.pop("files"), "files"),
    "files as a list": (lambda d: d.update(files=[]), "files"),
    "a negative offset": (
        lambda d: d["initializers"]["model.onnx"]["lm_head.fp8_weight"].update(offset=-8),
        "initializers.model.onnx.lm_head.fp8_weight.offset",
    ),
    "a length of parts": (
        lambda d: d["initializers"]["mtp.onnx"]["lm_head.fp8_weight"].update(length=1.5),
        "initializers.mtp.onnx.lm_head.fp8_weight.length",
    ),
    "a shape that is none": (
        lambda d: d["initializers"]["model.onnx"]["lm_head.fp8_weight"].update(shape=96),
        "initializers.model.onnx.lm_head.fp8_weight.shape",
    ),
    "an origin without a shard": (
        lambda d: d["initializers"]["model.onnx"]["lm_head.fp8_weight"]["origin"][0].pop("shard"),
        "initializers.model.onnx.lm_head.fp8_weight.origin.0.shard",
    ),
    "an op without a name": (
        lambda d: d["graphs"]["model.onnx"]["required_ops"][0].update(op=None),
        "graphs.model.onnx.required_ops.0.op",
    ),
    "an opset as text": (
        lambda d: d["graphs"]["mtp.onnx"]["opsets"].update({"ai.onnx": "21"}),
        "graphs.mtp.onnx.opsets.ai.onnx",
    ),
    "a version that is a number": (lambda d: d["producer"].update(numpy=2), "producer.numpy"),
    "options as text": (lambda d: d.update(options="default"), "options"),
    "no source": (lambda d: d.pop("source"), "source"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_refused_by_its_key(package: Path, damage: str) -> None:
    change, key = DAMAGE[damage]
    rewrite(package, change)
    with pytest.raises(Refused) as caught:
        manifest.read(package)
    assert f"manifest.json {key}: expected " in str(caught.value)
    assert str(caught.value).endswith("; export the package again")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff", b"[" * 100_000, b'{"version": NaN}'])
def test_what_is_no_manifest_is_refused(package: Path, content: bytes) -> None:
    (package / "manifest.json").write_bytes(content)
    with pytest.raises(Refused, match=r"manifest\.json"):
        manifest.read(package)


def test_what_a_later_version_may_add_is_passed_over(package: Path) -> None:
    """Additions do not change what is there; what does has another version number."""
    rewrite(package, lambda document: document.update(signature="..."))
    rewrite(package, lambda document: document["files"]["model.onnx"].update(owner="us"))
    assert manifest.read(package) is not None
