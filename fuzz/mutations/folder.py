"""The index, and the folder itself."""

from __future__ import annotations

from typing import Any

from fuzz.mutations.bases import TEXTS
from fuzz.mutations.choices import Choices
from fuzz.mutations.documents import (
    document,
)
from fuzz.mutations.drafts import (
    INDEX,
    Draft,
    Inapplicable,
    encoded,
)
from fuzz.mutations.odd_values import ESCAPES, NAMES, odd_value


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
    content = document(draft, INDEX)
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
