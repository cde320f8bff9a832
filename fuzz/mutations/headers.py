"""Headers that no reader may accept, or that lie."""

from __future__ import annotations

from fuzz.mutations.choices import Choices
from fuzz.mutations.drafts import (
    Draft,
    whole_tensor,
)
from fuzz.mutations.odd_values import NUMBERS, bomb, odd_value


def length_field(draft: Draft, choices: Choices) -> None:
    shard = draft.shard(choices)
    real = len(shard.header())
    size = 8 + real + len(shard.data)
    lengths = (0, 1, 2, real - 1, real + 1, size - 8, size, size + 1, 1 << 27, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
    shard.length = max(0, choices.pick(lengths))


def truncation(draft: Draft, choices: Choices) -> None:
    shard = draft.shard(choices)
    whole = len(shard.render())
    shard.cut = choices.pick((0, 7, 8, 9, whole - 1, max(0, whole - choices.below(1 << 12)), choices.below(whole + 1)))


def trailing_bytes(draft: Draft, choices: Choices) -> None:
    draft.shard(choices).tail = choices.take(1 + choices.below(9))


def header_bytes(draft: Draft, choices: Choices) -> None:
    """One to four bytes of the header replaced by some that mean something in JSON."""
    shard = draft.shard(choices)
    raw = bytearray(shard.header())
    for _ in range(1 + choices.below(4)):
        if raw:
            raw[choices.below(len(raw))] = choices.pick(b'0123456789-+.,:[]{}"\\eEuU \n\x00\xff')
    shard.raw_header = bytes(raw)


def whole_header(draft: Draft, choices: Choices) -> None:
    texts = (b"", b"{}", b"[]", b"null", b"7", b'"a"', b"{" * 50_000, b'{"a":' * 990, b"\xff\xfe", b"\xef\xbb\xbf{}")
    draft.shard(choices).raw_header = choices.pick(texts)


def entry_value(draft: Draft, choices: Choices) -> None:
    """A whole entry or one of its fields becomes something else, or goes."""
    shard, index = whole_tensor(draft, choices)
    name, entry = shard.entries[index]
    key = choices.pick(("dtype", "shape", "data_offsets", "", "extra"))
    if key == "":
        shard.entries[index] = (name, odd_value(choices))
    elif choices.one_in(4):
        shard.entries[index] = (name, {k: v for k, v in entry.items() if k != key})
    else:
        shard.replace(index, **{key: odd_value(choices)})


def odd_size(draft: Draft, choices: Choices) -> None:
    """One dimension that is no size, or a size nobody has."""
    shard, index = whole_tensor(draft, choices)
    shape = [*shard.entries[index][1]["shape"], choices.pick(NUMBERS)]
    shape[choices.below(len(shape))] = choices.pick((*NUMBERS, True, None, "2", [2]))
    shard.replace(index, shape=shape)


def many_dimensions(draft: Draft, choices: Choices) -> None:
    """More than numpy takes; sizes whose product takes minutes to compute, and more digits than Python prints."""
    shard, index = whole_tensor(draft, choices)
    rank = choices.pick((16, 17, 33, 65, 300, 5000, 200_000))
    shard.replace(index, shape=[choices.pick((1, 1, 0, 2, (1 << 63) - 1))] * rank)


def odd_offsets(draft: Draft, choices: Choices) -> None:
    shard, index = whole_tensor(draft, choices)
    begin, end = shard.entries[index][1]["data_offsets"]
    by = choices.pick((1, -1, 2, 16, -16, len(shard.data), 1 << 32, 1 << 62, -(1 << 40)))
    ranges = ([begin + by, end + by], [begin, end + by], [end, begin], [begin], [begin, end, end], [begin + 0.5, end])
    shard.replace(index, data_offsets=choices.pick(ranges))


def duplicate_key(draft: Draft, choices: Choices) -> None:
    shard, index = whole_tensor(draft, choices)
    name, _ = shard.entries[index]
    shard.entries.append((name, shard.entries[choices.below(len(shard.entries))][1]))


def metadata(draft: Draft, choices: Choices) -> None:
    draft.shard(choices).entries.insert(0, ("__metadata__", odd_value(choices)))


def header_bomb(draft: Draft, choices: Choices) -> None:
    """Rare: each one costs as much time as a thousand others."""
    if choices.one_in(60):
        draft.shard(choices).raw_header = bomb(choices)
