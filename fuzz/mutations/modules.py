"""Headers that stay consistent, so that the modules behind them are read."""

from __future__ import annotations

import json
import math

from fuzz.mutations.choices import Choices
from fuzz.mutations.drafts import (
    INDEX,
    SIZES,
    Draft,
    Shard,
    whole_tensor,
)
from fuzz.mutations.odd_values import LEAVES, NAMES


def same_size_dtype(draft: Draft, choices: Choices) -> None:
    """Another type of the same width: only whoever knows what the tensor is for can object."""
    shard, index = whole_tensor(draft, choices)
    size = SIZES[shard.entries[index][1]["dtype"]]
    shard.replace(index, dtype=choices.pick([name for name in SIZES if SIZES[name] == size]))


def reshape(draft: Draft, choices: Choices) -> None:
    shard, index = whole_tensor(draft, choices)
    shape = shard.entries[index][1]["shape"]
    count = math.prod(shape)
    shapes = (shape[::-1], [count], [1, *shape], [*shape, 1], [count, 1], [1] * 10 + shape, [] if count == 1 else shape)
    shard.replace(index, shape=choices.pick(shapes))


def resize(draft: Draft, choices: Choices) -> None:
    """A tensor of another size with bytes of its own at the end of the file."""
    shard, index = whole_tensor(draft, choices)
    entry = shard.entries[index][1]
    shape = list(entry["shape"])
    if shape:
        at = choices.below(len(shape))
        shape[at] = max(0, choices.pick((shape[at] - 1, shape[at] + 1, 0, 1, 2 * shape[at], shape[at] // 2)))
    else:
        shape = [choices.below(5)]
    _append(shard, index, choices.pick((str(entry["dtype"]), *SIZES)), shape)


def _append(shard: Shard, index: int, dtype: str, shape: list[int]) -> None:
    size = math.prod(shape) * SIZES[dtype]
    if size > 1 << 20:
        return
    offsets = [len(shard.data), len(shard.data) + size]
    shard.data += bytes(size)
    shard.replace(index, dtype=dtype, shape=shape, data_offsets=offsets)


def swap_ranges(draft: Draft, choices: Choices) -> None:
    """Two tensors of one size change places: consistent, and both mean something else."""
    shard, index = whole_tensor(draft, choices)
    begin, end = shard.entries[index][1]["data_offsets"]
    sizes = {i: shard.entries[i][1]["data_offsets"] for i in shard.tensors()}
    other = choices.pick([i for i, place in sizes.items() if place[1] - place[0] == end - begin])
    shard.replace(index, data_offsets=sizes[other])
    shard.replace(other, data_offsets=[begin, end])


def drop(draft: Draft, choices: Choices) -> None:
    shard, index = whole_tensor(draft, choices)
    del shard.entries[index]


def drop_prefix(draft: Draft, choices: Choices) -> None:
    """A whole layer, the head, or whatever shares the start of a name goes."""
    shard, index = whole_tensor(draft, choices)
    parts = shard.entries[index][0].split(".")
    prefix = ".".join(parts[: 1 + choices.below(len(parts))])
    for part in draft.shards.values():
        part.entries = [(name, entry) for name, entry in part.entries if not name.startswith(prefix)]
    _reindex(draft)


def rename(draft: Draft, choices: Choices) -> None:
    shard, index = whole_tensor(draft, choices)
    name, entry = shard.entries[index]
    module, _, leaf = name.rpartition(".")
    new = choices.pick(
        (f"{module}.{choices.pick(LEAVES)}", choices.pick(NAMES), f"{name}.{leaf}", name.upper(), module)
    )
    shard.entries[index] = (new, entry)
    if not choices.one_in(4):
        _reindex(draft)


def add(draft: Draft, choices: Choices) -> None:
    """A tensor nobody asked for beside a module's own, or anywhere."""
    shard, index = whole_tensor(draft, choices)
    module = shard.entries[index][0].rpartition(".")[0]
    name = choices.pick((f"{module}.{choices.pick(LEAVES)}", choices.pick(NAMES)))
    shard.entries.append((name, {}))
    _append(shard, len(shard.entries) - 1, choices.pick(list(SIZES)), [choices.below(5)] * choices.below(3))
    _reindex(draft)


def _reindex(draft: Draft) -> None:
    """An index, where there is one, that names what the shards hold now."""
    if INDEX in draft.files:
        weight_map = {name: shard for shard, parts in draft.shards.items() for name, _ in parts.entries}
        draft.files[INDEX] = json.dumps({"weight_map": weight_map}).encode()
