"""Changes: what differs between two mappings of names to JSON-ready facts."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Changes:
    """Facts by name: those that only B has (added), those that only A has (removed), A's and B's where both differ."""

    added: dict[str, Any] = field(default_factory=dict)
    removed: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.added) + len(self.removed) + len(self.changed)

    def only(self, names: Container[str]) -> Changes:
        """Those of them that have one of these names."""
        parts = (self.added, self.removed, self.changed)
        return Changes(*({name: fact for name, fact in part.items() if name in names} for part in parts))

    def to_json(self) -> dict[str, Any]:
        changed = {name: {"a": before, "b": after} for name, (before, after) in self.changed.items()}
        return {"added": self.added, "removed": self.removed, "changed": changed}


def between(a: Mapping[str, Any], b: Mapping[str, Any]) -> Changes:
    """Facts are compared as JSON: 1, 1.0 and true differ. Of facts that are objects only the keys that differ stay."""
    return Changes(
        added={name: fact for name, fact in b.items() if name not in a},
        removed={name: fact for name, fact in a.items() if name not in b},
        changed={name: _apart(fact, b[name]) for name, fact in a.items() if name in b and _differ(fact, b[name])},
    )


def _differ(a: Any, b: Any) -> bool:
    """Not `!=`, by which 1 equals true and NaN differs from itself."""
    return json.dumps(a, sort_keys=True) != json.dumps(b, sort_keys=True)


def _apart(a: Any, b: Any) -> tuple[Any, Any]:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return a, b
    same = {key for key in a.keys() & b.keys() if not _differ(a[key], b[key])}
    before, after = ({key: value for key, value in side.items() if key not in same} for side in (a, b))
    return before, after
