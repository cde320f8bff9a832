"""What a person reads of a PackageDiff: a verdict, then what differs, the first of each kind and how many there are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from builder.changes import Changes
from builder.comparison import PackageDiff
from builder.errors import one_line
from builder.graph_comparison import GraphDiff
from builder.structure import Group

SHOWN = 10
"""Lines of each kind; --json has all of them."""
DIGEST = re.compile(r"(\w+:[0-9a-f]{12})[0-9a-f]{20,}")
"""Its first digits are enough for a person."""


def lines(found: PackageDiff) -> Iterator[str]:
    """Names come from files: each line is fit for a terminal."""
    yield from map(one_line, _lines(found))


def _lines(found: PackageDiff) -> Iterator[str]:
    yield _verdict(found)
    yield from _changes("files", found.files)
    for file, changes in found.config.items():
        yield from _changes(file, changes)
    for file, graph in found.graphs.items():
        yield from _graph(file, graph)
    for file, changes in found.initializers.items():
        yield from _changes(f"{file} initializers", changes)
    yield from _layout(found)
    yield from _changes("provenance", found.provenance)


def _verdict(found: PackageDiff) -> str:
    if found.equal:
        return "equal"
    renamed = any(graph.renamed for graph in found.graphs.values())
    apart = {"layout": found.layout, "names inside graphs": renamed, "provenance": found.provenance}
    if found.content_equal:
        kinds = [name for name, differs in apart.items() if differs] or ["how files are written"]
        same = "weights, configuration and what the graphs compute are equal"
        return f"different only in {' and '.join(kinds)}; {same}"
    content = {
        **found.config,
        **{file: not graph.content_equal for file, graph in found.graphs.items()},
        "weights": any(found.initializers.values()),
        "tokenizer": found.tokenizer,
        "files": found.other_files,
    }
    return f"different: {', '.join(name for name, differs in (content | apart).items() if differs)}"


def _graph(file: str, graph: GraphDiff) -> Iterator[str]:
    parts = {"inputs": graph.inputs, "outputs": graph.outputs, "opsets": graph.opsets, "other fields": graph.model}
    for name, changes in parts.items():
        yield from _changes(f"{file} {name}", changes)
    yield from _structure(file, graph)
    if graph.renamed:
        names = [f"{before} -> {after}" for before, after in graph.renamed.nodes.items()]
        title = f"{file} renamed, same structure: {len(names)} nodes, {graph.renamed.values} values"
        yield from _listed(title, names)
    if any(graph.first):
        yield f"{file} first to compute something else: {graph.first[0]} in A, {graph.first[1]} in B"
    yield from _nodes(f"{file} nodes by name", graph.nodes)
    yield from _changes(f"{file} noted types", graph.values)


def _structure(file: str, graph: GraphDiff) -> Iterator[str]:
    """Where nodes are new or gone, what they stand between is told with them; else it is all there is to tell."""
    found = graph.structure
    if graph.nodes and not found:
        yield f"{file} structure: the same parts, named or wired otherwise"
    for side, groups in (("A", found.removed), ("B", found.added)):
        count = sum(group.count for group in groups)
        yield from _listed(f"{file} structure, only in {side}: {count} nodes", list(map(_group, groups)))
    rewired = sum(group.count for group in found.rewired)
    if not (found.removed or found.added):
        yield from _listed(f"{file} structure, wired otherwise: {rewired} nodes", list(map(_group, found.rewired)))
        rewired = 0
    if rewired + found.nearby:
        yield f"{file} structure: {rewired + found.nearby} nodes differ only by what is around them"


def _nodes(title: str, nodes: Changes) -> Iterator[str]:
    """Of nodes that have no counterpart the op is enough; changes that are alike share a line."""
    for side, facts in (("A", nodes.removed), ("B", nodes.added)):
        yield from _listed(f"{title}, only in {side}: {len(facts)}", [f"{name}: {facts[name]['op']}" for name in facts])
    alike: dict[str, list[str]] = {}
    for name, pair in nodes.changed.items():
        alike.setdefault(_pair(*pair), []).append(name)
    changed = [
        f"{names[0]}: {text}" if len(names) == 1 else f"{len(names)} x {text}, e.g. {names[0]}"
        for text, names in alike.items()
    ]
    yield from _listed(f"{title}, changed: {len(nodes.changed)}", changed)


def _group(group: Group) -> str:
    texts = [text for text in (group.a, group.b) if text]
    return f"{group.count} x {' became '.join(texts)}, e.g. {group.example}"


def _layout(found: PackageDiff) -> Iterator[str]:
    for file, counts in found.layout.initializers.items():
        moved = [
            f"{count} at other offsets of {a}" if a == b else f"{count} in {a} -> {b}"
            for (a, b), count in counts.items()
        ]
        yield from _listed(f"{file} layout: {sum(counts.values())} equal initializers elsewhere", moved)
    yield from _changes("shared initializers' layout", found.layout.shared)


def _changes(title: str, changes: Changes) -> Iterator[str]:
    for side, facts in (("A", changes.removed), ("B", changes.added)):
        named = [f"{name}: {_fact(fact)}" for name, fact in facts.items()]
        yield from _listed(f"{title}, only in {side}: {len(named)}", named)
    pairs = [f"{name}: {_pair(*pair)}" for name, pair in changes.changed.items()]
    yield from _listed(f"{title}, changed: {len(pairs)}", pairs)


def _pair(before: Any, after: Any) -> str:
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return f"{_fact(before)} -> {_fact(after)}"
    keys = list(dict.fromkeys([*before, *after]))
    return "; ".join(f"{key} {_fact(before.get(key, 'none'))} -> {_fact(after.get(key, 'none'))}" for key in keys)


def _fact(fact: Any) -> str:
    if isinstance(fact, dict):
        return ", ".join(f"{key} {_fact(value)}" for key, value in fact.items())
    return DIGEST.sub(r"\1", fact) if isinstance(fact, str) else json.dumps(fact, ensure_ascii=False)


def _listed(title: str, items: Sequence[str]) -> Iterator[str]:
    if not items:
        return
    yield title
    yield from (f"  {item}" for item in items[:SHOWN])
    if len(items) > SHOWN:
        yield f"  ... and {len(items) - SHOWN} more"
