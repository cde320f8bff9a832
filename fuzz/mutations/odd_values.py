"""Values nobody expects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from fuzz.mutations.choices import Choices
from fuzz.mutations.drafts import (
    TRAP,
    Verbatim,
)

DEPTHS = (20, 400, 900, 940, 960, 975, 985, 990, 100_000)
"""Around Python's recursion limit of 1000: what a parser just manages may break whoever prints or compares it."""
NUMBERS: Sequence[Any] = (
    *(0, 1, -1, 2, 3, 7, 16, 64, 255, 1 << 16, 1 << 20, 1 << 24, 1 << 31, (1 << 63) - 1, 1 << 63, 1 << 64, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 1e-320, 1e38, 1e308, -1e308, math.nan, math.inf, -math.inf),
)
NAMES: Sequence[str] = (
    *("", ".", "..", "\0", "a\nb", "\x1b[2J", "\ud800", "\U0001f600", "x" * 5000, "__metadata__", "__class__"),
    *("model.embed_tokens.weight", "lm_head.weight", "lm_head.bias", "mtp.fc.weight", "mtp.fc.bias", "mtp.", "weight"),
    *("model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.99.input_layernorm.weight", "model.visual.x"),
)
LEAVES = (
    *("bias", "pre_quant_scale", "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_packed", "weight"),
    *("weight_global_scale", "input_scale", "k_scale", "weight_zero_point", "svdquant_lora_a", "weight_shape", "g_idx"),
)
PATTERNS = (
    *("re:", "re:.*", "re:(", "re:[", "re:*", "re:\\", "re:(?P<a>.)(?P=b)", "re:a{99999999999999}", "re:(?i)LINEAR"),
    *("re:(\\w+\\.?)+!", "re:(.*)*(.*)*x$", "re:^(([a-z])+.)+[A-Z]([a-z])+$", "re:" + "(" * 3000, "re:\ud800", "re:\0"),
    *("re:" + "(" * 60 + ")" * 60, "re:(a|b|" * 200, "re:" + "x?" * 40 + "x" * 40, "Linear", "*", "mtp*", "[", "[!]"),
)
ESCAPES: Sequence[Any] = (
    *("../outside.safetensors", "../../etc/passwd", "/etc/passwd", "/dev/zero", "sub/model.safetensors", "", ".", ".."),
    *("..\\outside.safetensors", "a\0.safetensors", "\ud800.safetensors", "x" * 300 + ".safetensors", "model.pt"),
    *("pytorch_model.bin", f"modeling_{TRAP}.py", "config.json", "~/x.safetensors", "missing.safetensors"),
    *(None, 7, True, [], {}, ["model.safetensors"], {"a": 1}, 1.5, "file:///etc/passwd", "%2e%2e/x.safetensors"),
)


def odd_value(choices: Choices) -> Any:
    """A JSON value of any type, small or hostile."""
    makers: Sequence[Callable[[], Any]] = (
        lambda: choices.pick(NUMBERS),
        lambda: choices.pick((None, True, False, [], {}, [[]], {"": None}, "", "null", "64")),
        lambda: choices.pick(NAMES),
        lambda: choices.pick(PATTERNS),
        lambda: [odd_value(choices) for _ in range(choices.below(4))],
        lambda: {choices.pick(NAMES): odd_value(choices) for _ in range(choices.below(4))},
        lambda: nested(choices),
        lambda: choices.pick((Verbatim("9" * 10_000), Verbatim("1e99999"), Verbatim("-"), "x" * 100_000)),
    )
    return choices.pick(makers)()


def nested(choices: Choices) -> Verbatim:
    depth = choices.pick(DEPTHS)
    opening, closing = choices.pick((("[", "]"), ('{"a":', "}"), ('[{"":', "}]")))
    return Verbatim(opening * depth + "1" + (closing * depth if depth < 100_000 else ""))


def bomb(choices: Choices) -> bytes:
    """A few dozen MB of JSON whose Python objects would take many times as much memory."""
    unit = choices.pick((b"[],", b"{},", b'{"a":[]},', b'"a",', b'{"a":{"b":{}}},', b"1,"))
    size = choices.pick((1 << 22, 1 << 24, 1 << 26, 90_000_000))
    opening, closing = choices.pick(((b'{"a":[', b"0]}"), (b"[", b"0]"), (b'{"weight_map":[', b"0]}")))
    return opening + unit * (size // len(unit)) + closing
