"""Limits of rounding: that they are the formulas they say, and that errors are what they are called."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from runtime.rounding import UNIT, Rounding, relative_error, row_errors


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("float32", np.float32)]
)
def test_the_unit_is_half_the_distance_to_the_next_number(dtype: str, kind: type) -> None:
    assert UNIT[dtype] == float(ml_dtypes.finfo(kind).eps) / 2


def test_limits_grow_with_the_root_of_the_layers_and_with_the_type() -> None:
    four, sixteen = (Rounding("float16", layers, mixture=True) for layers in (4, 16))
    assert sixteen.limit == pytest.approx(2 * four.limit)
    assert four.after(16) == sixteen
    brain = Rounding("bfloat16", 4, mixture=True)
    assert brain.limit == pytest.approx(8 * four.limit)
    assert brain.limit_by_experts == pytest.approx(8**0.5 * four.limit_by_experts)


@pytest.mark.parametrize(
    ("rounding", "measured"),
    [
        (Rounding("float16", 4, mixture=False), 3.4e-3),
        (Rounding("bfloat16", 4, mixture=False), 2.8e-2),
    ],
)
def test_what_was_measured_on_a_gpu_is_within_and_not_far(rounding: Rounding, measured: float) -> None:
    assert measured < rounding.limit < 3 * measured


@pytest.mark.parametrize(("dtype", "measured"), [("float16", 2.9e-2), ("bfloat16", 0.16)])
def test_a_mixtures_outliers_are_more_than_rounding_and_less_than_experts(dtype: str, measured: float) -> None:
    rounding = Rounding(dtype, 4, mixture=True)
    assert rounding.limit < measured < rounding.limit_by_experts < 0.5


def test_float32_turns_no_experts() -> None:
    assert not Rounding("float32", 4, mixture=True).turns_experts
    assert not Rounding("float16", 4, mixture=False).turns_experts
    assert Rounding("float16", 4, mixture=True).turns_experts


def test_a_near_tie_of_unknown_logits_is_about_what_a_gpu_turned_over() -> None:
    """8 layers in float16: 0.04, tests/runtime/test_gpu.py."""
    assert Rounding("float16", 8, mixture=False).near_tie == pytest.approx(0.04, rel=0.15)


@pytest.mark.parametrize(
    ("dtype", "mixture", "measured"),
    [
        ("float16", False, 0.003),
        ("bfloat16", False, 0.084),
        ("float16", True, 0.223),
        ("bfloat16", True, 0.553),
    ],
)
def test_near_ties_are_those_that_transformers_turns_over_in_half_precision(
    dtype: str, mixture: bool, measured: float
) -> None:
    """The trained checkpoints, 512 tokens each; of mixtures with noise of that size in the routers, 24 times."""
    assert 1.3 * measured < Rounding(dtype, 8, mixture=mixture).near_tie < 1


def test_errors_are_relative_and_by_norm() -> None:
    theirs = np.array([[3.0, 4.0], [0.0, 1.0]], np.float32)
    ours = theirs + np.array([[0.3, 0.4], [0.0, 0.0]], np.float32)
    np.testing.assert_allclose(row_errors(ours, theirs), [0.1, 0], rtol=1e-6)
    assert relative_error(ours, theirs) == pytest.approx(0.5 / 26**0.5, rel=1e-6)
    assert np.isnan(relative_error(ours, theirs * 0 + np.nan))


def test_large_half_precision_numbers_do_not_overflow() -> None:
    theirs = np.full((2, 64), 60000, np.float16)
    assert relative_error(-theirs, theirs) == pytest.approx(2)


def test_only_a_mixtures_row_with_other_experts_may_turn_over_more() -> None:
    theirs = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    ours = theirs.copy()
    ours[1] += 0.1 * theirs[2]
    size = np.sqrt((theirs.astype(np.float64) ** 2).mean(-1))
    dense, mixture = (Rounding("float16", 4, mixture=mixture) for mixture in (False, True))
    np.testing.assert_allclose(dense.turned_over(ours, theirs), 2 * dense.limit * size)
    granted = [mixture.limit, mixture.limit_by_experts, mixture.limit]
    np.testing.assert_allclose(mixture.turned_over(ours, theirs), 2 * np.array(granted) * size)
