"""Overlays: ready changes to a package's configuration, for og.Config.overlay and `build-model run --overlay`.

An overlay is a part of genai_config.json that is laid over it key by key; it holds no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from builder.checkpoint import read_json_object
from builder.errors import Refused

FOLDER = "overlays"


def overlays(*, has_mtp: bool, max_draft_tokens: int) -> dict[str, dict[str, Any]]:
    """By name: `plain` leaves the head off, `latency` serves one request with as many drafts as the package allows."""
    latency: dict[str, Any] = {"engine": {"dynamic_batching": {"max_batch_size": 1}}}
    if not has_mtp:
        return {"latency": latency}
    if max_draft_tokens:
        latency["speculative"] = {"max_draft_tokens": max_draft_tokens}
    return {"latency": latency, "plain": {"model": {"mtp": {"enabled": False}}}}


def read(folder: Path, name: str) -> dict[str, Any]:
    """A package's overlay. Raises Refused where it has none of that name, listing those it has."""
    found = sorted(path.stem for path in (folder / FOLDER).glob("*.json"))
    if name not in found:
        raise Refused("--overlay", expected=" or ".join(found) or "none", found=name, remedy="choose another")
    return read_json_object(folder / FOLDER / f"{name}.json")


def merged(config: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """config with the overlay's values in place of its own; objects are merged, everything else is replaced."""
    result = dict(config)
    for key, value in overlay.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return result
