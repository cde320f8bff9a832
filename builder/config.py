"""ModelConfig: config.json read once into a frozen type; nothing downstream sees the dictionary.

Both shapes of the file are read: the text class keeps its keys at the top level, the vision-language class keeps them
under `text_config`. Where a key moved between transformers versions (rope_theta), every known place is tried and
there is no default: a wrong theta loads silently.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from builder.errors import Refused

MAX_LAYERS = 10_000
MAX_POSITIONS = 1 << 24
MAX_EXPERTS = 1 << 12
MAX_ROTARY_ELEMENTS = 1 << 26
"""Positions by rotary width: 1 M positions of the family's 64. The tables are made in memory, in float64."""
Size = Annotated[int, Field(gt=0, lt=1 << 31)]
LayerType = Literal["linear_attention", "full_attention"]
DENSE_TYPES = ("qwen3_5", "qwen3_5_text")
MOE_TYPES = ("qwen3_5_moe", "qwen3_5_moe_text")


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


_Section = Annotated[int, Field(ge=0, lt=1 << 31)]


class Rope(_Frozen):
    """Rotary embedding: base frequency theta, rotated share of the head, and the (t, h, w) split of the half width."""

    theta: float = Field(gt=1, lt=1e30)
    partial_rotary_factor: float = Field(gt=0, le=1)
    mrope_section: tuple[_Section, _Section, _Section]


class MoeConfig(_Frozen):
    """A mixture of experts in place of every MLP: how many, how many a token takes, and their inner widths."""

    num_experts: int = Field(gt=0, le=MAX_EXPERTS)
    num_experts_per_tok: Size
    moe_intermediate_size: Size
    shared_expert_intermediate_size: Size


class ModelConfig(_Frozen):
    """Geometry of a Qwen3.5-family text model. Sizes in elements; names are those of config.json.

    intermediate_size is a dense model's, moe a mixture's; the other one is None.
    """

    model_type: str
    hidden_size: Size
    intermediate_size: Size | None = None
    moe: MoeConfig | None = None
    vocab_size: Size
    num_hidden_layers: int = Field(gt=0, le=MAX_LAYERS)
    layer_types: tuple[LayerType, ...]
    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    linear_num_key_heads: Size
    linear_num_value_heads: Size
    linear_key_head_dim: Size
    linear_value_head_dim: Size
    linear_conv_kernel_dim: int = Field(gt=1, le=1024)
    rms_norm_eps: float = Field(gt=1e-30, lt=1)
    max_position_embeddings: int = Field(gt=0, le=MAX_POSITIONS)
    mtp_num_hidden_layers: int = 0
    tie_word_embeddings: bool = False
    rope: Rope

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rope.partial_rotary_factor)

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values side by side."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def layer_counts(self) -> dict[str, int]:
        return {kind: self.layer_types.count(kind) for kind in ("full_attention", "linear_attention")}

    def layers_of(self, kind: LayerType) -> tuple[int, ...]:
        return tuple(i for i, layer_type in enumerate(self.layer_types) if layer_type == kind)


def parse_config(document: dict[str, Any], source: str = "config.json") -> ModelConfig:
    """Reads the parsed config.json of a checkpoint. `source` names the file in errors. Raises Refused."""
    text = document.get("text_config", document)
    if not isinstance(text, dict):
        raise Refused(f"{source} text_config", expected="an object", found=type(text).__name__, remedy="mend the file")
    model_type = document.get("model_type")
    if model_type not in (*DENSE_TYPES, *MOE_TYPES):
        raise Refused(
            f"{source} model_type",
            expected=f"one of {', '.join((*DENSE_TYPES, *MOE_TYPES))}",
            found=repr(model_type),
            remedy="export a Qwen3.5-family checkpoint",
        )
    _refuse_unsupported(text, source)
    merged = {**text, "model_type": model_type, "layer_types": _layer_types(text), "rope": _rope(text, source)}
    mixture = model_type in MOE_TYPES
    merged |= {"intermediate_size": None, "moe": text} if mixture else {"moe": None}
    merged.setdefault("tie_word_embeddings", document.get("tie_word_embeddings", False))
    try:
        config = ModelConfig.model_validate(merged)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if part != "moe")
        missing = first["type"] == "missing"
        raise Refused(
            f"{source} {key}",
            expected="a value" if missing else first["msg"],
            found="nothing" if missing else repr(first["input"]),
            remedy="mend the file",
        ) from None
    if config.moe is None and config.intermediate_size is None:
        raise Refused(f"{source} intermediate_size", expected="a value", found="nothing", remedy="mend the file")
    _check_geometry(config, source)
    return config


def _refuse_unsupported(text: dict[str, Any], source: str) -> None:
    """Keys whose other values would need another graph. attn_output_gate is unconditional in transformers."""
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "attention_bias": (False, None),
        "attn_output_gate": (True, None),
        "output_gate_type": ("swish", "silu", None),
        "mtp_use_dedicated_embeddings": (False, None),
    }
    for key, allowed in supported.items():
        if text.get(key, allowed[0]) not in allowed:
            raise Refused(
                f"{source} {key}", expected=allowed[0], found=repr(text[key]), remedy="this variant is not supported"
            )


def _layer_types(text: dict[str, Any]) -> Any:
    if text.get("layer_types") is not None:
        return text["layer_types"]
    interval = text.get("full_attention_interval", 4)
    count = text.get("num_hidden_layers", 0)
    if not (isinstance(interval, int) and interval > 0 and isinstance(count, int) and count <= MAX_LAYERS):
        return None
    return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]


def _rope(text: dict[str, Any], source: str) -> dict[str, Any]:
    """rope_theta lived at the top, in rope_scaling, and now in rope_parameters."""
    parameters, scaling = (_object(text, key, source) for key in ("rope_parameters", "rope_scaling"))
    places = [parameters, text, scaling]

    def find(key: str, default: Any = None) -> Any:
        return next((place[key] for place in places if place.get(key) is not None), default)

    # Both spellings in both places: a scaled embedding that goes unnoticed is wrong without an error.
    kinds = [place[key] for place in (parameters, scaling) for key in ("rope_type", "type") if place.get(key)]
    for kind in kinds:
        if kind in ("default", "mrope"):
            continue
        raise Refused(
            f"{source} rope_type",
            expected="default",
            found=repr(kind),
            remedy="scaled rotary embeddings are not supported",
        )
    theta = find("rope_theta")
    if theta is None:
        raise Refused(
            f"{source} rope_theta",
            expected="a number in rope_parameters or text_config",
            found="nothing",
            remedy="add it",
        )
    return {
        "theta": theta,
        "partial_rotary_factor": find("partial_rotary_factor", 0.25),
        "mrope_section": find("mrope_section", [11, 11, 10]),
    }


def _object(text: dict[str, Any], key: str, source: str) -> dict[str, Any]:
    value = text.get(key) or {}
    if not isinstance(value, dict):
        raise Refused(f"{source} {key}", expected="an object", found=type(value).__name__, remedy="mend the file")
    return value


def _check_geometry(config: ModelConfig, source: str) -> None:
    def require(holds: bool, key: str, expected: str, found: object) -> None:
        if not holds:
            raise Refused(f"{source} {key}", expected=expected, found=found, remedy="mend the file")

    require(
        len(config.layer_types) == config.num_hidden_layers,
        "layer_types",
        f"{config.num_hidden_layers} entries (num_hidden_layers)",
        len(config.layer_types),
    )
    require(
        config.num_attention_heads % config.num_key_value_heads == 0,
        "num_attention_heads",
        f"a multiple of num_key_value_heads {config.num_key_value_heads}",
        config.num_attention_heads,
    )
    require(
        config.linear_num_value_heads % config.linear_num_key_heads == 0,
        "linear_num_value_heads",
        f"a multiple of linear_num_key_heads {config.linear_num_key_heads}",
        config.linear_num_value_heads,
    )
    if config.moe is not None:
        require(
            config.moe.num_experts_per_tok <= config.moe.num_experts,
            "num_experts_per_tok",
            f"at most num_experts {config.moe.num_experts}",
            config.moe.num_experts_per_tok,
        )
    half = config.rotary_dim // 2
    require(
        half > 0 and config.rotary_dim % 2 == 0 and sum(config.rope.mrope_section) == half,
        "mrope_section",
        f"three sizes that sum to {half}, half the rotary width",
        list(config.rope.mrope_section),
    )
    require(
        config.max_position_embeddings * config.rotary_dim <= MAX_ROTARY_ELEMENTS,
        "max_position_embeddings",
        f"at most {MAX_ROTARY_ELEMENTS // config.rotary_dim} for a rotary width of {config.rotary_dim}",
        config.max_position_embeddings,
    )
    require(
        config.mtp_num_hidden_layers in (0, 1),
        "mtp_num_hidden_layers",
        "0 or 1 (one head layer, chained)",
        config.mtp_num_hidden_layers,
    )
