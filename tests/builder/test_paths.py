"""paths: what the system cannot store is not there; what may not be looked at is the machine's refusal."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from builder import paths
from builder.errors import MachineError


def test_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert paths.is_file(tmp_path / "file") and paths.exists(tmp_path)
    assert not paths.is_file(tmp_path) and not paths.exists(tmp_path / "none")


def test_a_name_too_long_to_be_stored_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / ("n" * 300), tmp_path / ("n" * 300) / "file", Path("n/" * 5000)):
        assert not paths.exists(path) and not paths.is_file(path)


def test_what_may_not_be_looked_at_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object, **options: object) -> os.stat_result:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", denied)
    for ask in (paths.exists, paths.is_file):
        with pytest.raises(MachineError, match="file: Permission denied; it cannot be looked at"):
            ask(tmp_path / "file")
