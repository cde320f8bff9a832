"""Converts quantized Qwen3.5-family checkpoints to ONNX Runtime packages. The public API; imports are lazy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from builder.comparison import PackageDiff, diff
    from builder.exporter import ExportReport, export
    from builder.inspection import inspect
    from builder.options import ExportOptions
    from builder.planning import plan

__version__ = "0.1.0"
__all__ = ["ExportOptions", "ExportReport", "PackageDiff", "diff", "export", "inspect", "plan"]

_HOMES = {
    "ExportOptions": "builder.options",
    "ExportReport": "builder.exporter",
    "PackageDiff": "builder.comparison",
    "diff": "builder.comparison",
    "export": "builder.exporter",
    "inspect": "builder.inspection",
    "plan": "builder.planning",
}


def __getattr__(name: str) -> object:
    """Loads an API name on first use, so that `import builder` does not load onnx."""
    if name not in _HOMES:
        raise AttributeError(f"module 'builder' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
