"""Names: the modules and tensors of a checkpoint, and how a configuration's entry finds them.

Every lookup answers with the linear modules an entry means, () where it means something that is no linear module, and
None where it means nothing at all: such an entry is stale. A name is first taken as written. Where that finds nothing
it is tried in the other spellings of the same module, because exports rename: with and without `language_model.`,
with the `.linear` of a wrapper (case A13 of the design's list), and fused as inference engines fuse. Only then, since
a pattern such as `(?!.*language_model)` would turn into its opposite under another spelling.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain

from builder.errors import Refused

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
"""Modules that vLLM's Qwen classes hold as one, by the name of the whole; checkpoints store the parts."""

MAX_PATTERN = 1000
"""Characters of a pattern. One that lists 64 layers by number has under 300."""
MAX_NAME = 100
"""Longer names are not held against a pattern; those of the published checkpoints have up to 80."""
MAX_PARTS = 16
"""Dots in a name whose containers are known by name; the published checkpoints have up to 9."""
MAX_STEPS = 2 * 10**8
"""Steps of one match in the worst case, as `_worst_steps` bounds them: a few seconds."""
PATIENCE = 10.0
"""Seconds of processor time for all lists of one checkpoint, asked between two matches."""
MAX_CANDIDATES = 5000
"""Names compared with an entry to find the nearest ones; a comparison takes some 20 microseconds."""


def canonical(name: str) -> str:
    """One spelling for a module's names in all dialects: without `language_model` and a last `.linear`."""
    return f".{name.removesuffix('.linear')}.".replace(".language_model.", ".")[1:-1]


def with_containers(name: str) -> Iterator[str]:
    """A name, then its containers', outwards. A name that is none of a model's, itself alone: its prefixes grow."""
    yield name
    if len(name) <= 2 * MAX_NAME and name.count(".") < MAX_PARTS:
        while name := name.rpartition(".")[0]:
            yield name


def _nested(name: str) -> str:
    plain = canonical(name)
    return f"model.language_model.{plain.removeprefix('model.')}" if plain.startswith("model.") else plain


SPELLINGS: tuple[Callable[[str], str], ...] = (
    lambda name: name,
    canonical,  # model.layers.0
    _nested,  # model.language_model.layers.0
    lambda name: f"language_model.{canonical(name)}",  # language_model.model.layers.0, language_model.lm_head
)


class Names:
    """tensors: every tensor name of the checkpoint; linears: the modules that configurations speak about."""

    def __init__(self, tensors: Iterable[str], linears: Iterable[str]) -> None:
        self.linears = tuple(linears)
        self._under: dict[str, dict[str, None]] = {}  # a known name to the linear modules at or under it, in order
        self._canonical: dict[str, dict[str, None]] = {}  # the same for names in their canonical spelling
        self._modules: dict[str, None] = {}
        self._spellings: dict[Callable[[str], str], list[str]] = {}
        known = set(self.linears)
        for name in chain(self.linears, tensors):
            module = name if name in known else name.rpartition(".")[0]
            linear: Mapping[str, None] = {module: None} if module in known else {}
            if module not in self._modules:
                self._modules[module] = None
                self._enter(with_containers(module), linear)
            self._enter([name], linear)
        self._deadline = time.process_time() + PATIENCE

    def _enter(self, names: Iterable[str], linear: Mapping[str, None]) -> None:
        for name in filter(None, names):
            self._under.setdefault(name, {}).update(linear)
            self._canonical.setdefault(canonical(name), {}).update(linear)

    def under(self, entry: str) -> tuple[str, ...] | None:
        """An exact name of a module, a tensor or a container, which stands for all that it contains."""
        plain = canonical(entry)
        for table, name in ((self._under, entry), (self._canonical, plain)):
            if name in table:
                return tuple(table[name])
        parent, _, leaf = plain.rpartition(".")
        parts = [f"{parent}.{part}" for part in FUSED.get(leaf, ())]
        found = [self._canonical[part] for part in parts if part in self._canonical]
        return tuple(dict.fromkeys(chain(*found))) if found else None

    def exactly(self, entry: str) -> tuple[str, ...] | None:
        """An exact name, where a container stands for itself alone."""
        found = self.under(entry)
        parent, _, leaf = canonical(entry).rpartition(".")
        own = {canonical(entry), *(f"{parent}.{part}" for part in FUSED.get(leaf, ()))}
        return None if found is None else tuple(module for module in found if canonical(module) in own)

    def containing(self, entry: str) -> tuple[str, ...] | None:
        """A run of whole parts anywhere in a name, such as `linear_attn` or `visual`, or an exact name.

        Engines match any substring here. Whole parts are what lists mean by it, and they keep `mlp.gate`, the router,
        from standing for `mlp.gate_proj`.
        """
        found = self.under(entry)
        run = f".{canonical(entry)}."
        if found is not None or run == ".." or not self._in_time(entry) or run not in self._haystack:
            return found
        return tuple(module for module in self.linears if run in f".{canonical(module)}.")

    def globbed(self, key: str, pattern: str) -> tuple[str, ...] | None:
        """A shell pattern over whole names. Its translation holds no nested repeats: each `*` is atomic."""
        _check_length(key, pattern)
        return self._scan(f"{key} {pattern!r}", re.compile(fnmatch.translate(pattern.removesuffix(".linear"))))

    def regex(self, key: str, pattern: str) -> tuple[str, ...] | None:
        """A regular expression that matches from the start of a name. key: where it stands, for errors."""
        longest = max((len(name) for name in self._under if len(name) <= MAX_NAME), default=0)
        compiled = _compiled(key, pattern)
        if _worst_steps(pattern, longest) > MAX_STEPS:
            raise Refused(
                f"{key} {pattern!r}",
                expected="a pattern without repeated groups and with few repeats and alternatives",
                found="one whose matching may take very long",
                remedy="list names, or split it into several",
            )
        return self._scan(f"{key} {pattern!r}", compiled)

    def nearest(self, entry: str) -> list[str]:
        """Up to three module names that look like an entry; none for a pattern, which misspells no single name."""
        if any(character in entry for character in "*?[(:\\"):
            return []
        leaf = entry.rpartition(".")[2]
        alike = [name for name in self._modules if name.rpartition(".")[2] == leaf]
        candidates = (alike or list(self._modules))[:MAX_CANDIDATES]
        return difflib.get_close_matches(entry[:MAX_PATTERN], candidates, 3, 0.8)

    def _scan(self, subject: str, pattern: re.Pattern[str]) -> tuple[str, ...] | None:
        """In the first spelling that finds anything."""
        for spelled in SPELLINGS:
            found = tuple(module for module in self.linears if self._matches(subject, pattern, spelled(module)))
            if found or any(self._matches(subject, pattern, name) for name in self._spelled(spelled)):
                return found
        return None

    def _matches(self, subject: str, pattern: re.Pattern[str], name: str) -> bool:
        return self._in_time(subject) and len(name) <= MAX_NAME and pattern.match(name) is not None

    def _spelled(self, spelled: Callable[[str], str]) -> list[str]:
        """All names in one spelling, kept: every stale pattern goes through all of them."""
        if spelled not in self._spellings:
            self._spellings[spelled] = [spelled(name) for name in self._under]
        return self._spellings[spelled]

    @cached_property
    def _haystack(self) -> str:
        return "\n".join(f".{name}." for name in self._canonical)

    def _in_time(self, subject: str) -> bool:
        if time.process_time() > self._deadline:
            raise Refused(
                subject,
                expected=f"lists that are compared with the checkpoint within {PATIENCE:g} seconds",
                found="too many or too slow entries",
                remedy="list names, or write fewer and simpler patterns",
            )
        return True


def _check_length(key: str, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN:
        raise Refused(
            f"{key} {pattern!r}",
            expected=f"a pattern of at most {MAX_PATTERN} characters",
            found=len(pattern),
            remedy="split it into several",
        )


def _compiled(key: str, pattern: str) -> re.Pattern[str]:
    _check_length(key, pattern)
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise Refused(
            f"{key} {pattern!r}", expected="a regular expression", found=error, remedy="mend or remove it"
        ) from None


def _worst_steps(pattern: str, length: int) -> float:
    """An upper bound for the ways to match a name of so many characters, read off a valid pattern's text.

    Python's engine backtracks, cannot be stopped and knows no limit; `regex`, which has a timeout, can run out of
    memory before it. So what a pattern could cost is bounded before it runs. k repeats of single characters share a
    name of n in C(n + k, k) ways at most; an optional item doubles them, a group multiplies them by its alternatives.
    A repeated group may be exponential, and comments and verbose patterns hide what is repeated: all count as endless.
    """
    bare = re.sub(r"\\.", "e", pattern, flags=re.DOTALL)
    commented = "(?#" in bare  # asked first: a bracket in a comment would open what looks like a class
    bare = re.sub(r"\[\^?\]?[^\]]*\]", "c", bare)
    if commented or re.search(r"\)[*+{]|\(\?[a-zA-Z]*x", bare):
        return math.inf
    bare = re.sub(r"\(\?P?<?[=!:>]?", "(", bare)
    repeats = len(re.findall(r"[*+{]", re.sub(r"([*+}])[?+]", r"\1", bare)))
    optional = bare.count("?")
    return math.comb(length + repeats, repeats) * 2.0 ** min(optional, 1000) * _alternatives(bare)


def _alternatives(bare: str) -> float:
    """The product of all groups' alternatives, the whole pattern being one."""
    product, open_groups = 1.0, [1]
    for character in bare:
        if character == "(":
            open_groups.append(1)
        elif character == "|":
            open_groups[-1] += 1
        elif character == ")" and len(open_groups) > 1:
            product *= open_groups.pop()
    return product * math.prod(open_groups)
