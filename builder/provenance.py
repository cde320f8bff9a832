"""What goes into a package's manifest.json and build.json: sources, files, graphs and every initializer's origin."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from typing import Any

from builder import __version__, digests, ops
from builder.checkpoint import Checkpoint
from builder.graph import OPSETS, Graph
from builder.manifest import CONTRACT_VERSION, FORMAT, VERSION
from builder.weights import Placement, Stored, Weight

LIBRARIES = ("ml_dtypes", "numpy", "onnx", "onnx-ir", "onnxscript")
SOURCE_FILES = ("config.json", "hf_quant_config.json", "generation_config.json", "model.safetensors.index.json")
HUB_FOLDER = re.compile(r"models--(?P<repository>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})")


@dataclass(frozen=True)
class FileRecord:
    """A file of the package. digest: None where its bytes were not read. header: of a safetensors header alone."""

    size: int
    digest: str | None
    header: str | None = None


def document(
    checkpoint: Checkpoint,
    options: Mapping[str, Any],
    census: Mapping[str, Any],
    graphs: Mapping[str, Graph],
    places: Mapping[object, Placement],
    files: Mapping[str, FileRecord],
    names: Mapping[str, str],
    state_groups: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """options: what shaped the package, resolved. census: parameters, and modules of each graph by kind. files: every
    other file by name. names: graph to file name. state_groups: the states that a verify step shows.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "contract_version": CONTRACT_VERSION,
        "producer": {"draftsmith": __version__, **_versions()},
        "source": source(checkpoint),
        "options": dict(options),
        "census": dict(census),
        "state_groups": list(state_groups),
        "files": {name: asdict(files[name]) for name in sorted(files)},
        "graphs": {names[name]: _graph(graph, files[names[name]]) for name, graph in graphs.items()},
        "initializers": {names[name]: _initializers(graph.weights, places) for name, graph in graphs.items()},
    }


@cache
def _versions() -> dict[str, str]:
    """Looking them up reads files all over the installation; once is enough."""
    return {name: metadata.version(name) for name in LIBRARIES}


def source(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's name, its place on the Hub where its cache tells, and digests of what describes it."""
    folder = checkpoint.folder.resolve()
    hub = HUB_FOLDER.search(folder.as_posix())
    texts = {name: folder / name for name in SOURCE_FILES}
    return {
        "name": hub["repository"].replace("--", "/", 1) if hub else folder.name,
        "kind": "hub" if hub else "folder",
        "revision": hub["revision"] if hub else None,
        "files": {name: digests.of_bytes(path.read_bytes()) for name, path in texts.items() if path.is_file()},
        "shards": {
            path.name: {
                "size": path.stat().st_size,
                "digest": digests.free_of_charge(path),
                "header": digests.of_header(path),
            }
            for path in checkpoint.files
        },
    }


def _graph(graph: Graph, record: FileRecord) -> dict[str, Any]:
    """required_ops: attributes by (domain, op), for whoever asks whether a runtime knows them all."""
    return {
        "digest": record.digest,
        "opsets": {domain or "ai.onnx": version for domain, version in OPSETS.items()},
        "minimum_onnxruntime": ops.MINIMUM_RUNTIME,
        "required_ops": [
            {"domain": domain or "ai.onnx", "op": op, "attributes": sorted(attributes)}
            for (domain, op), attributes in sorted(graph.required_ops().items())
        ],
    }


def _initializers(weights: Mapping[str, Weight], places: Mapping[object, Placement]) -> dict[str, Any]:
    return {
        name: {
            **asdict(places[weight.key]),
            "dtype": weight.dtype.name.lower(),
            "shape": list(weight.shape),
            "transform": None if isinstance(weight, Stored) else weight.transform,
            "origin": [
                {"shard": ref.file.name, "tensor": ref.name, "offset": ref.offset, "length": ref.nbytes}
                for ref in weight.sources
            ],
        }
        for name, weight in weights.items()
    }


def build_record(manifest: bytes, checkpoint: Checkpoint, brought: Mapping[str, Any], created: str) -> dict[str, Any]:
    """What differs between two runs. brought: how weights came into the package; created: ISO 8601, UTC."""
    return {
        "manifest": digests.of_bytes(manifest),
        "created": created,
        "source": str(checkpoint.folder.resolve()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **brought,
    }
