"""Checkpoints for all tests: tiny ones written on demand, and the ones with transformers' own answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

import builder
from fixtures import writer

CHECKPOINTS = Path(__file__).parents[1] / "fixtures" / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))


class TinyFactory(Protocol):
    """Writes a tiny checkpoint into a folder of its own and returns the folder."""

    def __call__(
        self,
        dialect: writer.Dialect = "modelopt",
        options: writer.Tiny | None = None,
        edit: writer.Edit | None = None,
    ) -> Path: ...


@pytest.fixture
def tiny(tmp_path: Path) -> TinyFactory:
    """Tiny checkpoints under tmp_path/checkpoints."""

    def make(
        dialect: writer.Dialect = "modelopt", options: writer.Tiny | None = None, edit: writer.Edit | None = None
    ) -> Path:
        home = tmp_path / "checkpoints"
        home.mkdir(exist_ok=True)
        return writer.write(home / str(len(list(home.iterdir()))), dialect, options, edit)

    return make


@pytest.fixture(scope="session", params=NAMES)
def real_checkpoint(request: pytest.FixtureRequest) -> Path:
    """Each checkpoint written by ModelOpt, compressed-tensors or llm-compressor."""
    return CHECKPOINTS / str(request.param)


@pytest.fixture(scope="session")
def trained_checkpoint() -> Path:
    return CHECKPOINTS / "trained_mixed_dense_text"


@pytest.fixture(scope="session")
def trained_package(tmp_path_factory: pytest.TempPathFactory, trained_checkpoint: Path) -> Path:
    """The trained checkpoint with a data file of its own. Shared by all tests: copy it before changing it."""
    out = tmp_path_factory.mktemp("packages") / "trained"
    builder.export(trained_checkpoint, out, builder.ExportOptions(weights="copy"))
    return out


@pytest.fixture(scope="session", autouse=True)
def fixtures_stay_as_they_are() -> Iterator[None]:
    """A linked package shares its bytes with the checkpoint, so a test that damages one could damage these."""

    def state() -> dict[Path, tuple[int, int]]:
        stats = {path: path.stat() for path in CHECKPOINTS.rglob("*")}
        return {path: (found.st_size, found.st_mtime_ns) for path, found in stats.items()}

    before = state()
    yield
    assert state() == before
