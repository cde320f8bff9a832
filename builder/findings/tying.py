"""Whether LM head and embedding are one, as declared and as stored."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from builder.checkpoint import Checkpoint, TensorRef
from builder.config import ModelConfig
from builder.findings.streaming import row_ranges, rows_of
from builder.progress import Progress, silent
from builder.quant.tensors import Dense, Fp8, Mxfp4, Nvfp4, QuantTensor, dequantize


@dataclass(frozen=True)
class Ties:
    """declared: tie_word_embeddings by place in config.json, where written. tied: what is exported. max_difference:
    largest |lm_head - embedding|, read only where the two are declared to be one and both are stored.
    """

    declared: dict[str, bool]
    lm_head_stored: bool
    tied: bool
    max_difference: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def warnings(self) -> list[str]:
        lines = []
        if len(set(self.declared.values())) > 1:
            said = ", ".join(f"{place} {str(value).lower()}" for place, value in self.declared.items())
            lines.append(f"tie_word_embeddings differs: {said}; what is stored decides")
        if self.max_difference is not None:
            lines.append(
                f"lm_head and embedding are declared tied; as stored they differ by up to {self.max_difference:g}"
            )
        return lines


def ties(checkpoint: Checkpoint, config: ModelConfig, lm_head: QuantTensor | None, progress: Progress = silent) -> Ties:
    """lm_head: None where none is stored."""
    text = checkpoint.config.get("text_config")
    places = {"config.json": checkpoint.config, "config.json text_config": text if isinstance(text, dict) else {}}
    said = {place: document.get("tie_word_embeddings") for place, document in places.items()}
    declared = {place: value for place, value in said.items() if isinstance(value, bool)}
    difference = None
    if config.tie_word_embeddings and lm_head is not None:
        embedding = checkpoint[f"{checkpoint.prefix}embed_tokens.weight"]
        difference = max_difference(lm_head, embedding, progress)
    return Ties(declared, lm_head is not None, config.tie_word_embeddings and lm_head is None, difference)


def max_difference(tensor: QuantTensor, other: TensorRef, progress: Progress = silent) -> float | None:
    """Largest absolute difference of two [N, K] weights in float32, None where it is no finite number."""
    largest = np.float32(0)
    for start, stop in row_ranges(other, multiple=128):  # a multiple of any block's rows
        with np.errstate(all="ignore"):  # what is no finite number ends as None
            there = rows_of(other, start, stop).read().astype(np.float32)
            largest = np.maximum(largest, np.abs(dequantize(_part(tensor, start, stop)) - there).max())
        progress("comparing lm_head with the embedding", stop, other.shape[0])
    return float(largest) if np.isfinite(largest) else None


def _part(tensor: QuantTensor, start: int, stop: int) -> QuantTensor:
    """Rows [start, stop) of a weight, start a multiple of its block's rows."""
    match tensor:
        case Dense():
            return Dense(rows_of(tensor.weight, start, stop))
        case Fp8(weight=weight, scale=scale, block=(rows, columns)):
            if rows >= tensor.shape[0]:  # one row of scales for the whole weight
                return Fp8(rows_of(weight, start, stop), scale, (stop - start, columns))
            return replace(
                tensor, weight=rows_of(weight, start, stop), scale=rows_of(scale, start // rows, -(-stop // rows))
            )
        case Nvfp4() | Mxfp4():
            packed, scale = tensor.packed, tensor.block_scale
            return replace(tensor, packed=rows_of(packed, start, stop), block_scale=rows_of(scale, start, stop))
