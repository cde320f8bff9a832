"""How an entry of a configuration finds modules: spellings, globs, regular expressions and their bounds."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from builder.errors import Refused
from builder.quant import names as matching
from builder.quant.names import Names, canonical

LAYER = "model.language_model.layers.0"
QKV = f"{LAYER}.linear_attn.in_proj_qkv"
Z = f"{LAYER}.linear_attn.in_proj_z"
QUERY, KEY, VALUE = (f"model.language_model.layers.3.self_attn.{leaf}_proj" for leaf in "qkv")
GATE = f"{LAYER}.mlp.gate_proj"
EXPERT = f"{LAYER}.mlp.experts.7.up_proj"
LINEARS = (QKV, Z, QUERY, KEY, VALUE, GATE, EXPERT, "lm_head", "mtp.fc")
OTHERS = (
    f"{LAYER}.linear_attn.conv1d.weight",
    f"{LAYER}.linear_attn.A_log",
    "model.language_model.embed_tokens.weight",
    "model.visual.blocks.0.attn.qkv.weight",
)


def names(linears: tuple[str, ...] = LINEARS) -> Names:
    return Names([*(f"{module}.weight" for module in linears), *OTHERS], linears)


@pytest.mark.parametrize(
    ("entry", "exactly", "under"),
    [
        ("lm_head", ["lm_head"], ["lm_head"]),
        ("lm_head.linear", ["lm_head"], ["lm_head"]),
        ("language_model.lm_head", ["lm_head"], ["lm_head"]),
        (QUERY, [QUERY], [QUERY]),
        (f"{QUERY}.linear", [QUERY], [QUERY]),
        ("model.layers.3.self_attn.q_proj", [QUERY], [QUERY]),
        ("language_model.model.layers.3.self_attn.q_proj", [QUERY], [QUERY]),
        ("model.layers.3.self_attn.qkv_proj", [QUERY, KEY, VALUE], [QUERY, KEY, VALUE]),
        (f"{LAYER}.linear_attn.in_proj_qkvz", [QKV, Z], [QKV, Z]),
        (f"{LAYER}.mlp", [], [GATE, EXPERT]),
        (f"{LAYER}.mlp.experts", [], [EXPERT]),
        ("mtp", [], ["mtp.fc"]),
        (f"{LAYER}.linear_attn.conv1d", [], []),
        (f"{LAYER}.linear_attn.A_log", [], []),
        ("model.visual", [], []),
        ("model.language_model.layers.0.mlp.gate", None, None),
        ("layers.0", None, None),
        ("mtp.layers.0", None, None),
        ("", None, None),
    ],
)
def test_exact_names_are_found_in_every_spelling(
    entry: str, exactly: list[str] | None, under: list[str] | None
) -> None:
    for found, expected in ((names().exactly(entry), exactly), (names().under(entry), under)):
        assert (None if found is None else list(found)) == expected


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("linear_attn", [QKV, Z]),
        ("layers.3.self_attn", [QUERY, KEY, VALUE]),
        ("visual", []),
        ("mlp.gate", None),  # the router is not gate_proj
        ("attn", []),  # model.visual.blocks.0.attn
        ("proj", None),
        (".", None),
    ],
)
def test_a_run_of_whole_parts_is_found_anywhere(entry: str, expected: list[str] | None) -> None:
    found = names().containing(entry)
    assert (None if found is None else list(found)) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*lm_head*", ["lm_head"]),
        ("mtp*", ["mtp.fc"]),
        ("mtp.layers.0*", None),
        ("model.layers.3.self_attn.[qk]_proj", [QUERY, KEY]),
        ("*.self_attn.?_proj.linear", [QUERY, KEY, VALUE]),
        ("model.visual*", []),
        ("*.conv1d", []),
        ("visual*", None),
        ("*gate", None),
    ],
)
def test_globs(pattern: str, expected: list[str] | None) -> None:
    found = names().globbed("ignore", pattern)
    assert (None if found is None else list(found)) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (".*lm_head", ["lm_head"]),
        ("lm_head$", ["lm_head"]),
        ("head", None),  # matched from the start, no substring
        (r".*self_attn\.(q|k)_proj$", [QUERY, KEY]),
        (r"model\.layers\.3\.self_attn\.q_proj", [QUERY]),
        (r"language_model\.model\.layers\.0\.mlp\.gate_proj", [GATE]),
        ("^mtp.*", ["mtp.fc"]),
        (r".*\.conv1d$", []),
        ("(?!.*language_model).*", ["lm_head", "mtp.fc"]),  # no other spelling is tried once one has been found
        (r"^(?:model\.)?visual", []),
    ],
)
def test_regular_expressions(pattern: str, expected: list[str] | None) -> None:
    found = names().regex("ignore", pattern)
    assert (None if found is None else list(found)) == expected


def test_text_only_names_are_found_by_entries_of_the_vision_language_model() -> None:
    text = names(tuple(module.replace(".language_model", "") for module in LINEARS))
    assert text.under(QUERY) == text.regex("", r"model\.language_model\.layers\.3\.self_attn\.q_proj")
    assert text.under(QUERY) == (canonical(QUERY),)


def test_nearest_names_are_modules_alike_and_none_for_a_pattern() -> None:
    assert names().nearest("model.language_model.layers.3.self_attn.qproj")[0] == QUERY
    assert names().nearest("model.language_model.layers.9.mlp.gate_proj") == [GATE]
    assert names().nearest("mtp.layers.0*") == names().nearest("re:^mtq") == names().nearest("unlike") == []


@pytest.mark.parametrize("pattern", ["(", "a**", "(?P<a>x)(?P<a>y)", "(?R)", "*", "a{99999999999}", "[z-a]"])
def test_a_pattern_that_does_not_compile_is_refused_by_its_key(pattern: str) -> None:
    with pytest.raises(Refused, match=r"^config\.json ignore '.*': expected a regular expression"):
        names().regex("config.json ignore", pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(?:a|a)*b",
        "(?:a|aa){1,60}b",
        "(a*)*?b",
        "(?x)(a+) +b",
        "(?i-s:(?x:(a+) +b))",
        "(?#[)(a+)+b(?#])",
        "a?" * 40 + "a" * 40,
        "(?:a|a)" * 40 + "b",
        ".*" * 7 + "b",
        ".{0,99}" * 7 + "b",
        r"[]+*(](a+)+b",
        r"\\(a+)+b",
    ],
)
def test_a_pattern_that_could_run_away_is_refused_before_it_runs(pattern: str) -> None:
    re.compile(pattern)
    with pytest.raises(Refused, match="may take very long"):
        names().regex("config.json ignore", pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*layers\.(" + "|".join(map(str, range(64))) + r")\.mlp\.(gate|up|down)_proj$",
        r"^(?!.*(?:layers\.\d+\.mlp\.experts\.\d+)).*$",
        r".*\.layers\.\d{1,2}\.mlp\.experts\.\d+\..*_proj.*",
        r"^(?:model\.)?(?:language_model\.)?layers\.\d+\.linear_attn\.in_proj_[ab]$",
        r"[)*+]\)*\(+",
    ],
)
def test_patterns_as_recipes_have_them_are_not_refused(pattern: str) -> None:
    """And match what Python's own engine says."""
    expected = [module for module in LINEARS if re.match(pattern, module)]
    assert [module for module in names().regex("ignore", pattern) or () if module in LINEARS] == expected


def test_patterns_that_pass_share_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five repeats that share a name in every way, and fail: the clock is asked between two names."""
    monkeypatch.setattr(matching, "PATIENCE", 0.1)
    slow = [f"{i}{'a' * 50}" for i in range(1000)]
    with pytest.raises(Refused, match="too many or too slow entries"):
        Names([], slow).regex("ignore", ".*.*.*.*.*[xy]")


def test_deep_patterns_end_in_an_answer_or_a_refusal() -> None:
    for depth in (100, 300, 499):
        found: object = None
        try:
            found = names().regex("ignore", "(" * depth + ")" * depth)
        except Refused as refusal:
            found = str(refusal)
            assert "ignore" in found
        assert found


def test_a_pattern_beyond_the_length_is_refused() -> None:
    for match in (names().regex, names().globbed):
        with pytest.raises(Refused, match="at most 1000 characters"):
            match("ignore", "a" * 1001)


@settings(deadline=None)
@given(st.text("ab.*?[]!-", max_size=12))
@example("?a*")
@example("*.a")
def test_globs_are_fnmatchs(pattern: str) -> None:
    """In the first spelling in which a module, or a name that modules lie under, is met: the first example is met in
    language_model.a alone, the second in b.a, which is no module.
    """
    linears = ("a", "a.b", "ab.ba", "b.a.b")
    above = {name.rsplit(".", depth)[0] for name in linears for depth in range(3)}
    found = Names([], linears).globbed("ignore", pattern)
    if not pattern.endswith(".linear"):
        met = (
            [name for name in above if fnmatch.fnmatchcase(spelled(name), pattern)] for spelled in matching.SPELLINGS
        )
        first = next(filter(None, met), [])
        assert (found or ()) == tuple(module for module in linears if module in first)


def test_hostile_names_are_known_by_themselves_alone() -> None:
    """Prefixes of a name with n parts take n times its length."""
    hostile = [".".join("x" * 50_000), "y" * 100_000, ".".join("z" * 40), "..", ".weight", "a..b"]
    deep = Names(hostile, [])
    assert all(deep.under(name) == () for name in hostile)
    assert deep.under("x.x") is deep.under("z.z") is None and deep.under("a.") == ()
