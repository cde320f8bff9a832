"""export(): a checkpoint folder becomes a package folder."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from builder import contract, package
from builder.checkpoint import Checkpoint
from builder.genai_config import Limits, genai_config
from builder.graph import Graph, element_type
from builder.options import ExportOptions
from builder.progress import Progress, silent
from builder.source import Source, read_source
from builder.tokens import read_token_ids


@dataclass(frozen=True)
class GraphReport:
    """file in the package; nodes; MatMuls by weight format; layers by kind; quantized modules carried as float, why."""

    file: str
    nodes: int
    matmuls: dict[str, int]
    layers: dict[str, int]
    dequantized: dict[str, str]


@dataclass(frozen=True)
class ExportReport:
    """What was made. Bytes and seconds are of this export; peak_rss_bytes is the whole process's."""

    package: str
    graphs: dict[str, GraphReport | None]
    weights: dict[str, int]
    seconds: float
    peak_rss_bytes: int
    skipped_tensors: dict[str, int]
    warnings: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def export(
    src: str | Path, out: str | Path, options: ExportOptions | None = None, progress: Progress = silent
) -> ExportReport:
    """Writes the package `out` from checkpoint folder `src`. Raises Refused or MachineError; then nothing is left."""
    started = time.monotonic()
    options = options or ExportOptions()
    options.check()
    package.refuse_existing(Path(out), options.force)
    checkpoint = Checkpoint(src)
    package.refuse_source(checkpoint, Path(out))
    source = read_source(checkpoint, options.mtp, strict=options.strict)
    limits = options.limits(source.config)
    graphs = build_graphs(source, limits, options)
    tokens = read_token_ids(checkpoint, source.config.vocab_size)

    def describe(shared: list[dict[str, Any]]) -> dict[str, Any]:
        return genai_config(
            source.config,
            tokens,
            limits,
            capacity=options.capacity,
            has_mtp=source.mtp is not None,
            search=checkpoint.json("generation_config.json") or {},
            shared_initializers=shared,
        )

    written = package.write(Path(out), checkpoint, graphs, describe, force=options.force, progress=progress)
    return ExportReport(
        package=str(out),
        graphs=graph_reports(graphs, source),
        weights={"linked_bytes": 0, "copied_bytes": written.bytes, "shared_bytes": written.shared_bytes},
        seconds=time.monotonic() - started,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        skipped_tensors=source.skipped_counts,
        warnings=[*source.warnings, *written.warnings],
    )


def build_graphs(source: Source, limits: Limits, options: ExportOptions) -> dict[str, Graph]:
    """ "target", and "mtp" where the checkpoint has a head; weights are promises still."""
    dtype = options.activation_dtype
    io = contract.target_io(source.config, dtype, options.capacity)
    graphs = {"target": Graph("target", io, element_type(dtype))}
    source.target(graphs["target"], limits.context_length, options.capacity)
    if source.mtp:
        graphs["mtp"] = Graph("mtp", contract.mtp_io(source.config, dtype), element_type(dtype))
        source.mtp(graphs["mtp"], limits.context_length)
    return graphs


def graph_reports(graphs: Mapping[str, Graph], source: Source) -> dict[str, GraphReport | None]:
    layers = {"target": source.config.layer_counts, "mtp": {"full_attention": 1, "linear_attention": 0}}
    return {name: _report(graphs.get(name), file, layers[name]) for name, file in package.FILES.items()}


def _report(graph: Graph | None, file: str, layers: dict[str, int]) -> GraphReport | None:
    if graph is None:
        return None
    matmuls = {"nvfp4": 0, "fp8": 0, "float": 0, **graph.matmuls}
    return GraphReport(file, len(graph), matmuls, layers, graph.dequantized)
