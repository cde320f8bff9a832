"""plan(): what an export would write and what running it would take, from headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder import contract, package
from builder.checkpoint import Checkpoint
from builder.config import ModelConfig
from builder.exporter import GraphReport, build_graphs, graph_reports
from builder.graph import Graph
from builder.hub import checkpoint_folder
from builder.options import ExportOptions
from builder.source import read_source
from builder.weights import Stored, Weight

HALF_BYTES, FLOAT_BYTES = 2, 4


@dataclass(frozen=True)
class Plan:
    """Bytes by where they come from, MatMuls, experts and layers by kind, and memory in bytes on a GPU.

    parameters: all of the target's, and those that one token passes.
    """

    source: str
    graphs: dict[str, GraphReport | None]
    parameters: dict[str, int]
    weights: dict[str, int]
    memory: dict[str, int]
    skipped_tensors: dict[str, int]
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def plan(src: str | Path, options: ExportOptions | None = None, batch_size: int = 1) -> Plan:
    """What `export` would do with these options; memory for batch_size requests of full context. Raises Refused.

    No value is read, so a damaged scale goes unnoticed, and MXFP4 is taken to fit NVFP4's scales.
    """
    options = options or ExportOptions()
    options.check()
    checkpoint = Checkpoint(checkpoint_folder(src, options.revision))
    source = read_source(checkpoint, options.mtp, read_values=False, strict=options.strict)
    limits = options.limits(source.config)
    graphs = build_graphs(source, limits, options)
    weights = weight_bytes(graphs)
    return Plan(
        source=str(src),
        graphs=graph_reports(graphs, source),
        parameters=source.parameters,
        weights=weights,
        memory=memory_bytes(source.config, options, weights, limits.context_length, batch_size, "mtp" in graphs),
        skipped_tensors=source.skipped_counts,
        warnings=source.warnings,
    )


def weight_bytes(graphs: Mapping[str, Graph]) -> dict[str, int]:
    """Distinct bytes: usable in place, transformed, and those of them that both graphs use."""
    distinct = {weight.key: weight for graph in graphs.values() for weight in graph.weights.values()}
    shared = package.shared_weights(graphs)
    return {
        "linkable_bytes": _total(weight for weight in distinct.values() if isinstance(weight, Stored)),
        "transformed_bytes": _total(weight for weight in distinct.values() if not isinstance(weight, Stored)),
        "shared_bytes": _total(shared.values()),
    }


def _total(weights: Iterable[Weight]) -> int:
    return sum(weight.nbytes for weight in weights)


def memory_bytes(
    model: ModelConfig, options: ExportOptions, weights: Mapping[str, int], context: int, batch: int, with_head: bool
) -> dict[str, int]:
    """Memory on a GPU in bytes: weights, KV blocks, two banks of states, and what a verify step stages.

    KV entries and convolution states have the activation type (2 bytes), recurrent states and capsules are float32.
    """
    blocks = -(-context // options.block_size) * batch
    kv_layers = len(model.layers_of("full_attention")) + with_head
    token = 2 * HALF_BYTES * model.num_key_value_heads * model.head_dim
    linear = len(model.layers_of("linear_attention"))
    recurrent = model.linear_num_value_heads * model.linear_value_head_dim * model.linear_key_head_dim
    conv = model.conv_channels * (model.linear_conv_kernel_dim - 1)
    state = HALF_BYTES * conv + FLOAT_BYTES * recurrent
    captured = HALF_BYTES * model.conv_channels + FLOAT_BYTES * contract.capsule_width(model)
    rows = batch * (options.capacity or 1)
    parts = {
        "weights": weights["linkable_bytes"] + weights["transformed_bytes"],
        "kv_blocks": kv_layers * blocks * options.block_size * token,
        "states": 2 * batch * linear * state,
        "verify_staging": batch * linear * (options.capacity * captured + options.checkpoint_count * state)
        + rows * FLOAT_BYTES * model.vocab_size,
    }
    return {"context_length": context, "batch_size": batch, **parts, "total": sum(parts.values())}
