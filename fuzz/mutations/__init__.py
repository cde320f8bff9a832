"""Damaged checkpoints out of a byte string: the same bytes always make the same folder.

A valid tiny checkpoint is held in memory; a few mutations, chosen by the bytes, damage it where an attacker or a broken
download would: headers, index, configurations, tokenizer files, tensor bytes, the folder itself. Half of them keep the
headers consistent (a reshaped tensor, two swapped ranges, a NaN scale), so that what lies behind the header parser is
reached. Nothing here imports the builder: a fuzzer has to be able to instrument it before anyone loads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fuzz.mutations.bases import BASES, base
from fuzz.mutations.choices import Choices
from fuzz.mutations.documents import (
    config_key,
    config_number,
    config_value,
    document_bomb,
    document_bytes,
    other_document,
    positions,
    quantization,
    rope,
    sampling,
    token_ids,
)
from fuzz.mutations.drafts import (
    INDEX,
    SECRET,
    TRAP,
    Draft,
    Inapplicable,
)
from fuzz.mutations.folder import (
    index_allow_list,
    index_entry,
    index_shape,
    missing_file,
    not_a_file,
    second_shard,
    stray_link,
)
from fuzz.mutations.headers import (
    duplicate_key,
    entry_value,
    header_bomb,
    header_bytes,
    length_field,
    many_dimensions,
    metadata,
    odd_offsets,
    odd_size,
    trailing_bytes,
    truncation,
    whole_header,
)
from fuzz.mutations.modules import add, drop, drop_prefix, rename, reshape, resize, same_size_dtype, swap_ranges
from fuzz.mutations.tensor_bytes import random_bytes, scale_values, weight_values

__all__ = ["BASES", "INDEX", "LOUD", "QUIET", "SECRET", "TRAP", "base", "mutated", "write"]

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
