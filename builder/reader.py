"""Reads a package back: configuration and graph interfaces, cross-checked. No weight is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from builder import contract
from builder.contract import IoSpec, TensorSpec
from builder.errors import Refused

CONFIG_FILE = "genai_config.json"
RE_EXPORT = "export the package again"


@dataclass(frozen=True)
class GraphFile:
    """An .onnx file and its interface."""

    path: Path
    io: IoSpec


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


def read(folder: str | Path) -> Package:
    """Raises Refused where a file is missing or configuration and graphs contradict each other."""
    folder = Path(folder)
    config = _config(folder)
    try:
        package = _package(folder, config)
        _check_names(config, package)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Refused(
            folder / CONFIG_FILE,
            expected="a configuration of this project",
            found=f"{type(error).__name__} {error}",
            remedy=RE_EXPORT,
        ) from None
    return package


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise Refused(folder, expected=f"a package folder with {CONFIG_FILE}", found="none", remedy="check the path")
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise Refused(path, expected="JSON in UTF-8", found=str(error), remedy=RE_EXPORT) from None
    if not isinstance(document, dict):
        raise Refused(path, expected="a JSON object", found=type(document).__name__, remedy=RE_EXPORT)
    return document


def _package(folder: Path, config: dict[str, Any]) -> Package:
    model = config["model"]
    decoder, mtp = model["decoder"], model.get("mtp")
    groups = {group["kind"]: group for group in decoder["state_groups"]}
    recurrent = groups.get("fixed_recurrent", {})
    batching = config["engine"]["dynamic_batching"]
    eos = model.get("eos_token_id", [])
    return Package(
        folder=folder,
        target=_graph_file(folder, decoder["filename"]),
        mtp=_graph_file(folder, mtp["filename"]) if mtp else None,
        full_layers=tuple(groups.get("paged_kv", {}).get("layer_ids", ())),
        linear_layers=tuple(recurrent.get("layer_ids", ())),
        linear_num_key_heads=int(recurrent.get("state_update", {}).get("key_head_count", 0)),
        capacity=int(decoder["state_update_capacity"]),
        vocab_size=int(model["vocab_size"]),
        context_length=int(model["context_length"]),
        block_size=int(batching["block_size"]),
        max_batch_size=int(batching["max_batch_size"]),
        max_draft_tokens=int(config.get("speculative", {}).get("max_draft_tokens", 0)),
        eos_token_ids=tuple(eos if isinstance(eos, list) else [eos]),
    )


def _graph_file(folder: Path, name: str) -> GraphFile:
    path = folder / name
    if Path(name).name != name or not path.is_file():
        raise Refused(path, expected="a graph file inside the package", found="none", remedy=RE_EXPORT)
    try:
        graph = onnx.load(path, load_external_data=False).graph
    except Exception as error:  # protobuf raises its own, undocumented, types
        raise Refused(path, expected="an ONNX model", found=str(error)[:80], remedy=RE_EXPORT) from None
    return GraphFile(path, IoSpec(tuple(map(_spec, graph.input)), tuple(map(_spec, graph.output))))


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
