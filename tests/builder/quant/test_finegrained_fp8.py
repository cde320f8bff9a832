"""What the configurations of transformers' own quantizers declare, module by module."""

from __future__ import annotations

from typing import Any

import pytest

from builder.errors import Refused
from builder.quant.declaration import Declaration, Section
from builder.quant.finegrained_fp8 import declared
from builder.quant.names import Names

LAYER = "model.language_model.layers.1"
GATE, ROUTER = f"{LAYER}.mlp.gate_proj", f"{LAYER}.mlp.gate"
QUERY = f"{LAYER}.self_attn.q_proj"
LINEARS = (GATE, ROUTER, QUERY, "model.language_model.layers.11.self_attn.q_proj", "lm_head", "mtp.fc")
TENSORS = [*(f"{module}.weight" for module in LINEARS), "model.visual.pos_embed", f"{LAYER}.linear_attn.conv1d.weight"]


def said(**values: Any) -> Declaration | None:
    values = {"quant_method": "fp8", "weight_block_size": [128, 128], **values}
    return declared(Section("config.json quantization_config", values), Names(TENSORS, LINEARS))


def kept(declaration: Declaration | None) -> set[str]:
    assert declaration is not None
    return {module for module, kind in declaration.formats.items() if kind == "float"}


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("lm_head", {"lm_head"}),
        ("mtp.fc", {"mtp.fc"}),
        ("mtp", {"mtp.fc"}),
        (LAYER, {GATE, ROUTER, QUERY}),  # not layer 11
        ("model.layers.1.mlp.gate", {ROUTER}),
        ("mlp.gate", {ROUTER}),
        ("model.language_model.layers.*.self_attn", set(LINEARS[2:4])),
        (r"model.language_model.layers.\d+.mlp.gate", {ROUTER}),  # a pattern, too, ends where a part does
        ("re:.*self_attn.*", set(LINEARS[2:4])),
        ("*.mlp.gate", {ROUTER}),
        ("model.visual.pos_embed", set()),
        (f"{LAYER}.linear_attn.conv1d", set()),
    ],
)
def test_modules_that_are_not_converted_are_float(key: str, entry: str, expected: set[str]) -> None:
    declaration = said(**{key: [entry]})
    assert kept(declaration) == expected
    assert declaration is not None and declaration.stale == ()


def test_what_matches_nothing_is_stale() -> None:
    declaration = said(modules_to_not_convert=["lm_head", "visual.merger", "x*", "re:y", "z.*"])
    assert declaration is not None and declaration.stale == ("visual.merger", "x*", "re:y", "z.*")


@pytest.mark.parametrize(
    ("method", "kind"), [("fp8", "fp8"), ("FP8", "fp8"), ("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), (None, "fp8")]
)
def test_the_method_names_the_format(method: str | None, kind: str) -> None:
    declaration = said(quant_method=method)
    assert declaration is not None and declaration.formats == dict.fromkeys(LINEARS, kind)


@pytest.mark.parametrize("block", [128, [128], [128, 0], [128, -1], [128, "128"], [True, True], {}])
def test_a_block_size_that_is_none_is_refused(block: object) -> None:
    with pytest.raises(Refused, match=r"^config\.json quantization_config\.weight_block_size: expected two numbers"):
        said(weight_block_size=block)


def test_no_block_size_is_no_fault() -> None:
    assert kept(said(weight_block_size=None)) == set()
