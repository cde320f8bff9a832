"""A package's files against its manifest: presence, size, digest, and the options that the configuration repeats."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder import digests, manifest, paths
from builder.checkpoint import read_json_object
from builder.checks import Check, judged
from builder.errors import MachineError, Refused
from builder.manifest import BUILD_FILE, MANIFEST_FILE, File, Manifest
from builder.progress import Progress
from builder.reader import CONFIG_FILE, Package

ALWAYS_READ_BYTES = 1 << 26
"""Files up to this size are read even without --deep."""
RE_EXPORT = "export the package again"


def check_files(folder: Path, found: Manifest, progress: Progress, *, deep: bool) -> Iterator[Check]:
    """One check a file of the manifest, and one for what lies beside them.

    A linked shard without a digest passes as `content not checked`, and fails where `deep` asks for its content.
    """
    for name, record in found.files.items():

        def judge(name: str = name, record: File = record) -> str:
            return _file(folder, name, record, progress, deep=deep)

        yield judged(f"file {name}", judge)
    yield judged("other files", lambda: _others(folder, found))


def check_manifest(folder: Path) -> tuple[Check, Manifest | None]:
    """Whether there is a manifest that this version reads, and whether it is the one that the export wrote."""
    read: list[Manifest] = []

    def judge() -> str:
        found = manifest.read(folder)
        if found is None:
            raise Refused(folder / MANIFEST_FILE, expected="a manifest", found="none", remedy=RE_EXPORT)
        read.append(found)
        return _build_record(folder)

    check = judged("manifest", judge)
    return check, read[0] if read else None


def _build_record(folder: Path) -> str:
    path = folder / BUILD_FILE
    if not paths.is_file(path):
        return f"its own digest not checked: no {BUILD_FILE}"
    recorded = read_json_object(path).get("manifest")
    made = digests.of_bytes((folder / MANIFEST_FILE).read_bytes())
    if recorded != made:
        raise Refused(folder / MANIFEST_FILE, expected=f"{recorded} ({BUILD_FILE})", found=made, remedy=RE_EXPORT)
    return f"as {BUILD_FILE} records it"


def _file(folder: Path, name: str, record: File, progress: Progress, *, deep: bool) -> str:
    path = folder / name
    there = _inside(name) and paths.is_file(path)
    link = there and path.resolve() != folder.resolve() / name
    if not there or link:
        found = "a symbolic link" if link else "none"
        raise Refused(path, expected=f"a file of {record.size:,} bytes", found=found, remedy=RE_EXPORT)
    try:
        return _content(path, record, progress, deep=deep)
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}; it cannot be read") from error
    except ValueError as error:
        raise Refused(f"{MANIFEST_FILE} {name}", expected="a digest", found=error, remedy=RE_EXPORT) from None


def _inside(name: str) -> bool:
    """A path in a package has plain parts only: none leaves the folder."""
    return "\\" not in name and all(part not in ("", ".", "..") for part in name.split("/"))


def _content(path: Path, record: File, progress: Progress, *, deep: bool) -> str:
    size = path.stat().st_size
    if size != record.size:
        raise Refused(path, expected=f"{record.size:,} bytes", found=f"{size:,}", remedy=RE_EXPORT)
    if record.header is not None and (header := digests.of_header(path)) != record.header:
        raise Refused(f"{path} header", expected=record.header, found=header, remedy="bring the shard it was made with")
    if record.digest is None:
        if deep:
            raise Refused(
                f"{path} content not checked",
                expected="a recorded digest",
                found="none: it was linked unread",
                remedy="export with --hash",
            )
        return f"{size:,} bytes, content not checked: it was linked without a digest"
    if not deep and size > ALWAYS_READ_BYTES:
        return f"{size:,} bytes, content not checked: --deep reads it"
    if (digest := digests.of_file(path, digests.algorithm(record.digest), progress)) != record.digest:
        raise Refused(path, expected=record.digest, found=digest, remedy=RE_EXPORT)
    return f"{size:,} bytes, {digests.algorithm(record.digest)} as recorded"


def _others(folder: Path, found: Manifest) -> str:
    """Not wrong, but nobody who verifies a package should overlook what somebody put beside it."""
    known = {*found.files, MANIFEST_FILE, BUILD_FILE}
    others = []
    for path in _entries(folder):
        name, link = path.relative_to(folder).as_posix(), path.is_symlink()
        if link or name not in known:
            others.append(f"{name} (a symbolic link)" if link else name)
    return f"not the package's: {', '.join(sorted(others))}" if others else "none"


def _entries(folder: Path) -> Iterator[Path]:
    """Everything below the folder but the folders themselves; what a symbolic link leads to is not entered."""

    def fail(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=fail):
        links = [name for name in folders if (Path(parent) / name).is_symlink()]
        yield from (Path(parent) / name for name in (*files, *links))


def check_options(package: Package, found: Manifest) -> Check:
    """What the manifest's options say is what genai_config.json promises."""

    def judge() -> str:
        promised: dict[str, Any] = {
            "context_length": package.context_length,
            "block_size": package.block_size,
            "max_batch_size": package.max_batch_size,
        }
        if package.mtp and package.capacity:
            promised["max_draft_tokens"] = package.max_draft_tokens
        for key, value in promised.items():
            if found.options.get(key) != value:
                raise Refused(
                    f"{CONFIG_FILE} {key}",
                    expected=f"{found.options.get(key)} ({MANIFEST_FILE})",
                    found=value,
                    remedy="put it back, or use an overlay",
                )
        return ", ".join(f"{key} {value}" for key, value in promised.items())

    return judged("options", judge)
