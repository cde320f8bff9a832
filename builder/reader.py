"""Reads a package back: configuration and graph interfaces, cross-checked. No weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from builder import contract, graph_file, manifest, overlays, paths
from builder.checkpoint import read_json_object
from builder.contract import IoSpec, TensorSpec
from builder.errors import MachineError, Refused

CONFIG_FILE = "genai_config.json"
RE_EXPORT = "export the package again"
EXPERT_OPS = ("MoE", "QMoE")
MAX_DIGITS = 19
"""Of an offset or a length in bytes: more do not fit what ONNX Runtime reads them into."""


@dataclass(frozen=True)
class DataRange:
    """Where an initializer's bytes end in a data file of the package, and how many they are."""

    tensor: str
    file: str
    end: int
    length: int


@dataclass(frozen=True)
class GraphFile:
    """An .onnx file, its interface, the data it refers to, and the positions its rotary tables cover.

    mixture: whether it routes tokens to experts.
    """

    path: Path
    io: IoSpec
    data: tuple[DataRange, ...] = ()
    positions: int = 0
    mixture: bool = False


@dataclass(frozen=True)
class Package:
    """What a runtime needs to know. Layer ids are the model's; capacity is tokens of captured state per request;
    checkpoints is the states per request that a verify step shows, 0 for none; overlay is the one that was laid over
    the configuration.
    """

    folder: Path
    target: GraphFile
    mtp: GraphFile | None
    full_layers: tuple[int, ...]
    linear_layers: tuple[int, ...]
    linear_num_key_heads: int
    capacity: int
    vocab_size: int
    context_length: int
    block_size: int
    max_batch_size: int
    max_draft_tokens: int
    eos_token_ids: tuple[int, ...]
    overlay: str | None = None
    checkpoints: int = 0


def read(folder: str | Path, overlay: str | None = None) -> Package:
    """overlay: the name of one in the package's own folder of them, laid over its configuration.

    Raises Refused where a file is missing or the package contradicts itself, MachineError where it is unreadable."""
    folder = Path(folder)
    if overlay is None:
        return _read(folder)
    config(folder)
    try:
        change = overlays.read(folder, overlay)
    except OSError as error:
        raise MachineError(f"{error.filename or folder}: {error.strerror or error}; it cannot be read") from error
    try:
        return replace(_read(folder, change), overlay=overlay)
    except Refused as refusal:
        _read(folder)  # what is wrong without the overlay is not its fault
        raise refusal.within(f"with --overlay {overlay}:") from None


def _read(folder: Path, change: Mapping[str, Any] | None = None) -> Package:
    """change: an overlay's content."""
    try:
        found = overlays.merged(config(folder), change or {})
        manifest.read(folder)  # refuses a contract this version does not know
        package = _package(folder, found)
        _check_names(found, package)
        _check_consistent(package)
        for graph in filter(None, (package.target, package.mtp)):
            _check_data(graph)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(
            folder / CONFIG_FILE,
            expected="a configuration of this project",
            found=f"{type(error).__name__} {error}",
            remedy=RE_EXPORT,
        ) from None
    except OSError as error:
        raise MachineError(f"{error.filename or folder}: {error.strerror or error}; it cannot be read") from error
    return package


def config(folder: Path) -> dict[str, Any]:
    """genai_config.json. Raises Refused where it is none, MachineError where it is unreadable."""
    path = folder / CONFIG_FILE
    if not paths.is_file(path):
        raise Refused(folder, expected=f"a package folder with {CONFIG_FILE}", found="none", remedy="check the path")
    try:
        return read_json_object(path)
    except Refused as refusal:
        raise Refused(path, expected=refusal.expected, found=refusal.found, remedy=RE_EXPORT) from None
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}; it cannot be read") from error


def _package(folder: Path, config: dict[str, Any]) -> Package:
    model = config["model"]
    decoder, mtp = model["decoder"], model.get("mtp")
    if mtp and mtp.get("enabled") is False:
        mtp = None
    groups = {group["kind"]: group for group in decoder["state_groups"]}
    recurrent = groups.get("fixed_recurrent", {})
    batching = config["engine"]["dynamic_batching"]
    eos = model.get("eos_token_id", [])
    vocab_size = integer("vocab_size", model["vocab_size"], 1)
    target = _graph_file(folder, decoder["filename"])
    linear_layers = _layers("fixed_recurrent", recurrent.get("layer_ids", []))
    return Package(
        folder=folder,
        target=target,
        mtp=_graph_file(folder, mtp["filename"]) if mtp else None,
        full_layers=_layers("paged_kv", groups.get("paged_kv", {}).get("layer_ids", [])),
        linear_layers=linear_layers,
        linear_num_key_heads=integer("key_head_count", recurrent.get("state_update", {}).get("key_head_count", 0)),
        capacity=integer("state_update_capacity", decoder["state_update_capacity"]),
        vocab_size=vocab_size,
        context_length=integer("context_length", model["context_length"], 1),
        block_size=integer("block_size", batching["block_size"], 1),
        max_batch_size=integer("max_batch_size", batching["max_batch_size"], 1),
        max_draft_tokens=integer("max_draft_tokens", config.get("speculative", {}).get("max_draft_tokens", 0)),
        eos_token_ids=tuple(
            integer("eos_token_id", token, 0, vocab_size) for token in (eos if isinstance(eos, list) else [eos])
        ),
        checkpoints=_checkpoints(target, linear_layers),
    )


def _checkpoints(target: GraphFile, linear_layers: tuple[int, ...]) -> int:
    """As the graph's outputs tell it: the parser of genai_config.json refuses every key that could."""
    due, found = contract.checkpoint_names(linear_layers), {spec.name for spec in target.io.outputs}
    missing = [name for name in due if name not in found]
    if len(missing) == len(due):
        return 0
    if missing:
        raise Refused(
            f"{target.path.name} outputs {missing[0]}",
            expected="checkpoints of all linear-attention layers or of none",
            found="no such output",
            remedy=RE_EXPORT,
        )
    return sizes(target, due[0], 4, output=True)[0]


def integer(key: str, value: Any, least: int = 0, below: int = 1 << 31) -> int:
    """`value` of genai_config.json's `key`. Raises Refused for anything but an integer in its range."""
    if type(value) is not int or not least <= value < below:
        raise Refused(
            f"{CONFIG_FILE} {key}", expected=f"an integer from {least} to {below - 1}", found=value, remedy=RE_EXPORT
        )
    return value


def _layers(kind: str, ids: Any) -> tuple[int, ...]:
    layers = tuple(integer(f"{kind} layer_ids", layer) for layer in ids)
    if len(set(layers)) < len(layers):
        raise Refused(f"{CONFIG_FILE} {kind} layer_ids", expected="distinct ids", found=layers, remedy=RE_EXPORT)
    return layers


def _graph_file(folder: Path, name: str) -> GraphFile:
    path = folder / name
    if Path(name).name != name or not paths.is_file(path):
        raise Refused(path, expected="a graph file inside the package", found="none", remedy=RE_EXPORT)
    graph = graph_file.load(path).graph
    data = tuple(_data_range(path, tensor) for tensor in graph.initializer if _is_external(tensor))
    return GraphFile(
        path,
        IoSpec(_specs(path, "input", graph.input), _specs(path, "output", graph.output)),
        data,
        next((tensor.dims[0] for tensor in graph.initializer if _is_external(tensor) and _is_table(tensor)), 0),
        any(node.op_type in EXPERT_OPS for node in graph.node),
    )


def _is_external(tensor: onnx.TensorProto) -> bool:
    return tensor.data_location == onnx.TensorProto.EXTERNAL


def _is_table(tensor: onnx.TensorProto) -> bool:
    return tensor.name == contract.ROTARY_TABLE and len(tensor.dims) > 0


def _data_range(path: Path, tensor: onnx.TensorProto) -> DataRange:
    subject = f"{path} initializer {tensor.name}"
    known = set(ir.DataType) - {ir.DataType.UNDEFINED, ir.DataType.STRING}
    if tensor.data_type not in known:
        raise Refused(f"{subject} data_type", expected="numbers", found=tensor.data_type, remedy=RE_EXPORT)
    place = {entry.key: entry.value for entry in tensor.external_data}
    if not place.get("location"):
        raise Refused(f"{subject} location", expected="a file of the package", found="none", remedy=RE_EXPORT)
    for key, text in (("offset", place.get("offset", "0")), ("length", place.get("length", "none"))):
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise Refused(f"{subject} {key}", expected="a number of bytes", found=text, remedy=RE_EXPORT)
    length = int(place["length"])
    return DataRange(tensor.name, place["location"], int(place.get("offset", 0)) + length, length)


def _check_data(graph: GraphFile) -> None:
    """Every external initializer's bytes lie inside a file of the package."""
    folder = graph.path.parent
    sizes = {name: _size(folder, name) for name in {place.file for place in graph.data}}
    for place in graph.data:
        if sizes[place.file] < place.end:
            found = f"{sizes[place.file]} bytes" if sizes[place.file] >= 0 else "no such file in the package"
            expected = f"at least {place.end} bytes, for {place.tensor} of {graph.path.name}"
            raise Refused(folder / place.file, expected=expected, found=found, remedy=RE_EXPORT)


def _size(folder: Path, name: str) -> int:
    path = folder / name
    return path.stat().st_size if Path(name).name == name and paths.is_file(path) else -1


def _specs(path: Path, side: str, values: Iterable[onnx.ValueInfoProto]) -> tuple[TensorSpec, ...]:
    found = []
    for value in values:
        tensor = value.type.tensor_type
        if tensor.elem_type not in onnx.TensorProto.DataType.values() or not tensor.elem_type:
            raise Refused(
                f"{path} {side} {value.name}", expected="a tensor", found=f"type {tensor.elem_type}", remedy=RE_EXPORT
            )
        element = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
        shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
        found.append(TensorSpec(value.name, {"float": "float32"}.get(element, element), shape))
    return tuple(found)


def sizes(graph: GraphFile, name: str, rank: int, first: int = 1, *, output: bool = False) -> tuple[int, ...]:
    """Of the input or output `name`, the dimensions from `first` on, which are numbers. Raises Refused where they are
    not, where the graph has no such tensor, or where it has more or fewer than `rank` dimensions.
    """
    side, specs = ("output", graph.io.outputs) if output else ("input", graph.io.inputs)
    spec = next((spec for spec in specs if spec.name == name), None)
    fixed = [dim for dim in spec.shape[first:] if isinstance(dim, int) and dim > 0] if spec else []
    if spec is None or len(spec.shape) != rank or len(fixed) != rank - first:
        raise Refused(
            f"{graph.path} {side} {name}",
            expected=f"{rank} dimensions, numbers from number {first} on",
            found=f"[{', '.join(map(str, spec.shape))}]" if spec else "no such tensor",
            remedy=RE_EXPORT,
        )
    return tuple(fixed)


def _check_names(config: dict[str, Any], package: Package) -> None:
    """Every name of genai_config.json is in its graph, and every graph tensor but checkpoints is named."""
    decoder, mtp = config["model"]["decoder"], config["model"].get("mtp")
    unnamed = contract.checkpoint_names(package.linear_layers) if package.checkpoints else []
    _check_graph(package.target, decoder, package.full_layers, package.linear_layers, unnamed=unnamed)
    if package.mtp and mtp:
        paged = (contract.BLOCK_TABLE, contract.CUMULATIVE_LENGTHS, contract.PAST_LENGTHS, contract.ATTENTION_METADATA)
        _check_graph(package.mtp, mtp, (0,), (), paged)


def _check_graph(
    graph: GraphFile,
    section: dict[str, Any],
    cache_layers: tuple[int, ...],
    state_layers: tuple[int, ...],
    implied: Iterable[str] = (),
    unnamed: Iterable[str] = (),
) -> None:
    """implied: inputs that the engine names by the decoder's section. unnamed: outputs that no section may name."""
    for side, specs in (("inputs", graph.io.inputs), ("outputs", graph.io.outputs)):
        named = set(implied if side == "inputs" else unnamed)
        for name in section[side].values():
            layers = cache_layers if name.replace("%d", "{}") in contract.CACHE_TEMPLATES else state_layers
            named |= {name.replace("%d", str(layer)) for layer in layers} if "%d" in name else {name}
        odd = sorted(named ^ {spec.name for spec in specs})
        if odd:
            raise Refused(
                f"{graph.path.name} {side} {odd[0]}",
                expected=f"the same names as in {CONFIG_FILE}",
                found="only in the configuration" if odd[0] in named else "only in the graph",
                remedy=RE_EXPORT,
            )


def _check_consistent(package: Package) -> None:
    """What the configuration promises and what head and target share is what the graphs have."""
    target, head = package.target, package.mtp
    (hidden,) = sizes(target, contract.HIDDEN_STATES, 2, output=True)
    facts = [("vocab_size", package.vocab_size, target, sizes(target, contract.LOGITS, 2, output=True)[0])]
    if head:
        facts += [
            ("vocab_size", package.vocab_size, head, sizes(head, contract.LOGITS, 2, output=True)[0]),
            ("hidden_states", hidden, head, sizes(head, contract.HIDDEN_STATES, 2)[0]),
        ]
    if package.linear_layers:
        sizes(target, contract.PAST_CONV.format(package.linear_layers[0]), 3)
        facts += _capture_facts(package)
    if package.full_layers:
        sizes(target, contract.PAST_KEY.format(package.full_layers[0]), 4, 2)
    for graph in filter(None, (package.target, package.mtp)):
        if graph.positions and package.context_length > graph.positions:
            raise Refused(
                f"{CONFIG_FILE} context_length",
                expected=f"at most {graph.positions}, the positions of {graph.path.name}",
                found=package.context_length,
                remedy=RE_EXPORT,
            )
    for key, promised, graph, found in facts:
        if promised != found:
            raise Refused(f"{graph.path.name} {key}", expected=promised, found=found, remedy=RE_EXPORT)
    if package.max_draft_tokens and package.max_draft_tokens >= package.capacity:
        raise Refused(
            f"{CONFIG_FILE} max_draft_tokens",
            expected=f"less than state_update_capacity {package.capacity}",
            found=package.max_draft_tokens,
            remedy=RE_EXPORT,
        )


def _capture_facts(package: Package) -> list[tuple[str, int, GraphFile, int]]:
    """Capacity and key heads, as the shapes of the captured updates tell them."""
    graph, layer = package.target, package.linear_layers[0]
    heads, value_dim, key_dim = sizes(graph, contract.PAST_RECURRENT.format(layer), 4)
    if not package.capacity:
        return _checkpoint_facts(package)
    width = heads + package.linear_num_key_heads * key_dim + heads * value_dim
    captured, _ = sizes(graph, contract.CONV_UPDATE.format(layer), 3, output=True)
    (capsule,) = sizes(graph, contract.RECURRENT_UPDATE.format(layer), 2, output=True)
    return [
        ("state_update_capacity", package.capacity, graph, captured),
        ("width of a capsule (key_head_count)", package.capacity * width, graph, capsule),
        *_checkpoint_facts(package),
    ]


def _checkpoint_facts(package: Package) -> list[tuple[str, int, GraphFile, int]]:
    """Every series of states is as long as the updates it is made of, and its states are the layer's."""
    if not package.checkpoints:
        return []
    graph, facts = package.target, []
    for layer in package.linear_layers:
        pasts = (contract.PAST_CONV, 3), (contract.PAST_RECURRENT, 4)
        for name, (past, rank) in zip(contract.checkpoint_names([layer]), pasts, strict=True):
            due = (package.capacity, *sizes(graph, past.format(layer), rank))
            found = sizes(graph, name, rank + 1, output=True)
            facts += [(f"output {name}", expected, graph, size) for expected, size in zip(due, found, strict=True)]
    return facts
