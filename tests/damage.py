"""Damage to a copied checkpoint that loads, runs and crashes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np

from builder.checkpoint import Checkpoint, TensorRef

Damage = Callable[[Path], None]


def damaged(checkpoint: Path, folder: Path, damage: Damage) -> Path:
    """A copy of `checkpoint` at `folder`, damaged."""
    shutil.copytree(checkpoint, folder)
    damage(folder)
    return folder


def doubled_norm(name: str) -> Damage:
    """The factor 1 + w of a norm becomes twice as large; the weight is stored as bfloat16."""

    def damage(folder: Path) -> None:
        ref = Checkpoint(folder)[name]
        weight = ref.read().astype(np.float32)
        _overwrite(ref, (2 * (1 + weight) - 1).astype(ml_dtypes.bfloat16).tobytes())

    return damage


def swapped(first: str, second: str) -> Damage:
    """Two weights of one format in each other's place; their scales stay."""

    def damage(folder: Path) -> None:
        refs = [Checkpoint(folder)[name] for name in (first, second)]
        contents = [ref.read().tobytes() for ref in refs]
        for ref, content in zip(refs, reversed(contents), strict=True):
            _overwrite(ref, content)

    return damage


def _overwrite(ref: TensorRef, content: bytes) -> None:
    assert len(content) == ref.nbytes
    with ref.file.open("r+b") as file:
        file.seek(ref.offset)
        file.write(content)
