"""Experts in every layout become the same modules, and what is none of them is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from builder.checkpoint import read_header
from builder.errors import Refused
from builder.quant import packing
from builder.quant.experts import DOWN, GATE, UP, Experts, Sizes, source_name, whole
from builder.quant.modules import ModuleTensors
from builder.quant.tensors import Dense, dequantize

E, INNER, HIDDEN = 3, 128, 64
SIZES = Sizes(E, INNER, HIDDEN)
BF16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
Arrays = dict[str, NDArray[Any]]
Layout = Callable[[Mapping[str, NDArray[Any]]], Arrays]


def experts(folder: Path, arrays: Arrays, sizes: Sizes = SIZES) -> tuple[Experts, ModuleTensors]:
    """Read from a file that holds these tensors below `mlp.experts`."""
    folder.mkdir(exist_ok=True)
    stored = {f"mlp.experts.{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(stored, folder / "x.safetensors")
    tensors = ModuleTensors.of(read_header(folder / "x.safetensors"))
    return tensors.sub("mlp").experts("experts", sizes), tensors


def values(found: Experts) -> dict[str, NDArray[np.float32]]:
    parts = {GATE: found.gate, UP: found.up, DOWN: found.down}
    return {name: np.stack([dequantize(weight) for weight in weights]) for name, weights in parts.items()}


def random_bf16() -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal((E, *SIZES.shape(name))).astype(np.float32).astype(BF16) for name in (GATE, UP, DOWN)
    }


def one_by_one(weights: Mapping[str, NDArray[Any]]) -> Arrays:
    return {f"{e}.{name}.weight": weights[name][e] for name in weights for e in range(E)}


def index_last(weights: Mapping[str, NDArray[Any]]) -> Arrays:
    return {f"{name}.{e}.weight": weights[name][e] for name in weights for e in range(E)}


def stacked(weights: Mapping[str, NDArray[Any]]) -> Arrays:
    return {f"{name}.weight": weights[name] for name in weights}


def stacked_flat(weights: Mapping[str, NDArray[Any]]) -> Arrays:
    return {f"{name}.weight": weights[name].reshape(-1, weights[name].shape[-1]) for name in weights}


def fused(weights: Mapping[str, NDArray[Any]]) -> Arrays:
    return {"gate_up_proj": np.concatenate([weights[GATE], weights[UP]], axis=1), "down_proj": weights[DOWN]}


def fused_modules(weights: Mapping[str, NDArray[Any]]) -> Arrays:
    return {f"{name}.weight": array for name, array in fused(weights).items()}


LAYOUTS: Mapping[str, Layout] = {
    "one by one": one_by_one,
    "index last": index_last,
    "stacked": stacked,
    "stacked flat": stacked_flat,
    "fused": fused,
    "fused modules": fused_modules,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_the_same_experts(tmp_path: Path, layout: str) -> None:
    """Case A16. Names are those of experts stored one by one, and every stored tensor counts as used."""
    weights = random_bf16()
    found, tensors = experts(tmp_path, LAYOUTS[layout](weights))
    for name, array in values(found).items():
        assert np.array_equal(array, weights[name].astype(np.float32))
    assert tensors.linears.keys() == {f"mlp.experts.{e}.{name}" for e in range(E) for name in (GATE, UP, DOWN)}
    assert tensors.used == {f"mlp.experts.{name}" for name in LAYOUTS[layout](weights)}


def test_layouts_may_differ_between_projections(tmp_path: Path) -> None:
    weights = random_bf16()
    found, _ = experts(tmp_path, {"gate_up_proj": fused(weights)["gate_up_proj"], **index_last({DOWN: weights[DOWN]})})
    assert all(np.array_equal(array, weights[name].astype(np.float32)) for name, array in values(found).items())


def test_bulk_fused_nvfp4_is_what_its_parts_are(tmp_path: Path) -> None:
    """Codes, block scales and global scales of all experts in one tensor each; one global for gate and up."""
    rng = np.random.default_rng(1)
    codes = {name: rng.integers(0, 256, (E, rows, cols // 2), np.uint8) for name, (rows, cols) in shapes().items()}
    scales = {name: rng.uniform(0.5, 2, (E, rows, cols // 16)).astype(E4M3) for name, (rows, cols) in shapes().items()}
    both, down = rng.uniform(0.1, 1, (2, E)).astype(np.float32)
    apart: Arrays = {}
    for name, multiplier in ((GATE, both), (UP, both), (DOWN, down)):
        for e in range(E):
            own = {"weight": codes[name][e], "weight_scale": scales[name][e], "weight_scale_2": multiplier[e]}
            apart |= {f"{e}.{name}.{leaf}": np.asarray(array) for leaf, array in own.items()}
    joined = fused(codes) | {f"{name}_weight_scale": array for name, array in fused(scales).items()}
    joined |= {"gate_up_proj_weight_scale_2": both, "down_proj_weight_scale_2": down.reshape(E, 1, 1)}
    joined |= {"gate_up_proj_input_scale": np.ones(E, np.float32)}
    expected, _ = experts(tmp_path / "apart", apart)
    found, tensors = experts(tmp_path / "joined", joined)
    for name, array in values(found).items():
        assert np.array_equal(array, values(expected)[name])
    assert "mlp.experts.gate_up_proj_input_scale" not in tensors.used


def shapes() -> dict[str, tuple[int, int]]:
    return {name: SIZES.shape(name) for name in (GATE, UP, DOWN)}


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [((E,), (E, 1)), ((E, 2), (E,)), ((), ()), ((E, 2 * INNER, 1), (E, HIDDEN)), ((E, 2, 1), (E, 1, 1))],
    ids=["an expert", "gate and up", "all", "a row", "a block"],
)
def test_fp8_scales_are_sliced_with_their_weights(
    tmp_path: Path, gate_up: tuple[int, ...], down: tuple[int, ...]
) -> None:
    """In float64, by indices of the fused tensor."""
    rng = np.random.default_rng(2)
    weights = {name: rng.standard_normal((E, *shape)).astype(E4M3) for name, shape in shapes().items()}
    scales = {"gate_up_proj": rng.uniform(0.1, 1, gate_up), "down_proj": rng.uniform(0.1, 1, down)}
    arrays = fused(weights)
    for name, scale in scales.items():
        arrays[f"{name}_weight_scale"] = np.asarray(scale, np.float32)
    found, _ = experts(tmp_path, arrays)
    expected = {}
    for name, array in fused(weights).items():
        expected[name] = array.astype(np.float64) * spread(np.float32(scales[name]), array.shape)
    assert np.array_equal(values(found)[GATE], expected["gate_up_proj"][:, :INNER].astype(np.float32))
    assert np.array_equal(values(found)[UP], expected["gate_up_proj"][:, INNER:].astype(np.float32))
    assert np.array_equal(values(found)[DOWN], expected["down_proj"].astype(np.float32))


def spread(scale: NDArray[Any], shape: tuple[int, ...]) -> NDArray[np.float64]:
    """The scale of every element of a stacked weight."""
    scale = np.asarray(scale, np.float64)
    if scale.size in (1, E):
        return np.broadcast_to(scale.reshape(-1, 1, 1), shape)
    rows = scale.reshape(E, -1)
    return np.repeat(rows, shape[1] // rows.shape[1], axis=1)[:, :, None]


# What is refused


@pytest.mark.parametrize("layout", ["one by one", "index last"])
def test_a_missing_expert_is_named(tmp_path: Path, layout: str) -> None:
    arrays = {
        name: array for name, array in LAYOUTS[layout](random_bf16()).items() if "1" not in name or UP not in name
    }
    with pytest.raises(Refused, match=r"tensor mlp\.experts\.1\.up_proj\.weight: expected a weight, found none"):
        experts(tmp_path, arrays)


def test_more_experts_than_configured_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"num_experts: expected the number .* mlp\.experts\.2\.gate_proj, found 2"):
        experts(tmp_path, one_by_one(random_bf16()), Sizes(2, INNER, HIDDEN))


def test_no_experts_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"experts\.0\.gate_proj\.weight: expected experts one by one, stacked or fused"):
        experts(tmp_path, {"something.weight": np.zeros(3, np.float32)})


@pytest.mark.parametrize("layout", ["stacked", "fused", "stacked flat"])
def test_another_number_of_rows_is_refused(tmp_path: Path, layout: str) -> None:
    with pytest.raises(Refused, match=r"expected 3 experts of (112|224) rows"):
        experts(tmp_path, LAYOUTS[layout](random_bf16()), Sizes(E, 112, HIDDEN))


def test_block_scales_that_cross_from_gate_to_up_are_refused(tmp_path: Path) -> None:
    """96 rows of gate and 96 of up: the first block of 128 belongs to both."""
    rng = np.random.default_rng(0)
    arrays = {
        "gate_up_proj": rng.standard_normal((E, 192, HIDDEN)).astype(E4M3),
        "gate_up_proj_weight_scale_inv": np.ones((E, 2, 1), np.float32),
        "down_proj": rng.standard_normal((E, HIDDEN, 96)).astype(BF16),
    }
    # Two numbers an expert could as well be one for gate and one for up; three dimensions say blocks.
    with pytest.raises(Refused, match="gate_up_proj_weight_scale_inv"):
        experts(tmp_path, arrays, Sizes(E, 96, HIDDEN))


# Bytes


def test_stacked_experts_are_one_run_of_bytes(tmp_path: Path) -> None:
    found, _ = experts(tmp_path, fused(random_bf16()))
    refs = tuple(weight.weight for weight in found.down if isinstance(weight, Dense))
    joined = whole(refs)
    assert joined is not None and joined.shape == (E, HIDDEN, INNER) and joined.name == "mlp.experts.down_proj"
    assert np.array_equal(joined.read(), random_bf16()[DOWN])
    assert whole(refs[::-1]) is None and source_name(refs[1]) == joined.name


@pytest.mark.parametrize("pairs", [3, packing.TILE_ROWS, 2 * packing.TILE_ROWS + 5])
def test_rows_are_packed_as_the_plainest_loop_packs_them(pairs: int) -> None:
    """Case A32. A byte of column k holds the code of an even row in its low nibble, of the odd one in its high one."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (2 * pairs, 8))
    stored = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    packed = packing.pack_rows(stored[::2], stored[1::2])
    assert packed.shape == (8, pairs)
    for k in range(8):
        for pair in range(pairs):
            assert packed[k, pair] == codes[2 * pair, k] + 16 * codes[2 * pair + 1, k]
    by_turns = packing.interleave(np.arange(3), np.arange(10, 13))
    assert by_turns.tolist() == [0, 10, 1, 11, 2, 12]
