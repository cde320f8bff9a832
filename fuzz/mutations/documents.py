"""JSON documents: configurations, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from fixtures import writer
from fuzz.mutations.bases import TEXTS
from fuzz.mutations.choices import Choices
from fuzz.mutations.drafts import (
    INDEX,
    Draft,
    Inapplicable,
    encoded,
)
from fuzz.mutations.odd_values import NAMES, NUMBERS, PATTERNS, bomb, odd_value

DOCUMENTS = ("config.json", "hf_quant_config.json", *TEXTS)


def config_value(draft: Draft, choices: Choices) -> None:
    _edit(draft, "config.json", choices, odd_value)


def config_number(draft: Draft, choices: Choices) -> None:
    """A number in place of any value: the kind of damage that validation by type lets pass."""
    _edit(draft, "config.json", choices, lambda choices: choices.pick(NUMBERS))


def config_key(draft: Draft, choices: Choices) -> None:
    """A known key of the text model, wherever this checkpoint keeps it, so that geometry is hit often."""
    config = document(draft, "config.json")
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
    config = document(draft, "config.json")
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
    config = document(draft, "config.json")
    text = _text(config)
    text["max_position_embeddings"] = choices.pick((1, 2, 1 << 10, 1 << 18, 1 << 20, 1 << 22, 1 << 24, (1 << 24) + 1))
    draft.files["config.json"] = encoded(config).encode()


def quantization(draft: Draft, choices: Choices) -> None:
    """What the quantization section says of modules: groups, targets, patterns, algorithms."""
    config = document(draft, "config.json")
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
    content = document(draft, name)
    value = choices.pick((choices.pick(NUMBERS), [choices.pick(NUMBERS)], [writer.EOS] * 5, odd_value(choices), "</s>"))
    if name == "tokenizer.json":
        content["added_tokens"] = choices.pick(([{"id": value, "content": "<|im_end|>"}], value))
    else:
        content[choices.pick(("eos_token_id", "bos_token_id", "pad_token_id"))] = value
    draft.files[name] = encoded(content).encode()


def sampling(draft: Draft, choices: Choices) -> None:
    content = document(draft, "generation_config.json")
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


def document(draft: Draft, name: str) -> dict[str, Any]:
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
    content = document(draft, name)
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
