"""compressed-tensors: names of its tensors and what its configuration declares.

NVFP4 is `weight_packed` U8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_global_scale` F32 [1], which is a divisor:
the reciprocal of ModelOpt's `weight_scale_2`. FP8 is `weight` E4M3 [N, K] with `weight_scale` [N, 1] or [1].
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.quant.tensors import Nvfp4

FORMATS = {"nvfp4-pack-quantized": "nvfp4", "float-quantized": "fp8", "naive-quantized": "fp8"}


def nvfp4(tensors: Mapping[str, TensorRef]) -> Nvfp4:
    """tensors: the module's own, by last name part."""
    return Nvfp4(
        packed=tensors["weight_packed"],
        block_scale=tensors["weight_scale"],
        global_scale=tensors["weight_global_scale"],
        global_is_divisor=True,
    )


def declared_formats(section: Mapping[str, Any], modules: Iterable[str]) -> dict[str, str]:
    """Module to format for every module that a config group targets and the ignore list does not name.

    A target is a class name (`Linear`), an exact module name, or `re:` and a pattern matched from the start.
    """
    groups = section.get("config_groups") or {}
    ignore = section.get("ignore") or []
    declared: dict[str, str] = {}
    for module in modules:
        if any(_matches(entry, module) for entry in ignore):
            continue
        for group in groups.values():
            if any(_matches(target, module) for target in group.get("targets") or []):
                written = group.get("format") or section.get("format")
                declared[module] = FORMATS.get(str(written), str(written))
                break
    return declared


def _matches(entry: str, module: str) -> bool:
    if entry == "Linear":
        return True
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], module) is not None
        except re.error as error:
            raise Refused(
                f"config.json quantization_config {entry!r}",
                expected="a regular expression",
                found=str(error),
                remedy="mend it",
            ) from None
    return entry == module
