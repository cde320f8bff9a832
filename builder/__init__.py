"""Converts quantized Qwen3.5-family checkpoints to ONNX Runtime packages. The public API; imports are lazy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.exporter import ExportOptions, ExportReport, export
    from builder.inspection import inspect

__all__ = ["ExportOptions", "ExportReport", "export", "inspect"]

_HOMES = {
    "ExportOptions": "builder.exporter",
    "ExportReport": "builder.exporter",
    "export": "builder.exporter",
    "inspect": "builder.inspection",
}


def __getattr__(name: str) -> object:
    """Loads an API name on first use, so that `import builder` does not load onnx."""
    if name not in _HOMES:
        raise AttributeError(f"module 'builder' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
