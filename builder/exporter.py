"""export(): a checkpoint folder becomes a package folder."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from builder import contract, package, staging
from builder.card import card
from builder.checkpoint import Checkpoint
from builder.genai_config import Limits, genai_config
from builder.graph import Graph, element_type
from builder.hub import checkpoint_folder
from builder.manifest import state_groups
from builder.options import ExportOptions
from builder.overlays import overlays
from builder.progress import Progress, silent
from builder.source import Source, read_source
from builder.tokens import read_token_ids


@dataclass(frozen=True)
class GraphReport:
    """file in the package; nodes; MatMuls by weight format; layers by kind; quantized modules carried as float, why.

    experts: of all mixtures, by the format they are carried in.
    """

    file: str
    nodes: int
    matmuls: dict[str, int]
    layers: dict[str, int]
    dequantized: dict[str, str]
    experts: dict[str, int]


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
    """Writes the package `out` from `src`, a checkpoint folder or a Hub id.

    Raises Refused or MachineError; then nothing is left.
    """
    started = time.monotonic()
    options = options or ExportOptions()
    options.check()
    package.refuse_existing(Path(out), options.force)
    checkpoint = Checkpoint(checkpoint_folder(src, options.revision, quiet=progress is silent))
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

    reports = graph_reports(graphs, source)
    facts = _facts(source, limits, options)
    recipe = package.Recipe(
        graphs,
        describe,
        lambda manifest, checks: card(manifest, reports, facts, checks),
        overlays(has_mtp=source.mtp is not None, max_draft_tokens=limits.max_draft_tokens if options.capacity else 0),
        options.recorded(limits),
        {
            "parameters": source.parameters,
            "graphs": {name: asdict(report) for name, report in reports.items() if report},
        },
        options.weights,
        options.hash,
        state_groups(source.config.layers_of("linear_attention"), options.checkpoint_count),
    )
    with package.machine_errors(Path(out)):
        recovered = staging.recover(Path(os.path.abspath(out)), package.is_package)
    package.refuse_existing(Path(out), options.force)
    written = package.write(Path(out), checkpoint, recipe, force=options.force, progress=progress)
    return ExportReport(
        package=str(out),
        graphs=reports,
        weights={name: getattr(written, name) for name in ("linked_bytes", "copied_bytes", "shared_bytes")},
        seconds=time.monotonic() - started,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        skipped_tensors=source.skipped_counts,
        warnings=[*recovered, *source.warnings, *written.warnings],
    )


def _facts(source: Source, limits: Limits, options: ExportOptions) -> dict[str, object]:
    """Lines of the model card's first table."""
    counts, moe = source.parameters, source.config.moe
    linear = "linear_attention" in source.config.layer_types
    return {
        "parameters": f"{counts['total']:,}, of which a token passes {counts['active']:,}",
        **({"experts": f"{moe.num_experts} a layer, {moe.num_experts_per_tok} a token"} if moe else {}),
        "activations": options.activation_dtype,
        "context": f"{limits.context_length:,} tokens",
        "drafts per step": limits.max_draft_tokens if source.mtp and options.capacity else 0,
        **(
            {"checkpoints": f"{options.checkpoint_count} states a request"}
            if options.checkpoint_count and linear
            else {}
        ),
        "cache block": f"{limits.block_size} tokens",
        "requests per step": limits.max_batch_size,
    }


def build_graphs(source: Source, limits: Limits, options: ExportOptions) -> dict[str, Graph]:
    """ "target", and "mtp" where the checkpoint has a head; weights are promises still."""
    dtype = options.activation_dtype
    io = contract.target_io(source.config, dtype, options.capacity, options.checkpoint_count)
    graphs = {"target": Graph("target", io, element_type(dtype))}
    source.target(graphs["target"], limits.context_length, options.capacity, options.checkpoint_count)
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
    return GraphReport(file, len(graph), matmuls, layers, graph.dequantized, dict(graph.experts))
