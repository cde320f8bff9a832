"""config.json in every spelling that is about, and the variants that would need another graph."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.checkpoint import Checkpoint
from builder.config import ModelConfig, parse_config
from builder.errors import Refused
from fixtures.writer import CONFIG
from tests.builder import oracle

Document = dict[str, Any]


def document(**changes: object) -> Document:
    """The tiny configuration with some keys changed, or dropped where the value is Ellipsis."""
    merged = {**copy.deepcopy(CONFIG), **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def rope(**changes: object) -> Document:
    merged = {**CONFIG["rope_parameters"], **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def refusal(config: Document) -> str:
    with pytest.raises(Refused) as caught:
        parse_config(config)
    return str(caught.value)


def test_the_geometry_of_real_checkpoints(real_checkpoint: Path) -> None:
    """Against the file's own numbers and the shapes of the tensors themselves."""
    written = json.loads((real_checkpoint / "config.json").read_text())
    text = written.get("text_config", written)
    config = parse_config(written)
    for key in (
        "hidden_size",
        "vocab_size",
        "num_attention_heads",
        "head_dim",
        "linear_value_head_dim",
        "rms_norm_eps",
    ):
        assert getattr(config, key) == text[key]
    assert list(config.layer_types) == text["layer_types"]
    assert config.rope.theta == text["rope_parameters"]["rope_theta"]
    tensors = oracle.read_checkpoint(real_checkpoint)
    prefix = Checkpoint(real_checkpoint).prefix
    first = config.layers_of("linear_attention")[0]
    assert tensors[f"{prefix}layers.{first}.linear_attn.conv1d.weight"].shape == (config.conv_channels, 1, 4)
    assert tensors[f"{prefix}layers.{first}.linear_attn.out_proj.weight"].shape[0] == config.hidden_size
    assert tensors[f"{prefix}layers.{first}.linear_attn.norm.weight"].shape == (config.linear_value_head_dim,)
    assert f"{prefix}layers.{config.layers_of('full_attention')[0]}.self_attn.q_norm.weight" in tensors


def test_derived_sizes() -> None:
    config = parse_config(document())
    assert config.rotary_dim == 8
    assert (config.linear_key_dim, config.linear_value_dim, config.conv_channels) == (32, 64, 128)
    assert config.layers_of("linear_attention") == (0, 1, 2) and config.layers_of("full_attention") == (3,)


THETA = 123456.0
SPELLINGS = {
    "rope_parameters": document(rope_parameters=rope(rope_theta=THETA)),
    "top of the text config": document(rope_parameters=rope(rope_theta=...), rope_theta=THETA),
    "rope_scaling": document(rope_parameters=..., rope_scaling=rope(rope_theta=THETA, rope_type="mrope")),
    "nested text_config": {
        "model_type": "qwen3_5",
        "rope_theta": 1.5,  # of something else: the text model's own keys are the nested ones
        "text_config": document(rope_parameters=rope(rope_theta=THETA)),
    },
    "no rope object at all": document(
        rope_parameters=..., rope_theta=THETA, partial_rotary_factor=0.25, mrope_section=[2, 1, 1]
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_theta_is_found_wherever_it_is_written(spelling: str) -> None:
    config = parse_config(SPELLINGS[spelling])
    assert config.rope.theta == THETA
    assert config.rope.mrope_section == (2, 1, 1) and config.rotary_dim == 8


def test_the_newest_place_wins() -> None:
    """transformers moved the key to rope_parameters; what stayed behind elsewhere is stale."""
    config = document(rope_parameters=rope(rope_theta=THETA), rope_theta=5.0, rope_scaling={"rope_theta": 6.0})
    assert parse_config(config).rope.theta == THETA
    config = document(rope_parameters=..., rope_theta=THETA, rope_scaling=rope(rope_theta=6.0))
    assert parse_config(config).rope.theta == THETA


def test_theta_has_no_default() -> None:
    assert "config.json rope_theta: " in refusal(document(rope_parameters=rope(rope_theta=...)))
    assert "config.json rope_theta: " in refusal(document(rope_parameters=...))


@pytest.mark.parametrize("theta", ["much", -1.0, 1, float("nan"), float("inf"), True, [1e4]])
def test_a_theta_that_is_no_base_is_refused(theta: object) -> None:
    assert "config.json rope.theta: " in refusal(document(rope_parameters=rope(rope_theta=theta)))


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": rope(rope_type="yarn")},
        {"rope_parameters": rope(type="linear")},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
    ],
    ids=str,
)
def test_a_scaled_rotary_embedding_is_refused_in_every_spelling(changes: Document) -> None:
    assert "config.json rope_type: expected default" in refusal(document(**changes))


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_rope_section_that_is_no_object_is_refused(key: str) -> None:
    assert f"config.json {key}: expected an object, found str" in refusal(document(**{key: "default"}))


def test_layer_types_or_an_interval() -> None:
    """transformers uses the interval up and saves layer_types; published configs may have either."""
    listed = parse_config(document()).layer_types
    for interval in ({"full_attention_interval": 4}, {}):
        assert parse_config(document(layer_types=..., **interval)).layer_types == listed
    two = parse_config(document(layer_types=None, full_attention_interval=2)).layer_types
    assert two == ("linear_attention", "full_attention") * 2
    both = parse_config(document(full_attention_interval=2)).layer_types
    assert both == listed  # the list is the more explicit of the two


@pytest.mark.parametrize("interval", [0, -1, 2.5, "4"])
def test_a_bad_interval_is_refused(interval: object) -> None:
    assert "layer_types" in refusal(document(layer_types=..., full_attention_interval=interval))


@pytest.mark.parametrize("model_type", ["qwen3_next", "llama", None, 7, ["qwen3_5"]])
def test_another_architecture_is_refused(model_type: object) -> None:
    message = refusal(document(model_type=model_type))
    assert message.startswith("config.json model_type: expected one of qwen3_5, qwen3_5_text")
    assert repr(model_type) in message


def test_architectures_do_not_matter() -> None:
    plain = parse_config(document())
    for names in (None, [], ["Qwen3_5ForCausalLM"], ["Qwen3_5ForConditionalGeneration"]):
        assert parse_config(document(architectures=names)) == plain


def test_the_text_model_may_be_nested() -> None:
    flat = parse_config(document(model_type="qwen3_5"))
    nested = parse_config({"model_type": "qwen3_5", "text_config": document(), "vision_config": {"hidden_size": 9}})
    assert nested == flat


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(True, ..., True), (..., True, True), (False, True, True), (True, False, False), (..., ..., False)],
)
def test_the_tie_flag_is_the_text_models_then_the_outer_one(outer: object, inner: object, tied: bool) -> None:
    config = {"model_type": "qwen3_5", "text_config": document(tie_word_embeddings=inner)}
    if outer is not ...:
        config["tie_word_embeddings"] = outer
    assert parse_config(config).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_act", "gelu"), ("attention_bias", True), ("attn_output_gate", False), ("output_gate_type", "sigmoid")],
)
def test_a_variant_that_needs_another_graph_is_refused(key: str, value: object) -> None:
    message = refusal(document(**{key: value}))
    assert f"config.json {key}: " in message and repr(value) in message


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layer_types": ["full_attention"] * 3}, "layer_types: expected 4 entries"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types.0: "),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "num_attention_heads: expected a multiple"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads: expected a multiple"),
        ({"rope_parameters": rope(mrope_section=[11, 11, 10])}, "mrope_section: expected three sizes that sum to 4"),
        ({"rope_parameters": rope(mrope_section=...)}, "mrope_section: expected three sizes that sum to 4"),
        ({"rope_parameters": rope(mrope_section=[2, 2])}, "rope.mrope_section"),
        ({"rope_parameters": rope(partial_rotary_factor=1.5)}, "rope.partial_rotary_factor"),
        ({"head_dim": 36}, "mrope_section: "),  # a quarter of it is odd: it cannot be rotated in halves
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers: expected 0 or 1"),
        ({"hidden_size": 0}, "hidden_size: "),
        ({"vocab_size": "many"}, "vocab_size: "),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: "),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim: "),
    ],
    ids=str,
)
def test_an_impossible_geometry_is_refused_by_key(changes: Document, key: str) -> None:
    assert f"config.json {key}" in refusal(document(**changes))


REQUIRED = sorted(
    key
    for key, field in ModelConfig.model_fields.items()
    if field.is_required() and key not in ("rope", "layer_types", "model_type")
)


@pytest.mark.parametrize("key", REQUIRED)
def test_a_missing_size_is_named(key: str) -> None:
    assert f"config.json {key}: expected a value, found nothing" in refusal(document(**{key: ...}))


def test_the_source_is_in_the_message() -> None:
    with pytest.raises(Refused, match=r"^/some/where/config\.json model_type"):
        parse_config({}, "/some/where/config.json")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from([*CONFIG, "text_config", "rope_scaling", "rope_theta", "full_attention_interval"]), JSON_VALUES)
def test_any_value_under_any_key_is_read_or_refused(key: str, value: object) -> None:
    """No third outcome: never another exception."""
    try:
        config = parse_config(document(**{"layer_types": ..., key: value}))
    except Refused:
        return
    assert len(config.layer_types) == config.num_hidden_layers
    assert 2 * sum(config.rope.mrope_section) == config.rotary_dim
