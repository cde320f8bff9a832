"""Whether what is about to be allocated fits into the machine's free memory."""

from __future__ import annotations

from pathlib import Path

from builder.errors import MachineError

MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """Memory that can be had without swapping, or None where the system does not say."""
    if not MEMINFO.is_file():
        return None
    for line in MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def require(needed: int, what: str, remedy: str) -> None:
    """Raises MachineError when `needed` bytes exceed what is available."""
    available = available_bytes()
    if available is not None and needed > available:
        raise MachineError(f"{what} need {needed:,} bytes, {available:,} are available; {remedy}")
