"""Damaged checkpoints out of a byte string: the same bytes always make the same folder.

A valid tiny checkpoint is held in memory; a few mutations, chosen by the bytes, damage it where an attacker or a broken
download would: headers, index, configurations, tokenizer files, tensor bytes, the folder itself. Half of them keep the
headers consistent (a reshaped tensor, two swapped ranges, a NaN scale), so that what lies behind the header parser is
reached. Nothing here imports the builder: a fuzzer has to be able to instrument it before anyone loads it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fixtures import writer
from fixtures.writer import Tiny

T = TypeVar("T")
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


class Choices:
    """Decisions read off a byte string; once it is used up every decision is the first one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes, padded with zeros."""
        piece = self._data[self._at : self._at + count]
        self._at += count
        return piece.ljust(count, b"\0")

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        width = max(1, (limit.bit_length() + 7) // 8)
        return int.from_bytes(self.take(width), "little") % limit if limit > 1 else 0

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def one_in(self, count: int) -> bool:
        """True once in `count` times, never when the bytes are used up."""
        return self.below(count) == count - 1


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


# Valid checkpoints to start from


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


# Values nobody expects

SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "F32"), 4),
    **dict.fromkeys(("I64", "F64"), 8),
}
DEPTHS = (20, 400, 900, 940, 960, 975, 985, 990, 100_000)
"""Around Python's recursion limit of 1000: what a parser just manages may break whoever prints or compares it."""
NUMBERS: Sequence[Any] = (
    *(0, 1, -1, 2, 3, 7, 16, 64, 255, 1 << 16, 1 << 20, 1 << 24, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e38, 1e308, -1e308, math.nan, math.inf, -math.inf),
)
NAMES: Sequence[str] = (
    *("", ".", "..", "\0", "a\nb", "\x1b[2J", "\ud800", "\U0001f600", "x" * 5000, "__metadata__", "__class__"),
    *("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias", "mtp.fc.weight", "mtp.fc.bias", "mtp.", "weight"),
    *("model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.99.input_layernorm.weight", "model.visual.x"),
)
LEAVES = (
    *("bias", "pre_quant_scale", "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_packed", "weight"),
    *("weight_global_scale", "input_scale", "k_scale", "weight_zero_point", "svdquant_lora_a", "weight_shape", "g_idx"),
)
PATTERNS = (
    *("re:", "re:.*", "re:(", "re:[", "re:*", "re:\\", "re:(?P<a>.)(?P=b)", "re:a{99999999999999}", "re:(?i)LINEAR"),
    *("re:(\\w+\\.?)+!", "re:(.*)*(.*)*x$", "re:^(([a-z])+.)+[A-Z]([a-z])+$", "re:" + "(" * 3000, "re:\ud800", "re:\0"),
    *("re:" + "(" * 60 + ")" * 60, "re:(a|b|" * 200, "re:" + "x?" * 40 + "x" * 40, "Linear", "*", "mtp*", "[", "[!]"),
)
ESCAPES: Sequence[Any] = (
    *("../outside.safetensors", "../../etc/passwd", "/etc/passwd", "/dev/zero", "sub/model.safetensors", "", ".", ".."),
    *("..\\outside.safetensors", "a\0.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors", "model.pt"),
    *("pytorch_model.bin", f"modeling_{TRAP}.py", "config.json", "~/x.safetensors", "missing.safetensors"),
    *(None, 7, True, [], {}, ["model.safetensors"], {"a": 1}, 1.5, "file:///etc/passwd", "%2e%2e/x.safetensors"),
)


def odd_value(choices: Choices) -> Any:
    """A JSON value of any type, small or hostile."""
    makers: Sequence[Callable[[], Any]] = (
        lambda: choices.pick(NUMBERS),
        lambda: choices.pick((None, True, False, [], {}, [[]], {"": None}, "", "null", "64")),
        lambda: choices.pick(NAMES),
        lambda: choices.pick(PATTERNS),
        lambda: [odd_value(choices) for _ in range(choices.below(4))],
        lambda: {choices.pick(NAMES): odd_value(choices) for _ in range(choices.below(4))},
        lambda: nested(choices),
        lambda: choices.pick((Verbatim("9" * 10_000), Verbatim("1e99999"), Verbatim("-"), "x" * 100_000)),
    )
    return choices.pick(makers)()


def nested(choices: Choices) -> Verbatim:
    depth = choices.pick(DEPTHS)
    opening, closing = choices.pick((("[", "]"), ('{"a":', "}"), ('[{"":', "}]")))
    return Verbatim(opening * depth + "1" + (closing * depth if depth < 100_000 else ""))


def bomb(choices: Choices) -> bytes:
    """A few dozen MB of JSON whose Python objects would take many times as much memory."""
    unit = choices.pick((b"[],", b"{},", b'{"a":[]},', b'"a",', b'{"a":{"b":{}}},', b"1,"))
    size = choices.pick((1 << 22, 1 << 24, 1 << 26, 90_000_000))
    opening, closing = choices.pick(((b'{"a":[', b"0]}"), (b"[", b"0]"), (b'{"weight_map":[', b"0]}")))
    return opening + unit * (size // len(unit)) + closing


# Headers that no reader may accept, or that lie


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
    shard, index = _tensor(draft, choices)
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
    shard, index = _tensor(draft, choices)
    shape = [*shard.entries[index][1]["shape"], choices.pick(NUMBERS)]
    shape[choices.below(len(shape))] = choices.pick((*NUMBERS, True, None, "2", [2]))
    shard.replace(index, shape=shape)


def many_dimensions(draft: Draft, choices: Choices) -> None:
    """More than numpy takes; sizes whose product takes minutes to compute, and more digits than Python prints."""
    shard, index = _tensor(draft, choices)
    rank = choices.pick((16, 17, 33, 65, 300, 5000, 200_000))
    shard.replace(index, shape=[choices.pick((1, 1, 0, 2, (1 << 63) - 1))] * rank)


def odd_offsets(draft: Draft, choices: Choices) -> None:
    shard, index = _tensor(draft, choices)
    begin, end = shard.entries[index][1]["data_offsets"]
    by = choices.pick((1, -1, 2, 16, -16, len(shard.data), 1 << 32, 1 << 62, -(1 << 40)))
    ranges = ([begin + by, end + by], [begin, end + by], [end, begin], [begin], [begin, end, end], [begin + 0.5, end])
    shard.replace(index, data_offsets=choices.pick(ranges))


def duplicate_key(draft: Draft, choices: Choices) -> None:
    shard, index = _tensor(draft, choices)
    name, _ = shard.entries[index]
    shard.entries.append((name, shard.entries[choices.below(len(shard.entries))][1]))


def metadata(draft: Draft, choices: Choices) -> None:
    draft.shard(choices).entries.insert(0, ("__metadata__", odd_value(choices)))


def header_bomb(draft: Draft, choices: Choices) -> None:
    """Rare: each one costs as much time as a thousand others."""
    if choices.one_in(60):
        draft.shard(choices).raw_header = bomb(choices)


# Headers that stay consistent, so that the modules behind them are read


def same_size_dtype(draft: Draft, choices: Choices) -> None:
    """Another type of the same width: only whoever knows what the tensor is for can object."""
    shard, index = _tensor(draft, choices)
    size = SIZES[shard.entries[index][1]["dtype"]]
    shard.replace(index, dtype=choices.pick([name for name in SIZES if SIZES[name] == size]))


def reshape(draft: Draft, choices: Choices) -> None:
    shard, index = _tensor(draft, choices)
    shape = shard.entries[index][1]["shape"]
    count = math.prod(shape)
    shapes = (shape[::-1], [count], [1, *shape], [*shape, 1], [count, 1], [1] * 10 + shape, [] if count == 1 else shape)
    shard.replace(index, shape=choices.pick(shapes))


def resize(draft: Draft, choices: Choices) -> None:
    """A tensor of another size with bytes of its own at the end of the file."""
    shard, index = _tensor(draft, choices)
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
    shard, index = _tensor(draft, choices)
    begin, end = shard.entries[index][1]["data_offsets"]
    sizes = {i: shard.entries[i][1]["data_offsets"] for i in shard.tensors()}
    other = choices.pick([i for i, place in sizes.items() if place[1] - place[0] == end - begin])
    shard.replace(index, data_offsets=sizes[other])
    shard.replace(other, data_offsets=[begin, end])


def drop(draft: Draft, choices: Choices) -> None:
    shard, index = _tensor(draft, choices)
    del shard.entries[index]


def drop_prefix(draft: Draft, choices: Choices) -> None:
    """A whole layer, the head, or whatever shares the start of a name goes."""
    shard, index = _tensor(draft, choices)
    parts = shard.entries[index][0].split(".")
    prefix = ".".join(parts[: 1 + choices.below(len(parts))])
    for part in draft.shards.values():
        part.entries = [(name, entry) for name, entry in part.entries if not name.startswith(prefix)]
    _reindex(draft)


def rename(draft: Draft, choices: Choices) -> None:
    shard, index = _tensor(draft, choices)
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
    shard, index = _tensor(draft, choices)
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


def _tensor(draft: Draft, choices: Choices) -> tuple[Shard, int]:
    """A shard and the position of one of its whole entries."""
    names = [name for name in sorted(draft.shards) if draft.shards[name].tensors()]
    if not names:
        raise Inapplicable
    shard = draft.shards[choices.pick(names)]
    return shard, choices.pick(shard.tensors())


class Inapplicable(Exception):
    """An earlier mutation took away what this one changes."""


# Bytes of tensors

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
    shard, index = _tensor(draft, choices)
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


# Documents

DOCUMENTS = ("config.json", "hf_quant_config.json", *TEXTS)


def config_value(draft: Draft, choices: Choices) -> None:
    _edit(draft, "config.json", choices, odd_value)


def config_number(draft: Draft, choices: Choices) -> None:
    """A number in place of any value: the kind of damage that validation by type lets pass."""
    _edit(draft, "config.json", choices, lambda choices: choices.pick(NUMBERS))


def config_key(draft: Draft, choices: Choices) -> None:
    """A known key of the text model, wherever this checkpoint keeps it, so that geometry is hit often."""
    config = _document(draft, "config.json")
    text = _text(config)
    key = choices.pick(sorted(writer.CONFIG))
    place, key = (text, key) if key != "rope_parameters" else (_rope(text), choices.pick(sorted(ROPE)))
    old = place.get(key)
    near: list[Any] = [old * 2, old + 1, old // 2, old - 1] if type(old) is int else [old, [old], None]
    place[key] = choices.pick((choices.pick(near), choices.pick(NUMBERS), odd_value(choices)))
    draft.files["config.json"] = encoded(config).encode()


ROPE = writer.CONFIG["rope_parameters"]
ROPE_VALUES: dict[str, Sequence[Any]] = {
    "mrope_section": ([4, 0, 0], [5, -1, 0], [2, 1], [2, 1, 1, 0], [1 << 62, 1, 1], [0, 0, 0], "211", [2.0, 1, 1]),
    "partial_rotary_factor": (1, 0, 1e-9, 0.26, 0.03, 0.5, 2, "0.25"),
    "rope_theta": (1, 1.0000001, 1e308, 10**400, "1e4", True, 0, -1),
    "rope_type": ("yarn", "linear", "mrope", "", ["default"], 0),
}


def rope(draft: Draft, choices: Choices) -> None:
    config = _document(draft, "config.json")
    text = _text(config)
    for _ in range(1 + choices.below(2)):
        key = choices.pick(sorted(ROPE_VALUES))
        _rope(text)[key] = choices.pick(ROPE_VALUES[key])
    draft.files["config.json"] = encoded(config).encode()


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The part of config.json that holds the text model's keys."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(text.get("rope_parameters"), dict):
        text["rope_parameters"] = {}
    return text["rope_parameters"]


def positions(draft: Draft, choices: Choices) -> None:
    """More positions than any model has: their rotary tables are made in memory."""
    config = _document(draft, "config.json")
    text = _text(config)
    text["max_position_embeddings"] = choices.pick((1, 2, 1 << 10, 1 << 18, 1 << 20, 1 << 22, 1 << 24, (1 << 24) + 1))
    draft.files["config.json"] = encoded(config).encode()


def quantization(draft: Draft, choices: Choices) -> None:
    """What the quantization section says of modules: groups, targets, patterns, algorithms."""
    config = _document(draft, "config.json")
    section = config.get("quantization_config")
    if not isinstance(section, dict):
        raise Inapplicable
    match choices.below(5):
        case 0:
            section["ignore"] = [choices.pick(PATTERNS) for _ in range(1 + choices.below(3))]
        case 1:
            section["config_groups"] = {"g": {"targets": [choices.pick(PATTERNS)], "format": odd_value(choices)}}
        case 2:
            section[choices.pick(sorted(section))] = odd_value(choices)
        case 3:
            section["quant_method"] = choices.pick(("modelopt", "compressed-tensors", "fp8", None, 7, [], "\ud800"))
        case _:
            section["quantized_layers"] = {choices.pick(NAMES): odd_value(choices), "lm_head": {"quant_algo": "\x1b"}}
    draft.files["config.json"] = encoded(config).encode()


def other_document(draft: Draft, choices: Choices) -> None:
    """Any value of hf_quant_config.json, the tokenizer's or the generation settings."""
    names = [name for name in DOCUMENTS[1:] if name in draft.files]
    _edit(draft, choices.pick(names), choices, odd_value)


def token_ids(draft: Draft, choices: Choices) -> None:
    name = choices.pick(("config.json", "generation_config.json", "tokenizer.json"))
    content = _document(draft, name)
    value = choices.pick((choices.pick(NUMBERS), [choices.pick(NUMBERS)], [writer.EOS] * 5, odd_value(choices), "</s>"))
    if name == "tokenizer.json":
        content["added_tokens"] = choices.pick(([{"id": value, "content": "<|im_end|>"}], value))
    else:
        content[choices.pick(("eos_token_id", "bos_token_id", "pad_token_id"))] = value
    draft.files[name] = encoded(content).encode()


def sampling(draft: Draft, choices: Choices) -> None:
    content = _document(draft, "generation_config.json")
    key = choices.pick(("do_sample", "temperature", "top_k", "top_p", "repetition_penalty", "max_length"))
    content[key] = choices.pick((choices.pick(NUMBERS), odd_value(choices)))
    draft.files["generation_config.json"] = encoded(content).encode()


def document_bytes(draft: Draft, choices: Choices) -> None:
    """Bytes of a JSON file: cut, flipped, or all of them something else."""
    name = choices.pick([name for name in (*DOCUMENTS, INDEX) if name in draft.files])
    raw = draft.files[name]
    garbage = (b"", b"\0", b"\xff\xfe{}", b"\xef\xbb\xbf{}", b"[]", b"null", b"{}", b"[" * 100_000, b'"\\ud800"')
    at = choices.below(len(raw) + 1)
    flipped = raw[:at] + choices.take(1) + raw[at + 1 :]
    draft.files[name] = choices.pick((raw[:at], flipped, choices.pick(garbage)))


def document_bomb(draft: Draft, choices: Choices) -> None:
    """Rare, like header_bomb."""
    if choices.one_in(60):
        draft.files[choices.pick(("config.json", "tokenizer.json", "generation_config.json", INDEX))] = bomb(choices)


def _document(draft: Draft, name: str) -> dict[str, Any]:
    """The parsed file, or Inapplicable where an earlier mutation broke it."""
    try:
        content = json.loads(draft.files.get(name, b""))
    except (ValueError, RecursionError):
        raise Inapplicable from None
    if not isinstance(content, dict):
        raise Inapplicable
    return content


def _edit(draft: Draft, name: str, choices: Choices, value: Callable[[Choices], Any]) -> None:
    """One random place of a JSON document changed, deleted, or given a new key."""
    content = _document(draft, name)
    place: Any = content
    while True:
        keys: list[Any] = sorted(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = choices.pick(keys)
        if not isinstance(place[key], (dict, list)) or choices.one_in(4):
            if choices.one_in(5):
                del place[key]
            else:
                place[key] = value(choices)
            break
        place = place[key]
    draft.files[name] = encoded(content).encode()


# The index and the folder


def index_entry(draft: Draft, choices: Choices) -> None:
    """One tensor of the index moves to another shard, to a path, to nowhere, or is new."""
    content = _index(draft)
    weight_map = content["weight_map"]
    name = choices.pick(sorted(weight_map))
    match choices.below(5):
        case 0:
            del weight_map[name]
        case 1:
            weight_map[choices.pick(NAMES)] = choices.pick(sorted(draft.shards))
        case 2:
            weight_map[name] = choices.pick(sorted(draft.shards))
        case _:
            weight_map[name] = choices.pick(ESCAPES)
    draft.files[INDEX] = encoded(content).encode()


def index_allow_list(draft: Draft, choices: Choices) -> None:
    """Only some tensors are listed; the headers stay right."""
    content = _index(draft)
    part = choices.pick(("mtp.", "norm", "scale", "layers.3", "lm_head", "visual"))
    content["weight_map"] = {name: shard for name, shard in content["weight_map"].items() if part not in name}
    draft.files[INDEX] = encoded(content).encode()


def index_shape(draft: Draft, choices: Choices) -> None:
    content = _index(draft)
    content[choices.pick(("weight_map", "metadata", "extra"))] = odd_value(choices)
    draft.files[INDEX] = encoded(content).encode()


def _index(draft: Draft) -> dict[str, Any]:
    content = _document(draft, INDEX)
    if not isinstance(content.get("weight_map"), dict) or not content["weight_map"]:
        raise Inapplicable
    return content


def missing_file(draft: Draft, choices: Choices) -> None:
    name = choices.pick(sorted([*draft.files, *draft.shards]))
    draft.files.pop(name, None)
    if len(draft.shards) > 1:
        draft.shards.pop(name, None)


def second_shard(draft: Draft, choices: Choices) -> None:
    draft.files[choices.pick(("a.safetensors", "model.safetensors.bak", "\udc80.safetensors"))] = choices.take(16)


def not_a_file(draft: Draft, choices: Choices) -> None:
    """A folder where a file is expected."""
    name = choices.pick(("config.json", INDEX, "tokenizer.json", "generation_config.json", "model.safetensors"))
    draft.directories.add(name)


def stray_link(draft: Draft, choices: Choices) -> None:
    """A text file that is a link out of the folder, to a secret, to nothing, to itself or to a device."""
    name = choices.pick((*TEXTS, "chat_template.jinja", "merges.txt", "config.json", INDEX))
    draft.links[name] = choices.pick(("../secret.json", "../missing", name, "/dev/zero", "/proc/self/mem", ".", ".."))


LOUD: Sequence[Callable[[Draft, Choices], None]] = (
    *(length_field, truncation, header_bytes, whole_header, entry_value, odd_size, odd_offsets, duplicate_key),
    many_dimensions,
    *(metadata, header_bomb, document_bytes, index_entry, index_shape, missing_file, second_shard, not_a_file),
    *(stray_link, document_bomb, trailing_bytes),
)
"""Most of these end at the header parser, the index or the JSON reader."""

QUIET: Sequence[Callable[[Draft, Choices], None]] = (
    *(same_size_dtype, reshape, resize, swap_ranges, drop, drop_prefix, rename, add, index_allow_list),
    *(scale_values, scale_values, weight_values, random_bytes, config_value, config_number, config_key, config_key),
    *(rope, positions, quantization, quantization, other_document, token_ids, sampling),
)
"""These leave headers consistent, so that modules, scales, configuration and the package are reached."""


def mutated(data: bytes) -> tuple[Draft, Choices]:
    """The checkpoint that `data` stands for, and what is left of its decisions. b"" gives a valid checkpoint."""
    choices = Choices(data)
    draft = base(choices.below(len(BASES))).copy()
    for _ in range(choices.pick((0, 1, 1, 1, 1, 2, 2, 3))):
        mutation = choices.pick(LOUD if choices.below(5) == 4 else QUIET) if choices.below(8) else choices.pick(LOUD)
        with contextlib.suppress(Inapplicable, RecursionError):  # json.dumps of what was nested before
            mutation(draft, choices)
            draft.done.append(mutation.__name__)
    return draft, choices


def write(draft: Draft, folder: Path) -> None:
    """Writes the draft's files into `folder`, which is made anew, with files to steal and to run around it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("secret.json", "outside.safetensors"):
        (folder.parent / name).write_text(json.dumps({"secret": SECRET}), "utf-8")
    for name, content in _contents(draft):
        path = folder / name
        if name in draft.directories:
            path.mkdir()
        elif name not in draft.links:
            path.write_bytes(content)
    for name, target in draft.links.items():
        if not os.path.lexists(folder / name):
            (folder / name).symlink_to(target)


def _contents(draft: Draft) -> Iterator[tuple[str, bytes]]:
    yield from ((name, shard.render()) for name, shard in draft.shards.items())
    yield from draft.files.items()
    yield from ((name, b"") for name in draft.directories - set(draft.files) - set(draft.shards))
