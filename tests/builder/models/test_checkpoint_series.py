"""The series of states by themselves, run by ONNX Runtime as written, against the recurrence in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from builder import contract
from builder.config import ModelConfig, parse_config
from builder.contract import IoSpec, TensorSpec
from builder.graph import Graph, element_type
from builder.models.checkpoint_series import add_checkpoints
from builder.models.step import Step
from fixtures.writer import CONFIG
from tests.builder.test_contract import UNLIKE

LENGTHS = (4, 1, 3, 2, 6)
ASKED = (4, 0, 5, 1, 9)
CAPTURED = (4, 0, 3, 1, 6)
"""Of five rows: the second drafts nothing, the fourth captures less than it has; more than there is cannot be."""
LAYERS = (0, 1, 2)


@dataclass(frozen=True)
class Factors:
    """Random inputs of one layer: past states, rows of the convolution [B, W, C], and what the capsules hold."""

    conv: NDArray[Any]
    recurrent: NDArray[Any]
    rows: NDArray[Any]
    decays: NDArray[Any]
    keys: NDArray[Any]
    deltas: NDArray[Any]

    @classmethod
    def random(cls, config: ModelConfig, capacity: int, seed: int, dtype: str) -> Factors:
        rng, batch, heads = np.random.default_rng(seed), len(LENGTHS), config.linear_num_value_heads

        def normal(*shape: int) -> NDArray[Any]:
            return rng.standard_normal((batch, *shape)).astype(np.float32)

        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        return cls(
            normal(config.conv_channels, config.linear_conv_kernel_dim - 1).astype(dtype),
            normal(heads, value_dim, key_dim),
            normal(capacity, config.conv_channels).astype(dtype),
            rng.uniform(0.5, 1, (batch, capacity, heads)).astype(np.float32),
            normal(capacity, config.linear_num_key_heads, key_dim),
            normal(capacity, heads, value_dim),
        )

    @property
    def capsule(self) -> NDArray[np.float32]:
        """As the op lays it out; what was not captured is NaN, because nobody may read it."""
        parts = [self.decays.copy(), self.keys.copy(), self.deltas.copy()]
        for part in parts:
            for row, count in enumerate(CAPTURED):
                part[row, count:] = np.nan
        return np.concatenate([part.reshape(len(LENGTHS), -1) for part in parts], axis=1)

    def states(self, row: int, count: int) -> tuple[NDArray[Any], NDArray[np.float64]]:
        """The row's states after `count` tokens: the newest rows, and S = decay S + delta outer key in float64."""
        past = self.conv[row].T
        conv = np.concatenate([past, self.rows[row, :count]])[-len(past) :].T
        recurrent = self.recurrent[row].astype(np.float64)
        group = self.deltas.shape[2] // self.keys.shape[2]
        for token in range(count):
            for head in range(len(recurrent)):
                key = self.keys[row, token, head // group].astype(np.float64)
                outer = self.deltas[row, token, head][:, None] * key[None, :]
                recurrent[head] = self.decays[row, token, head] * recurrent[head] + outer
        return conv, recurrent


def model(config: ModelConfig, dtype: str, capacity: int) -> onnx.ModelProto:
    """The checkpoint outputs alone; what the linear-attention ops would capture is given as inputs."""
    whole = contract.target_io(config, dtype, capacity, capacity)
    updates = [spec for spec in whole.outputs if spec.name.startswith("state_update.")]
    given = tuple(TensorSpec(f"given.{spec.name}", spec.dtype, spec.shape) for spec in updates)
    outputs = [spec for spec in whole.outputs if spec.name.startswith(("state_update.", "present_checkpoints."))]
    graph = Graph("series", IoSpec((*whole.inputs, *given), tuple(outputs)), element_type(dtype))
    for spec in updates:
        graph.set_output(spec.name, graph.op.Identity(graph.input(f"given.{spec.name}")))
    add_checkpoints(graph, config, Step.of(graph, config, 8, capacity))
    graph.weights.clear()  # rotary tables, which nothing uses here
    found = graph.to_model({})
    for name in ("cos_cache", "sin_cache"):
        del found.graph.initializers[name]
    return ir.to_proto(found)


def run(proto: onnx.ModelProto, layers: dict[int, Factors], active: int, dtype: str) -> dict[str, NDArray[Any]]:
    feed: dict[str, NDArray[Any]] = {
        contract.CUMULATIVE_LENGTHS: np.cumsum([0, *LENGTHS], dtype=np.int32),
        contract.CAPTURE_COUNT: np.array(ASKED, np.int32) * active,
        contract.CAPTURE_ACTIVE: np.array([active], np.int32),
    }
    for layer, own in layers.items():
        feed[contract.PAST_CONV.format(layer)] = own.conv
        feed[contract.PAST_RECURRENT.format(layer)] = own.recurrent
        feed[f"given.{contract.CONV_UPDATE.format(layer)}"] = own.rows
        feed[f"given.{contract.RECURRENT_UPDATE.format(layer)}"] = own.capsule
    session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = contract.checkpoint_names(LAYERS)
    for spec in session.get_inputs():  # of an empty batch: whatever has nothing to do with states
        feed.setdefault(
            spec.name, np.zeros([dim if isinstance(dim, int) else 1 for dim in spec.shape], TYPES[spec.type])
        )
    return dict(zip(names, session.run(names, feed), strict=True))


TYPES = {
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_slot_is_the_state_after_its_token(dtype: str) -> None:
    """Rows of several lengths, two value heads a key head, no two sizes alike; exact where nothing is computed."""
    config, capacity = parse_config({**CONFIG, **UNLIKE}), 6
    layers = {layer: Factors.random(config, capacity, layer, dtype) for layer in LAYERS}
    found = run(model(config, dtype, capacity), layers, 1, dtype)
    for layer, own in layers.items():
        conv, recurrent = (found[name] for name in contract.checkpoint_names([layer]))
        assert conv.shape == (5, capacity, 2 * 5 * 7 + 10 * 11, 4) and recurrent.shape == (5, capacity, 10, 11, 7)
        for row, captured in enumerate(CAPTURED):
            for count in range(1, captured + 1):
                expected_conv, expected = own.states(row, count)
                np.testing.assert_array_equal(conv[row, count - 1], expected_conv)
                np.testing.assert_allclose(
                    recurrent[row, capacity - captured + count - 1], expected, rtol=1e-5, atol=1e-5
                )
            assert np.isfinite(recurrent[row]).all(), "what was not captured is nowhere in it"


@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_other_capacities(capacity: int) -> None:
    """Also one where every series is a single state, and of rows that are shorter than the capacity."""
    config = parse_config(CONFIG)
    layers = {layer: Factors.random(config, capacity, layer, "float32") for layer in LAYERS}
    found = run(model(config, "float32", capacity), layers, 1, "float32")
    for layer, own in layers.items():
        conv, recurrent = (found[name] for name in contract.checkpoint_names([layer]))
        for row, count in enumerate(min(captured, capacity) for captured in CAPTURED):
            expected_conv, expected = own.states(row, count)
            if count:
                np.testing.assert_array_equal(conv[row, count - 1], expected_conv)
            np.testing.assert_allclose(recurrent[row, -1], expected, rtol=1e-5, atol=1e-5)


def test_a_step_that_captures_nothing_makes_no_rows() -> None:
    config = parse_config(CONFIG)
    layers = {layer: Factors.random(config, 4, layer, "float32") for layer in LAYERS}
    found = run(model(config, "float32", 4), layers, 0, "float32")
    shapes = {name: value.shape for name, value in found.items()}
    assert shapes == {
        f"present_checkpoints.{layer}.{kind}": shape
        for layer in LAYERS
        for kind, shape in (("conv", (0, 4, 128, 3)), ("recurrent", (0, 4, 4, 16, 16)))
    }


def test_a_model_without_linear_attention_has_no_checkpoints() -> None:
    config = parse_config({**CONFIG, "layer_types": ["full_attention"] * 4})
    io = contract.target_io(config, "float16", 4, 4)
    graph = Graph("none", io, element_type("float16"))
    add_checkpoints(graph, config, Step.of(graph, config, 8, 4))
    assert graph.count("If") == 0 and not any("checkpoints" in spec.name for spec in io.outputs)
