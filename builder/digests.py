"""Digests of files, as "algorithm:hexadecimal".

Small files have SHA-256. Weights have XXH3-128, which keeps up with memory and finds every kind of damage; it is no
proof against somebody who forges a file on purpose, and neither is a manifest that nobody signed. Files from the Hub
have the SHA-256 that names them in its cache, for which nothing has to be read.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import xxhash

from builder.checkpoint import MAX_JSON_BYTES
from builder.errors import Refused
from builder.progress import Progress, silent

CHUNK_BYTES = 1 << 24
HEADER_LENGTH_BYTES = 8
BLOB_NAME = re.compile(r"[0-9a-f]{64}")
SHA256, XXH3 = "sha256", "xxh3_128"


class Hasher(Protocol):
    def update(self, data: Any) -> object: ...

    def hexdigest(self) -> str: ...


HASHERS: dict[str, Callable[[], Hasher]] = {SHA256: hashlib.sha256, XXH3: xxhash.xxh3_128}


def of_bytes(data: bytes) -> str:
    """Of a small file's content."""
    return f"{SHA256}:{hashlib.sha256(data).hexdigest()}"


def of_file(path: Path, algorithm: str, progress: Progress = silent) -> str:
    """Reads the whole file, some megabytes at a time. Raises OSError."""
    hasher, size, done = HASHERS[algorithm](), path.stat().st_size, 0
    buffer = memoryview(bytearray(min(CHUNK_BYTES, max(size, 1))))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            done += count
            progress(f"reading {path.name}", done, size)
    return f"{algorithm}:{hasher.hexdigest()}"


def of_header(path: Path) -> str:
    """Of a safetensors file's length field and JSON header: which tensors lie where, without their bytes.

    Raises Refused where the field says more than the file or any header has, OSError.
    """
    with path.open("rb") as file:
        field, size = file.read(HEADER_LENGTH_BYTES), os.fstat(file.fileno()).st_size
        length = int.from_bytes(field, "little")
        if length > min(size - HEADER_LENGTH_BYTES, MAX_JSON_BYTES):
            raise Refused(
                path,
                expected="a safetensors header",
                found=f"a length of {length} in a file of {size} bytes",
                remedy="bring the shard again",
            )
        return of_bytes(field + file.read(length))


def free_of_charge(path: Path) -> str | None:
    """The digest by which the Hub's cache names a large file (blobs/SHA256), or None. path: may be a link to it."""
    real = path.resolve()
    if real.parent.name == "blobs" and BLOB_NAME.fullmatch(real.name):
        return f"{SHA256}:{real.name}"
    return None


def algorithm(digest: str) -> str:
    """Of a recorded digest. Raises ValueError for one that is unknown here."""
    name, _, value = digest.partition(":")
    if name not in HASHERS or not re.fullmatch(r"[0-9a-f]+", value):
        raise ValueError(f"an unknown digest {digest}")
    return name
