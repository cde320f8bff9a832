"""Valid checkpoints to start from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fixtures import writer
from fixtures.writer import Tiny
from fuzz.mutations.drafts import (
    INDEX,
    TRAP,
    TRAP_FILES,
    Draft,
    Shard,
)


def mx(tensors: writer.Tensors) -> None:
    """MLPs as MXFP4 and attention as MXFP8: blocks of 32 with exponents for scales."""
    for name in [name for name in tensors if name.endswith(".weight_scale_2")]:
        module = name.removesuffix(".weight_scale_2")
        del tensors[name]
        tensors[f"{module}.weight_scale"] = _exponents(tensors[f"{module}.weight"].shape, 16)
    for name in [name for name in tensors if name.endswith("self_attn.q_proj.weight_scale")]:
        weight = name.removesuffix("_scale")
        tensors[name] = _exponents(tensors[weight].shape, 32)


def _exponents(shape: tuple[int, ...], block: int) -> Any:
    """uint8 [rows, columns / block] for a weight of rows by columns bytes, powers of two around 1/16."""
    rows, columns = shape
    return (np.arange(rows * (columns // block), dtype=np.uint8) % 5 + 121).reshape(rows, -1)


def blocks(tensors: writer.Tensors) -> None:
    """FP8 with scales of 128 by 128, in ModelOpt's four dimensions and as weight_scale_inv in turn."""
    fp8 = [name for name in tensors if name.endswith(".weight_scale") and tensors[name].ndim < 2]
    for i, name in enumerate(fp8):
        rows, columns = tensors[name.removesuffix("_scale")].shape
        scale = np.full((-(-rows // 128), -(-columns // 128)), 0.0625, np.float32)
        del tensors[name]
        tensors[f"{name}_inv" if i % 2 else name] = scale if i % 2 else scale[:, None, :, None]


BASES: Sequence[tuple[writer.Dialect, Tiny, bool, Callable[[writer.Tensors], None] | None]] = (
    ("modelopt", Tiny(), False, None),
    ("compressed-tensors", Tiny(), True, None),
    ("modelopt", Tiny(vision=True, fp8_per_channel=True), True, None),
    ("compressed-tensors", Tiny(tied=True, fp8_per_channel=True, gates="nvfp4"), False, None),
    ("modelopt", Tiny(mtp=False, tied=True, gates="fp8"), True, None),
    ("modelopt", Tiny(), False, mx),
    ("modelopt", Tiny(vision=True), True, blocks),
)
"""Dialect, options, whether the tensors are spread over two shards with an index, and another storage of some."""

TEXTS: dict[str, Any] = {
    "generation_config.json": {"eos_token_id": [writer.EOS], "do_sample": True, "temperature": 0.6, "top_k": 20},
    "tokenizer_config.json": {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"},
    "tokenizer.json": {"version": "1.0", "added_tokens": [{"id": writer.EOS, "content": "<|im_end|>"}], "model": {}},
    "special_tokens_map.json": {"eos_token": {"content": "<|im_end|>"}},
}


@cache
def base(number: int) -> Draft:
    """The valid checkpoint of that number in BASES. Shared: copy it before changing it."""
    dialect, options, sharded, store = BASES[number]

    def edit(tensors: writer.Tensors, config: writer.Config) -> None:
        config["auto_map"] = {"AutoModelForCausalLM": f"modeling_{TRAP}.Model", "AutoConfig": f"modeling_{TRAP}.Config"}
        config["trust_remote_code"] = True
        if store:
            store(tensors)

    with tempfile.TemporaryDirectory() as home:
        folder = writer.write(Path(home) / "checkpoint", dialect, options, edit)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
    shards = {"model.safetensors": _parsed(files.pop("model.safetensors"))}
    if sharded:
        shards = _split(shards["model.safetensors"])
        weight_map = {name: shard for shard, parts in shards.items() for name, _ in parts.entries}
        files[INDEX] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    files |= {name: json.dumps(value).encode() for name, value in TEXTS.items()}
    return Draft(shards, files | TRAP_FILES | {"chat_template.jinja": b"{{ messages }}"})


def _parsed(raw: bytes) -> Shard:
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return Shard(list(header.items()), raw[8 + length :])


def _split(whole: Shard) -> dict[str, Shard]:
    """MTP and every second other tensor in a shard of their own."""
    shards = {"model-00001-of-00002.safetensors": Shard([], b""), "model-00002-of-00002.safetensors": Shard([], b"")}
    for i, (name, entry) in enumerate(whole.entries):
        shard = list(shards.values())[name.startswith("mtp.") or i % 2]
        begin, end = entry["data_offsets"]
        place = [len(shard.data), len(shard.data) + end - begin]
        shard.entries.append((name, {**entry, "data_offsets": place}))
        shard.data += whole.data[begin:end]
    return shards
