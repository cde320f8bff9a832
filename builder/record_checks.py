"""A package's manifest against what it describes: that it leaves nothing out and contradicts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from builder import contract, ops
from builder.checks import Check, judged
from builder.errors import Refused
from builder.graph import OPSETS
from builder.manifest import MANIFEST_FILE, Initializer, Manifest, Origin, StateGroup, state_groups
from builder.reader import CONFIG_FILE, Package
from builder.weights import DATA_FILE, TRANSFORMED_FILE

RE_EXPORT = "export the package again"
WRITTEN_FILES = (DATA_FILE, TRANSFORMED_FILE)
"""Data files that an export writes; every other one is a linked shard under its own name."""


def check_record(package: Package, found: Manifest) -> Iterator[Check]:
    """What other checks take from the manifest, so that leaving it out there does not silence them."""
    yield judged("manifest contents", lambda: _contents(package, found))
    yield judged("manifest graphs", lambda: _graphs(package, found))
    yield judged("manifest origins", lambda: _origins(found))
    yield judged("manifest state groups", lambda: _state_groups(package, found))


def _contents(package: Package, found: Manifest) -> str:
    """Every graph, data file and the configuration are listed; what was not linked unread has a digest."""
    graphs = [graph for graph in (package.target, package.mtp) if graph]
    names = {graph.path.name for graph in graphs}
    due = {CONFIG_FILE, *names, *(place.file for graph in graphs for place in graph.data)}
    for section, needed, there in (
        ("files", due, set(found.files)),
        ("graphs", names, set(found.graphs)),
        ("initializers", names, set(found.initializers)),
    ):
        if missing := sorted(needed - there):
            raise Refused(f"{MANIFEST_FILE} {section}", expected=missing[0], found="no entry", remedy=RE_EXPORT)
    for name, record in found.files.items():  # of a linked shard, the header may be all that was read
        if record.digest is None and record.header is None:
            raise Refused(f"{MANIFEST_FILE} files {name}", expected="a digest", found="none", remedy=RE_EXPORT)
    return f"{len(due)} files that a runtime opens, {len(names)} graphs"


def _graphs(package: Package, found: Manifest) -> str:
    """Of each graph the digest that its file has, and the opsets and runtime that this contract is written for."""
    opsets = {domain or "ai.onnx": version for domain, version in OPSETS.items()}
    for name, record in found.graphs.items():
        file = found.files.get(name)
        for key, expected, actual in (
            ("digest", file.digest if file else None, record.digest),
            ("opsets", opsets, record.opsets),
            ("minimum_onnxruntime", ops.MINIMUM_RUNTIME, record.minimum_onnxruntime),
        ):
            if expected != actual:
                raise Refused(f"{MANIFEST_FILE} graphs {name} {key}", expected=expected, found=actual, remedy=RE_EXPORT)
    dtype = package.target.io.output(contract.HIDDEN_STATES).dtype
    if found.options.get("dtype") != dtype:
        raise Refused(
            f"{MANIFEST_FILE} options dtype",
            expected=f"{dtype}, as {package.target.path.name} has it",
            found=found.options.get("dtype"),
            remedy=RE_EXPORT,
        )
    return f"{dtype} for ONNX Runtime {ops.MINIMUM_RUNTIME}"


def _state_groups(package: Package, found: Manifest) -> str:
    """Checkpoints are those that the graph puts out, and what the package was asked to have."""
    due = [StateGroup(**group) for group in state_groups(package.linear_layers, package.checkpoints)]
    subject, graph = f"{MANIFEST_FILE} state_groups", package.target.path.name
    if len(due) != len(found.state_groups):
        raise Refused(
            subject,
            expected=f"{len(due)} groups with checkpoints, as {graph} has them",
            found=len(found.state_groups),
            remedy=RE_EXPORT,
        )
    for index, (group, other) in enumerate(zip(due, found.state_groups, strict=True)):
        for key, value in group:
            if getattr(other, key) != value:
                raise Refused(
                    f"{subject}[{index}] {key}",
                    expected=f"{value}, as {graph} has it",
                    found=getattr(other, key),
                    remedy=RE_EXPORT,
                )
    option = "dense" if package.checkpoints else "compact" if package.capacity else "off"
    if package.linear_layers and found.options.get("checkpoints") != option:
        raise Refused(
            f"{MANIFEST_FILE} options checkpoints",
            expected=f"{option}, as {graph} has it",
            found=found.options.get("checkpoints"),
            remedy=RE_EXPORT,
        )
    return f"{package.checkpoints} checkpoints of {len(package.linear_layers)} layers" if due else "no checkpoints"


def _origins(found: Manifest) -> str:
    """What is stored as it was has the length of what it was made of, and in a linked shard lies where that lies."""
    stored = 0
    for graph, entries in found.initializers.items():
        for name, entry in entries.items():
            if entry.transform is None:
                _origin(f"{MANIFEST_FILE} initializers {graph} {name}", entry)
                stored += 1
    return f"{stored} initializers are the checkpoint's bytes"


def _origin(subject: str, entry: Initializer) -> None:
    """A run of slices that follow each other may stand for one initializer."""
    length = sum(origin.length for origin in entry.origin)
    if not entry.origin or length != entry.length:
        raise Refused(f"{subject} origin", expected=f"{entry.length} bytes", found=length, remedy=RE_EXPORT)
    first = entry.origin[0]
    if entry.file not in WRITTEN_FILES and (first.shard, first.offset) != (entry.file, entry.offset):
        raise Refused(
            f"{subject} origin",
            expected=f"{entry.file} from {entry.offset} on, where it lies",
            found=f"{first.shard} from {first.offset} on",
            remedy=RE_EXPORT,
        )
    if not all(_follows(*pair) for pair in pairwise(entry.origin)):
        raise Refused(
            f"{subject} origin", expected="slices that follow each other", found="a gap between them", remedy=RE_EXPORT
        )


def _follows(one: Origin, other: Origin) -> bool:
    return other.shard == one.shard and other.offset == one.offset + one.length
