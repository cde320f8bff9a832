"""IoSpec: every input and output of the target and MTP-head graphs, once, as data.

The graphs, genai_config.json and the runtime all read it. Names and layouts are those of onnxruntime-genai 0.18's
paged engine. Symbols: num_tokens packed rows of this step, batch_size requests, num_blocks and block_size of the
paged cache. `{}` in a template stands for the model's layer index; only layers of the right kind have the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

Dim = int | str

INPUT_IDS = "input_ids"
POSITION_IDS = "position_ids"
BLOCK_TABLE = "block_table"
CUMULATIVE_LENGTHS = "cumulative_sequence_lengths"
PAST_LENGTHS = "past_sequence_lengths"
ATTENTION_METADATA = "attention_metadata"
CAPTURE_COUNT = "state_update_capture_count"
CAPTURE_ACTIVE = "state_update_active"
LOGITS = "logits"
HIDDEN_STATES = "hidden_states"
HEAD_HIDDEN_STATES = "hidden_states_out"

ROTARY_TABLE = "cos_cache"
"""Initializer whose rows are the positions a graph can rotate."""

PAST_KEY = "past_key_values.{}.key"
PAST_VALUE = "past_key_values.{}.value"
PRESENT_KEY = "present.{}.key"
PRESENT_VALUE = "present.{}.value"
PAST_CONV = "past.{}.conv"
PRESENT_CONV = "present.{}.conv"
PAST_RECURRENT = "past.{}.recurrent"
PRESENT_RECURRENT = "present.{}.recurrent"
CONV_UPDATE = "state_update.{}.conv_value"
RECURRENT_UPDATE = "state_update.{}.recurrent_capsule"
CONV_CHECKPOINTS = "present_checkpoints.{}.conv"
RECURRENT_CHECKPOINTS = "present_checkpoints.{}.recurrent"
"""The states themselves after each token of a verify step, in packages exported with dense checkpoints. Slot j of the
convolution's W is the state after the row's token j (aligned left); slot W - L + j of the recurrence's is, where L
tokens of the row are captured (aligned right). Other slots are unspecified, and on a step that captures nothing there
are no rows at all.
"""

CACHE_TEMPLATES = (PAST_KEY, PAST_VALUE, PRESENT_KEY, PRESENT_VALUE)
CHECKPOINT_ROWS = "num_checkpoint_rows"
"""Rows of the checkpoints: batch_size on a step that captures, else 0."""
MAX_CAPACITY = 8
"""Largest state_update_capacity the ops take."""


class Geometry(Protocol):
    """What the contract needs to know of a model; builder.config.ModelConfig has it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_key_value_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def linear_num_key_heads(self) -> int: ...
    @property
    def linear_num_value_heads(self) -> int: ...
    @property
    def linear_key_head_dim(self) -> int: ...
    @property
    def linear_value_head_dim(self) -> int: ...
    @property
    def linear_conv_kernel_dim(self) -> int: ...
    @property
    def conv_channels(self) -> int: ...
    @property
    def layer_types(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class TensorSpec:
    """name, ONNX element type in lower case ("float16", "int32"), and shape with symbols."""

    name: str
    dtype: str
    shape: tuple[Dim, ...]


@dataclass(frozen=True)
class IoSpec:
    """Inputs and outputs of one graph, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input(self, name: str) -> TensorSpec:
        return next(spec for spec in self.inputs if spec.name == name)

    def output(self, name: str) -> TensorSpec:
        return next(spec for spec in self.outputs if spec.name == name)


def capsule_width(model: Geometry) -> int:
    """Floats that one token adds to a recurrent capsule: decays [Hv], keys [Hk, dk], deltas [Hv, dv]."""
    heads = model.linear_num_value_heads
    return heads + model.linear_num_key_heads * model.linear_key_head_dim + heads * model.linear_value_head_dim


def checkpoint_names(layers: Iterable[int]) -> list[str]:
    """Outputs that hold the checkpoints of these layers, in order."""
    return [name.format(layer) for layer in layers for name in (CONV_CHECKPOINTS, RECURRENT_CHECKPOINTS)]


def target_io(model: Geometry, dtype: str, capacity: int, checkpoints: int = 0) -> IoSpec:
    """The target graph. capacity: tokens whose state updates are captured per request; 0 leaves capture out.

    checkpoints: states per request that a verify step shows, 0 or as many as capacity.
    """
    inputs = [*_packed_inputs()]
    outputs = [
        TensorSpec(LOGITS, _logits_dtype(dtype), ("num_tokens", model.vocab_size)),
        TensorSpec(HIDDEN_STATES, dtype, ("num_tokens", model.hidden_size)),
    ]
    for layer, kind in enumerate(model.layer_types):
        past, present = _cache(model, layer, dtype) if kind == "full_attention" else _states(model, layer, dtype)
        inputs += past
        outputs += present
    if capacity:
        inputs += [TensorSpec(CAPTURE_COUNT, "int32", ("batch_size",)), TensorSpec(CAPTURE_ACTIVE, "int32", (1,))]
        for layer, kind in enumerate(model.layer_types):
            if kind == "linear_attention":
                outputs += _updates(model, layer, dtype, capacity)
    if checkpoints:
        for layer, kind in enumerate(model.layer_types):
            if kind == "linear_attention":
                outputs += _checkpoints(model, layer, dtype, checkpoints)
    return IoSpec(tuple(inputs), tuple(outputs))


def mtp_io(model: Geometry, dtype: str) -> IoSpec:
    """The MTP-head graph: row p is (hidden p, token p + 1) at position p, with a cache of its own."""
    past, present = _cache(model, 0, dtype)
    hidden = ("num_tokens", model.hidden_size)
    packed = _packed_inputs()
    return IoSpec(
        (packed[0], TensorSpec(HIDDEN_STATES, dtype, hidden), *packed[1:], *past),
        (
            TensorSpec(LOGITS, _logits_dtype(dtype), ("num_tokens", model.vocab_size)),
            TensorSpec(HEAD_HIDDEN_STATES, dtype, hidden),
            *present,
        ),
    )


def _packed_inputs() -> list[TensorSpec]:
    return [
        TensorSpec(INPUT_IDS, "int64", ("num_tokens",)),
        TensorSpec(POSITION_IDS, "int64", (3, "num_tokens")),
        TensorSpec(BLOCK_TABLE, "int32", ("batch_size", "max_num_blocks")),
        TensorSpec(CUMULATIVE_LENGTHS, "int32", ("batch_size + 1",)),
        TensorSpec(PAST_LENGTHS, "int32", ("batch_size",)),
        TensorSpec(ATTENTION_METADATA, "int32", (3,)),
    ]


def _logits_dtype(dtype: str) -> str:
    """bfloat16 logits would lose the order of close tokens, so they leave the graph as float32."""
    return "float32" if dtype == "bfloat16" else dtype


def _cache(model: Geometry, layer: int, dtype: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
    shape = ("num_blocks", "block_size", model.num_key_value_heads, model.head_dim)
    past = [TensorSpec(name.format(layer), dtype, shape) for name in (PAST_KEY, PAST_VALUE)]
    present = [TensorSpec(name.format(layer), dtype, shape) for name in (PRESENT_KEY, PRESENT_VALUE)]
    return past, present


def _states(model: Geometry, layer: int, dtype: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
    conv = ("batch_size", model.conv_channels, model.linear_conv_kernel_dim - 1)
    recurrent = (
        "batch_size",
        model.linear_num_value_heads,
        model.linear_value_head_dim,
        model.linear_key_head_dim,
    )
    past = [
        TensorSpec(PAST_CONV.format(layer), dtype, conv),
        TensorSpec(PAST_RECURRENT.format(layer), "float32", recurrent),
    ]
    present = [
        TensorSpec(PRESENT_CONV.format(layer), dtype, conv),
        TensorSpec(PRESENT_RECURRENT.format(layer), "float32", recurrent),
    ]
    return past, present


def _updates(model: Geometry, layer: int, dtype: str, capacity: int) -> list[TensorSpec]:
    return [
        TensorSpec(CONV_UPDATE.format(layer), dtype, ("batch_size", capacity, model.conv_channels)),
        TensorSpec(RECURRENT_UPDATE.format(layer), "float32", ("batch_size", capacity * capsule_width(model))),
    ]


def _checkpoints(model: Geometry, layer: int, dtype: str, count: int) -> list[TensorSpec]:
    """Each state of `layer`, a slot more in front."""
    _, present = _states(model, layer, dtype)
    names = checkpoint_names([layer])
    return [
        TensorSpec(name, state.dtype, (CHECKPOINT_ROWS, count, *state.shape[1:]))
        for name, state in zip(names, present, strict=True)
    ]
