"""NVIDIA ModelOpt: names of its tensors and what its configuration declares.

NVFP4 is `weight` U8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_scale_2` F32 [] (a multiplier); FP8 is `weight`
E4M3 [N, K] with a scalar `weight_scale`. `input_scale` and the KV scales quantize activations, which we leave alone.

A configuration names one algorithm for all linear modules but the excluded ones (`exclude_modules` in
hf_quant_config.json, `ignore` in config.json), or MIXED_PRECISION and `quantized_layers`, a map of the modules that
are quantized. Source: nvidia-modelopt 0.47, torch/export/convert_hf_config.py and quant_utils.py.
"""

from collections.abc import Mapping

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.quant.declaration import UNQUANTIZED, Declaration, Section
from builder.quant.names import Names, canonical, with_containers
from builder.quant.tensors import Nvfp4

FORMATS = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "W4A8_NVFP4_FP8": "nvfp4",
    "FP8": "fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8",
    "FP8_PC_PT": "fp8",
    "FP8_PB_WO": "fp8",
    "FP8_PB_REAL": "fp8",
    "FP8_BLOCK_SCALES": "fp8",
    "MXFP8": "mxfp8",
    "MXFP4": "mxfp4",
    "W4A8_MXFP4_FP8": "mxfp4",
}
"""Algorithms, in upper case (exports write some in lower), to a QuantTensor's kind."""

REFUSED = {
    "AWQ": "it scales a module's input (pre_quant_scale), which the graph does not carry",
    "SVD": "it adds low-rank factors to a module (svdquant_lora_a, svdquant_lora_b), which the graph does not carry",
    "INT": "it stores integers",
    "_SQ": "it stores integers",
    "W8A16": "it stores integers",
}
"""Parts of names of algorithms that this version refuses, and why."""

MIXED = "MIXED_PRECISION"


def nvfp4(tensors: Mapping[str, TensorRef]) -> Nvfp4:
    """tensors: the module's own, by last name part."""
    return Nvfp4(
        packed=tensors["weight"],
        block_scale=tensors["weight_scale"],
        global_scale=tensors["weight_scale_2"],
        global_is_divisor=False,
    )


def declared(section: Section, names: Names) -> Declaration | None:
    """What a section says of every linear module, or None where it names no algorithm. Raises Refused."""
    layers = section.sections("quantized_layers")
    if layers:
        return _mixed(section, layers, names)
    algorithm = section.text("quant_algo")
    if algorithm is None or algorithm.upper() == MIXED:
        return None
    excluded, stale = _excluded(section, names)
    kind = _kind(section, algorithm)
    formats = {module: UNQUANTIZED if module in excluded else kind for module in names.linears}
    size = _group_size(section)
    sizes = {} if size is None else dict.fromkeys(names.linears, size)
    return Declaration(section.where, formats, stale, sizes)


def _group_size(section: Section) -> int | None:
    """hf_quant_config.json has it beside the algorithm, config.json in its groups; there it counts if all agree."""
    weights = [group.section("weights") for group in section.sections("config_groups").values()]
    sizes = {part.size("group_size") for part in weights if part}
    return section.size("group_size") or (sizes.pop() if len(sizes) == 1 else None)


def _mixed(section: Section, layers: Mapping[str, Section], names: Names) -> Declaration:
    """A layer stands for all that it contains (`mlp.experts`); the longest one speaks, and what none lists is float.

    A listed layer is meant even where a glob excludes it: the map is explicit, `mtp*` is written by habit.
    """
    listed = {canonical(name): layer for name, layer in layers.items()}
    formats = dict.fromkeys(names.linears, UNQUANTIZED)
    sizes: dict[str, int] = {}
    for module in names.linears:
        layer = next((listed[name] for name in with_containers(canonical(module)) if name in listed), None)
        algorithm = layer.text("quant_algo") if layer else None
        if layer and algorithm is not None:
            formats[module] = _kind(layer, algorithm)
        if layer and (size := layer.size("group_size")) is not None:
            sizes[module] = size
    unknown = tuple(name for name in layers if names.under(name) is None)
    return Declaration(section.where, formats, (*unknown, *_excluded(section, names)[1]), sizes)


def _excluded(section: Section, names: Names) -> tuple[set[str], tuple[str, ...]]:
    """The modules that are not quantized, and the entries that match nothing.

    Entries are exact names or shell patterns; older exports abbreviate names, which engines take as substrings
    (vLLM, quantization/modelopt.py, is_layer_excluded).
    """
    excluded: set[str] = set()
    stale: list[str] = []
    for key in ("exclude_modules", "ignore"):
        for entry in section.names(key):
            glob = any(character in entry for character in "*?[")
            found = names.globbed(section.key(key), entry) if glob else names.containing(entry)
            excluded.update(found or ())
            if found is None:
                stale.append(entry)
    return excluded, tuple(dict.fromkeys(stale))


def _kind(section: Section, algorithm: str) -> str:
    """A QuantTensor's kind, or the algorithm's own name where it is unknown: then only the bytes can tell."""
    name = algorithm.upper()
    for part, reason in REFUSED.items():
        if part in name and name not in FORMATS:
            raise Refused(
                section.key("quant_algo"),
                expected=f"one of {', '.join(FORMATS)} or {MIXED}",
                found=f"{algorithm}: {reason}",
                remedy="quantize the model again with one of those",
            )
    return FORMATS.get(name, algorithm.lower())
