"""transformers' own quantizers (`quant_method` "fp8" and its kin): what their configurations declare.

Qwen's FP8 releases are `weight` E4M3 [N, K] with `weight_scale_inv` [N/128, K/128], which multiplies despite its name.
Every linear module is converted but those of `modules_to_not_convert`. Source: transformers 5.24,
quantizers/quantizers_utils.py, should_convert_module; vLLM calls the same list `ignored_layers`.
"""

from builder.quant.declaration import UNQUANTIZED, Declaration, Section
from builder.quant.names import Names

METHODS = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp8": "mxfp8", "mxfp4": "mxfp4", "nvfp4": "nvfp4"}
"""quant_method to a QuantTensor's kind."""
LISTS = ("modules_to_not_convert", "ignored_layers")
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"
"""Where a pattern has to end: should_convert_module's."""


def declared(section: Section, names: Names) -> Declaration | None:
    """What a section says of every linear module. Raises Refused."""
    _check_block(section)
    kind = METHODS.get((section.text("quant_method") or "fp8").lower())
    if kind is None:
        return None
    kept: set[str] = set()
    stale: list[str] = []
    for key in LISTS:
        for entry in section.names(key):
            found = _matched(section.key(key), entry, names)
            kept.update(found or ())
            if found is None:
                stale.append(entry)
    formats = {module: UNQUANTIZED if module in kept else kind for module in names.linears}
    return Declaration(section.where, formats, tuple(dict.fromkeys(stale)))


def _matched(key: str, entry: str, names: Names) -> tuple[str, ...] | None:
    """An entry stands for what it names and all that this contains; a pattern, too. None where it matches nothing."""
    if entry.startswith("re:"):
        return names.regex(key, entry.removeprefix("re:"))
    if any(character in entry for character in "\\^$+()|") or ".*" in entry:
        return names.regex(key, f"(?:{entry}){BOUNDARY}")
    if not any(character in entry for character in "*?["):
        return names.containing(entry)
    found = [names.globbed(key, pattern) for pattern in (entry, f"{entry}.*")]
    return None if found == [None, None] else tuple(module for part in found for module in part or ())


def _check_block(section: Section) -> None:
    """weight_block_size is rows and columns. What is stored decides; a size that is no size is a damaged file."""
    block = section.values.get("weight_block_size")
    if block is None:
        return
    sizes = block if isinstance(block, list) and len(block) == 2 else [None]
    if not all(type(size) is int and size > 0 for size in sizes):
        raise section.refusal("weight_block_size", "two numbers above 0, rows and columns", block)
