"""The package folder: where bytes lie, what is shared, and that nothing half-written ever stays."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnxruntime_genai import Config

import builder
from builder import files, package, staging
from builder.checkpoint import MAX_JSON_BYTES
from builder.errors import MachineError, Refused
from builder.exporter import ExportOptions
from fixtures.writer import Tiny
from tests.builder import oracle
from tests.conftest import TinyFactory

REPOSITORY = Path(__file__).parents[2]
Range = tuple[str, int, int]
COPY, LINK = ExportOptions(weights="copy"), ExportOptions(weights="link")
LAYOUTS = {"weights.data": COPY, "transformed.data": LINK}
"""How weights come, by the name of the one data file that is ours."""
PAPERS = {"manifest.json", "build.json", "README.md"}
"""Files that tell of the checkpoint, too, and so differ between two whose packages are otherwise the same."""


def external(folder: Path, file: str) -> dict[str, Range]:
    """File, offset and length of every external initializer."""
    external = onnx.TensorProto.EXTERNAL
    tensors = [tensor for tensor in oracle.graph(folder, file).initializer if tensor.data_location == external]
    return {tensor.name: oracle.place(tensor) for tensor in tensors}


def ranges(folder: Path) -> list[Range]:
    """The distinct byte ranges that all graphs use, in order."""
    return sorted({place for path in folder.glob("*.onnx") for place in external(folder, path.name).values()})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def lasting(folder: Path) -> dict[str, bytes]:
    """All of a package but what belongs to the run that made it."""
    made = contents(folder)
    assert made.pop("build.json")
    return made


def substance(folder: Path) -> dict[str, bytes]:
    """All of a package but its papers."""
    made = contents(folder)
    assert made.keys() >= PAPERS
    return {name: data for name, data in made.items() if name not in PAPERS}


# Weights


def test_our_data_file_is_covered_up_to_alignment(package_folder: Path) -> None:
    """No byte belongs to two tensors or to none, beyond zeros that align the next; large ones start at 64 KiB."""
    ((name, data),) = [(path.name, path.read_bytes()) for path in package_folder.glob("*.data")]
    assert name == ("transformed.data" if package_folder.name == "linked" else "weights.data")
    end = 0
    for file, offset, length in ranges(package_folder):
        if file != name:
            continue
        alignment = 65536 if length >= 65536 else 256
        assert length > 0 and offset == -(-end // alignment) * alignment
        assert not any(data[end:offset])
        end = offset + length
    assert end == len(data)


def test_ranges_of_a_file_do_not_overlap(package_folder: Path) -> None:
    """Two graphs or names may share a range, but never a part of one; and all lie inside their file."""
    for (file, offset, length), after in itertools.pairwise([*ranges(package_folder), ("", 0, 0)]):
        assert offset + length <= (package_folder / file).stat().st_size
        assert after[0] != file or offset + length <= after[1]


def test_lengths_are_those_of_the_declared_shapes(package_folder: Path) -> None:
    for path in package_folder.glob("*.onnx"):
        places = external(package_folder, path.name)
        for tensor in oracle.graph(package_folder, path.name).initializer:
            if tensor.name in places:
                itemsize = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
                assert places[tensor.name][2] == int(np.prod(list(tensor.dims))) * itemsize


@pytest.mark.parametrize("ours", LAYOUTS)
def test_the_report_counts_the_bytes(tiny: TinyFactory, tmp_path: Path, ours: str) -> None:
    report = builder.export(tiny("modelopt"), tmp_path / "out", LAYOUTS[ours])
    target, head = (external(tmp_path / "out", file) for file in ("model.onnx", "mtp.onnx"))
    shared = sum(
        target[name][2] for name in ("model.embed_tokens.weight", "lm_head.fp8_weight", "lm_head.fp8_weight_scale")
    )
    assert report.weights == {
        "linked_bytes": sum(length for file, _, length in ranges(tmp_path / "out") if file != ours),
        "copied_bytes": sum(length for file, _, length in ranges(tmp_path / "out") if file == ours),
        "shared_bytes": shared,
    }
    assert set(head.values()) & set(target.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("trained", ["model.embed_tokens.weight", "lm_head.fp8_weight", "lm_head.fp8_weight_scale"]),
        ("tiny", ["model.embed_tokens.weight", "lm_head.fp8_weight", "lm_head.fp8_weight_scale"]),
        (
            "linked",
            ["model.language_model.embed_tokens.weight", "lm_head.fp8_weight", "lm_head.fp8_weight_scale"],
        ),
    ],
)
def test_the_head_uses_the_targets_embedding_and_lm_head(
    packages: Mapping[str, Path], name: str, expected: list[str]
) -> None:
    folder = packages[name]
    target, head = external(folder, "model.onnx"), external(folder, "mtp.onnx")
    for shared in expected:
        assert head[shared] == target[shared]
    config = json.loads((folder / "genai_config.json").read_text("utf-8"))["model"]
    assert config["decoder"]["shared_initializers"] == config["mtp"]["shared_initializers"]
    tensors = {tensor.name: tensor for tensor in oracle.graph(folder, "mtp.onnx").initializer}
    assert config["mtp"]["shared_initializers"] == [
        {
            "name": shared,
            "data_file": head[shared][0],
            "offset": str(head[shared][1]),  # text, because JSON readers keep numbers as doubles
            "length": str(head[shared][2]),
            "data_type": tensors[shared].data_type,
            "shape": list(tensors[shared].dims),
        }
        for shared in expected
    ]


def test_a_tied_head_is_the_embedding_in_both_graphs(tiny: TinyFactory, tmp_path: Path) -> None:
    builder.export(tiny("modelopt", Tiny(tied=True)), tmp_path / "out")
    target, head = (external(tmp_path / "out", file) for file in ("model.onnx", "mtp.onnx"))
    places = [places[name] for places in (target, head) for name in ("lm_head.weight", "model.embed_tokens.weight")]
    assert len(set(places)) == 1


# Reproducibility


def test_two_exports_are_byte_identical(tiny: TinyFactory, tmp_path: Path) -> None:
    """Names carry no counter of the process, and nothing depends on hash order or time."""
    for dialect in ("modelopt", "compressed-tensors"):
        folder = tiny(dialect)  # type: ignore[arg-type]
        outputs = [tmp_path / dialect / name for name in ("first", "second with another name")]
        for out in outputs:
            builder.export(folder, out)
        assert lasting(outputs[0]) == lasting(outputs[1])


def test_the_directory_one_stands_in_does_not_matter(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data file of that name in the current directory is neither read nor taken for ours."""
    folder = tiny("modelopt")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("weights.data", "model.onnx", "genai_config.json"):
        (elsewhere / name).write_text("somebody else's")
    for ours, options in LAYOUTS.items():
        builder.export(folder, tmp_path / "absolute" / ours, options)
    monkeypatch.chdir(elsewhere)
    for ours, options in LAYOUTS.items():
        builder.export(os.path.relpath(folder), f"relative/{ours}", options)
        assert lasting(elsewhere / "relative" / ours) == lasting(tmp_path / "absolute" / ours)
    assert (elsewhere / "weights.data").read_text() == "somebody else's"


@pytest.mark.parametrize("name", ["mit Leerzeichen", "Übung mé x", "日本 🙂", "a'b\"c", "100%d"])
@pytest.mark.parametrize("ours", LAYOUTS)
def test_any_folder_name_will_do(tiny: TinyFactory, tmp_path: Path, name: str, ours: str) -> None:
    source = tmp_path / name / "checkpoint"
    source.parent.mkdir()
    shutil.copytree(tiny("modelopt"), source)
    out = tmp_path / name / "package"
    builder.export(source, out, LAYOUTS[ours])
    Config(str(out))
    text = (out / "genai_config.json").read_bytes()
    assert not text.startswith(b"\xef\xbb\xbf")
    files = [value for key, value in pairs(json.loads(text.decode("utf-8"))) if key in ("filename", "data_file")]
    linked = {"model.safetensors"} if ours == "transformed.data" else set()
    assert set(files) == {"model.onnx", "mtp.onnx", ours} | linked <= {path.name for path in out.iterdir()}
    assert oracle.initializer(out, "lm_head.fp8_weight").shape == (96, 64)


def pairs(value: Any) -> list[tuple[str, Any]]:
    """Every key of a JSON document with its value."""
    if isinstance(value, dict):
        return [*value.items(), *itertools.chain.from_iterable(pairs(inner) for inner in value.values())]
    if isinstance(value, list):
        return list(itertools.chain.from_iterable(pairs(inner) for inner in value))
    return []


# What is in the way


def test_an_existing_output_is_refused_and_left_alone(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt")
    for name, make in (("folder", Path.mkdir), ("file", Path.touch)):
        out = tmp_path / name
        make(out)
        with pytest.raises(
            Refused, match=f"{name}: expected a new folder, found something there already; pass --force"
        ):
            builder.export(folder, out)
        assert out.exists() and not list(out.iterdir() if out.is_dir() else ())


def test_force_replaces_the_whole_folder(tiny: TinyFactory, tmp_path: Path) -> None:
    """Nothing of the old package stays, so a second, smaller export leaves no orphaned bytes."""
    big, small = tiny("modelopt"), tiny("modelopt", Tiny(mtp=False))
    builder.export(big, tmp_path / "out")
    (tmp_path / "out" / "stale.data").write_bytes(b"x")
    builder.export(small, tmp_path / "out", ExportOptions(force=True))
    builder.export(small, tmp_path / "fresh")
    assert lasting(tmp_path / "out") == lasting(tmp_path / "fresh")
    assert "mtp.onnx" not in contents(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "fresh", "out"]


def test_force_does_not_replace_a_file(tiny: TinyFactory, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(Refused, match="choose another name"):
        builder.export(tiny("modelopt"), tmp_path / "out", ExportOptions(force=True))
    assert (tmp_path / "out").read_text() == "mine"


def test_force_never_deletes_the_checkpoint(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt")
    before = contents(folder)
    link = tmp_path / "link"
    link.symlink_to(folder)
    for home in (folder, folder.parent):
        for name in OLD_PACKAGE:  # even where it passes for a package
            (home / name).touch()
    for out in (folder, folder.parent, folder / ".." / folder.name):
        with pytest.raises(Refused, match="a folder apart from the checkpoint"):
            builder.export(folder, out, ExportOptions(force=True))
    with pytest.raises(Refused, match="not a package"):
        builder.export(folder, link, ExportOptions(force=True))
    assert contents(folder) == before | dict.fromkeys(OLD_PACKAGE, b"")


def test_force_never_deletes_what_a_checkpoint_links_to(tiny: TinyFactory, tmp_path: Path) -> None:
    real, links = tiny("modelopt"), tmp_path / "links"
    links.mkdir()
    for path in real.iterdir():
        (links / path.name).symlink_to(path)
    for name in OLD_PACKAGE:
        (real / name).touch()
    before = contents(real)
    with pytest.raises(Refused, match="a folder apart from the checkpoint"):
        builder.export(links, real, ExportOptions(force=True))
    assert contents(real) == before


@pytest.mark.parametrize("mistyped", ["folder", ".", "..", "file", "dangling"])
def test_force_replaces_nothing_but_packages(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistyped: str
) -> None:
    """A slip of the hand before --force costs nothing."""
    checkpoint, home = tiny("modelopt"), tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (home / "folder" / "precious").write_text("kept")
    (home / "file").write_text("kept")
    (home / "dangling").symlink_to("nowhere")
    monkeypatch.chdir(home / "folder")
    out = mistyped if mistyped.startswith(".") else home / mistyped
    with pytest.raises(Refused, match="not a package"):
        builder.export(checkpoint, out, ExportOptions(force=True))
    assert contents(home) == {"folder/precious": b"kept", "file": b"kept"}


def test_dots_in_the_path_are_resolved_before_anything_is_renamed(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, out = tiny("modelopt"), tmp_path / "home" / "out"
    builder.export(checkpoint, out)
    (out / "sub").mkdir()
    monkeypatch.chdir(out / "sub")
    builder.export(checkpoint, "..", ExportOptions(force=True))
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert not (out / "sub").exists()


def test_an_impossible_name_is_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    checkpoint = tiny("modelopt")
    (tmp_path / "file").touch()
    for out in (tmp_path / ("x" * 300), tmp_path / "file" / "sub"):
        with pytest.raises(Refused, match="expected a usable path"):
            builder.export(checkpoint, out)


def test_parents_made_for_a_failed_export_go_again(tiny: TinyFactory, tmp_path: Path) -> None:
    checkpoint = tiny("modelopt")
    (checkpoint / "vocab.json").write_text("garbage")
    with pytest.raises(Refused, match=r"vocab\.json: expected JSON"):
        builder.export(checkpoint, tmp_path / "a" / "b" / "out")
    assert not (tmp_path / "a").exists()


def test_a_link_out_of_the_checkpoint_is_not_followed(tiny: TinyFactory, tmp_path: Path) -> None:
    checkpoint = tiny("modelopt")
    (tmp_path / "secret").write_text("{}")
    (checkpoint / "special_tokens_map.json").symlink_to(tmp_path / "secret")
    with pytest.raises(Refused, match=r"special_tokens_map\.json: expected a file of the checkpoint, found a link"):
        builder.export(checkpoint, tmp_path / "out")


# What fails on the way


def full_disk(patch: pytest.MonkeyPatch) -> None:
    """A disk with room for 100,000 bytes: as on a real one, the last write before it is full is cut short."""
    write, copy, room = os.write, os.copy_file_range, 100_000

    def take(written: int) -> int:
        nonlocal room
        room -= written
        return written

    def at_most(count: int) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return min(count, room)

    patch.setattr(os, "write", lambda target, data: take(write(target, data[: at_most(len(data))])))
    patch.setattr(
        os,
        "copy_file_range",
        lambda source, target, count, offset: take(copy(source, target, at_most(count), offset)),
    )


def failing(owner: Any, name: str, code: int, when: Callable[..., bool]) -> Callable[[pytest.MonkeyPatch], None]:
    """Makes a call raise an OSError where `when` says so of its arguments."""

    def apply(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                paths = [str(arg) for arg in args[:1] if isinstance(arg, Path)]
                raise OSError(code, os.strerror(code), *paths)
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    return apply


FAILURES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "weights": (full_disk, "out: no space left for the package"),
    "graph": (
        failing(os, "open", errno.ENOSPC, lambda path, *rest, **how: Path(path).name == "mtp.onnx"),
        "out: no space left for the package",
    ),
    "configuration": (
        failing(os, "open", errno.EIO, lambda path, *rest, **how: Path(path).name == "genai_config.json"),
        "genai_config.json: Input/output error; the package was not written",
    ),
    "flush": (
        failing(os, "fsync", errno.EDQUOT, lambda descriptor: True),
        "out: Disk quota exceeded; the package was not written",
    ),
    "staging": (
        failing(tempfile, "mkdtemp", errno.EACCES, lambda prefix, dir: True),
        "out: Permission denied; the package was not written",
    ),
    "rename": (
        failing(Path, "rename", errno.EXDEV, lambda path, target: path.name.startswith(".partial-")),
        "Invalid cross-device link; the package was not written",
    ),
    "exchange": (
        failing(staging, "_exchange", errno.EIO, lambda folder, out: folder.name.startswith(".partial-")),
        "Input/output error; the package was not written",
    ),
}
CASES = [
    (failure, existing)
    for failure in FAILURES
    for existing in (False, True)
    if existing or failure != "exchange"  # nothing is there to exchange
]


def without_exchange(patch: pytest.MonkeyPatch) -> None:
    """As on a file system that cannot swap two names."""
    patch.setattr(staging, "_renameat2", lambda first, second, flags: False)


@pytest.mark.parametrize("options", LAYOUTS.values(), ids=["copy", "link"])
@pytest.mark.parametrize(("failure", "existing"), CASES)
def test_a_failure_on_the_way_leaves_things_as_they_were(
    tiny: TinyFactory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failure: str,
    existing: bool,
    options: ExportOptions,
) -> None:
    folder, home = tiny("modelopt"), home_of(tmp_path, existing)
    before = contents(folder)
    fault, text = FAILURES[failure]
    with monkeypatch.context() as patch:
        if failure == "rename":
            without_exchange(patch)
        fault(patch)
        with pytest.raises(MachineError) as caught:
            builder.export(folder, home / "out", replace(options, force=existing))
    assert text in str(caught.value) and str(home) in str(caught.value)
    assert_untouched(home, existing)
    assert contents(folder) == before


def with_free_space(patch: pytest.MonkeyPatch, free: int) -> None:
    real = shutil.disk_usage

    def disk_usage(path: Path) -> Any:
        return real(path)._replace(free=free)

    patch.setattr(shutil, "disk_usage", disk_usage)


@pytest.mark.parametrize("ours", LAYOUTS)
def test_a_disk_that_is_too_small_is_found_before_anything_is_written(
    trained_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: str
) -> None:
    """The bytes that are due are those of the package, without what is linked, and a margin."""
    builder.export(trained_checkpoint, tmp_path / "whole", LAYOUTS[ours])
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").iterdir() if path.suffix != ".safetensors"}
    with_free_space(monkeypatch, 4096)
    with pytest.raises(MachineError, match="free some or choose another disk") as caught:
        builder.export(trained_checkpoint, tmp_path / "home" / "out", LAYOUTS[ours])
    found = re.search(r"home: the package needs ([\d,]+) bytes, 4,096 are free", str(caught.value))
    assert found and [path.name for path in tmp_path.iterdir()] == ["whole"]
    needed = int(found[1].replace(",", ""))
    assert sum(sizes.values()) < needed < sum(sizes.values()) + package.SPARE_BYTES + (1 << 20)
    with_free_space(monkeypatch, needed)
    builder.export(trained_checkpoint, tmp_path / "home" / "out", LAYOUTS[ours])


def test_a_shard_that_has_to_be_copied_is_counted_before_its_first_byte(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where links were asked for and the checkpoint is on another disk."""
    folder = tiny("modelopt")
    size = (folder / "model.safetensors").stat().st_size
    real = Path.stat

    def stat(path: Path, **how: Any) -> os.stat_result:
        found = real(path, **how)
        if path.name == "model.safetensors":
            return os.stat_result((found[0], found[1], found.st_dev + 1, *found[3:]))
        return found

    monkeypatch.setattr(Path, "stat", stat)
    with_free_space(monkeypatch, package.SPARE_BYTES + size - 1 + 10 * size)
    builder.export(folder, tmp_path / "enough", LINK)
    made = (tmp_path / "enough" / "transformed.data").stat().st_size
    with_free_space(monkeypatch, package.SPARE_BYTES + size)
    with pytest.raises(MachineError, match=r"needs [0-9,]+ bytes") as caught:
        builder.export(folder, tmp_path / "out", LINK)
    needed = int(str(caught.value).partition("needs ")[2].partition(" ")[0].replace(",", ""))
    assert package.SPARE_BYTES + size < needed <= package.SPARE_BYTES + size + made
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".partial-*"))


OLD_PACKAGE = ("genai_config.json", "model.onnx")
"""What makes a folder one that --force may replace."""


def home_of(tmp_path: Path, existing: bool) -> Path:
    """A folder that holds an old package or nothing."""
    home = tmp_path / "home"
    home.mkdir()
    if existing:
        (home / "out").mkdir()
        for name in OLD_PACKAGE:
            (home / "out" / name).write_text("kept")
    return home


def assert_untouched(home: Path, existing: bool) -> None:
    assert contents(home) == ({f"out/{name}": b"kept" for name in OLD_PACKAGE} if existing else {})
    assert [path.name for path in home.iterdir()] == (["out"] if existing else [])


@pytest.mark.parametrize(
    ("moment", "existing"),
    [
        *itertools.product(("place", "_copy_text_files", "sync", "rename"), (False, True)),
        ("exchange", True),
    ],
)
def test_an_interrupt_leaves_things_as_they_were(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, existing: bool
) -> None:
    folder, home = tiny("modelopt"), home_of(tmp_path, existing)
    owner, name = {
        "sync": (files, "sync"),
        "rename": (Path, "rename"),
        "exchange": (staging, "_exchange"),
    }.get(moment, (package, moment))
    real = getattr(owner, name)

    def interrupt(*args: Any) -> Any:
        if moment == "rename" and not args[0].name.startswith(".partial-"):
            return real(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if moment == "rename":
            without_exchange(patch)
        patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            builder.export(folder, home / "out", ExportOptions(force=existing))
    assert_untouched(home, existing)


@pytest.mark.parametrize("existing", [False, True], ids=["new", "replacing"])
@pytest.mark.parametrize("options", LAYOUTS.values(), ids=["copy", "link"])
def test_a_refusal_while_writing_leaves_things_as_they_were(
    tiny: TinyFactory, tmp_path: Path, existing: bool, options: ExportOptions
) -> None:
    """A value beyond float16 is seen only when its tensor is streamed, or read where it is linked."""

    def edit(tensors: dict[str, np.ndarray], config: object) -> None:
        tensors["mtp.fc.weight"][3, 3] = 1e6

    folder, home = tiny("modelopt", edit=edit), home_of(tmp_path, existing)
    with pytest.raises(Refused, match=r"tensor mtp\.fc\.weight: .*--dtype bfloat16"):
        builder.export(folder, home / "out", replace(options, force=existing))
    assert_untouched(home, existing)


def test_an_output_that_appears_meanwhile_is_not_overwritten(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = package.place

    def slow(*args: Any) -> Any:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").write_text("first")
        return real(*args)

    monkeypatch.setattr(package, "place", slow)
    with pytest.raises(Refused, match="something there already"):
        builder.export(tiny("modelopt"), tmp_path / "out")
    assert contents(tmp_path / "out") == {"theirs": b"first"}
    assert not list(tmp_path.glob(".partial-*"))


def test_a_package_that_would_not_read_back_is_not_published(
    tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(folder: Path) -> None:
        raise Refused("x", expected="a", found="b", remedy="c")

    monkeypatch.setattr(package.reader, "read", refuse)
    with pytest.raises(Refused, match="x: expected a, found b"):
        builder.export(tiny("modelopt"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_a_killed_export_leaves_no_package_and_the_next_one_succeeds(tiny: TinyFactory, tmp_path: Path) -> None:
    folder, home = tiny("modelopt"), home_of(tmp_path, existing=False)
    script = f"""
import os, signal
import builder
from builder import files, package, staging
real = package.place
def place(weights, *rest):
    real(list(weights)[:3], *rest)
    os.kill(os.getpid(), signal.SIGKILL)
package.place = place
builder.export({str(folder)!r}, {str(home / "out")!r})
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False, cwd=REPOSITORY)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name.startswith(".partial-out-") for path in home.iterdir()] == [True]
    report = builder.export(folder, home / "out")
    Config(str(home / "out"))
    assert [path.name for path in home.iterdir()] == ["out"]
    assert [line.endswith("was removed: a killed run had left it") for line in report.warnings] == [True]


def test_an_oversized_text_file_is_refused(tiny: TinyFactory, tmp_path: Path) -> None:
    folder = tiny("modelopt")
    for name, limit in (("merges.txt", package.MAX_TEXT_FILE_BYTES), ("vocab.json", MAX_JSON_BYTES)):
        (folder / name).touch()
        os.truncate(folder / name, limit + 1)  # sparse
        with pytest.raises(Refused, match=f"{name}: expected at most"):
            builder.export(folder, tmp_path / "out")
        (folder / name).unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
