"""ExportOptions: what `export` and `plan` may be asked for, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from builder import contract
from builder.config import ModelConfig
from builder.errors import Refused
from builder.genai_config import Limits

CHOICES: Mapping[str, tuple[str, ...]] = {
    "weights": ("auto", "link", "copy"),
    "dtype": ("auto", "float16", "bfloat16"),
    "mtp": ("auto", "off", "require"),
    "checkpoints": ("compact", "dense", "off"),
}


@dataclass(frozen=True)
class ExportOptions:
    """Options of `build-model export`, by the same names; cli.md documents them."""

    weights: Literal["auto", "link", "copy"] = "auto"
    dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    mtp: Literal["auto", "off", "require"] = "auto"
    max_draft_tokens: int = 3
    checkpoints: Literal["compact", "dense", "off"] = "compact"
    block_size: int = 256
    max_batch_size: int = 100
    context_length: int | None = None
    strict: bool = False
    hash: bool = False
    revision: str | None = None
    force: bool = False

    @property
    def activation_dtype(self) -> str:
        return "float16" if self.dtype == "auto" else self.dtype

    @property
    def capacity(self) -> int:
        """One capture slot more than drafts: the anchor row is captured too."""
        return self.max_draft_tokens + 1 if self.checkpoints != "off" else 0

    @property
    def checkpoint_count(self) -> int:
        """States that a verify step shows of each request: with dense checkpoints one for every captured token."""
        return self.capacity if self.checkpoints == "dense" else 0

    def recorded(self, limits: Limits) -> dict[str, object]:
        """What shaped the package, resolved. How weights were brought is each file's own record."""
        return {
            "dtype": self.activation_dtype,
            "mtp": self.mtp,
            "checkpoints": self.checkpoints,
            "context_length": limits.context_length,
            "max_draft_tokens": limits.max_draft_tokens,
            "block_size": limits.block_size,
            "max_batch_size": limits.max_batch_size,
        }

    def check(self) -> None:
        """Raises Refused for a value outside what is possible."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise Refused(
                    f"--{name}", expected=" or ".join(allowed), found=getattr(self, name), remedy="choose one of them"
                )
        size = self.block_size
        if size < 16 or size & (size - 1):
            raise Refused("--block-size", expected="a power of two, 16 or more", found=size, remedy="choose another")
        _check_range("--max-draft-tokens", self.max_draft_tokens, contract.MAX_CAPACITY - 1)
        _check_range("--max-batch-size", self.max_batch_size, 256)

    def limits(self, config: ModelConfig) -> Limits:
        """What the package promises. Raises Refused for a context the model has no positions for."""
        longest = config.max_position_embeddings
        context = longest if self.context_length is None else self.context_length
        _check_range("--context-length", context, longest)
        return Limits(context, self.max_draft_tokens, self.block_size, self.max_batch_size)


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise Refused(name, expected=f"1 to {most}", found=value, remedy="choose another")
