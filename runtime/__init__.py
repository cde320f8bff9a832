"""Runs packages to validate them: the paged speculative loop on ONNX Runtime. The public API; imports are lazy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.engine import Engine
    from runtime.failures import FailAt, InjectedFailure
    from runtime.limits import EngineOptions
    from runtime.loading import LoadedPackage, load
    from runtime.metrics import to_prometheus
    from runtime.request import Request
    from runtime.sampling import SamplingOptions
    from runtime.transaction import RollbackFailed
    from runtime.verification import Verification, VerifyOptions, verify

__all__ = [
    "Engine",
    "EngineOptions",
    "FailAt",
    "InjectedFailure",
    "LoadedPackage",
    "Request",
    "RollbackFailed",
    "SamplingOptions",
    "Verification",
    "VerifyOptions",
    "load",
    "to_prometheus",
    "verify",
]

_HOMES = {
    "Engine": "runtime.engine",
    "EngineOptions": "runtime.limits",
    "FailAt": "runtime.failures",
    "InjectedFailure": "runtime.failures",
    "LoadedPackage": "runtime.loading",
    "Request": "runtime.request",
    "RollbackFailed": "runtime.transaction",
    "SamplingOptions": "runtime.sampling",
    "Verification": "runtime.verification",
    "VerifyOptions": "runtime.verification",
    "load": "runtime.loading",
    "to_prometheus": "runtime.metrics",
    "verify": "runtime.verification",
}


def __getattr__(name: str) -> object:
    """Loads an API name on first use, so that `import runtime` does not load ONNX Runtime."""
    if name not in _HOMES:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
