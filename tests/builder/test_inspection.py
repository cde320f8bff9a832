"""inspect(): what it says is what the files hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

import builder
from builder.errors import Refused
from builder.inspection import role
from tests.builder import oracle


def test_a_checkpoints_description(real_checkpoint: Path) -> None:
    found = builder.inspect(real_checkpoint)
    tensors = oracle.read_checkpoint(real_checkpoint)
    config = json.loads((real_checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    assert json.loads(json.dumps(found)) == found
    assert found["kind"] == "checkpoint" and found["model_type"] == config["model_type"]
    assert found["tensors"] == len(tensors) and found["mtp"] is True and found["warnings"] == []
    assert found["layers"] == Counter(text["layer_types"])
    for module in found["modules"]:
        assert module["shape"] == list(oracle.weight(tensors, module["module"]).shape)
        parts = ("weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
        stored = [tensors.get(f"{module['module']}.{part}") for part in parts]
        assert module["bytes"] == sum(len(raw.data) for raw in stored if raw)
    assert found["formats"] == Counter(module["format"] for module in found["modules"])


def test_the_trained_checkpoints_formats(trained_checkpoint: Path) -> None:
    """The census of the target and, less the shared LM head, of the MTP head."""
    assert builder.inspect(trained_checkpoint)["formats"] == {"nvfp4": 21, "fp8": 30, "float": 12 + 8}


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("lm_head", "lm_head"),
        ("mtp.fc", "mtp.fc"),
        ("model.layers.12.mlp.gate_proj", "mlp.gate_proj"),
        ("model.language_model.layers.0.linear_attn.in_proj_a", "linear_attn.in_proj_a"),
        ("mtp.layers.0.self_attn.q_proj", "mtp.self_attn.q_proj"),
    ],
)
def test_roles(module: str, expected: str) -> None:
    assert role(module) == expected


def test_a_packages_description(packages: Mapping[str, Path]) -> None:
    for name, folder in packages.items():
        found = builder.inspect(folder)
        assert json.loads(json.dumps(found)) == found and found["kind"] == "package"
        for graph, file in (("target", "model.onnx"), ("mtp", "mtp.onnx")):
            if not (folder / file).is_file():
                assert name == "headless" and found["graphs"][graph] is None
                continue
            proto = oracle.graph(folder, file)
            assert found["graphs"][graph] == {
                "file": file,
                "inputs": len(proto.input),
                "outputs": len(proto.output),
            }
        assert found["eos_token_ids"] == [0 if name == "trained" else 89]
        assert found["layers"]["full_attention"] == (2 if name == "trained" else 1)


def test_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"config\.json"):
        builder.inspect(tmp_path)
