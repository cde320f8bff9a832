"""inspect(): what a checkpoint or a package holds, from headers and scales."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from builder import reader
from builder.checkpoint import Checkpoint
from builder.exporter import read_source
from builder.tokens import read_token_ids


def inspect(path: str | Path) -> dict[str, Any]:
    """A JSON-ready description with `kind` "package" or "checkpoint". Raises Refused for neither."""
    folder = Path(path)
    return _package(folder) if (folder / reader.CONFIG_FILE).is_file() else _checkpoint(folder)


def _package(folder: Path) -> dict[str, Any]:
    package = reader.read(folder)
    graphs = {"target": package.target, "mtp": package.mtp}
    return {
        "kind": "package",
        "graphs": {
            name: None
            if graph is None
            else {"file": graph.path.name, "inputs": len(graph.io.inputs), "outputs": len(graph.io.outputs)}
            for name, graph in graphs.items()
        },
        "layers": {"full_attention": len(package.full_layers), "linear_attention": len(package.linear_layers)},
        "context_length": package.context_length,
        "vocab_size": package.vocab_size,
        "max_draft_tokens": package.max_draft_tokens,
        "block_size": package.block_size,
        "eos_token_ids": list(package.eos_token_ids),
    }


def _checkpoint(folder: Path) -> dict[str, Any]:
    checkpoint = Checkpoint(folder)
    source = read_source(checkpoint, "auto")
    config = source.config
    tokens = read_token_ids(checkpoint, config.vocab_size)
    modules = [
        {
            "module": name,
            "role": role(name),
            "format": quantized.kind,
            "shape": list(quantized.shape),
            "bytes": sum(ref.nbytes for ref in quantized.refs),
        }
        for name, quantized in source.linears.items()
    ]
    return {
        "kind": "checkpoint",
        "model_type": config.model_type,
        "layers": {kind: len(config.layers_of(kind)) for kind in ("full_attention", "linear_attention")},
        "mtp": source.mtp is not None,
        "tensors": len(checkpoint),
        "skipped_tensors": source.skipped,
        "formats": dict(Counter(module["format"] for module in modules)),
        "modules": modules,
        "eos_token_ids": list(tokens.eos),
        "warnings": source.warnings,
    }


def role(module: str) -> str:
    """What a module is for: "mlp.gate_proj", "mtp.fc", "lm_head"; layers of one kind share it."""
    head = "mtp." if module.startswith("mtp.") else ""
    parts = module.split(".")
    after_layer = parts[parts.index("layers") + 2 :] if "layers" in parts else parts[-1:]
    return head + ".".join(after_layer)
