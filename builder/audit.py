"""audit(): a package against its manifest, its contract and itself, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from builder import paths, reader
from builder.checks import Check, judged
from builder.errors import Refused
from builder.file_checks import check_files, check_manifest, check_options
from builder.graph_checks import check_graphs
from builder.manifest import MANIFEST_FILE
from builder.progress import Progress, silent
from builder.reader import CONFIG_FILE, Package
from builder.record_checks import check_record


def audit(folder: Path, progress: Progress = silent, *, deep: bool = False) -> list[Check]:
    """Every check, also those behind a failed one. deep: read all bytes. Raises Refused for what is no package, and
    MachineError for a folder that may not be looked at.
    """
    if not paths.is_file(folder / CONFIG_FILE) and not paths.is_file(folder / MANIFEST_FILE):
        raise Refused(folder, expected=f"a package folder with {CONFIG_FILE}", found="none", remedy="check the path")
    check, found = check_manifest(folder)
    checks = [check]
    if found is not None:
        checks += check_files(folder, found, progress, deep=deep)
    read: list[tuple[Package, dict[str, Any]]] = []

    def judge() -> str:
        read.append((reader.read(folder), reader.config(folder)))
        return f"{CONFIG_FILE} and the graphs name the same tensors"

    checks.append(judged("configuration", judge))
    if not read:
        return checks
    package, config = read[0]
    if found is not None:
        checks.append(check_options(package, found))
        checks += check_record(package, found)
    return [*checks, *check_graphs(package, config, found)]
