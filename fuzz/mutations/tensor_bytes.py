"""Bytes of tensors."""

from __future__ import annotations

import math

import numpy as np

from fixtures import writer
from fuzz.mutations.choices import Choices
from fuzz.mutations.drafts import (
    SIZES,
    Draft,
    Inapplicable,
    Shard,
    whole_tensor,
)

SPECIAL = (0.0, -0.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, 1e-39, 1e38, 3e38, 65504.0, 65536.0, 448.0)


def scale_values(draft: Draft, choices: Choices) -> None:
    """One value, or all, of a scale becomes special."""
    shard, index = _tensor_named(draft, choices, "scale")
    _fill(shard, index, choices)


def weight_values(draft: Draft, choices: Choices) -> None:
    """Weights that quantization leaves alone: norms, gates, embedding, convolution."""
    shard, index = _tensor_named(draft, choices, choices.pick(("norm", "A_log", "dt_bias", "embed", "conv1d", "mtp")))
    _fill(shard, index, choices)


def random_bytes(draft: Draft, choices: Choices) -> None:
    shard, index = whole_tensor(draft, choices)
    begin, end = shard.entries[index][1]["data_offsets"]
    noise = np.random.default_rng(choices.below(1 << 16)).bytes(max(0, min(end, len(shard.data)) - begin))
    shard.data = shard.data[:begin] + noise + shard.data[begin + len(noise) :]


def _tensor_named(draft: Draft, choices: Choices, part: str) -> tuple[Shard, int]:
    found = [(shard, i) for shard in draft.shards.values() for i in shard.tensors() if part in shard.entries[i][0]]
    if not found:
        raise Inapplicable
    return choices.pick(found)


def _fill(shard: Shard, index: int, choices: Choices) -> None:
    entry = shard.entries[index][1]
    begin, end = entry["data_offsets"]
    width = SIZES[entry["dtype"]]
    one = _encoded(entry["dtype"], choices.pick(SPECIAL))
    count = (end - begin) // width
    if count == 0 or end > len(shard.data):
        return
    if choices.one_in(3):
        shard.data = shard.data[:begin] + one * count + shard.data[end:]
        return
    at = begin + width * choices.below(count)
    shard.data = shard.data[:at] + one + shard.data[at + width :]


def _encoded(dtype: str, value: float) -> bytes:
    numpy_type = {"F8_E4M3": writer.E4M3, "BF16": writer.BF16, "F32": np.dtype("f4"), "F16": np.dtype("f2")}.get(dtype)
    if numpy_type is None:
        return bytes([0x80 if math.copysign(1, value) < 0 else 0x7F]) * SIZES[dtype]
    with np.errstate(all="ignore"):
        return np.array([value], np.float32).astype(numpy_type).tobytes()
