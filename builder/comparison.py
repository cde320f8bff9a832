"""diff(): what differs between two packages. Their content is told apart from where it lies and what it was made of.

Content is what an engine computes with: configuration, graphs whatever their nodes are called, weights, and every file
but the manifest, the card made of it and the data files. Two packages are equal when nothing at all differs. So one in
another layout (weights linked or copied, other offsets), of another producer, or with renamed nodes is different, with
equal content. build.json is of one run and is ignored, as are dot files; bytes of data files that no graph refers to
are left unread.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx

from builder import digests, graph_comparison, graph_file, initializers
from builder.changes import Changes, between
from builder.checkpoint import read_json_object
from builder.errors import Refused
from builder.genai_config import TARGET_FILE
from builder.graph_comparison import GraphDiff
from builder.initializers import Initializer, Place, reading
from builder.manifest import BUILD_FILE, MANIFEST_FILE
from builder.overlays import FOLDER as OVERLAYS
from builder.package import CARD_FILE, CONFIG_FILE
from builder.progress import Progress, silent
from builder.tokens import TEXT_FILES

PROVENANCE = ("format", "version", "contract_version", "producer", "source", "options", "state_groups")
"""Keys of the manifest that are compared; the others follow from what is compared itself."""
SECTIONS = ("decoder", "mtp")
"""Parts of the configuration's `model` that list shared initializers."""
PLAIN_KEY = re.compile(r"[\w%/-]+")
"""Keys that stand in a path as they are; any other is quoted, so that no two paths look alike."""


@dataclass(frozen=True)
class Layout:
    """Where equal bytes lie. data_files: sizes by name. initializers: for each graph the number of those that lie
    elsewhere, by A's and B's file. shared: places in the configuration's shared_initializers.
    """

    data_files: Changes = field(default_factory=Changes)
    initializers: dict[str, dict[tuple[str, str], int]] = field(default_factory=dict)
    shared: Changes = field(default_factory=Changes)

    def __bool__(self) -> bool:
        return any((self.data_files, self.shared, *self.initializers.values()))

    def to_json(self) -> dict[str, Any]:
        return {
            "data_files": self.data_files.to_json(),
            "initializers": {
                graph: [{"a": a, "b": b, "count": count} for (a, b), count in counts.items()]
                for graph, counts in self.initializers.items()
            },
            "shared_initializers": self.shared.to_json(),
        }


@dataclass(frozen=True)
class PackageDiff:
    """From A to B. files: all by name, by digest where they are neither data nor manifest. config: by file, flattened.

    graphs, initializers: by graph that both have. tokenizer: those of the files that text is made with.
    """

    files: Changes
    config: dict[str, Changes]
    graphs: dict[str, GraphDiff]
    initializers: dict[str, Changes]
    tokenizer: Changes
    layout: Layout
    provenance: Changes

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        parts = (self.config, self.graphs, self.initializers)
        inside = [change for part in parts for change in part.values()]
        return not any((self.files, self.layout, self.provenance, *inside))

    @property
    def content_equal(self) -> bool:
        """Whether an engine computes the same with both."""
        parts = (*self.config.values(), *self.initializers.values())
        return not self.other_files and not any(parts) and all(graph.content_equal for graph in self.graphs.values())

    @property
    def other_files(self) -> bool:
        """Whether files differ that are neither layout nor provenance; of those compared piece by piece their bytes
        do not matter, their presence does.
        """
        layout = self.layout.data_files
        aside = {CARD_FILE, MANIFEST_FILE, *layout.added, *layout.removed, *layout.changed}
        present = {*self.files.added, *self.files.removed}
        altered = self.files.changed.keys() - self.config.keys() - self.graphs.keys()
        return bool((present | altered) - aside)

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "content_equal": self.content_equal,
            "files": self.files.to_json(),
            "config": {file: changes.to_json() for file, changes in self.config.items()},
            "graphs": {file: graph.to_json() for file, graph in self.graphs.items()},
            "initializers": {file: changes.to_json() for file, changes in self.initializers.items()},
            "tokenizer": self.tokenizer.to_json(),
            "layout": self.layout.to_json(),
            "provenance": self.provenance.to_json(),
        }


def diff(a: str | Path, b: str | Path, progress: Progress = silent) -> PackageDiff:
    """Reads both packages. Raises Refused for what is none or names data outside of it, MachineError where the machine
    fails to read.
    """
    before, after = _Package.load(Path(a)), _Package.load(Path(b))
    both = [name for name in before.graphs if name in after.graphs]
    shared = [key for key in before.shared if key in after.shared]
    pairs = [(before.shared[key], after.shared[key]) for key in shared]
    pairs += [pair for name in both for pair in initializers.pairs(before.tables[name], after.tables[name])]
    found, files = initializers.digests_of(pairs, progress), _files(before, after)
    alike = [key for key in shared if initializers.equal(before.shared[key], after.shared[key], found)]
    tables = {name: (before.tables[name], after.tables[name]) for name in both}
    weights = {name: initializers.compare(*table, found) for name, table in tables.items()}
    return PackageDiff(
        files=files,
        config={
            name: between(_settings(document, alike), _settings(after.documents[name], alike))
            for name, document in before.documents.items()
            if name in after.documents
        },
        graphs={name: graph_comparison.compare(before.graphs[name], after.graphs[name]) for name in both},
        initializers=weights,
        tokenizer=files.only(TEXT_FILES),
        layout=Layout(
            data_files=files.only(before.data | after.data),
            initializers={name: initializers.moved(*table, weights[name]) for name, table in tables.items()},
            shared=between(*({key: _words(package.shared[key]) for key in alike} for package in (before, after))),
        ),
        provenance=between(before.provenance, after.provenance),
    )


# --- a package


@dataclass(frozen=True)
class _Package:
    """documents: configuration and overlays. tables: initializers by graph. shared: by path in the configuration."""

    files: dict[str, Path]
    documents: dict[str, dict[str, Any]]
    graphs: dict[str, onnx.ModelProto]
    tables: dict[str, dict[str, Initializer]]
    shared: dict[str, Place]
    provenance: dict[str, Any]

    @classmethod
    def load(cls, folder: Path) -> _Package:
        with reading(folder):
            _refuse_other(folder)
            return cls._loaded(folder)

    @classmethod
    def _loaded(cls, folder: Path) -> _Package:
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        files = {name: path for name, path in files.items() if name != BUILD_FILE and not f"/{name}".count("/.")}
        overlays = [name for name in files if name.startswith(f"{OVERLAYS}/") and name.endswith(".json")]
        documents = {name: read_json_object(files[name]) for name in (CONFIG_FILE, *overlays)}
        graphs = {
            name: graph_file.load(path) for name, path in files.items() if name.endswith(".onnx") and "/" not in name
        }
        manifest = read_json_object(files[MANIFEST_FILE]) if MANIFEST_FILE in files else {}
        return cls(
            files=files,
            documents={name: _named(document) for name, document in documents.items()},
            graphs=graphs,
            tables={name: initializers.read(folder, name, model.graph) for name, model in graphs.items()},
            shared=dict(_shared(folder, documents[CONFIG_FILE])),
            provenance=dict(_flat({key: manifest[key] for key in PROVENANCE if key in manifest})),
        )

    @property
    def data(self) -> set[str]:
        """Files that initializers lie in, but for those that are something else, too."""
        files = {one.place.file for table in self.tables.values() for one in table.values()}
        return files - self.graphs.keys() - self.documents.keys() - {*TEXT_FILES, CARD_FILE, MANIFEST_FILE}


def _refuse_other(folder: Path) -> None:
    missing = [name for name in (CONFIG_FILE, TARGET_FILE) if not os.path.isfile(folder / name)]
    if missing:
        raise Refused(
            folder,
            expected=f"a package folder with {CONFIG_FILE} and {TARGET_FILE}",
            found=f"no {' and no '.join(missing)}" if os.path.isdir(folder) else "no folder",
            remedy="check the path",
        )


def _files(a: _Package, b: _Package) -> Changes:
    """By size; where that is the same, by digest. Data files are compared by initializer, the manifest by key."""
    sizes = [{name: {"bytes": path.stat().st_size} for name, path in package.files.items()} for package in (a, b)]
    by_size = between(*sizes)
    known = by_size.removed.keys() | by_size.changed.keys() | a.data | b.data
    unsure = [name for name, path in a.files.items() if name not in known and not path.samefile(b.files[name])]
    read = [{name: {"digest": _digest(side.files[name])} for name in unsure} for side in (a, b)]
    changed = by_size.changed | between(*read).changed
    return Changes(by_size.added, by_size.removed, {name: changed[name] for name in changed if name != MANIFEST_FILE})


def _digest(path: Path) -> str:
    with reading(path):
        return digests.of_file(path, digests.SHA256)


# --- configuration


def _named(document: dict[str, Any]) -> dict[str, Any]:
    """The document, its lists of shared initializers by name where every entry has one of its own."""
    model = document.get("model")
    if not isinstance(model, dict):
        return document
    sections = {
        section: {**model[section], "shared_initializers": entries}
        for section in SECTIONS
        if (entries := _entries(model.get(section)))
    }
    return {**document, "model": {**model, **sections}}


def _entries(section: Any) -> dict[str, dict[str, Any]]:
    """Shared initializers by name; none where the section does not list them as this project does."""
    listed = section.get("shared_initializers") if isinstance(section, dict) else None
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        return {}
    named = {entry["name"]: entry for entry in listed if isinstance(entry.get("name"), str)}
    return named if len(named) == len(listed) else {}


def _shared(folder: Path, document: dict[str, Any]) -> Iterator[tuple[str, Place]]:
    """Each shared initializer's path in the flattened configuration, and where its bytes lie."""
    model = document.get("model")
    for section in SECTIONS:
        for name, entry in _entries(model.get(section) if isinstance(model, dict) else None).items():
            subject = f"{folder / CONFIG_FILE} {section} shared initializer {name}"
            place = initializers.place(folder, subject, {**entry, "location": entry.get("data_file")})
            yield f"model.{section}.shared_initializers.{_step(name)}", place


def _settings(document: dict[str, Any], alike: Container[str]) -> dict[str, Any]:
    """The flattened document, but for the places of shared initializers whose bytes are equal."""
    return {
        path: value
        for path, value in _flat(document)
        if not (path.endswith((".data_file", ".offset")) and path.rpartition(".")[0] in alike)
    }


def _words(place: Place) -> str:
    return f"{place.range[1]} in {place.file}"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Values by their paths; lists of plain values stay whole, as do objects and lists without entries inside."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{_step(key)}" if path else _step(key))
    elif isinstance(value, list) and any(isinstance(inner, dict | list) for inner in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{i}]")
    elif path:
        yield path, value


def _step(key: str) -> str:
    return key if PLAIN_KEY.fullmatch(key) else json.dumps(key)
