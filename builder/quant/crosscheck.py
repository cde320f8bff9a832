"""The configuration's word against the bytes: disagreements become warnings, because the bytes decide.

A checkpoint declares its formats in config.json, in hf_quant_config.json (ModelOpt, the only place in older exports)
or in both. config.json is believed where they differ, hf_quant_config.json in what it says of the KV cache: one of
NVIDIA's own exports has that nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from builder.checkpoint import Checkpoint
from builder.errors import Refused, one_line
from builder.quant import compressed_tensors, finegrained_fp8, modelopt
from builder.quant.declaration import UNQUANTIZED, Declaration, Section
from builder.quant.names import Names
from builder.quant.tensors import Mxfp4, Nvfp4, QuantTensor

HF_FILE = "hf_quant_config.json"
Reader = Callable[[Section, Names], Declaration | None]
NESTINGS = ("quantization_config", "quantization")
FEW = 3
"""Stale entries that a warning shows."""


def declared_disagreements(checkpoint: Checkpoint, linears: Mapping[str, QuantTensor]) -> list[str]:
    """One line for each kind of disagreement: with a count and the first module, or the first few entries.

    linears: every linear module that was read. Raises Refused for a section of a wrong type, a pattern that is broken
    or too costly, an algorithm this version refuses, and blocks of another size than the stored scales have.
    """
    sections = list(_sections(checkpoint))
    names = Names(checkpoint, linears)
    readers = [(section, _reader(section)) for section in sections]
    declarations = [said for section, reader in readers if reader and (said := reader(section, names))]
    warnings = [_unknown(section) for section, reader in readers if reader is None and section.text("quant_method")]
    for said in declarations:
        _refuse_other_blocks(said, linears)
    found = {module: quantized.kind for module, quantized in linears.items()}
    if declarations:
        first, *others = declarations
        warnings += [line for other in others for line in _between(first, other)]
        warnings += _against(first, found)
    elif not warnings:
        warnings += _undeclared(found)
    return [*warnings, *_kv_disagreement(sections), *_stale(declarations, names)]


def kv_cache_format(checkpoint: Checkpoint) -> str | None:
    """The KV cache's declared format ("fp8", "nvfp4", "int8", ...), or None. Raises Refused for a wrong type."""
    said = _kv_declarations(list(_sections(checkpoint)))
    return said[0][1] if said else None


def _sections(checkpoint: Checkpoint) -> Iterator[Section]:
    """Where a quantization may be declared, the most trusted first, without the nestings."""
    config = Section("config.json", checkpoint.config)
    for outer in (config, config.section("text_config")):
        section = outer.section("quantization_config") if outer else None
        if section is not None:
            yield _unwrapped(section)
    document = checkpoint.json(HF_FILE)
    if document is not None:
        yield _unwrapped(Section(HF_FILE, document))


def _unwrapped(section: Section) -> Section:
    """The innermost section. What stands beside it, such as quant_method, holds where it says nothing else."""
    for _ in range(3):  # seen are one and two; a limit ends what a file could nest without end
        inner = next((part for part in map(section.section, NESTINGS) if part is not None), None)
        if inner is None:
            break
        outer = {key: value for key, value in section.values.items() if key not in NESTINGS}
        section = Section(inner.where, {**outer, **inner.values})
    return section


def _reader(section: Section) -> Reader | None:
    """The dialect's `declared`, by quant_method, or by its keys without one; None for a dialect unknown here."""
    method = (section.text("quant_method") or "").lower()
    keys = set() if method else section.values.keys()
    if method.startswith("modelopt") or keys & {"quant_algo", "quantized_layers"}:
        return modelopt.declared  # inference engines also say modelopt_fp4 and modelopt_mixed
    if method == "compressed-tensors" or keys & {"config_groups", "format"}:
        return compressed_tensors.declared
    if method in finegrained_fp8.METHODS or keys & {"weight_block_size", *finegrained_fp8.LISTS}:
        return finegrained_fp8.declared
    return None


def _unknown(section: Section) -> str:
    method = one_line(section.text("quant_method"))
    return f"{section.where} has the quant_method {method}, which is not known here: its word was not compared"


def _between(first: Declaration, other: Declaration) -> list[str]:
    """Where two files say different things of a module."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for module, said in first.formats.items():
        if other.formats[module] != said:
            kinds.setdefault((said, other.formats[module]), []).append(module)
    return [
        f"{len(modules)} modules are declared {one_line(said)} in {first.source} but {one_line(also)} in "
        f"{other.source} (the first was compared), the first {modules[0]}"
        for (said, also), modules in kinds.items()
    ]


def _against(declaration: Declaration, found: Mapping[str, str]) -> list[str]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for module, kind in found.items():
        said = declaration.formats[module]
        if said != kind:
            kinds.setdefault((said, kind), []).append(module)
    return [
        f"{len(modules)} modules are declared {one_line(said)} but stored as {kind} (used as stored), "
        f"the first {modules[0]}"
        for (said, kind), modules in kinds.items()
    ]


def _refuse_other_blocks(declaration: Declaration, linears: Mapping[str, QuantTensor]) -> None:
    """Scales of half the width they should have look like blocks of twice the size, and the result like a model."""
    for module, size in declaration.group_sizes.items():
        quantized = linears[module]
        same_kind = declaration.formats[module] == quantized.kind
        if same_kind and isinstance(quantized, Nvfp4 | Mxfp4) and quantized.block_size != size:
            scale, columns = quantized.block_scale, quantized.shape[1]
            raise Refused(
                f"tensor {scale.name}",
                expected=f"[{scale.shape[0]}, {columns // size}] for the group_size {size} of {declaration.source}",
                found=f"{list(scale.shape)}, blocks of {quantized.block_size}",
                remedy="mend the file that is wrong",
            )


def _undeclared(found: Mapping[str, str]) -> list[str]:
    """Older exports may have lost their file; the bytes are enough, but whoever copied them should know."""
    kinds: dict[str, list[str]] = {}
    for module, kind in found.items():
        if kind != UNQUANTIZED:
            kinds.setdefault(kind, []).append(module)
    return [
        f"{len(modules)} modules are declared nowhere but stored as {kind} (used as stored), the first {modules[0]}"
        for kind, modules in kinds.items()
    ]


def _kv_declarations(sections: list[Section]) -> list[tuple[str, str | None]]:
    """Source and format of every word on the KV cache, the most trusted first.

    A null in config.json says nothing, as compressed-tensors always writes one; in hf_quant_config.json it says that
    the cache is left alone.
    """
    said: list[tuple[str, str | None]] = []
    for section in sections:
        stated = [key for key in ("kv_cache_quant_algo", "kv_cache_scheme") if key in section.values]
        kv = next((kv for kv in (_kv_format(section, key) for key in stated) if kv is not None), None)
        if section.where.startswith(HF_FILE) and stated:
            said.insert(0, (section.where, kv))
        elif kv is not None:
            said.append((section.where, kv))
    return said


def _kv_format(section: Section, key: str) -> str | None:
    """ModelOpt names an algorithm or, as compressed-tensors does, gives the numbers of a scheme."""
    value = section.values[key]
    if isinstance(value, dict):
        kind, bits = value.get("type"), value.get("num_bits")
        if not isinstance(kind, str) or type(bits) is not int:
            raise section.refusal(key, "a scheme with type and num_bits", str(value))
        return {("float", 8): "fp8", ("float", 4): "nvfp4"}.get((kind, bits), f"{kind}{bits}")
    name = (section.text(key) or "").lower()
    return None if name in ("", "none", "auto") else name


def _kv_disagreement(sections: list[Section]) -> list[str]:
    said = _kv_declarations(sections)
    return [
        f"{said[0][0]} declares a KV cache of {one_line(said[0][1] or 'unquantized numbers')} but {source} one of "
        f"{one_line(kv or 'unquantized numbers')} (the first is believed)"
        for source, kv in said[1:]
        if kv != said[0][1]
    ][:1]


def _stale(declarations: list[Declaration], names: Names) -> list[str]:
    """All entries that match nothing, of every list, in one line: a list of forty is one mistake, not forty."""
    entries = list(dict.fromkeys(entry for declaration in declarations for entry in declaration.stale))
    if not entries:
        return []
    shown = [_with_nearest(entry, names) for entry in entries[:FEW]]
    rest = f" and {len(entries) - FEW} more" if len(entries) > FEW else ""
    return [
        f"{len(entries)} entries of the quantization's lists match nothing in the checkpoint: {', '.join(shown)}{rest}"
    ]


def _with_nearest(entry: str, names: Names) -> str:
    nearest = names.nearest(entry)
    return one_line(entry) + (f" (nearest: {', '.join(map(one_line, nearest))})" if nearest else "")
