"""genai_config.json as a pure function. The parser of onnxruntime-genai 0.18 refuses every key it does not know.

The head's paged inputs (block_table and so on) are not listed under model.mtp: the engine takes their names from
model.decoder, and the parser refuses them there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builder import contract
from builder.config import ModelConfig
from builder.errors import Refused
from builder.tokens import TokenIds

TARGET_FILE = "model.onnx"
MTP_FILE = "mtp.onnx"


@dataclass(frozen=True)
class Limits:
    """What a package promises: tokens of context, drafts per step, cache block size, requests per step."""

    context_length: int
    max_draft_tokens: int
    block_size: int
    max_batch_size: int


def genai_config(
    model: ModelConfig,
    tokens: TokenIds,
    limits: Limits,
    *,
    capacity: int,
    has_mtp: bool,
    search: Mapping[str, Any],
    shared_initializers: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """search: the checkpoint's generation_config.json. capacity: state_update_capacity, 0 for none."""
    special = {"bos_token_id": tokens.bos, "eos_token_id": list(tokens.eos) or None, "pad_token_id": tokens.pad}
    config: dict[str, Any] = {
        "model": {
            "type": "qwen3_5_moe_text" if model.moe else "qwen3_5_text",
            **{key: value for key, value in special.items() if value is not None},
            "vocab_size": model.vocab_size,
            "context_length": limits.context_length,
            "decoder": _decoder(model, capacity, has_mtp, shared_initializers),
        },
        "search": _search(search, limits.context_length),
        "engine": {
            "dynamic_batching": {
                "block_size": limits.block_size,
                "max_batch_size": limits.max_batch_size,
                "gpu_utilization_factor": 0.6,
                "prefix_caching": False,
            }
        },
    }
    if has_mtp:
        config["model"]["mtp"] = _mtp(model, shared_initializers)
    if has_mtp and capacity:
        config["speculative"] = {"max_draft_tokens": limits.max_draft_tokens}
    return config


def _percent(template: str) -> str:
    return template.replace("{}", "%d")


def _session_options() -> dict[str, Any]:
    return {"log_id": "onnxruntime-genai", "provider_options": [{"cuda": {"enable_cuda_graph": "0"}}]}


def _decoder(
    model: ModelConfig, capacity: int, has_mtp: bool, shared_initializers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    inputs = {
        **{name: name for name in (contract.INPUT_IDS, contract.POSITION_IDS, contract.BLOCK_TABLE)},
        **{name: name for name in (contract.CUMULATIVE_LENGTHS, contract.PAST_LENGTHS, contract.ATTENTION_METADATA)},
        "past_key_names": _percent(contract.PAST_KEY),
        "past_value_names": _percent(contract.PAST_VALUE),
        "past_conv_names": _percent(contract.PAST_CONV),
        "past_recurrent_names": _percent(contract.PAST_RECURRENT),
    }
    outputs = {
        "logits": contract.LOGITS,
        "hidden_states": contract.HIDDEN_STATES,
        "present_key_names": _percent(contract.PRESENT_KEY),
        "present_value_names": _percent(contract.PRESENT_VALUE),
        "present_conv_names": _percent(contract.PRESENT_CONV),
        "present_recurrent_names": _percent(contract.PRESENT_RECURRENT),
    }
    if capacity:
        inputs |= {name: name for name in (contract.CAPTURE_COUNT, contract.CAPTURE_ACTIVE)}
        outputs["state_update_conv_value_names"] = _percent(contract.CONV_UPDATE)
        outputs["state_update_recurrent_capsule_names"] = _percent(contract.RECURRENT_UPDATE)
    decoder = {
        "session_options": _session_options(),
        "filename": TARGET_FILE,
        "head_size": model.head_dim,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_hidden_layers": model.num_hidden_layers,
        "num_key_value_heads": model.num_key_value_heads,
        "inputs": inputs,
        "outputs": outputs,
        "state_groups": _state_groups(model, capacity),
        "state_update_capacity": capacity,
    }
    if has_mtp:
        decoder["shared_initializers"] = list(shared_initializers)
    return decoder


def _state_groups(model: ModelConfig, capacity: int) -> list[dict[str, Any]]:
    linear, full = list(model.layers_of("linear_attention")), list(model.layers_of("full_attention"))
    update: dict[str, Any] = {"state_update": {"capacity": capacity}} if capacity else {}
    recurrent = (
        {"state_update": {"capacity": capacity, "key_head_count": model.linear_num_key_heads}} if capacity else {}
    )
    groups: list[dict[str, Any]] = []
    if full:
        groups.append({"kind": "paged_kv", "layer_ids": full})
    if linear:
        groups.append({"kind": "fixed_conv", "layer_ids": linear, **update})
        groups.append({"kind": "fixed_recurrent", "layer_ids": linear, **recurrent})
    return groups


def _mtp(model: ModelConfig, shared_initializers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "enabled": True,
        "filename": MTP_FILE,
        "session_options": _session_options(),
        "num_hidden_layers": 1,
        "num_key_value_heads": model.num_key_value_heads,
        "head_size": model.head_dim,
        "main_hidden_states": contract.HIDDEN_STATES,
        "inputs": {
            "input_ids": contract.INPUT_IDS,
            "hidden_states": contract.HIDDEN_STATES,
            "position_ids": contract.POSITION_IDS,
            "past_key_names": _percent(contract.PAST_KEY),
            "past_value_names": _percent(contract.PAST_VALUE),
        },
        "outputs": {
            "logits": contract.LOGITS,
            "hidden_states": contract.HEAD_HIDDEN_STATES,
            "present_key_names": _percent(contract.PRESENT_KEY),
            "present_value_names": _percent(contract.PRESENT_VALUE),
        },
        "shared_initializers": list(shared_initializers),
    }


class _Sampling(BaseModel):
    """The settings of generation_config.json that we pass on; what is absent or null takes the default."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)

    do_sample: bool = False
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(50, ge=0, lt=1 << 31)
    top_p: float = Field(1.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)


def _search(generation: Mapping[str, Any], context_length: int) -> dict[str, Any]:
    """Search defaults; a checkpoint's own sampling settings where its generation_config.json has them."""
    try:
        sampling = _Sampling.model_validate({key: value for key, value in generation.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        raise Refused(
            f"generation_config.json {'.'.join(map(str, first['loc']))}",
            expected=first["msg"],
            found=repr(first["input"]),
            remedy="mend the file",
        ) from None
    return {
        **sampling.model_dump(),
        "diversity_penalty": 0.0,
        "early_stopping": True,
        "length_penalty": 1.0,
        "max_length": context_length,
        "min_length": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "num_return_sequences": 1,
        "past_present_share_buffer": True,
    }
