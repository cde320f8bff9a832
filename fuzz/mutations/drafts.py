"""Draft: a checkpoint folder in the making, held in memory."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

from fuzz.mutations.choices import Choices

Entry = tuple[str, Any]

INDEX = "model.safetensors.index.json"
SECRET = "only outside the checkpoint"
"""Stands in the files around a checkpoint that no export may carry away."""
TRAP = "draftsmith_trap"
"""Stands in the code and pickles beside the shards that nothing may open, import or unpickle."""
TRAP_FILES = {
    f"modeling_{TRAP}.py": f"raise SystemExit('{TRAP}')\n".encode(),
    "pytorch_model.bin": b"cos\nsystem\n(S'exit 1'\ntR.",
    "model.pt": b"cos\nsystem\n(S'exit 1'\ntR.",
}
SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "F32"), 4),
    **dict.fromkeys(("I64", "F64"), 8),
}


@dataclass
class Shard:
    """A safetensors file in parts. What is set in length or raw_header stands for what the parts would give."""

    entries: list[Entry]
    data: bytes
    length: int | None = None
    raw_header: bytes | None = None
    cut: int | None = None
    tail: bytes = b""

    def render(self) -> bytes:
        header = self.header()
        whole = struct.pack("<Q", len(header) if self.length is None else self.length) + header + self.data
        return whole[: self.cut] + self.tail

    def header(self) -> bytes:
        """Joined by hand: json.dumps of a dictionary could not say the same key twice."""
        if self.raw_header is not None:
            return self.raw_header
        return ("{" + ",".join(f"{json.dumps(key)}:{encoded(value)}" for key, value in self.entries) + "}").encode()

    def tensors(self) -> list[int]:
        """Positions of the entries that are still whole: other mutations may have been here before."""
        return [
            i
            for i, (name, entry) in enumerate(self.entries)
            if name != "__metadata__" and isinstance(entry, dict) and _whole(entry)
        ]

    def replace(self, index: int, **changes: Any) -> None:
        """Entries are shared between drafts, so they are replaced, never changed."""
        name, entry = self.entries[index]
        self.entries[index] = (name, {**entry, **changes})


def _whole(entry: dict[str, Any]) -> bool:
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    return (
        isinstance(entry.get("dtype"), str)
        and entry["dtype"] in SIZES
        and isinstance(shape, list)
        and all(type(n) is int and n >= 0 for n in shape)
        and isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(n) is int and 0 <= n < 1 << 40 for n in offsets)
    )


@dataclass
class Draft:
    """A checkpoint folder in the making: its shards, its other files, and names that are no plain files."""

    shards: dict[str, Shard]
    files: dict[str, bytes]
    directories: set[str] = field(default_factory=set)
    links: dict[str, str] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def copy(self) -> Draft:
        shards = {name: Shard(list(shard.entries), shard.data) for name, shard in self.shards.items()}
        return Draft(shards, dict(self.files))

    def shard(self, choices: Choices) -> Shard:
        return self.shards[choices.pick(sorted(self.shards))]


@dataclass(frozen=True)
class Verbatim:
    """JSON text that no Python value stands for, or that Python's own encoder gives up on."""

    text: str


MARK = "\u0001"


def encoded(value: Any) -> str:
    """JSON of a value with Verbatim parts: they are encoded as marked strings, then unquoted."""
    parts = json.dumps(value, default=lambda part: f"{MARK}{part.text}{MARK}").split(json.dumps(MARK)[1:-1])
    for i in range(1, len(parts), 2):
        parts[i - 1] = parts[i - 1].removesuffix('"')
        parts[i] = json.loads(f'"{parts[i]}"')
        parts[i + 1] = parts[i + 1].removeprefix('"')
    return "".join(parts)


def whole_tensor(draft: Draft, choices: Choices) -> tuple[Shard, int]:
    """A shard and the position of one of its whole entries."""
    names = [name for name in sorted(draft.shards) if draft.shards[name].tensors()]
    if not names:
        raise Inapplicable
    shard = draft.shards[choices.pick(names)]
    return shard, choices.pick(shard.tensors())


class Inapplicable(Exception):
    """An earlier mutation took away what this one changes."""
