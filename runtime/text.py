"""Text in and out, with the package's own tokenizer files. transformers is imported when text is wanted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from builder.errors import Refused
from builder.reader import CONFIG_FILE


class Tokenizer:
    """Encodes prompts and decodes generations; never runs code from the package."""

    def __init__(self, folder: Path) -> None:
        if not (folder / CONFIG_FILE).is_file():
            raise Refused(
                folder, expected=f"a package folder with {CONFIG_FILE}", found="none", remedy="check the path"
            )
        if not (folder / "tokenizer.json").is_file():
            raise Refused(
                folder,
                expected="tokenizer.json",
                found="none",
                remedy="use --token-ids, or a checkpoint with a tokenizer",
            )
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # whatever a damaged file makes of the tokenizer library
            raise Refused(
                folder / "tokenizer.json",
                expected="a tokenizer transformers can load",
                found=error,
                remedy="use --token-ids",
            ) from None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(_valid(text))
        return ids

    def encode_chat(self, text: str) -> list[int]:
        """`text` as one user message through the package's chat template, up to where the assistant speaks."""
        if not self._tokenizer.chat_template:
            raise Refused(
                "chat template", expected="chat_template.jinja in the package", found="none", remedy="use --prompt"
            )
        messages = [{"role": "user", "content": _valid(text)}]
        try:
            prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template may raise anything, on purpose or not
            raise Refused(
                "chat template", expected="one that renders a user message", found=error, remedy="use --prompt"
            ) from None
        ids: list[int] = self._tokenizer.encode(prompt, add_special_tokens=False)
        return ids

    def decode(self, token_ids: Sequence[int], stop_token_ids: Sequence[int]) -> str:
        """Text of the generated tokens without the stop id they may end with."""
        ids = list(token_ids[:-1]) if token_ids and token_ids[-1] in stop_token_ids else list(token_ids)
        text: str = self._tokenizer.decode(ids)
        return text


def _valid(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refused("prompt", expected="text in UTF-8", found=ascii(text), remedy="check the encoding") from None
    return text
