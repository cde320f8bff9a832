"""The package folder: weights linked or streamed, graphs, configuration, text files and manifest, made in one piece.

Everything is written into a staging folder beside the target, read back and cross-checked, flushed, and published.
Whatever fails on the way takes that folder with it and leaves what stood there before.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import onnx_ir as ir

from builder import digests, files, manifest, overlays, reader, staging
from builder.checkpoint import Checkpoint
from builder.checks import Check
from builder.errors import MachineError, Refused
from builder.genai_config import MTP_FILE, TARGET_FILE
from builder.graph import Graph
from builder.graph_checks import check_graphs
from builder.linking import Brought, bring
from builder.progress import Progress
from builder.provenance import FileRecord, build_record, document
from builder.tokens import TEXT_FILES
from builder.weights import DATA_FILE, TRANSFORMED_FILE, Placement, Stored, Weight, check_in_place, place

FILES = {"target": TARGET_FILE, "mtp": MTP_FILE}
CONFIG_FILE = reader.CONFIG_FILE
CARD_FILE = "README.md"
MAX_TEXT_FILE_BYTES = 1 << 24
AnyWeight = TypeVar("AnyWeight", bound=Weight)
SPARE_BYTES = 1 << 24
"""Room for graphs, manifest and file system, beside the weights and text files."""


@dataclass(frozen=True)
class Recipe:
    """What write() makes a package of.

    graphs: "target" and perhaps "mtp". describe: shared initializers to genai_config.json's content. card: the manifest
    to README.md's text. options: what shaped the package, census: what it counts, both for the manifest. weights:
    "auto", "link" or "copy". hash: read linked shards for their digest and check all their values. state_groups: the
    states that a verify step shows, for the manifest.
    """

    graphs: Mapping[str, Graph]
    describe: Callable[[list[dict[str, Any]]], dict[str, Any]]
    card: Callable[[Mapping[str, Any], Sequence[Check]], str]
    overlays: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]
    census: Mapping[str, Any]
    weights: str
    hash: bool
    state_groups: Sequence[Mapping[str, Any]] = ()

    @property
    def distinct(self) -> list[Weight]:
        weights = [weight for graph in self.graphs.values() for weight in graph.weights.values()]
        return list({weight.key: weight for weight in weights}.values())

    @property
    def narrowed(self) -> set[object]:
        return set[object]().union(*(graph.narrowed for graph in self.graphs.values()))


@dataclass(frozen=True)
class Written:
    """Bytes of weights by how they came, how many of them both graphs use, and what was odd."""

    linked_bytes: int
    copied_bytes: int
    shared_bytes: int
    warnings: list[str]


@dataclass
class Draft:
    """A package in its staging folder: what is in it so far."""

    folder: Path
    records: dict[str, FileRecord] = field(default_factory=dict)
    shards: dict[str, Brought] = field(default_factory=dict)
    places: dict[object, Placement] = field(default_factory=dict)
    why_copied: str | None = None
    warnings: list[str] = field(default_factory=list)

    def write(self, name: str, data: bytes) -> None:
        self.records[name] = FileRecord(len(data), files.write(self.folder / name, data))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        self.write(name, manifest.encode(content))


def refuse_existing(out: Path, force: bool) -> None:
    """Raises Refused where `out` is in the way; asked again just before the rename.

    Only an empty folder or a package is ever replaced: --force on a mistyped path must not delete anything else.
    """
    try:
        str(out).encode("utf-8")
        out.lstat()
    except FileNotFoundError:
        return
    except UnicodeEncodeError:  # ONNX Runtime would refuse to load from there
        raise Refused(ascii(str(out)), expected="a name in UTF-8", found="other bytes", remedy="choose one") from None
    except OSError as error:
        raise Refused(out, expected="a usable path", found=error.strerror, remedy="choose another name") from None
    if force and out.is_dir() and not out.is_symlink() and replaceable(out):
        return
    remedy = "choose another name" if force else "pass --force to replace a package, or choose another name"
    found = "something that is not a package" if force else "something there already"
    raise Refused(out, expected="a new folder", found=found, remedy=remedy)


def replaceable(folder: Path) -> bool:
    """An empty folder or a package."""
    return is_package(folder) or not any(folder.iterdir())


def is_package(folder: Path) -> bool:
    return {CONFIG_FILE, TARGET_FILE} <= {path.name for path in folder.iterdir()}


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


def write(out: Path, checkpoint: Checkpoint, recipe: Recipe, *, force: bool, progress: Progress) -> Written:
    """Raises Refused or MachineError, with nothing left behind and what stood at `out` untouched."""
    out = Path(os.path.abspath(out))  # no `..` may stay: it would lead elsewhere once folders are renamed
    with machine_errors(out), staging.staging(out) as folder:
        draft = Draft(folder)
        _require_room(checkpoint, recipe, folder)
        _bring_weights(draft, checkpoint, recipe, progress)
        checkpoint.refuse_changed()
        for name, graph in recipe.graphs.items():
            proto = ir.to_proto(graph.to_model(draft.places))
            draft.write(FILES[name], proto.SerializeToString(deterministic=True))
        _copy_text_files(draft, checkpoint)
        shared = _shared_initializers(recipe.graphs, draft.places)
        config = recipe.describe(shared)
        draft.write_json(CONFIG_FILE, config)
        _write_overlays(draft, recipe.overlays)
        checks = list(check_graphs(reader.read(folder), config, None))
        if wrong := [check for check in checks if not check.ok]:
            raise AssertionError(f"{wrong[0].name}: {wrong[0].detail}")
        _write_manifest(draft, checkpoint, recipe, checks)
        reader.read(folder)
        for path in (folder / overlays.FOLDER, folder):
            files.sync(path)
        draft.warnings += _publish(folder, out, force)
    return _written(draft, shared)


def _publish(folder: Path, out: Path, force: bool) -> list[str]:
    try:
        word = staging.publish(folder, out, replaceable if force else None)
    except FileExistsError:
        refuse_existing(out, force)
        raise Refused(
            out, expected="a new folder", found="something that appeared meanwhile", remedy="choose another name"
        ) from None
    return [word] if word else []


def _written(draft: Draft, shared: list[dict[str, Any]]) -> Written:
    linked = {name for name, shard in draft.shards.items() if shard.linked}
    sizes = {True: 0, False: 0}
    for placement in draft.places.values():
        sizes[placement.file in linked] += placement.length
    return Written(sizes[True], sizes[False], sum(int(entry["length"]) for entry in shared), draft.warnings)


@contextlib.contextmanager
def machine_errors(out: Path) -> Iterator[None]:
    """What the operating system refuses becomes a MachineError that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise MachineError(f"{out}: no space left for the package; free some or choose another disk") from error
        where = error.filename or out
        raise MachineError(f"{where}: {error.strerror or error}; the package was not written") from error


# --- weights


def _stored(weights: Sequence[Weight]) -> list[Stored]:
    return [weight for weight in weights if isinstance(weight, Stored)]


def _shards(weights: Sequence[Weight]) -> list[Path]:
    return sorted({weight.ref.file for weight in _stored(weights)})


def _may_link(recipe: Recipe, folder: Path) -> bool:
    """Whether links are to be tried: "auto" does so where all shards are on the package's own file system."""
    if recipe.weights != "auto":
        return recipe.weights == "link"
    device = folder.stat().st_dev
    return all(path.stat().st_dev == device for path in _shards(recipe.distinct))


def _require_room(checkpoint: Checkpoint, recipe: Recipe, folder: Path) -> None:
    """Raises MachineError where the package cannot fit. A link takes no room, if links are possible."""
    linked = _may_link(recipe, folder)
    weights = [weight for weight in recipe.distinct if not (linked and isinstance(weight, Stored))]
    texts = [checkpoint.folder / name for name in TEXT_FILES]
    needed = SPARE_BYTES + sum(weight.nbytes for weight in weights)
    if recipe.weights == "link":  # a shard of another file system is copied whole
        device = folder.stat().st_dev
        sizes = (path.stat() for path in _shards(recipe.distinct))
        needed += sum(stat.st_size for stat in sizes if stat.st_dev != device)
    needed += sum(path.stat().st_size for path in texts if path.is_file())
    _refuse_full(folder, needed)


def _refuse_full(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise MachineError(
            f"{folder.parent}: the package needs {needed:,} bytes, {free:,} are free; free some or choose another disk"
        )


def _bring_weights(draft: Draft, checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> None:
    """Links what can stay as it is, and streams the rest into one data file."""
    weights, linked = recipe.distinct, _may_link(recipe, draft.folder)
    if not linked:
        draft.why_copied = "asked for" if recipe.weights == "copy" else "the checkpoint is on another file system"
    linked = linked and _bring_shards(draft, recipe, progress)
    if linked:
        in_place = _stored(weights)
        draft.places |= {weight.key: weight.in_place for weight in in_place}
        weights = [weight for weight in weights if not isinstance(weight, Stored)]
        # What float16 cannot hold is a matter of this export; the rest of 22 GB is read when somebody asks for it.
        judged = in_place if recipe.hash else [weight for weight in in_place if weight.key in recipe.narrowed]
        draft.warnings += check_in_place(_reported(judged, "checking linked weights", progress), recipe.narrowed)
    if draft.why_copied and recipe.weights != "copy":
        draft.warnings.append(f"weights were copied: {draft.why_copied}")
    name = TRANSFORMED_FILE if linked else DATA_FILE
    with files.NewFile(draft.folder / name, digests.XXH3) as file:
        placed = place(_reported(weights, "writing weights", progress), file, name, recipe.narrowed)
    draft.records[name] = FileRecord(file.size, file.digest)
    draft.places |= placed.places
    draft.warnings += placed.warnings


def _bring_shards(draft: Draft, recipe: Recipe, progress: Progress) -> bool:
    """False where "auto" finds that links are impossible after all; then nothing of them stays."""
    for path in _shards(recipe.distinct):
        target = draft.folder / path.name
        if recipe.weights == "link":
            _refuse_full_for_copy(path, draft.folder)
        shard = bring(path, target, progress, may_copy=recipe.weights == "link")
        if shard is None:
            draft.why_copied = f"{path.name} cannot be linked here"
            for name in draft.shards:
                (draft.folder / name).unlink()
            draft.shards.clear()
            return False
        draft.shards[path.name] = shard
        if not shard.linked:
            draft.warnings.append(f"{path.name} was copied whole: {shard.reason}")
    for name, shard in draft.shards.items():
        digest = shard.digest
        if digest is None and recipe.hash:
            digest = digests.of_file(draft.folder / name, digests.XXH3, progress)
        draft.records[name] = FileRecord(
            (draft.folder / name).stat().st_size, digest, digests.of_header(draft.folder / name)
        )
    return True


def _refuse_full_for_copy(shard: Path, folder: Path) -> None:
    """A shard of another file system is going to be copied; find out before the first byte whether it fits."""
    if shard.stat().st_dev != folder.stat().st_dev:
        _refuse_full(folder, SPARE_BYTES + shard.stat().st_size)


def _reported(weights: Sequence[AnyWeight], task: str, progress: Progress) -> Iterator[AnyWeight]:
    total, done = sum(weight.nbytes for weight in weights), 0
    for weight in weights:
        yield weight
        done += weight.nbytes
        progress(task, done, total)


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


# --- texts


def _copy_text_files(draft: Draft, checkpoint: Checkpoint) -> None:
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
        draft.write(name, source.read_bytes())


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


def _write_overlays(draft: Draft, contents: Mapping[str, Mapping[str, Any]]) -> None:
    (draft.folder / overlays.FOLDER).mkdir()
    for name, content in contents.items():
        draft.write_json(f"{overlays.FOLDER}/{name}.json", content)


def _write_manifest(draft: Draft, checkpoint: Checkpoint, recipe: Recipe, checks: Sequence[Check]) -> None:
    """The card is one of the manifest's files and is made of the rest of it, so it comes first."""

    def made() -> dict[str, Any]:
        facts = recipe.options, recipe.census, recipe.graphs
        return document(checkpoint, *facts, draft.places, draft.records, FILES, recipe.state_groups)

    draft.write(CARD_FILE, recipe.card(made(), checks).encode("utf-8"))
    encoded = manifest.encode(made())
    files.write(draft.folder / manifest.MANIFEST_FILE, encoded)
    shards = {name: {"how": shard.how, "why_not_better": shard.reason} for name, shard in draft.shards.items()}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    layout = {"linked": draft.why_copied is None, "why_not": draft.why_copied}
    record = build_record(encoded, checkpoint, {"weights": layout, "shards": shards}, created)
    files.write(draft.folder / manifest.BUILD_FILE, manifest.encode(record))
