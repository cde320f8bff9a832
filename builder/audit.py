"""audit(): a package against its manifest, its contract and itself, without running anything."""

from __future__ import annotations

from pathlib import Path

from builder import reader
from builder.checkpoint import read_json_object
from builder.checks import Check, judged
from builder.errors import Refused
from builder.file_checks import check_files, check_manifest, check_options
from builder.graph_checks import check_graphs
from builder.progress import Progress, silent
from builder.reader import CONFIG_FILE, Package


def audit(folder: Path, progress: Progress = silent, *, deep: bool = False) -> list[Check]:
    """Every check, also those behind a failed one. deep: read all bytes. Raises Refused for what is no package."""
    if not (folder / CONFIG_FILE).is_file():
        raise Refused(folder, expected=f"a package folder with {CONFIG_FILE}", found="none", remedy="check the path")
    check, found = check_manifest(folder)
    checks = [check]
    if found is not None:
        checks += check_files(folder, found, progress, deep=deep)
    read: list[Package] = []

    def judge() -> str:
        read.append(reader.read(folder))
        return f"{CONFIG_FILE} and the graphs name the same tensors"

    checks.append(judged("configuration", judge))
    if not read:
        return checks
    if found is not None:
        checks.append(check_options(read[0], found))
    return [*checks, *check_graphs(read[0], read_json_object(folder / CONFIG_FILE), found)]
