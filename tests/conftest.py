"""Checkpoints for all tests: tiny ones written on demand, and the ones with transformers' own answers."""

from __future__ import annotations

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
    """The trained checkpoint exported with default options. Shared by all tests: copy it before changing it."""
    out = tmp_path_factory.mktemp("packages") / "trained"
    builder.export(trained_checkpoint, out)
    return out
