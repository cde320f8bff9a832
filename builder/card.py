"""The package's README.md: what a person who deploys it has to know, from the manifest and the export's own counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from builder.checks import Check
from builder.manifest import BUILD_FILE, MANIFEST_FILE

RUN = """## Run it

Needs ONNX Runtime {minimum} or newer on a GPU, 1.32 or newer on a CPU, or onnxruntime-genai 0.18 or newer.

```
build-model verify .
build-model run . {prompt} --draft-tokens {drafts}
```

In onnxruntime-genai the folder is a model for its Engine as it is:

```python
import onnxruntime_genai as og

config = og.Config("path/to/this/folder")
# config.overlay(open("path/to/this/folder/overlays/plain.json").read())  # plain decoding
engine = og.Engine(og.Model(config))
```

`build-model verify` repeats the checks below, checks digests (`--deep` reads all bytes) and compares speculative with
plain tokens by running both.
"""


def card(
    manifest: Mapping[str, Any], graphs: Mapping[str, Any], facts: Mapping[str, Any], checks: Sequence[Check]
) -> str:
    """Markdown. graphs: GraphReports by name, None for one that is absent. facts: lines of the first table, in order.
    checks: what was verified of the package before it was published.

    Nothing here differs between two exports of one source: what belongs to a run is in build.json.
    """
    source = manifest["source"]
    place = f"{source['name']} at revision {source['revision']}" if source["revision"] else source["name"]
    return "\n".join(
        [
            f"# {source['name'].rpartition('/')[2]} for ONNX Runtime",
            "",
            f"Made by draftsmith {manifest['producer']['draftsmith']} from {place} ({source['kind']}). "
            f"`{MANIFEST_FILE}` names the bytes of the checkpoint that every weight was made of; `{BUILD_FILE}` tells "
            "when and where this package was made.",
            "",
            "| | |",
            "|---|---|",
            *_rows({**facts, "contract": f"version {manifest['contract_version']}"}),
            "",
            "## Weights",
            "",
            *_census(graphs),
            "",
            *_files(manifest),
            "",
            RUN.format(
                minimum=_minimum(manifest),
                drafts=facts["drafts per step"],
                prompt='--prompt "Hello"' if "tokenizer.json" in manifest["files"] else "--token-ids 1,2,3",
            ),
            "| verified before it was published | seen |",
            "|---|---|",
            *(f"| {check.name} | {check.detail} |" for check in checks),
            "",
        ]
    )


def _rows(facts: Mapping[str, Any]) -> list[str]:
    return [f"| {name} | {value} |" for name, value in facts.items()]


def _census(graphs: Mapping[str, Any]) -> list[str]:
    present = {name: graph for name, graph in graphs.items() if graph}
    formats = list(dict.fromkeys(kind for graph in present.values() for kind in graph.matmuls))
    lines = [f"| linear modules | {' | '.join(formats)} |", f"|---|{'---|' * len(formats)}"]
    lines += [
        f"| {graph.file} | {' | '.join(str(graph.matmuls.get(kind, 0)) for kind in formats)} |"
        for graph in present.values()
    ]
    for graph in present.values():
        if graph.experts:
            lines += [
                "",
                f"Experts of {graph.file}: {', '.join(f'{n:,} as {kind}' for kind, n in graph.experts.items())}.",
            ]
        if graph.dequantized:
            lines += ["", f"{len(graph.dequantized)} quantized modules of {graph.file} are carried as float."]
    return lines


def _files(manifest: Mapping[str, Any]) -> list[str]:
    lines = ["| file | bytes | digest |", "|---|---|---|"]
    lines += [
        f"| {name} | {record['size']:,} | {record['digest'] or 'not read'} |"
        for name, record in manifest["files"].items()
    ]
    return lines


def _minimum(manifest: Mapping[str, Any]) -> str:
    return str(next(iter(manifest["graphs"].values()))["minimum_onnxruntime"])
