"""The package folder: weights streamed, graphs, configuration and text files, staged beside the target and renamed.

Nothing appears under the final name before it is whole: everything is written into a `.partial-*` folder in the same
parent, read back and cross-checked, flushed, and renamed. Whatever fails on the way takes that folder with it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from builder import reader
from builder.checkpoint import Checkpoint
from builder.errors import MachineError, Refused
from builder.genai_config import MTP_FILE, TARGET_FILE
from builder.graph import Graph
from builder.progress import Progress
from builder.tokens import TEXT_FILES
from builder.weights import Placed, Placement, Weight, place

FILES = {"target": TARGET_FILE, "mtp": MTP_FILE}
DATA_FILE = "weights.data"
CONFIG_FILE = reader.CONFIG_FILE
MAX_TEXT_FILE_BYTES = 1 << 24


@dataclass(frozen=True)
class Written:
    """Bytes of weights in the package, how many of them both graphs use, and what was odd about the values."""

    bytes: int
    shared_bytes: int
    warnings: list[str]


def refuse_existing(out: Path, force: bool) -> None:
    """Raises Refused where `out` is in the way; asked again just before the rename.

    Only an empty folder or a package is ever replaced: --force on a mistyped path must not delete anything else.
    """
    try:
        out.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise Refused(out, expected="a usable path", found=error.strerror, remedy="choose another name") from None
    if force and out.is_dir() and not out.is_symlink() and _is_package_or_empty(out):
        return
    remedy = "choose another name" if force else "pass --force to replace a package, or choose another name"
    found = "something that is not a package" if force else "something there already"
    raise Refused(out, expected="a new folder", found=found, remedy=remedy)


def _is_package_or_empty(folder: Path) -> bool:
    names = {path.name for path in folder.iterdir()}
    return not names or {CONFIG_FILE, TARGET_FILE} <= names


def refuse_source(checkpoint: Checkpoint, out: Path) -> None:
    """Raises Refused where replacing `out` would delete the checkpoint, or what its links point to."""
    target = out.resolve()
    sources = [checkpoint.folder, *checkpoint.files]
    inside = next((path for path in sources if target in (path.resolve(), *path.resolve().parents)), None)
    if inside:
        raise Refused(
            out,
            expected="a folder apart from the checkpoint",
            found=f"{inside} inside it",
            remedy="choose another name",
        )


def write(
    out: Path,
    checkpoint: Checkpoint,
    graphs: Mapping[str, Graph],
    describe: Callable[[list[dict[str, Any]]], dict[str, Any]],
    *,
    force: bool,
    progress: Progress,
) -> Written:
    """graphs: "target" and perhaps "mtp". describe: shared initializers to genai_config.json's content.

    Raises Refused or MachineError, with nothing left behind.
    """
    out = Path(os.path.abspath(out))  # no `..` may stay: it would lead elsewhere once folders are renamed
    with _machine_errors(out), _staging(out) as folder:
        placed = _write_weights(folder, graphs, progress)
        places = placed.places
        for name, graph in graphs.items():
            proto = ir.to_proto(graph.to_model(places))
            (folder / FILES[name]).write_bytes(proto.SerializeToString(deterministic=True))
        _copy_text_files(checkpoint, folder)
        shared = _shared_initializers(graphs, places)
        config = describe(shared)
        (folder / CONFIG_FILE).write_text(
            json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n", "utf-8"
        )
        reader.read(folder)
        _flush(folder)
        refuse_existing(out, force)
        _publish(folder, out)
        _sync(out.parent)
    total = sum(placement.length for placement in places.values())
    return Written(total, sum(int(entry["length"]) for entry in shared), placed.warnings)


@contextlib.contextmanager
def _machine_errors(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise MachineError(f"{out}: no space left for the package; free some or choose another disk") from error
        where = error.filename or out
        raise MachineError(f"{where}: {error.strerror or error}; the package was not written") from error


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """A folder beside `out`, gone afterwards unless it was renamed."""
    made = [parent for parent in out.parents if not parent.exists()]
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".partial-{out.name[:100]}-", dir=out.parent))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not out.exists():
            for parent in made:
                with contextlib.suppress(OSError):
                    parent.rmdir()


def _write_weights(folder: Path, graphs: Mapping[str, Graph], progress: Progress) -> Placed:
    weights = [weight for graph in graphs.values() for weight in graph.weights.values()]
    narrowed = set[object]().union(*(graph.narrowed for graph in graphs.values()))
    with (folder / DATA_FILE).open("wb") as file:
        return place(_reported(weights, progress), file, DATA_FILE, narrowed)


def _reported(weights: list[Weight], progress: Progress) -> Iterator[Weight]:
    total, done = sum(weight.nbytes for weight in weights), 0
    for weight in weights:
        yield weight
        done += weight.nbytes
        progress("writing weights", done, total)


def shared_weights(graphs: Mapping[str, Graph]) -> dict[str, Weight]:
    """Weights of the checkpoint that the head takes from the target: embedding and LM head, by initializer name."""
    if "mtp" not in graphs:
        return {}
    target = graphs["target"].weights
    return {
        name: weight for name, weight in graphs["mtp"].weights.items() if name in target and weight.origin is not None
    }


def _shared_initializers(graphs: Mapping[str, Graph], places: Mapping[object, Placement]) -> list[dict[str, Any]]:
    """The configuration's list of them. Offsets are text: JSON readers keep numbers as doubles."""
    return [
        {
            "name": name,
            "data_file": places[weight.key].file,
            "offset": str(places[weight.key].offset),
            "length": str(places[weight.key].length),
            "data_type": int(weight.dtype),
            "shape": list(weight.shape),
        }
        for name, weight in shared_weights(graphs).items()
    ]


def _copy_text_files(checkpoint: Checkpoint, folder: Path) -> None:
    """The allow-listed files, as they are. A link may lead to the checkpoint's own cache, nowhere else."""
    for name in TEXT_FILES:
        source = checkpoint.folder / name
        if not source.is_file():
            continue
        _refuse_stray_link(source)
        if name.endswith(".json"):
            checkpoint.json(name)  # refuses what is not JSON, or is too large
        elif source.stat().st_size > MAX_TEXT_FILE_BYTES:
            raise Refused(
                source,
                expected=f"at most {MAX_TEXT_FILE_BYTES} bytes",
                found=source.stat().st_size,
                remedy="check the file",
            )
        (folder / name).write_bytes(source.read_bytes())


def _refuse_stray_link(source: Path) -> None:
    """Hub caches link snapshots/REVISION/FILE to ../../blobs/DIGEST; a link elsewhere could carry a secret out."""
    real, home = source.resolve(), source.parent.resolve()
    if home not in real.parents and home.parent.parent / "blobs" not in real.parents:
        raise Refused(
            source,
            expected="a file of the checkpoint",
            found=f"a link to {real}",
            remedy="replace it by the file itself",
        )


def _flush(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    """A file or a folder; a rename lasts only once the folder it happened in is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _publish(folder: Path, out: Path) -> None:
    """Renames; an old package is set aside first and restored if the rename fails."""
    if not out.exists():
        folder.rename(out)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".partial-{out.name[:100]}-old-", dir=out.parent))
    old = aside / out.name
    try:
        out.rename(old)
        folder.rename(out)
    except BaseException:  # an interrupt too: what was set aside is somebody's only copy
        if old.exists():
            old.rename(out)
        aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)
