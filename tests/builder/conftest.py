"""Packages that only read tests share: every option that changes the graphs or where bytes lie, exported once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import builder
from builder.exporter import ExportOptions
from fixtures import writer
from fixtures.writer import Tiny

TINY_PACKAGES: Mapping[str, tuple[writer.Dialect, Tiny, ExportOptions]] = {
    "tiny": ("modelopt", Tiny(), ExportOptions(weights="copy")),
    "bfloat16": (
        "compressed-tensors",
        Tiny(fp8_per_channel=True),
        ExportOptions(weights="copy", dtype="bfloat16", max_draft_tokens=7),
    ),
    "headless": (
        "modelopt",
        Tiny(mtp=False, tied=True, vision=True),
        ExportOptions(weights="copy", context_length=100),
    ),
    "no capture": ("compressed-tensors", Tiny(gates="nvfp4"), ExportOptions(weights="copy", checkpoints="off")),
    "dense": ("modelopt", Tiny(), ExportOptions(weights="copy", checkpoints="dense")),
    "dense bfloat16": (
        "compressed-tensors",
        Tiny(mtp=False),
        ExportOptions(weights="copy", checkpoints="dense", dtype="bfloat16", max_draft_tokens=1),
    ),
    "linked": ("compressed-tensors", Tiny(vision=True, fp8_per_channel=True), ExportOptions(weights="link")),
}
PACKAGE_NAMES = ("trained", *TINY_PACKAGES)


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory, trained_package: Path) -> Mapping[str, Path]:
    """Package folders by name; nobody may change them, least of all what a linked one shares with its checkpoint."""
    home = tmp_path_factory.mktemp("packages")
    folders = {"trained": trained_package}
    for name, (dialect, tiny, options) in TINY_PACKAGES.items():
        checkpoint = writer.write(home / f"{name} checkpoint", dialect, tiny)
        folders[name] = home / name
        builder.export(checkpoint, folders[name], options)
    return folders


@pytest.fixture(scope="session", params=PACKAGE_NAMES)
def package_folder(request: pytest.FixtureRequest, packages: Mapping[str, Path]) -> Path:
    return packages[str(request.param)]
