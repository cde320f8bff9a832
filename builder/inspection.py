"""inspect(): what a checkpoint or a package holds. A checkpoint's values are read, a package's are not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from builder import findings, graph_file, overlays, reader
from builder.checkpoint import Checkpoint, TensorRef, reading
from builder.contract import TensorSpec
from builder.errors import MachineError, one_line
from builder.manifest import BUILD_FILE, MANIFEST_FILE
from builder.package import CARD_FILE
from builder.progress import Progress, silent
from builder.reader import GraphFile, Package
from builder.source import Source, read_source
from builder.tokens import TEXT_FILES, TokenIds, read_token_ids
from builder.weights import DATA_FILE

NEVER_LOADED = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".py", ".gguf")
"""Endings of files that could run code or hold other weights: named where they lie beside a checkpoint's shards."""
MINIMUM_RUNTIME = {"TokenizersBackend": "transformers 5"}
"""What a tokenizer_class needs to load by its name; the tokenizer.json beside it is read by any tokenizers release."""

Range = tuple[str, int, int]
"""Data file, offset and length in bytes."""


def inspect(path: str | Path, progress: Progress = silent) -> dict[str, Any]:
    """A JSON-ready description with `kind` "package" or "checkpoint". Raises Refused for neither.

    `warnings` is everything odd, one line each. Damaged scales are described, not refused; every other thing that
    export refuses in headers or configuration is refused here too.
    """
    folder = Path(path)
    return _package(folder) if (folder / reader.CONFIG_FILE).is_file() else _checkpoint(folder, progress)


# --- a checkpoint


def _checkpoint(folder: Path, progress: Progress) -> dict[str, Any]:
    checkpoint = Checkpoint(folder)
    with reading(folder):
        return _described(checkpoint, progress)


def _described(checkpoint: Checkpoint, progress: Progress) -> dict[str, Any]:
    source = read_source(checkpoint, "auto", read_values=False)
    config = source.config
    tokens = read_token_ids(checkpoint, config.vocab_size)
    values = findings.read_values(source.linears, _others(checkpoint, source), config, progress)
    norms = findings.norm_evidence(checkpoint)
    kv_scales = findings.kv_scales(checkpoint, config)
    ties = findings.ties(checkpoint, config, source.linears.get("lm_head"), progress)
    tokenizer_json = checkpoint.json("tokenizer.json")
    tokenizer = _tokenizer(checkpoint, tokenizer_json, config.vocab_size)
    by_file = _eos_by_file(checkpoint, _added_tokens(tokenizer_json))
    modules = _modules(source, values)
    return {
        "kind": "checkpoint",
        "model_type": config.model_type,
        "layers": config.layer_counts,
        "parameters": source.parameters,
        "experts": config.moe.model_dump() if config.moe else None,
        "mtp": source.mtp is not None,
        "tensors": len(checkpoint),
        "skipped_tensors": source.skipped_counts,
        "files": {file.name: file.stat().st_size for file in checkpoint.files},
        "quantization": _quantization(checkpoint),
        "formats": dict(Counter(module["format"] for module in modules)),
        "modules": modules,
        "norms": norms.to_json(),
        **values.to_json(),
        "kv_scales": kv_scales.to_json(),
        "ties": ties.to_json(),
        "tokenizer": tokenizer,
        "vocab_size": config.vocab_size,
        "eos_token_ids": list(tokens.eos),
        "eos_by_file": by_file,
        "warnings": [
            *source.warnings,
            *ties.warnings(),
            *values.warnings(),
            *norms.warnings(),
            *kv_scales.warnings(),
            *_token_warnings(tokens, by_file, tokenizer, config.vocab_size),
            *_stray_files(checkpoint),
        ],
    }


def _modules(source: Source, values: findings.Values) -> list[dict[str, Any]]:
    return [
        {
            "module": name,
            "role": role(name),
            "format": quantized.kind,
            "shape": list(quantized.shape),
            "bytes": sum(ref.nbytes for ref in quantized.refs),
            "zero_rows": values.fractions[name],
        }
        for name, quantized in source.linears.items()
    ]


def role(module: str) -> str:
    """What a module is for: "mlp.gate_proj", "mlp.experts.up_proj", "mtp.fc"; layers and experts share it."""
    head = "mtp." if module.startswith("mtp.") else ""
    parts = module.split(".")
    after_layer = parts[parts.index("layers") + 2 :] if "layers" in parts else parts[-1:]
    return head + ".".join(part for part in after_layer if not part.isdigit())


def _others(checkpoint: Checkpoint, source: Source) -> list[TensorRef]:
    """Tensors to read besides the linears': every other one in use, and the activation scales."""
    linear = {ref.name for quantized in source.linears.values() for ref in quantized.refs}
    skipped = {name for why, names in source.skipped.items() if why != "activation_scales" for name in names}
    return [ref for name, ref in checkpoint.items() if name not in linear and name not in skipped]


def _quantization(checkpoint: Checkpoint) -> dict[str, Any]:
    """What the configuration calls the whole, and the names it leaves out; the modules' bytes decide all the same."""
    section = checkpoint.config.get("quantization_config")
    hf_document = checkpoint.json("hf_quant_config.json")
    hf_section = (hf_document or {}).get("quantization")
    section, hf_section = (part if isinstance(part, dict) else {} for part in (section, hf_section))
    ignored = section.get("ignore") or section.get("modules_to_not_convert") or hf_section.get("exclude_modules") or []
    return {
        "method": _text(section.get("quant_method")),
        "algorithm": _text(section.get("quant_algo") or hf_section.get("quant_algo") or section.get("format")),
        "files": ["config.json"] * bool(section) + ["hf_quant_config.json"] * (hf_document is not None),
        "ignored": [one_line(name) for name in (ignored if isinstance(ignored, list) else [ignored])],
    }


def _text(value: Any) -> str | None:
    return None if value is None else one_line(value)


def _eos_by_file(checkpoint: Checkpoint, added: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Stop ids as each file has them, where it has any; read_token_ids has checked them and takes their union."""
    text = checkpoint.config.get("text_config")
    places = {
        "generation_config.json": (checkpoint.json("generation_config.json") or {}).get("eos_token_id"),
        "config.json": checkpoint.config.get("eos_token_id"),
        "config.json text_config": text.get("eos_token_id") if isinstance(text, dict) else None,
        "tokenizer_config.json": _tokenizer_eos(checkpoint, added),
    }
    return {place: ids if isinstance(ids, list) else [ids] for place, ids in places.items() if ids not in (None, [])}


def _tokenizer_eos(checkpoint: Checkpoint, added: list[dict[str, Any]]) -> list[int]:
    token = (checkpoint.json("tokenizer_config.json") or {}).get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    return [entry["id"] for entry in added if content is not None and entry.get("content") == content]


def _added_tokens(tokenizer_json: dict[str, Any] | None) -> list[dict[str, Any]]:
    added = (tokenizer_json or {}).get("added_tokens")
    entries = added if isinstance(added, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and type(entry.get("id")) is int]


def _tokenizer(checkpoint: Checkpoint, tokenizer_json: dict[str, Any] | None, vocab_size: int) -> dict[str, Any]:
    """length: one more than the largest id that the tokenizer knows; padding: rows of logits beyond it."""
    settings = checkpoint.json("tokenizer_config.json") or {}
    name = settings.get("tokenizer_class")
    length = None if tokenizer_json is None else _tokenizer_length(tokenizer_json)
    templates = [file for file in ("chat_template.jinja", "chat_template.json") if (checkpoint.folder / file).is_file()]
    return {
        "files": [file for file in TEXT_FILES if (checkpoint.folder / file).is_file()],
        "class": _text(name),
        "minimum_runtime": MINIMUM_RUNTIME.get(name) if isinstance(name, str) else None,
        "chat_templates": templates + ["tokenizer_config.json"] * ("chat_template" in settings),
        "length": length,
        "padding": None if length is None else vocab_size - length,
    }


def _tokenizer_length(document: dict[str, Any]) -> int:
    model = document.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = [entry["id"] for entry in _added_tokens(document)]
    if isinstance(vocab, dict):
        ids += [value for value in vocab.values() if type(value) is int]
    elif isinstance(vocab, list):  # a unigram model: the place in the list is the id
        ids.append(len(vocab) - 1)
    return max(ids, default=-1) + 1


def _token_warnings(
    tokens: TokenIds, by_file: Mapping[str, list[int]], tokenizer: Mapping[str, Any], vocab_size: int
) -> list[str]:
    lines = []
    if not tokens.eos:
        lines.append("no file names a stop id: generation ends at its length only")
    if any(set(ids) != set(tokens.eos) for ids in by_file.values()):
        said = ", ".join(f"{place} {ids}" for place, ids in by_file.items())
        lines.append(f"stop ids differ between files: {said}; each of them ends generation")
    length = tokenizer["length"]
    if length is not None and length > vocab_size:
        lines.append(
            f"the tokenizer knows {length} ids, the model {vocab_size}: ids from {vocab_size} on cannot be read"
        )
    if len(tokenizer["chat_templates"]) > 1:
        lines.append(f"more than one chat template: {', '.join(tokenizer['chat_templates'])}")
    return list(map(one_line, lines))


def _stray_files(checkpoint: Checkpoint) -> list[str]:
    lines = []
    unlisted = [path.name for path in checkpoint.unlisted_shards()]
    if unlisted:
        lines.append(f"the index lists no tensor of {', '.join(unlisted)}: not read")
    code = sorted(path.name for path in checkpoint.folder.iterdir() if path.suffix.lower() in NEVER_LOADED)
    if code:
        lines.append(f"files beside the shards that are never opened: {', '.join(code)}")
    if checkpoint.config.get("auto_map"):
        lines.append("config.json auto_map names code: it is never run")
    return list(map(one_line, lines))


# --- a package


def _package(folder: Path) -> dict[str, Any]:
    package = reader.read(folder)
    try:
        return _described_package(folder, package)
    except OSError as error:
        raise MachineError(f"{error.filename or folder}: {error.strerror or error}; it cannot be read") from error


def _described_package(folder: Path, package: Package) -> dict[str, Any]:
    files = {"target": package.target, "mtp": package.mtp}
    protos = {name: onnx.load(graph.path, load_external_data=False) for name, graph in files.items() if graph}
    ranges = {name: _data_ranges(proto) for name, proto in protos.items()}
    shared = _shared(ranges)
    return {
        "kind": "package",
        "graphs": {name: _graph(graph, protos[name], ranges[name]) if graph else None for name, graph in files.items()},
        "layers": {"full_attention": len(package.full_layers), "linear_attention": len(package.linear_layers)},
        "context_length": package.context_length,
        "vocab_size": package.vocab_size,
        "max_draft_tokens": package.max_draft_tokens,
        "block_size": package.block_size,
        "max_batch_size": package.max_batch_size,
        "state_update_capacity": package.capacity,
        "checkpoint_count": package.checkpoints,
        "eos_token_ids": list(package.eos_token_ids),
        "contract": {name: _contract(graph) for name, graph in files.items() if graph} | _layers(package),
        "provenance": {
            "files": {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()},
            "data": _data_use(folder, ranges),
            "shared_initializers": shared,
            "shared_bytes": sum(entry["length"] for entry in shared),
        },
        "warnings": _package_warnings(folder, package, protos, ranges, shared),
    }


def _graph(graph: GraphFile, model: onnx.ModelProto, ranges: Mapping[str, Range]) -> dict[str, Any]:
    """bytes: of the data this graph refers to, each byte range once. ops: domain::type where it is not ONNX's own."""
    census = Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph_file.nodes(model.graph)
    )
    return {
        "file": graph.path.name,
        "inputs": len(graph.io.inputs),
        "outputs": len(graph.io.outputs),
        "nodes": census.total(),
        "ops": dict(census.most_common()),
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "ir_version": model.ir_version,
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "initializers": len(model.graph.initializer),
        "bytes": sum(length for _, _, length in set(ranges.values())),
        "positions": graph.positions,
    }


def _contract(graph: GraphFile) -> dict[str, list[dict[str, Any]]]:
    def described(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
        return [{"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape)} for spec in specs]

    return {"inputs": described(graph.io.inputs), "outputs": described(graph.io.outputs)}


def _layers(package: Package) -> dict[str, Any]:
    return {"cache_layers": list(package.full_layers), "state_layers": list(package.linear_layers)}


def _data_ranges(model: onnx.ModelProto) -> dict[str, Range]:
    """Where each external initializer lies; the reader has checked that it is inside the package."""
    ranges = {}
    for tensor in model.graph.initializer:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in tensor.external_data}
            ranges[tensor.name] = place["location"], int(place.get("offset", 0)), int(place["length"])
    return ranges


def _shared(ranges: Mapping[str, Mapping[str, Range]]) -> list[dict[str, Any]]:
    """Initializers by which both graphs mean the same bytes."""
    head = ranges.get("mtp", {})
    both = {name: place for name, place in ranges["target"].items() if head.get(name) == place}
    return [
        {"name": name, "data_file": file, "offset": offset, "length": length}
        for name, (file, offset, length) in both.items()
    ]


def _data_use(folder: Path, ranges: Mapping[str, Mapping[str, Range]]) -> dict[str, dict[str, int]]:
    """For each data file its size, and how many of its bytes a graph refers to.

    The rest is alignment, or what no graph uses of a linked shard.
    """
    places = {place for own in ranges.values() for place in own.values()}
    return {
        file: {
            "bytes": (folder / file).stat().st_size,
            "referenced_bytes": sum(length for name, _, length in places if name == file),
        }
        for file in sorted({name for name, _, _ in places})
    }


def _package_warnings(
    folder: Path,
    package: Package,
    protos: Mapping[str, onnx.ModelProto],
    ranges: Mapping[str, Mapping[str, Range]],
    shared: list[dict[str, Any]],
) -> list[str]:
    graphs = [graph.path.name for graph in (package.target, package.mtp) if graph]
    data = {file for own in ranges.values() for file, _, _ in own.values()}
    papers = {MANIFEST_FILE, BUILD_FILE, CARD_FILE, overlays.FOLDER}
    known = {reader.CONFIG_FILE, *TEXT_FILES, *graphs, *data, DATA_FILE, *papers}
    stray = sorted(path.name for path in folder.iterdir() if path.name not in known)
    lines = [f"files that no part of the package refers to: {', '.join(stray)}"] if stray else []
    if not package.eos_token_ids:
        lines.append("no stop id: generation ends at its length only")
    for model, name in zip(protos.values(), graphs, strict=True):
        if model.producer_name != "draftsmith":
            lines.append(f"{name} was written by {model.producer_name or 'an unnamed producer'}")
    lines += _shared_warnings(folder, shared)
    return list(map(one_line, lines))


def _shared_warnings(folder: Path, shared: list[dict[str, Any]]) -> list[str]:
    """The configuration lists what the engine is to load once: bytes both graphs mean, or it loads what is not there.

    The graphs may share more than the list: rotary tables are no weights of the checkpoint.
    """
    listed = json.loads((folder / reader.CONFIG_FILE).read_text("utf-8"))["model"]["decoder"].get("shared_initializers")
    entries = listed if isinstance(listed, list) else []
    keys = ("name", "data_file", "offset", "length")
    there = {tuple(str(entry[key]) for key in keys) for entry in shared}
    odd = [
        entry for entry in entries if not isinstance(entry, dict) or tuple(str(entry.get(k)) for k in keys) not in there
    ]
    if not odd:
        return []
    name = odd[0].get("name") if isinstance(odd[0], dict) else odd[0]
    return [f"{reader.CONFIG_FILE} lists {len(odd)} shared initializers that the graphs do not share, the first {name}"]
