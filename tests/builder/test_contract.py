"""The contract's shapes where no two sizes are alike, so that none can stand in for another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import builder
from builder import contract
from builder.config import parse_config
from fixtures.writer import CONFIG, Config, Tensors, Tiny
from tests.builder import oracle
from tests.builder.test_models import answers
from tests.conftest import TinyFactory

UNLIKE = {
    "hidden_size": 100,
    "vocab_size": 1000,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 11,
    "linear_conv_kernel_dim": 5,
}


def shapes(specs: tuple[contract.TensorSpec, ...]) -> dict[str, tuple[int | str, ...]]:
    return {spec.name: spec.shape for spec in specs}


def test_sizes_of_the_target() -> None:
    io = contract.target_io(parse_config({**CONFIG, **UNLIKE}), "float16", 6)
    inputs, outputs = shapes(io.inputs), shapes(io.outputs)
    assert inputs["past_key_values.3.key"] == ("num_blocks", "block_size", 3, 32)
    assert inputs["past.0.conv"] == outputs["present.0.conv"] == ("batch_size", 2 * 5 * 7 + 10 * 11, 4)
    # Value-major: [value heads, value width, key width].
    assert inputs["past.0.recurrent"] == outputs["present.0.recurrent"] == ("batch_size", 10, 11, 7)
    assert outputs["state_update.0.conv_value"] == ("batch_size", 6, 180)
    # For every token a decay per value head, a key per key head, a delta per value head.
    assert outputs["state_update.0.recurrent_capsule"] == ("batch_size", 6 * (10 + 5 * 7 + 10 * 11))
    assert outputs["logits"] == ("num_tokens", 1000) and outputs["hidden_states"] == ("num_tokens", 100)


def test_sizes_of_checkpoints() -> None:
    """The states' own, with a slot for every captured token; none unless they are asked for."""
    config = parse_config({**CONFIG, **UNLIKE})
    with_them, without = (contract.target_io(config, "bfloat16", 6, count) for count in (6, 0))
    more = {spec.name: (spec.dtype, spec.shape) for spec in with_them.outputs[len(without.outputs) :]}
    assert with_them.inputs == without.inputs and with_them.outputs[: len(without.outputs)] == without.outputs
    assert more == {
        f"present_checkpoints.{layer}.{kind}": (dtype, ("num_checkpoint_rows", 6, *shape))
        for layer in range(3)
        for kind, dtype, shape in (("conv", "bfloat16", (180, 4)), ("recurrent", "float32", (10, 11, 7)))
    }


def test_sizes_of_the_head() -> None:
    io = contract.mtp_io(parse_config({**CONFIG, **UNLIKE}), "float16")
    assert shapes(io.inputs)["past_key_values.0.value"] == ("num_blocks", "block_size", 3, 32)
    assert shapes(io.outputs)["hidden_states_out"] == ("num_tokens", 100)


def test_specs_are_found_by_name() -> None:
    io = contract.target_io(parse_config(CONFIG), "bfloat16", 0)
    assert io.input("past.1.recurrent").dtype == "float32" and io.input("past.1.conv").dtype == "bfloat16"
    assert io.output("logits").dtype == "float32"
    with pytest.raises(StopIteration):
        io.input("state_update_active")


def test_key_and_value_widths_may_differ(tiny: TinyFactory, tmp_path: Path) -> None:
    """A tiny model with keys of 8 and values of 16: exported, and run by ops that check their shapes."""
    qkv = np.r_[0:16, 32:48, 64:128]  # of 32 query, 32 key and 64 value rows

    def edit(tensors: Tensors, config: Config) -> None:
        config["linear_key_head_dim"] = 8
        for name in list(tensors):
            if "in_proj_qkv.weight" in name or "conv1d.weight" in name:
                tensors[name] = np.ascontiguousarray(tensors[name][qkv])

    folder = tiny("modelopt", Tiny(fp8_per_channel=True), edit)
    builder.export(folder, tmp_path / "out")
    graph = oracle.graph(tmp_path / "out")
    values = {value.name: oracle.dims(value) for value in [*graph.value_info, *graph.input, *graph.output]}
    for node in graph.node:
        if node.op_type == "GatedDeltaNet":
            assert [values[name] for name in node.input[:3]] == [
                ["num_tokens", 2, 8],
                ["num_tokens", 2, 8],
                ["num_tokens", 4, 16],
            ]
            assert values[node.output[1]] == ["batch_size", 4, 16, 8]
    for name, values_of in answers(tmp_path / "out").items():
        assert np.isfinite(values_of).all(), name
