"""Section and Declaration: a configuration's words, typed on the way in, and what they say of every module.

Nothing here decides how a module is read; the bytes do. A wrong type is refused by its file and key, because a list
that cannot be read cannot be compared either, and whoever wrote it meant something by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from builder.errors import Refused

UNQUANTIZED = "float"
"""The declared format of a module that is left alone; a QuantTensor's `kind` has the same word for it."""
MAX_ENTRIES = 100_000
"""Names in one list. A mixture of 256 experts in 48 layers that lists each of its linear modules has 36,864."""


@dataclass(frozen=True)
class Declaration:
    """What one section says of the weights.

    source: its file and key. formats: every linear module to its declared kind, as in QuantTensor.kind, or to an
    algorithm's own name where we know none. stale: entries of its lists that match nothing in the checkpoint.
    group_sizes: columns under one scale, of the modules it says that of.
    """

    source: str
    formats: Mapping[str, str]
    stale: tuple[str, ...] = ()
    group_sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A JSON object of a configuration. where: its file and key, for errors. A null is as good as an absent key."""

    where: str
    values: Mapping[str, Any]

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.refusal(key, "text", value)

    def size(self, key: str) -> int | None:
        """A number above 0; absent, null and the 0 and -1 of formats without groups are None."""
        value = self.values.get(key)
        if value is None or (type(value) is int and value in (0, -1)):
            return None
        if type(value) is not int or value < 0:
            raise self.refusal(key, "a number", value)
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """A list of names or patterns, each once."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.refusal(key, "a list of names", value)
        odd = sorted({type(entry).__name__ for entry in value} - {"str"})
        if odd:
            raise self.refusal(key, "a list of names", f"{', '.join(odd)} in it")
        if len(value) > MAX_ENTRIES:
            raise self.refusal(key, f"at most {MAX_ENTRIES} names", f"{len(value)}")
        return tuple(dict.fromkeys(value))

    def section(self, key: str) -> Section | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refusal(key, "an object", value)
        return Section(self.key(key), value)

    def sections(self, key: str) -> dict[str, Section]:
        """An object whose values are objects."""
        outer = self.section(key)
        inner = {name: outer.section(name) for name in outer.values} if outer else {}
        return {name: section for name, section in inner.items() if section is not None}

    def key(self, key: str) -> str:
        """A key's full name: `config.json quantization_config.ignore`."""
        return f"{self.where}.{key}" if " " in self.where else f"{self.where} {key}"

    def refusal(self, key: str, expected: str, found: object) -> Refused:
        shown = found if isinstance(found, str) else type(found).__name__
        return Refused(self.key(key), expected=expected, found=shown, remedy="mend it or delete the key")
