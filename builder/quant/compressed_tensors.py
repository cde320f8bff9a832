"""compressed-tensors: names of its tensors and what its configuration declares.

NVFP4 is `weight_packed` U8 [N, K/2], `weight_scale` E4M3 [N, K/16], `weight_global_scale` F32 [1], which is a divisor:
the reciprocal of ModelOpt's `weight_scale_2`. FP8 is `weight` E4M3 [N, K] with `weight_scale` [N, 1] or [1].

A configuration has `config_groups` of targets with a format each, and an `ignore` list that wins over all of them.
Source: compressed-tensors 0.20.1, utils/match.py and quantization/lifecycle/apply.py.
"""

from collections.abc import Mapping
from typing import Any

from builder.checkpoint import TensorRef
from builder.errors import Refused
from builder.quant.declaration import UNQUANTIZED, Declaration, Section
from builder.quant.names import Names
from builder.quant.tensors import Nvfp4

FORMATS = {
    "nvfp4-pack-quantized": "nvfp4",
    "mxfp4-pack-quantized": "mxfp4",
    "float-quantized": "fp8",
    "naive-quantized": "fp8",
    "mxfp8-quantized": "mxfp8",
    "dense": UNQUANTIZED,
}
MIXED = "mixed-precision"
LINEAR_CLASSES = ("Linear", "LinearBase")
REFUSED = {
    "transform_config": "rotations of weights and inputs",
    "sparsity_config": "a sparse layout",
    "moe_sparsity_config": "sparse experts",
}
"""Keys that change what is stored or computed in ways this version does not carry."""


def nvfp4(tensors: Mapping[str, TensorRef]) -> Nvfp4:
    """tensors: the module's own, by last name part."""
    return Nvfp4(
        packed=tensors["weight_packed"],
        block_scale=tensors["weight_scale"],
        global_scale=tensors["weight_global_scale"],
        global_is_divisor=True,
    )


def declared(section: Section, names: Names) -> Declaration | None:
    """What a section says of every linear module, or None where it names no format. Raises Refused."""
    _refuse_transforms(section)
    targets = _targets(section)
    if not targets:
        return None
    formats = dict.fromkeys(names.linears, UNQUANTIZED)
    sizes: dict[str, int] = {}
    stale: list[str] = []
    for key, target in reversed(targets):  # the most specific one has the last word
        found = _matched(key, target, names)
        kind, size = targets[key, target]
        formats.update(dict.fromkeys(found or (), kind))
        if size is not None:
            sizes.update(dict.fromkeys(found or (), size))
        if found is None:
            stale.insert(0, target)
    for entry in section.names("ignore"):
        found = _matched(section.key("ignore"), entry, names)
        formats.update(dict.fromkeys(found or (), UNQUANTIZED))
        if found is None:
            stale.append(entry)
    return Declaration(section.where, formats, tuple(dict.fromkeys(stale)), sizes)


def _targets(section: Section) -> dict[tuple[str, str], tuple[str, int | None]]:
    """Key and target to kind and group size, the most specific first: exact names, patterns, classes (match_targets).

    The same target in two groups has the later one's format. Without groups the outer format is every module's.
    """
    groups = section.sections("config_groups")
    written = section.text("format")
    if not groups:
        silent = written is None or written == MIXED
        return {} if silent else {(section.key("format"), "Linear"): (FORMATS.get(str(written), str(written)), None)}
    kinds: dict[str, tuple[str, str, int | None]] = {}
    for group in groups.values():
        kind = _kind(group, written)
        weights = group.section("weights")
        size = weights.size("group_size") if weights else None
        kinds.update({target: (group.key("targets"), kind, size) for target in group.names("targets")})
    ordered = sorted(kinds, key=lambda target: (_is_class(target), target.startswith("re:"), target))
    return {(kinds[target][0], target): kinds[target][1:] for target in ordered}


def _kind(group: Section, outer: str | None) -> str:
    """A group's own format; older files leave it to the outer one, and some to what they say of the weights."""
    weights = group.section("weights")
    if weights is not None and weights.text("type") == "int":
        return "int"
    written = group.text("format") or outer
    if written is not None and written != MIXED:
        return FORMATS.get(written, written)
    if weights is None:
        return UNQUANTIZED  # only activations
    return _kind_of_weights(weights.values)


def _kind_of_weights(weights: Mapping[str, Any]) -> str:
    """ModelOpt writes groups without a format, too. Blocks of 32 have the shared exponents of MX formats."""
    kinds = {(4, True): "mxfp4", (4, False): "nvfp4", (8, True): "mxfp8", (8, False): "fp8"}
    bits = weights.get("num_bits")
    known = bits if isinstance(bits, int) else 0
    return kinds.get((known, weights.get("group_size") == 32), "an unnamed format")


def _matched(key: str, entry: str, names: Names) -> tuple[str, ...] | None:
    """The linear modules that a target or an ignore entry means; None where it means nothing in the checkpoint."""
    if entry.startswith("re:"):
        return names.regex(key, entry.removeprefix("re:"))
    if _is_class(entry):
        return names.linears if entry in LINEAR_CLASSES else ()
    return names.exactly(entry)


def _is_class(entry: str) -> bool:
    """Names of modules are lower case; a class that is no linear one concerns nothing we compare."""
    return entry[:1].isupper() and entry.isidentifier()


def _refuse_transforms(section: Section) -> None:
    for key, what in REFUSED.items():
        part = section.section(key)
        if part is None or _is_empty(part.values) or part.values.get("format") == "dense":
            continue
        raise Refused(
            section.key(key),
            expected="nothing",
            found=f"{what} ({', '.join(part.values)})",
            remedy="this variant is not supported; compress the model again without it",
        )


def _is_empty(values: Mapping[str, Any]) -> bool:
    """Also {"config_groups": {}}, which is what an empty one becomes when it is written out."""
    return not any(values.values())
