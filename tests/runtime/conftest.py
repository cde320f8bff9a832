"""Packages and references that the runtime tests share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

import builder
import runtime
from fixtures import TRAINED
from runtime.loading import LoadedPackage
from runtime.place import Place
from runtime.session import Session
from tests.runtime.gpu import TRAINED_ONES

ADDRESSED = Place("cpu", widened=True, is_host=False)
"""A CPU whose memory is addressed as a GPU's is."""


@pytest.fixture(scope="session")
def reference() -> Mapping[str, NDArray[Any]]:
    """transformers' answers on the trained checkpoint."""
    return dict(np.load(TRAINED / "reference.npz"))


@pytest.fixture(scope="session")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "package"
    builder.export(TRAINED, folder)
    return folder


@pytest.fixture(scope="session")
def trained(trained_folder: Path) -> LoadedPackage:
    return runtime.load(trained_folder)


@pytest.fixture(scope="session")
def prompts(reference: Mapping[str, NDArray[Any]]) -> list[list[int]]:
    return [reference[f"prompt_{i}"].tolist() for i in range(8)]


@pytest.fixture(scope="session")
def greedy_tokens(reference: Mapping[str, NDArray[Any]]) -> list[list[int]]:
    """64 greedy tokens of transformers in float32 for each prompt."""
    return [reference[f"greedy_{i}"].tolist() for i in range(8)]


class Addressed:
    """A package with caches, states and drafts addressed as on a GPU, and tokens chosen by the graphs."""

    def __init__(self, package: LoadedPackage) -> None:
        self.package = package.package
        self.target = Session(self.package.target, "cpu", place=ADDRESSED)
        self.unpacked: Session | None = None
        assert self.package.mtp
        self._mtp = Session(self.package.mtp, "cpu", place=ADDRESSED)

    def mtp(self) -> Session:
        return self._mtp


@pytest.fixture(scope="session")
def addressed(trained: LoadedPackage) -> LoadedPackage:
    return cast(LoadedPackage, Addressed(trained))


@pytest.fixture(scope="module", params=TRAINED_ONES, ids=lambda folder: folder.name)
def model_checkpoint(request: pytest.FixtureRequest) -> Path:
    """A trained checkpoint: dense, and mixtures of two dialects."""
    return Path(request.param)


@pytest.fixture(scope="module")
def model_package(model_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "package"
    builder.export(model_checkpoint, folder)
    return folder


@pytest.fixture(scope="module")
def model_answers(model_checkpoint: Path) -> Mapping[str, NDArray[Any]]:
    """transformers' answers on that checkpoint."""
    return dict(np.load(model_checkpoint / "reference.npz"))
