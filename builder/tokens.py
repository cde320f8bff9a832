"""Special token ids and text files of a checkpoint. Nothing here runs a template or repository code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from builder.checkpoint import Checkpoint
from builder.errors import Refused

TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""The only files copied beside the graphs, by plain name."""


@dataclass(frozen=True)
class TokenIds:
    """Ids below vocab_size. eos holds every stop id, in order of precedence; bos and pad may be absent."""

    eos: tuple[int, ...]
    bos: int | None
    pad: int | None


def read_token_ids(checkpoint: Checkpoint, vocab_size: int) -> TokenIds:
    """Stop ids are the ordered union of generation_config.json, config.json (outer, then text) and the tokenizer's.

    Reading one file only is how an end-of-turn token goes unnoticed. Raises Refused for an id outside the vocabulary.
    """
    generation = checkpoint.json("generation_config.json") or {}
    outer = checkpoint.config
    text: dict[str, Any] = outer.get("text_config") or {}
    sources = {"generation_config.json": generation, "config.json": outer, "config.json text_config": text}

    def ids(key: str) -> list[int]:
        found: list[int] = []
        for source, document in sources.items():
            found += _ids(document.get(key), f"{source} {key}", vocab_size)
        return found

    stops = [*ids("eos_token_id"), *_tokenizer_eos(checkpoint, vocab_size)]
    bos, pad = ids("bos_token_id"), ids("pad_token_id")
    return TokenIds(tuple(dict.fromkeys(stops)), bos[0] if bos else None, pad[0] if pad else None)


def _ids(value: Any, source: str, vocab_size: int) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    for item in values:
        if type(item) is not int or not 0 <= item < vocab_size:
            raise Refused(
                source, expected=f"token ids below the vocabulary of {vocab_size}", found=item, remedy="mend the file"
            )
    return values


def _tokenizer_eos(checkpoint: Checkpoint, vocab_size: int) -> list[int]:
    """The id of tokenizer_config.json's eos_token, looked up among tokenizer.json's added tokens."""
    token = (checkpoint.json("tokenizer_config.json") or {}).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        return []  # and not whatever added token has no content either
    added = (checkpoint.json("tokenizer.json") or {}).get("added_tokens") or []
    if not isinstance(added, list):
        raise Refused("tokenizer.json added_tokens", expected="a list", found=added, remedy="mend the file")
    matches = [entry.get("id") for entry in added if isinstance(entry, dict) and entry.get("content") == content]
    return _ids(matches, "tokenizer.json eos_token", vocab_size)
