"""The configuration's word against the bytes: disagreements become warnings, because the bytes decide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from builder.checkpoint import Checkpoint
from builder.errors import Refused
from builder.quant import compressed_tensors, modelopt
from builder.quant.tensors import QuantTensor


def declared_disagreements(checkpoint: Checkpoint, linears: Mapping[str, QuantTensor]) -> list[str]:
    """One line for each kind of disagreement, with a count and the first module."""
    try:
        declared = _declared(checkpoint, linears)
    except (AttributeError, TypeError) as error:
        raise Refused(
            f"{checkpoint.folder.name} quantization_config",
            expected="the layout of ModelOpt or compressed-tensors",
            found=str(error),
            remedy="mend config.json or hf_quant_config.json",
        ) from None
    kinds: dict[tuple[str, str], list[str]] = {}
    for module, quantized in linears.items():
        said = declared.get(module)
        if said is not None and said != quantized.kind:
            kinds.setdefault((said, quantized.kind), []).append(module)
    return [_line(said, found, modules) for (said, found), modules in kinds.items()]


def _declared(checkpoint: Checkpoint, linears: Mapping[str, QuantTensor]) -> dict[str, str]:
    """Module to format, as far as the configuration says one."""
    section = checkpoint.config.get("quantization_config") or {}
    if section.get("quant_method") == "compressed-tensors":
        return compressed_tensors.declared_formats(section, linears)
    hf_section = (checkpoint.json("hf_quant_config.json") or {}).get("quantization") or {}
    return modelopt.declared_formats(section) or modelopt.declared_formats(hf_section)


def _line(said: str, found: str, modules: list[Any]) -> str:
    return f"{len(modules)} modules are declared {said} but stored as {found} (used as stored), the first {modules[0]}"
