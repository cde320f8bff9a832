"""export(): a checkpoint folder becomes a package folder."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from builder import contract, package
from builder.checkpoint import Checkpoint
from builder.config import ModelConfig, parse_config
from builder.errors import Refused
from builder.genai_config import Limits, genai_config
from builder.graph import Graph, element_type
from builder.models.decoder import Target
from builder.models.mtp import MtpHead
from builder.progress import Progress, silent
from builder.quant.crosscheck import declared_disagreements
from builder.quant.modules import ModuleTensors
from builder.quant.tensors import QuantTensor
from builder.tokens import read_token_ids

VISION_PREFIXES = ("model.visual.", "visual.")
MTP_PREFIX = "mtp."


@dataclass(frozen=True)
class ExportOptions:
    """Options of `build-model export`, by the same names; cli.md documents them."""

    weights: Literal["auto", "link", "copy"] = "auto"
    dtype: Literal["auto", "float16", "bfloat16"] = "auto"
    mtp: Literal["auto", "off", "require"] = "auto"
    max_draft_tokens: int = 3
    checkpoints: Literal["compact", "off"] = "compact"
    block_size: int = 256
    max_batch_size: int = 100
    context_length: int | None = None
    force: bool = False

    @property
    def activation_dtype(self) -> str:
        return "float16" if self.dtype == "auto" else self.dtype

    @property
    def capacity(self) -> int:
        """One capture slot more than drafts: the anchor row is captured too."""
        return self.max_draft_tokens + 1 if self.checkpoints == "compact" else 0


@dataclass(frozen=True)
class GraphReport:
    """file in the package; nodes; MatMuls by weight format; layers by kind."""

    file: str
    nodes: int
    matmuls: dict[str, int]
    layers: dict[str, int]


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


@dataclass(frozen=True)
class Source:
    """A checkpoint understood: its geometry, its modules, and what was noticed on the way."""

    config: ModelConfig
    target: Target
    mtp: MtpHead | None
    linears: Mapping[str, QuantTensor]
    skipped: dict[str, int]
    warnings: list[str]


def read_source(checkpoint: Checkpoint, mtp: str) -> Source:
    """Reads headers and scales of every module. Raises Refused before anything is written."""
    config = parse_config(checkpoint.config, str(checkpoint.folder / "config.json"))
    vision = [name for name in checkpoint if name.startswith(VISION_PREFIXES)]
    tensors = ModuleTensors.of({name: checkpoint[name] for name in checkpoint if not name.startswith(VISION_PREFIXES)})
    target = Target(tensors, config, checkpoint.prefix)
    warnings: list[str] = []
    if config.tie_word_embeddings and tensors.has("lm_head"):
        warnings.append("config.json ties the LM head to the embedding but lm_head is stored: used as stored")
    head = _read_mtp(checkpoint, tensors, config, target, mtp, warnings)
    warnings += declared_disagreements(checkpoint, tensors.linears)
    unused = [name for name in checkpoint if name not in tensors.used and not name.startswith(VISION_PREFIXES)]
    if mtp == "off":
        unused = [name for name in unused if not name.startswith(MTP_PREFIX)]
    if unused:
        warnings.append(f"{len(unused)} tensors belong to no module and were left out, the first {unused[0]}")
    return Source(config, target, head, tensors.linears, {"vision": len(vision), "unclaimed": len(unused)}, warnings)


def _read_mtp(
    checkpoint: Checkpoint,
    tensors: ModuleTensors,
    config: ModelConfig,
    target: Target,
    mtp: str,
    warnings: list[str],
) -> MtpHead | None:
    """The head where its tensors are on disk. Half a head is always refused, by its first missing tensor."""
    if mtp == "off":
        return None
    if any(name.startswith(MTP_PREFIX) for name in checkpoint):
        return MtpHead(tensors.sub("mtp"), config, target)
    if mtp == "require":
        raise Refused(
            f"{checkpoint.folder.name} tensor mtp.fc.weight",
            expected="an MTP head (--mtp require)",
            found="no mtp.* tensor",
            remedy="use a checkpoint that kept its head, or --mtp auto",
        )
    if config.mtp_num_hidden_layers:
        warnings.append("config.json promises an MTP head but no mtp.* tensor is there: exported without a head")
    return None


def export(
    src: str | Path, out: str | Path, options: ExportOptions | None = None, progress: Progress = silent
) -> ExportReport:
    """Writes the package `out` from checkpoint folder `src`. Raises Refused or MachineError; then nothing is left."""
    started = time.monotonic()
    options = options or ExportOptions()
    _check_options(options)
    package.refuse_existing(Path(out), options.force)
    checkpoint = Checkpoint(src)
    package.refuse_source(checkpoint, Path(out))
    source = read_source(checkpoint, options.mtp)
    limits = _limits(options, source.config)
    graphs = {"target": _target_graph(source, limits, options), "mtp": _mtp_graph(source, limits, options)}
    present = {name: graph for name, graph in graphs.items() if graph is not None}
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

    written = package.write(Path(out), checkpoint, present, describe, force=options.force, progress=progress)
    layers = {kind: len(source.config.layers_of(kind)) for kind in ("full_attention", "linear_attention")}
    return ExportReport(
        package=str(out),
        graphs={
            "target": graph_report(graphs["target"], package.FILES["target"], layers),
            "mtp": graph_report(graphs["mtp"], package.FILES["mtp"], {"full_attention": 1, "linear_attention": 0}),
        },
        weights={"linked_bytes": 0, "copied_bytes": written.bytes, "shared_bytes": written.shared_bytes},
        seconds=time.monotonic() - started,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        skipped_tensors=source.skipped,
        warnings=source.warnings,
    )


def graph_report(graph: Graph | None, file: str, layers: dict[str, int]) -> GraphReport | None:
    if graph is None:
        return None
    ops_by_format = {
        "nvfp4": "MatMulBlockQuantizedFp4Weight",
        "fp8": "MatMulBlockQuantizedFp8Weight",
        "float": "Gemm",
    }
    return GraphReport(file, len(graph), {name: graph.count(op) for name, op in ops_by_format.items()}, layers)


CHOICES: Mapping[str, tuple[str, ...]] = {
    "weights": ("auto", "link", "copy"),
    "dtype": ("auto", "float16", "bfloat16"),
    "mtp": ("auto", "off", "require"),
    "checkpoints": ("compact", "off"),
}


def _check_options(options: ExportOptions) -> None:
    for name, allowed in CHOICES.items():
        if getattr(options, name) not in allowed:
            raise Refused(
                f"--{name}", expected=" or ".join(allowed), found=getattr(options, name), remedy="choose one of them"
            )
    if options.weights == "link":
        raise Refused("--weights", expected="auto or copy", found="link", remedy="this version copies weights")
    size = options.block_size
    if size < 16 or size & (size - 1):
        raise Refused("--block-size", expected="a power of two, 16 or more", found=size, remedy="choose another")
    if not 1 <= options.max_draft_tokens < contract.MAX_CAPACITY:
        raise Refused(
            "--max-draft-tokens",
            expected=f"1 to {contract.MAX_CAPACITY - 1}",
            found=options.max_draft_tokens,
            remedy="choose another",
        )
    if not 1 <= options.max_batch_size <= 256:
        raise Refused("--max-batch-size", expected="1 to 256", found=options.max_batch_size, remedy="choose another")


def _limits(options: ExportOptions, config: ModelConfig) -> Limits:
    longest = config.max_position_embeddings
    context = longest if options.context_length is None else options.context_length
    if not 1 <= context <= longest:
        raise Refused(
            "--context-length",
            expected=f"1 to {longest}, the model's positions",
            found=context,
            remedy="choose another",
        )
    return Limits(context, options.max_draft_tokens, options.block_size, options.max_batch_size)


def _target_graph(source: Source, limits: Limits, options: ExportOptions) -> Graph:
    io = contract.target_io(source.config, options.activation_dtype, options.capacity)
    graph = Graph("target", io, element_type(options.activation_dtype))
    source.target(graph, limits.context_length, options.capacity)
    return graph


def _mtp_graph(source: Source, limits: Limits, options: ExportOptions) -> Graph | None:
    if source.mtp is None:
        return None
    graph = Graph(
        "mtp", contract.mtp_io(source.config, options.activation_dtype), element_type(options.activation_dtype)
    )
    source.mtp(graph, limits.context_length)
    return graph
