"""Reads a package back: configuration and graph interfaces, cross-checked. No weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from builder import contract, manifest, overlays
from builder.contract import IoSpec, TensorSpec
from builder.errors import MachineError, Refused

CONFIG_FILE = "genai_config.json"
RE_EXPORT = "export the package again"


@dataclass(frozen=True)
class DataRange:
    """Where an initializer's bytes end in a data file of the package, and how many they are."""

    tensor: str
    file: str
    end: int
    length: int


@dataclass(frozen=True)
class GraphFile:
    """An .onnx file, its interface, the data it refers to, and the positions its rotary tables cover."""

    path: Path
    io: IoSpec
    data: tuple[DataRange, ...] = ()
    positions: int = 0


@dataclass(frozen=True)
class Package:
    """What a runtime needs to know. Layer ids are the model's; capacity is tokens of captured state per request."""

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


def read(folder: str | Path, overlay: str | None = None) -> Package:
    """overlay: the name of one in the package's own folder of them, laid over its configuration.

    Raises Refused where a file is missing or the package contradicts itself, MachineError where it is unreadable."""
    folder = Path(folder)
    try:
        config = _config(folder)
        if overlay is not None:
            config = overlays.merged(config, overlays.read(folder, overlay))
        manifest.read(folder)  # refuses a contract this version does not know
        package = _package(folder, config)
        _check_names(config, package)
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


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise Refused(folder, expected=f"a package folder with {CONFIG_FILE}", found="none", remedy="check the path")
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused(path, expected="JSON in UTF-8", found=error, remedy=RE_EXPORT) from None
    if not isinstance(document, dict):
        raise Refused(path, expected="a JSON object", found=type(document).__name__, remedy=RE_EXPORT)
    return document


def _package(folder: Path, config: dict[str, Any]) -> Package:
    model = config["model"]
    decoder, mtp = model["decoder"], model.get("mtp")
    if mtp and mtp.get("enabled") is False:
        mtp = None
    groups = {group["kind"]: group for group in decoder["state_groups"]}
    recurrent = groups.get("fixed_recurrent", {})
    batching = config["engine"]["dynamic_batching"]
    eos = model.get("eos_token_id", [])
    vocab_size = _integer("vocab_size", model["vocab_size"], 1)
    return Package(
        folder=folder,
        target=_graph_file(folder, decoder["filename"]),
        mtp=_graph_file(folder, mtp["filename"]) if mtp else None,
        full_layers=_layers("paged_kv", groups.get("paged_kv", {}).get("layer_ids", [])),
        linear_layers=_layers("fixed_recurrent", recurrent.get("layer_ids", [])),
        linear_num_key_heads=_integer("key_head_count", recurrent.get("state_update", {}).get("key_head_count", 0)),
        capacity=_integer("state_update_capacity", decoder["state_update_capacity"]),
        vocab_size=vocab_size,
        context_length=_integer("context_length", model["context_length"], 1),
        block_size=_integer("block_size", batching["block_size"], 1),
        max_batch_size=_integer("max_batch_size", batching["max_batch_size"], 1),
        max_draft_tokens=_integer("max_draft_tokens", config.get("speculative", {}).get("max_draft_tokens", 0)),
        eos_token_ids=tuple(
            _integer("eos_token_id", token, 0, vocab_size) for token in (eos if isinstance(eos, list) else [eos])
        ),
    )


def _integer(key: str, value: Any, least: int = 0, below: int = 1 << 31) -> int:
    if type(value) is not int or not least <= value < below:
        raise Refused(
            f"{CONFIG_FILE} {key}", expected=f"an integer from {least} to {below - 1}", found=value, remedy=RE_EXPORT
        )
    return value


def _layers(kind: str, ids: Any) -> tuple[int, ...]:
    layers = tuple(_integer(f"{kind} layer_ids", layer) for layer in ids)
    if len(set(layers)) < len(layers):
        raise Refused(f"{CONFIG_FILE} {kind} layer_ids", expected="distinct ids", found=layers, remedy=RE_EXPORT)
    return layers


def _graph_file(folder: Path, name: str) -> GraphFile:
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise Refused(path, expected="a graph file inside the package", found="none", remedy=RE_EXPORT)
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except OSError:
        raise
    except Exception as error:  # protobuf raises its own, undocumented, types
        raise Refused(path, expected="an ONNX model", found=error, remedy=RE_EXPORT) from None
    external = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    return GraphFile(
        path,
        IoSpec(tuple(map(_spec, graph.input)), tuple(map(_spec, graph.output))),
        tuple(map(_data_range, external)),
        next((tensor.dims[0] for tensor in external if tensor.name == contract.ROTARY_TABLE), 0),
    )


def _data_range(tensor: onnx.TensorProto) -> DataRange:
    place = {entry.key: entry.value for entry in tensor.external_data}
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
    return path.stat().st_size if Path(name).name == name and path.is_file() else -1


def _spec(value: onnx.ValueInfoProto) -> TensorSpec:
    tensor = value.type.tensor_type
    element = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    shape = tuple(dim.dim_param or dim.dim_value for dim in tensor.shape.dim)
    return TensorSpec(value.name, {"float": "float32"}.get(element, element), shape)


def _check_names(config: dict[str, Any], package: Package) -> None:
    """Every name of genai_config.json is in its graph, and every graph tensor is named."""
    decoder, mtp = config["model"]["decoder"], config["model"].get("mtp")
    _check_graph(package.target, decoder, package.full_layers, package.linear_layers, ())
    if package.mtp and mtp:
        paged = (contract.BLOCK_TABLE, contract.CUMULATIVE_LENGTHS, contract.PAST_LENGTHS, contract.ATTENTION_METADATA)
        _check_graph(package.mtp, mtp, (0,), (), paged)


def _check_graph(
    graph: GraphFile,
    section: dict[str, Any],
    cache_layers: tuple[int, ...],
    state_layers: tuple[int, ...],
    implied: tuple[str, ...],
) -> None:
    """implied: inputs that the engine names by the decoder's section."""
    for side, specs in (("inputs", graph.io.inputs), ("outputs", graph.io.outputs)):
        named = set(implied) if side == "inputs" else set()
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
    target = package.target.io
    hidden = target.output(contract.HIDDEN_STATES).shape[1]
    facts: list[tuple[str, int | str, GraphFile, int | str]] = [
        ("vocab_size", package.vocab_size, package.target, target.output(contract.LOGITS).shape[1])
    ]
    if package.mtp:
        head = package.mtp.io
        facts += [
            ("vocab_size", package.vocab_size, package.mtp, head.output(contract.LOGITS).shape[1]),
            ("hidden_states", hidden, package.mtp, head.input(contract.HIDDEN_STATES).shape[1]),
        ]
    if package.capacity and package.linear_layers:
        facts += _capture_facts(package)
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


def _capture_facts(package: Package) -> list[tuple[str, int | str, GraphFile, int | str]]:
    """Capacity and key heads, as the shapes of the captured updates tell them."""
    io, layer = package.target.io, package.linear_layers[0]
    heads, value_dim, key_dim = map(int, io.input(contract.PAST_RECURRENT.format(layer)).shape[1:])
    width = heads + package.linear_num_key_heads * key_dim + heads * value_dim
    captured = io.output(contract.CONV_UPDATE.format(layer)).shape[1]
    capsule = io.output(contract.RECURRENT_UPDATE.format(layer)).shape[1]
    return [
        ("state_update_capacity", package.capacity, package.target, captured),
        ("width of a capsule (key_head_count)", package.capacity * width, package.target, capsule),
    ]
