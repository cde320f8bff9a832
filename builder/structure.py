"""What a graph computes, told without the names of its nodes and values.

A node's colour is a number that equal keys share, in whichever graph they occur. The key of radius 0 is the node's own:
op, domain, attributes, and for each input whether it is left out, a graph input, made by a node, or an initializer of
which type and shape. Each further radius adds the colours of producers, input by input, and of users, output by output
(Weisfeiler-Lehman). Colours of radius 2 say what differs in a part of a graph that other parts repeat, and are blind to
what lies further away. Identities see everything before a node instead: two nodes of one identity compute the same
from the same inputs and initializers of the same names, so they alone prove that only names differ.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import onnx

from builder import digests, graph_file

Pair = tuple[int, int]
"""Two numbers: a node of A and one of B by their place in the file; a node and the slot of one of its outputs."""
Unlike = tuple[str | None, str | None]
"""The first node of A and of B that computes what no node of the other graph does, by name; None: there is none."""


@dataclass(frozen=True)
class Group:
    """Nodes that differ alike. a, b: their surroundings in either graph, None where it has no such nodes; example: one
    of them by name, A's where A has them.
    """

    count: int
    a: str | None
    b: str | None
    example: str


@dataclass(frozen=True)
class StructureDiff:
    """removed, added: nodes without a like in the other graph. rewired: the same nodes between others. nearby: number
    of nodes that differ only by what lies around their neighbours.
    """

    removed: tuple[Group, ...]
    added: tuple[Group, ...]
    rewired: tuple[Group, ...]
    nearby: int

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.rewired or self.nearby)

    def to_json(self) -> dict[str, Any]:
        parts = {"removed": self.removed, "added": self.added, "rewired": self.rewired}
        groups = {name: [asdict(group) for group in part] for name, part in parts.items()}
        return {**groups, "nearby": self.nearby}


@dataclass(frozen=True)
class Renaming:
    """Names of nodes of A that B calls otherwise, and the number of values it calls otherwise."""

    nodes: dict[str, str]
    values: int

    def __bool__(self) -> bool:
        return bool(self.nodes or self.values)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Palette:
    """Numbers for keys, equal ones for equal keys."""

    def __init__(self) -> None:
        self._colours: dict[Hashable, int] = {}

    def colour(self, key: Hashable) -> int:
        return self._colours.setdefault(key, len(self._colours))


# --- nodes


def op_name(node: onnx.NodeProto) -> str:
    """domain::type where it is not ONNX's own."""
    return f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def node_names(graph: onnx.GraphProto) -> list[str]:
    """A distinct name for each node: ONNX wants neither that nodes have names nor that they differ."""
    taken: set[str] = set()
    names = []
    for node in graph.node:
        name = stem = node.name or f"{node.op_type} of {next(iter(node.output), 'nothing')}"
        count = 1
        while name in taken:
            count += 1
            name = f"{stem} #{count}"
        taken.add(name)
        names.append(name)
    return names


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """JSON-ready values by name; the digest of what is neither number nor text."""
    return {entry.name: _attribute(entry) for entry in node.attribute}


def _attribute(entry: onnx.AttributeProto) -> Any:
    kinds = onnx.AttributeProto
    if entry.type in (kinds.FLOAT, kinds.INT, kinds.STRING):
        return _plain(onnx.helper.get_attribute_value(entry))
    if entry.type in (kinds.FLOATS, kinds.INTS, kinds.STRINGS):
        return [_plain(value) for value in onnx.helper.get_attribute_value(entry)]
    return digests.of_bytes(entry.SerializeToString(deterministic=True))


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def reads(node: onnx.NodeProto) -> list[str]:
    """The values that a node is given, then those that its branches take from outside by name."""
    return [*node.input, *graph_file.captured(node)]


def type_text(data_type: int, dims: Iterable[int]) -> str:
    """ "bfloat16[96, 64]"."""
    return f"{type_name(data_type)}{list(dims)}"


@cache
def type_name(data_type: int) -> str:
    """An element type by its lower-case name; one that the installed onnx does not know by its number."""
    names = onnx.TensorProto.DataType
    name = names.Name(data_type).lower() if data_type in names.values() else f"type {data_type}"
    return {"float": "float32"}.get(name, name)


def _own_key(node: onnx.NodeProto) -> Hashable:
    """The node by itself: op, attributes, and which of its outputs are there."""
    settings = sorted((entry.name, entry.SerializeToString(deterministic=True)) for entry in node.attribute)
    return op_name(node), node.overload, tuple(settings), tuple(map(bool, node.output))


# --- pairs


@dataclass(frozen=True)
class _Pairing:
    """Nodes of A and B that belong together, and those left over of either, in file order. names: of A's and B's."""

    names: tuple[Sequence[str], Sequence[str]]
    left: Sequence[int]
    right: Sequence[int]
    pairs: list[Pair]

    @classmethod
    def none(cls, a: Sequence[str], b: Sequence[str]) -> _Pairing:
        return cls((a, b), range(len(a)), range(len(b)), [])

    def extended(self, a: Sequence[int], b: Sequence[int]) -> _Pairing:
        """Pairs those left over of one colour, those of one name too before others. a, b: colours by node."""
        before, after = self.names
        named = self._matched(list(zip(a, before, strict=True)), list(zip(b, after, strict=True)))
        return named._matched(a, b)

    def _matched(self, a: Sequence[Hashable], b: Sequence[Hashable]) -> _Pairing:
        waiting: dict[Hashable, deque[int]] = defaultdict(deque)
        for i in self.left:
            waiting[a[i]].append(i)
        pairs, rest = list(self.pairs), []
        for j in self.right:
            queue = waiting[b[j]]
            if queue:
                pairs.append((queue.popleft(), j))
            else:
                rest.append(j)
        return _Pairing(self.names, sorted(i for queue in waiting.values() for i in queue), rest, pairs)


# --- identities


def _identities(graph: onnx.GraphProto, palette: Palette) -> tuple[list[int], dict[str, int]] | None:
    """Of the nodes in their order, and of the graph's outputs by name. None where a value is used before it is made."""
    values = {entry.name: palette.colour(("input", entry.name)) for entry in graph.input}
    for tensor in graph.initializer:
        values[tensor.name] = palette.colour(("initializer", tensor.name, tensor.data_type, tuple(tensor.dims)))
    values[""] = palette.colour("left out")
    nodes = []
    for node in graph.node:
        given = reads(node)
        if any(name not in values for name in given):
            return None
        nodes.append(palette.colour((_own_key(node), tuple(values[name] for name in given))))
        values |= {name: palette.colour((nodes[-1], slot)) for slot, name in enumerate(node.output) if name}
    if any(entry.name not in values for entry in graph.output):
        return None
    return nodes, {entry.name: values[entry.name] for entry in graph.output}


def renaming(a: onnx.GraphProto, b: onnx.GraphProto) -> tuple[Renaming | None, Unlike]:
    """Whose names differ where nothing else does; None, and the first nodes unlike any other, where more does."""
    palette = Palette()
    left, right = _identities(a, palette), _identities(b, palette)
    if left is None or right is None:
        return None, (None, None)
    first = _first_unlike(a, left[0], right[0]), _first_unlike(b, right[0], left[0])
    if any(first) or left[1] != right[1]:
        return None, first
    names, others = node_names(a), node_names(b)
    pairs = _Pairing.none(names, others).extended(left[0], right[0]).pairs
    moved = {names[i]: others[j] for i, j in pairs if names[i] != others[j]}
    values = sum(x != y for i, j in pairs for x, y in zip(a.node[i].output, b.node[j].output, strict=True))
    return Renaming(moved, values), (None, None)


def _first_unlike(graph: onnx.GraphProto, own: Sequence[int], others: Sequence[int]) -> str | None:
    left = Counter(others)
    for name, identity in zip(node_names(graph), own, strict=True):
        left[identity] -= 1
        if left[identity] < 0:
            return name
    return None


# --- structure


class Wiring:
    """One graph's nodes and edges. levels: colours by node, each level a coarser look at the surroundings."""

    def __init__(self, graph: onnx.GraphProto, palette: Palette) -> None:
        self._palette = palette
        self._nodes = list(graph.node)
        self._reads = [reads(node) for node in self._nodes]
        self._types = {tensor.name: type_text(tensor.data_type, tensor.dims) for tensor in graph.initializer}
        self._inputs = {entry.name for entry in graph.input}
        self._outputs = {entry.name for entry in graph.output}
        self.names = node_names(graph)
        made: dict[str, Pair] = {
            name: (i, slot) for i, node in enumerate(self._nodes) for slot, name in enumerate(node.output) if name
        }
        self._producers = [[made.get(name) for name in names] for names in self._reads]
        self._users: list[list[Pair]] = [[] for _ in self._nodes]
        for i, edges in enumerate(self._producers):
            for producer, slot in filter(None, edges):
                self._users[producer].append((slot, i))
        own = [palette.colour(self._key(i)) for i in range(len(self._nodes))]
        near = self._wider(own)
        self.levels = (
            self._wider(near),
            near,
            [palette.colour(key) for key in zip(own, self._before(own), strict=True)],
            [palette.colour(key) for key in zip(own, self._after(own), strict=True)],
            own,
        )

    def _key(self, i: int) -> Hashable:
        node = self._nodes[i]
        outputs = tuple(name in self._outputs for name in node.output)
        return _own_key(node), tuple(map(self._kind, self._reads[i])), outputs

    def _kind(self, name: str) -> str:
        if name in self._types:
            return self._types[name]
        return "input" if name in self._inputs else "value" if name else ""

    def _before(self, colours: Sequence[int]) -> list[Hashable]:
        return [tuple(edge and (colours[edge[0]], edge[1]) for edge in edges) for edges in self._producers]

    def _after(self, colours: Sequence[int]) -> list[Hashable]:
        return [tuple(sorted((slot, colours[i]) for slot, i in users)) for users in self._users]

    def _wider(self, colours: Sequence[int]) -> list[int]:
        keys = zip(colours, self._before(colours), self._after(colours), strict=True)
        return [self._palette.colour(key) for key in keys]

    def text(self, i: int, *, whole: bool) -> str:
        """Producers -> node -> users. whole: with the node's attributes and the types of its initializers."""
        node = self._nodes[i]
        settings = ", ".join(f"{name}={value}" for name, value in sorted(attributes(node).items()) if whole)
        edges = zip(self._reads[i], self._producers[i], strict=True)
        before = [self._nodes[edge[0]].op_type if edge else self._kind(name) for name, edge in edges if whole or edge]
        after = sorted(self._nodes[user].op_type for _, user in self._users[i])
        parts = (", ".join(_counted(before)), f"{op_name(node)}({settings})" if settings else op_name(node))
        return " -> ".join(filter(None, (*parts, ", ".join(_counted(after)))))


def _counted(texts: Iterable[str]) -> list[str]:
    counts = Counter(text for text in texts if text)
    return [text if count == 1 else f"{count} {text}" for text, count in counts.items()]


def compare(a: onnx.GraphProto, b: onnx.GraphProto) -> StructureDiff:
    """Nodes are paired by colours of radius 2, those left over by radius 1, by themselves and their producers, by
    themselves and their users, and by themselves alone. What then is left over has no like at all.
    """
    palette = Palette()
    left, right = Wiring(a, palette), Wiring(b, palette)
    whole = pairing = _Pairing.none(left.names, right.names).extended(left.levels[0], right.levels[0])
    for own, others in zip(left.levels[1:], right.levels[1:], strict=True):
        pairing = pairing.extended(own, others)
    loose = sorted(pairing.pairs[len(whole.pairs) :])
    texts = [(left.text(i, whole=False), right.text(j, whole=False), left.names[i]) for i, j in loose]
    rewired = [text for text in texts if text[0] != text[1]]
    return StructureDiff(
        removed=_groups((left.text(i, whole=True), None, left.names[i]) for i in pairing.left),
        added=_groups((None, right.text(j, whole=True), right.names[j]) for j in pairing.right),
        rewired=_groups(rewired),
        nearby=len(texts) - len(rewired),
    )


def _groups(nodes: Iterable[tuple[str | None, str | None, str]]) -> tuple[Group, ...]:
    """The largest first. nodes: surroundings in A, in B, and the name."""
    examples: dict[tuple[str | None, str | None], list[str]] = defaultdict(list)
    for before, after, name in nodes:
        examples[before, after].append(name)
    groups = [Group(len(names), *texts, names[0]) for texts, names in examples.items()]
    return tuple(sorted(groups, key=lambda group: -group.count))
