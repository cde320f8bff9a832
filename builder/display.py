"""What a person reads of inspect's result: short lines, then tables. The result itself is JSON-ready data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import click

from builder.errors import one_line


def table(title: str, columns: list[str], rows: list[list[Any]]) -> None:
    """Cells are text as it is: brackets are no markup, and what came from a file cannot steer the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(*columns, title=title)
    for row in rows:
        drawn.add_row(*(Text(one_line(cell), overflow="fold") for cell in row))
    Console().print(drawn)


def trace(points: list[dict[str, Any]]) -> None:
    """Relative errors of the residual stream, a line a layer; those beyond their limit are marked."""
    parts = list(dict.fromkeys(point["part"] for point in points))
    rows: dict[int, list[Any]] = {}
    for point in points:
        row = rows.setdefault(point["layer"], [point["layer"], point["kind"], f"{point['limit']:.1e}"])
        error = point["error"]
        row.append("no number !" if error is None else f"{error:.1e}{'' if error <= point['limit'] else ' !'}")
    titles = ["relative error" if part == "layer" else f"relative error, {part}" for part in parts]
    table("residual stream", ["layer", "kind", "limit", *titles], list(rows.values()))


def facts(lines: Mapping[str, str]) -> None:
    """Short lines, their names side by side."""
    width = max(map(len, lines))
    for name, text in lines.items():
        click.echo(f"{name:{width}}  {one_line(text)}")


def _parameters(found: Mapping[str, Any]) -> str:
    numbers, experts = found["parameters"], found["experts"]
    if not experts:
        return f"{numbers['total']:,}"
    mixture = f"{experts['num_experts']} experts a layer, {experts['num_experts_per_tok']} of them for each token"
    return f"{numbers['total']:,}, of which a token passes {numbers['active']:,}; {mixture}"


def counts(numbers: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in numbers.items() if count) or "none"


def checkpoint(found: Mapping[str, Any]) -> None:
    files, scales = found["files"], found["scales"]
    quantization, skipped = found["quantization"], counts(found["skipped_tensors"])
    dead = [part for part in found["zero_rows"] if not part["part"]]
    facts(
        {
            "model": f"{found['model_type']}; layers: {counts(found['layers'])}; MTP head: {_yes(found['mtp'])}",
            "parameters": _parameters(found),
            "tensors": f"{found['tensors']} in {len(files)} files, {sum(files.values()):,} bytes; skipped: {skipped}",
            "declared": f"{quantization['method'] or 'no quantization'} {quantization['algorithm'] or ''}".strip()
            + f"; {len(quantization['ignored'])} names ignored",
            "stored": counts(found["formats"]),
            "scales": f"{scales['values']:,} in {scales['tensors']} tensors;"
            f" {scales['zero']:,} zero, {scales['nan']:,} NaN",
            "zero rows": f"in {len(dead)} weights, {sum(part['zero'] for part in dead):,} rows" if dead else "none",
            "norms": _norms_text(found["norms"]),
            "KV scales": _kv_text(found["kv_scales"]),
            "ties": _ties_text(found["ties"]),
            "tokenizer": _tokenizer_text(found["tokenizer"], found["vocab_size"]),
            "eos": f"{found['eos_token_ids']} of "
            + ("; ".join(f"{file} {ids}" for file, ids in found["eos_by_file"].items()) or "no file"),
        }
    )
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for module in found["modules"]:
        shape = "x".join(map(str, module["shape"]))
        groups.setdefault((module["role"], module["format"], shape), []).append(module)
    rows = [
        [*group, len(many), f"{sum(m['bytes'] for m in many):,}", f"{max(m['zero_rows'] for m in many):.0%}"]
        for group, many in sorted(groups.items())
    ]
    table("linear modules", ["role", "format", "shape", "count", "bytes", "zero rows"], rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _norms_text(norms: Mapping[str, Any]) -> str:
    """The norms that tell the convention; --json has all of them."""
    told = {role: mean for role, mean in norms["means"].items() if role.endswith("layernorm")}
    means = ", ".join(f"{role} {'not finite' if mean is None else f'{mean:.2f}'}" for role, mean in told.items())
    return f"convention {norms['convention']}; conv1d {', '.join(norms['conv_layouts']) or 'none'}; means: {means}"


def _kv_text(kv: Mapping[str, Any]) -> str:
    declared = ", ".join(f"{what} ({file})" for file, what in kv["declared"].items()) or "not declared"
    total = len(kv["pairs"]) + len(kv["missing"])
    stored = f"pairs for {len(kv['pairs'])} of {total} full-attention layers" if kv["scales"] else "none stored"
    if kv["minimum"] is not None:
        stored += f", {kv['minimum']:g} to {kv['maximum']:g}, as {', '.join(kv['spellings'])}"
    return f"{declared}; {stored}"


def _ties_text(ties: Mapping[str, Any]) -> str:
    declared = ", ".join(f"{place} {str(value).lower()}" for place, value in ties["declared"].items())
    head = "stored" if ties["lm_head_stored"] else "not stored"
    return f"{'tied' if ties['tied'] else 'not tied'}; lm_head {head}; declared: {declared or 'nowhere'}"


def _tokenizer_text(tokenizer: Mapping[str, Any], vocab_size: int) -> str:
    """Without a tokenizer token ids still work."""
    if tokenizer["length"] is None:
        return f"none; vocabulary {vocab_size}"
    needs = f" (needs {tokenizer['minimum_runtime']})" if tokenizer["minimum_runtime"] else ""
    templates = ", ".join(tokenizer["chat_templates"]) or "no chat template"
    length = f"{tokenizer['length']} ids for a vocabulary of {vocab_size}"
    padding = f", {tokenizer['padding']} rows padding" if tokenizer["padding"] > 0 else ""
    return f"{tokenizer['class'] or 'no class'}{needs}; {length}{padding}; {templates}"


def package(found: Mapping[str, Any]) -> None:
    provenance, contract = found["provenance"], found["contract"]
    graphs = {name: graph for name, graph in found["graphs"].items() if graph}
    facts(
        {
            "layers": counts(found["layers"]),
            "caches": f"layers {contract['cache_layers']}, blocks of {found['block_size']}",
            "states": f"layers {contract['state_layers']}, capacity {found['state_update_capacity']},"
            f" checkpoints {found['checkpoint_count']}",
            "limits": f"context {found['context_length']}, drafts {found['max_draft_tokens']},"
            f" batch {found['max_batch_size']}, vocabulary {found['vocab_size']}",
            "eos": str(found["eos_token_ids"]),
            "shared": f"{provenance['shared_bytes']:,} bytes: "
            + (", ".join(entry["name"] for entry in provenance["shared_initializers"]) or "none"),
            **{graph["file"]: _graph_text(graph) for graph in graphs.values()},
            **{
                file: f"{use['bytes']:,} bytes, {use['referenced_bytes']:,} of them referred to"
                for file, use in provenance["data"].items()
            },
        }
    )
    ops = list(dict.fromkeys(op for graph in graphs.values() for op in graph["ops"]))
    table("ops", ["op", *graphs], [[op, *(graph["ops"].get(op, 0) for graph in graphs.values())] for op in ops])
    for name in graphs:
        table(f"{name}: inputs and outputs", ["name", "", "count", "type", "shape"], _contract_rows(contract[name]))
    table("files", ["file", "bytes"], [[name, f"{size:,}"] for name, size in provenance["files"].items()])


def _graph_text(graph: Mapping[str, Any]) -> str:
    opsets = ", ".join(f"{domain} {version}" for domain, version in graph["opsets"].items())
    sizes = f"{graph['nodes']} nodes, {graph['initializers']} initializers, {graph['bytes']:,} bytes"
    return f"{sizes}; IR {graph['ir_version']}, {opsets}; by {graph['producer'] or 'nobody'}"


def _contract_rows(contract: Mapping[str, Any]) -> list[list[Any]]:
    """Tensors of all layers that are alike in one row, their layer written as {}."""
    groups: Counter[tuple[str, str, str, str]] = Counter()
    for side in ("inputs", "outputs"):
        for spec in contract[side]:
            name = re.sub(r"\.\d+\.", ".{}.", spec["name"])
            groups[name, side[:-1], spec["dtype"], ", ".join(map(str, spec["shape"]))] += 1
    return [
        [name, "in" if side == "input" else "out", count, dtype, f"[{shape}]"]
        for (name, side, dtype, shape), count in groups.items()
    ]
