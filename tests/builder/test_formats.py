"""Every format in the packaged graph: what its initializers mean, what the graph answers, what is carried as float."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

import builder
import runtime
from builder.checkpoint import read_header
from builder.contract import IoSpec, TensorSpec
from builder.errors import Refused
from builder.files import NewFile
from builder.graph import Graph, element_type
from builder.models.layers import Linear
from builder.quant.modules import ModuleTensors
from builder.weights import place
from fixtures import writer
from fixtures.writer import E4M3, Config, Dialect, Edit, Kind, Tensors, Tiny
from runtime.kernels import has_cpu_kernel
from runtime.lowering import lower
from runtime.recording import dump
from tests.builder import oracle
from tests.builder.test_package import COPY
from tests.conftest import TinyFactory

FORMATS: Mapping[Kind, str] = {"fp8 block": "fp8", "mxfp8": "mxfp8", "nvfp4 32": "nvfp4", "mxfp4": "mxfp4"}
FLOAT32_PRODUCTS = 3 * 2.0**-24
"""Three roundings to float32: of a reciprocal and of two products."""
SUM_NOISE = 2e-5
"""Sums of float32 products in another order, on logits around 3."""
SPAN = "its block scales span more than E4M3 holds"
DECAY = "the decay it computes is exponentiated"
GATE = "model.layers.1.mlp.gate_proj"


def lone_linear(folder: Path, stored: Mapping[str, NDArray[Any]], shape: tuple[int, int]) -> Graph:
    """A package's graph of one linear module `m` in folder/model.onnx, with its weights."""
    folder.mkdir(exist_ok=True)
    save_file({f"m.{leaf}": array for leaf, array in stored.items()}, folder / "linear.safetensors")
    rows, columns = shape
    layer = Linear(ModuleTensors.of(read_header(folder / "linear.safetensors")), "m", rows, columns)
    inputs = (TensorSpec("x", "float16", ("num_tokens", columns)),)
    graph = Graph("one", IoSpec(inputs, (TensorSpec("y", "float16", ("num_tokens", rows)),)), element_type("float16"))
    graph.set_output("y", layer(graph, graph.input("x")))
    (folder / "weights.data").unlink(missing_ok=True)
    with NewFile(folder / "weights.data", "xxh3_128") as file:
        places = place(graph.weights.values(), file, "weights.data", graph.narrowed).places
    onnx.save(ir.to_proto(graph.to_model(places)), folder / "model.onnx")
    return graph


def run(folder: Path, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """What the lowered graph answers; the CPU widens half precision to float32."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    model = lower(folder / "model.onnx", has_cpu_kernel)
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": x})[0])


def meaning(folder: Path) -> NDArray[np.float64]:
    """The stored module `m` in float64."""
    return oracle.weight(oracle.read_checkpoint(folder), "m")


# One linear


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("shape", [(300, 320), (7, 32), (128, 160)], ids=str)
@pytest.mark.parametrize("kind", FORMATS)
def test_the_lowered_graph_agrees_with_float64(
    tmp_path: Path, kind: Kind, shape: tuple[int, int], dialect: Dialect
) -> None:
    """The identity shows the weight itself, to the bit: every scale here is exact in float32."""
    rng = np.random.default_rng(0)
    weight = (rng.standard_normal(shape) * rng.uniform(0.01, 4, (shape[0], 1))).astype(np.float32)
    graph = lone_linear(tmp_path, writer.quantize(weight, kind, dialect), shape)
    assert graph.matmuls == {FORMATS[kind]: 1} and graph.dequantized == {}
    expected = meaning(tmp_path)
    assert np.abs(expected - weight).max() < np.abs(weight).max() / 6  # it is that weight, and not a wild one
    assert np.array_equal(oracle.packaged_weights(tmp_path)["m"], expected)
    assert np.array_equal(run(tmp_path, np.eye(shape[1], dtype=np.float32)).T, expected)
    x = rng.standard_normal((5, shape[1])).astype(np.float32)
    assert np.allclose(run(tmp_path, x), x.astype(np.float64) @ expected.T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(300, 200), (130, 129), (5, 7), (260, 60)], ids=str)
@pytest.mark.parametrize("spelling", ["weight_scale", "ModelOpt", "weight_scale_inv"])
def test_ragged_block_scales_reach_the_graph(tmp_path: Path, shape: tuple[int, int], spelling: str) -> None:
    """Scales that are no powers of two, over matrices that end inside a block; one row of them for every row."""
    rng = np.random.default_rng(1)
    grid = rng.uniform(1e-3, 8, (-(-shape[0] // 128), -(-shape[1] // 128))).astype(np.float32)
    stored = grid.reshape(grid.shape[0], 1, grid.shape[1], 1) if spelling == "ModelOpt" else grid
    name = "weight_scale" if spelling == "ModelOpt" else spelling
    lone_linear(tmp_path, {"weight": rng.standard_normal(shape).astype(E4M3), name: stored}, shape)
    expected = meaning(tmp_path)
    scale = oracle.initializer(tmp_path, "m.fp8_weight_scale")
    assert scale.dtype == np.float32 and scale.shape == (shape[0], grid.shape[1])
    assert np.array_equal(scale, grid[np.arange(shape[0]) // 128])
    assert np.array_equal(oracle.packaged_weights(tmp_path)["m"], expected)
    identity = np.eye(shape[1], dtype=np.float32)
    assert np.array_equal(run(tmp_path, identity).T, expected.astype(np.float32))


# MXFP4 as the NVFP4 op


def mxfp4(exponents: NDArray[np.uint8], zero: list[tuple[int, int]] | None = None) -> Tensors:
    """An MXFP4 module with every code; the blocks of `zero` hold zeros of both signs."""
    rows, blocks = exponents.shape
    packed = np.resize(np.arange(256, dtype=np.uint8), (rows, blocks, 16))
    for block in zero or []:
        packed[block] = np.resize([0x00, 0x80, 0x08, 0x88], 16)
    return {"weight": packed.reshape(rows, -1), "weight_scale": exponents}


def assert_native(folder: Path, graph: Graph) -> None:
    assert graph.matmuls == {"mxfp4": 1} and graph.dequantized == {}
    assert np.array_equal(oracle.packaged_weights(folder)["m"], meaning(folder))


def assert_float(folder: Path, graph: Graph) -> None:
    assert graph.matmuls == {"float": 1} and graph.dequantized == {"m": SPAN}
    value = oracle.initializer(folder, "m.weight")
    assert value.dtype == np.float32 and np.array_equal(value, meaning(folder))


@pytest.mark.parametrize("lowest", [0, 1, 60, 110, 130])
def test_mxfp4_scales_are_e4m3_times_a_power_of_two_to_the_bit(tmp_path: Path, lowest: int) -> None:
    """18 exponents in a row, from 2 ** -9 to 2 ** 8 of E4M3."""
    exponents = (lowest + np.arange(18, dtype=np.uint8)).reshape(9, 2)
    graph = lone_linear(tmp_path, mxfp4(exponents), (9, 64))
    assert_native(tmp_path, graph)
    scales = oracle.e4m3(oracle.initializer(tmp_path, "m.nvfp4_weight_scale"))
    common = oracle.initializer(tmp_path, "m.nvfp4_weight_scale_2")
    assert common.shape == (1,) and common.dtype == np.float32
    assert np.array_equal(scales * common.astype(np.float64), oracle.e8m0(exponents))
    assert scales.min() == 2.0**-9 and scales.max() == 2.0**8


@pytest.mark.parametrize("exponent", [0, 1, 127, 240])
def test_mxfp4_of_one_exponent_is_native(tmp_path: Path, exponent: int) -> None:
    assert_native(tmp_path, lone_linear(tmp_path, mxfp4(np.full((3, 2), exponent, np.uint8)), (3, 64)))


@pytest.mark.parametrize(("low", "high", "native"), [(100, 117, True), (100, 118, False), (0, 130, False)])
def test_mxfp4_scales_too_far_apart_make_the_weight_float(tmp_path: Path, low: int, high: int, native: bool) -> None:
    exponents = np.array([[110, low], [high, 111]], np.uint8)
    graph = lone_linear(tmp_path, mxfp4(exponents), (2, 64))
    (assert_native if native else assert_float)(tmp_path, graph)
    assert np.array_equal(run(tmp_path, np.eye(64, dtype=np.float32)).T, meaning(tmp_path).astype(np.float32))


@pytest.mark.parametrize("outlier", [0, 60, 93, 119, 254])
def test_a_scale_over_zeros_does_not_count(tmp_path: Path, outlier: int) -> None:
    """ModelOpt gives a block of zeros exponent 0. Zeros times any scale are zeros, and keep their sign."""
    exponents = np.array([[110, outlier], [111, 101]], np.uint8)
    graph = lone_linear(tmp_path, mxfp4(exponents, zero=[(0, 1)]), (2, 64))
    assert_native(tmp_path, graph)
    assert not (oracle.initializer(tmp_path, "m.nvfp4_weight_scale") & 0x7F == 0x7F).any()
    signs = np.signbit(oracle.packaged_weights(tmp_path)["m"])
    assert np.array_equal(signs, np.signbit(meaning(tmp_path))) and signs[0, 32:].any()


def test_zeros_under_every_scale_are_zeros(tmp_path: Path) -> None:
    lone_linear(tmp_path, mxfp4(np.array([[0, 254]], np.uint8), zero=[(0, 0), (0, 1)]), (1, 64))
    assert not run(tmp_path, np.eye(64, dtype=np.float32)).any()


def test_an_exponent_that_makes_infinity_is_refused(tmp_path: Path) -> None:
    """6 * 2 ** 126 is no float32; 6 * 2 ** 125 is."""
    lone_linear(tmp_path / "largest", mxfp4(np.full((1, 2), 252, np.uint8)), (1, 64))
    with pytest.raises(Refused, match=r"weight_scale at \[0, 1\]: expected a scale below 8.50706e\+37 over weights"):
        lone_linear(tmp_path / "beyond", mxfp4(np.array([[252, 253]], np.uint8)), (1, 64))


@pytest.mark.parametrize("exponent", range(12))
def test_the_smallest_exponents_leave_a_multiplier_that_no_device_flushes(tmp_path: Path, exponent: int) -> None:
    assert_native(tmp_path, lone_linear(tmp_path, mxfp4(np.full((1, 2), exponent, np.uint8)), (1, 64)))
    assert oracle.initializer(tmp_path, "m.nvfp4_weight_scale_2")[0] >= np.finfo(np.float32).tiny


def test_one_code_that_is_not_zero_makes_its_scale_count(tmp_path: Path) -> None:
    stored = mxfp4(np.array([[110, 60], [111, 101]], np.uint8), zero=[(0, 1)])
    stored["weight"][0, 31] = 0x18
    assert_float(tmp_path, lone_linear(tmp_path, stored, (2, 64)))


# NaN block scales


def with_zero_blocks(byte: int, size: int) -> Edit:
    """Block scale [41, 1] of one module is `byte`, over zeros of both signs; [7, 0] is 0xFF over zeros."""

    def edit(tensors: Tensors, config: Config) -> None:
        packed = tensors[f"{GATE}.weight" if f"{GATE}.weight" in tensors else f"{GATE}.weight_packed"]
        scale = tensors[f"{GATE}.weight_scale"].view(np.uint8)
        packed[41, size // 2 : size] = np.resize([0x00, 0x88, 0x80, 0x08], size // 2)
        packed[7, : size // 2] = 0
        scale[41, 1], scale[7, 0] = byte, 0xFF

    return edit


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize(("kind", "size"), [("nvfp4", 16), ("nvfp4 32", 32)])
def test_nan_over_a_block_of_zeros_is_clamped(
    tiny: TinyFactory, tmp_path: Path, dialect: Dialect, kind: Kind, size: int, byte: int
) -> None:
    """What dividing 0 by 0 left behind. One such byte in a graph turns every answer into NaN."""
    folder = tiny(dialect, Tiny(projections=kind), with_zero_blocks(byte, size))
    builder.export(folder, tmp_path / "out")
    stored = oracle.read_checkpoint(folder)[f"{GATE}.weight_scale"].bytes_array()
    written = oracle.initializer(tmp_path / "out", f"{GATE}.nvfp4_weight_scale")
    nan = (stored & 0x7F) == 0x7F
    assert sorted(zip(*nan.nonzero(), strict=True)) == [(7, 0), (41, 1)]
    assert not ((written & 0x7F) == 0x7F).any() and np.array_equal(written[~nan], stored[~nan])
    values = oracle.packaged_weights(tmp_path / "out")[GATE]
    assert np.isfinite(values).all() and not values[41, size : 2 * size].any() and not values[7, :size].any()
    assert np.signbit(values[41, size : size + 4]).tolist() == [False, False, True, True]


@pytest.mark.parametrize("column", [16, 31])
def test_nan_over_a_weight_is_refused_by_row_and_block(tiny: TinyFactory, tmp_path: Path, column: int) -> None:
    """A single code that is not zero, the first or the last of its block."""

    def edit(tensors: Tensors, config: Config) -> None:
        with_zero_blocks(0x7F, 16)(tensors, config)
        tensors[f"{GATE}.weight"][41, column // 2] = 0x10 if column % 2 else 0x01

    with pytest.raises(Refused) as caught:
        builder.export(tiny("modelopt", edit=edit), tmp_path / "out")
    assert f"tensor {GATE}.weight_scale at [41, 1]: expected a finite block scale" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_nan_over_zeros_of_a_gate_is_zeros_in_float(tiny: TinyFactory, tmp_path: Path) -> None:
    name = "model.layers.0.linear_attn.in_proj_a"

    def edit(tensors: Tensors, config: Config) -> None:
        tensors[f"{name}.weight"][2, 8:16] = 0x80
        tensors[f"{name}.weight_scale"].view(np.uint8)[2, 1] = 0x7F

    builder.export(tiny("modelopt", Tiny(gates="nvfp4"), edit), tmp_path / "out")
    value = oracle.initializer(tmp_path / "out", f"{name}.weight")
    assert np.isfinite(value).all() and not value[2, 16:32].any() and value[2, :16].any()


# Whole packages


def test_real_initializers_mean_what_the_checkpoint_does(real_checkpoint: Path, tmp_path: Path) -> None:
    report = builder.export(real_checkpoint, tmp_path / "out")
    stored = oracle.read_checkpoint(real_checkpoint)
    quantized = {name.rpartition(".")[0] for name in stored if name.endswith((".weight_scale", ".weight_scale_inv"))}
    seen = set()
    for graph, file in (("target", "model.onnx"), ("mtp", "mtp.onnx")):
        found = oracle.packaged_weights(tmp_path / "out", file)
        seen |= found.keys()
        for module, values in found.items():
            expected = oracle.weight(stored, module)
            assert np.allclose(values, expected, rtol=FLOAT32_PRODUCTS, atol=0), module
        matmuls = report.to_json()["graphs"][graph]["matmuls"]
        assert sum(count for kind, count in matmuls.items() if kind != "float") == len(found)
        assert report.to_json()["graphs"][graph]["dequantized"] == {}
    assert seen == {module for module in quantized if ".experts." not in module} and len(seen) > 20


def kinds_of(stored: Mapping[str, oracle.Raw], modules: set[str]) -> Counter[str]:
    """Formats counted from the files' own types and names."""
    counts: Counter[str] = Counter()
    for module in modules:
        own = {name.rpartition(".")[2]: raw for name, raw in stored.items() if name.rpartition(".")[0] == module}
        scale = own["weight_scale"]
        packed = own["weight_packed"] if "weight_packed" in own else own["weight"]
        mx = scale.dtype == "U8"
        counts[("mxfp4" if mx else "nvfp4") if packed.dtype == "U8" else "mxfp8" if mx else "fp8"] += 1
    return counts


def test_the_census_counts_formats_as_stored(real_checkpoint: Path, tmp_path: Path) -> None:
    report = builder.export(real_checkpoint, tmp_path / "out").to_json()
    stored = oracle.read_checkpoint(real_checkpoint)
    for graph, file in (("target", "model.onnx"), ("mtp", "mtp.onnx")):
        matmuls = Counter(report["graphs"][graph]["matmuls"])
        floats = sum(node.op_type == "Gemm" for node in oracle.graph(tmp_path / "out", file).node)
        assert matmuls.pop("float") == floats
        assert +matmuls == kinds_of(stored, set(oracle.packaged_weights(tmp_path / "out", file)))


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_model_of_one_format(tiny: TinyFactory, tmp_path: Path, kind: Kind, dialect: Dialect) -> None:
    """26 projections, LM head included; answers are those of the dequantized model."""
    folder = tiny(dialect, Tiny(projections=kind))
    report = builder.export(folder, tmp_path / "out").to_json()
    matmuls = {"nvfp4": 0, "fp8": 0, "float": 6, **{FORMATS[kind]: 26}}
    assert report["graphs"]["target"]["matmuls"] == matmuls and report["graphs"]["target"]["dequantized"] == {}
    stored = oracle.read_checkpoint(folder)
    found = oracle.packaged_weights(tmp_path / "out")
    assert len(found) == 26
    for module, values in found.items():
        assert np.array_equal(values, oracle.weight(stored, module)), module

    def plain(tensors: Tensors, config: Config) -> None:
        for module in found:
            for name in [name for name in tensors if name.rpartition(".")[0] == module]:
                del tensors[name]
            tensors[f"{module}.weight"] = oracle.weight(stored, module).astype(np.float32)
        del config["quantization_config"]

    builder.export(tiny("compressed-tensors", Tiny(projections=kind), plain), tmp_path / "plain")
    ours, expected = answers(tmp_path / "out"), answers(tmp_path / "plain")
    for name in ("logits", "hidden_states", "mtp_logits"):
        assert ours[name].std() > 0.1 and np.abs(ours[name] - expected[name]).max() < SUM_NOISE, name


def answers(folder: Path) -> Mapping[str, NDArray[Any]]:
    return dump(runtime.load(folder), list(range(3, 21)), 3, runtime.EngineOptions(num_blocks=16, block_size=16))


def test_weights_stay_the_checkpoints_bytes(tiny: TinyFactory, tmp_path: Path) -> None:
    for kind in FORMATS:
        folder = tiny("modelopt", Tiny(projections=kind))
        builder.export(folder, tmp_path / kind)
        suffix = "fp8_weight" if "fp8" in kind else "nvfp4_weight"
        value = oracle.initializer(tmp_path / kind, f"{GATE}.{suffix}")
        assert value.tobytes() == oracle.read_checkpoint(folder)[f"{GATE}.weight"].data


@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
@pytest.mark.parametrize("kind", ["fp8", "fp8 block", "mxfp8", "nvfp4", "nvfp4 32", "mxfp4"])
def test_every_projection_may_be_packed_and_gates_are_float(
    tiny: TinyFactory, tmp_path: Path, kind: Kind, dialect: Dialect
) -> None:
    """Community files pack all of them. Gates are reported, with the reason, and exact."""
    folder = tiny(dialect, Tiny(projections=kind, gates=kind))
    report = builder.export(folder, tmp_path / "out").to_json()["graphs"]["target"]
    gates = {f"model.layers.{layer}.linear_attn.in_proj_{gate}" for layer in range(3) for gate in "ab"}
    assert report["dequantized"] == dict.fromkeys(gates, DECAY)
    assert report["matmuls"]["float"] == 6 and report["matmuls"][kind.split()[0]] == 26
    stored = oracle.read_checkpoint(folder)
    for module in gates:
        value = oracle.initializer(tmp_path / "out", f"{module}.weight")
        assert value.dtype == np.float32 and np.array_equal(value, oracle.weight(stored, module)), module
    names = {tensor.name for tensor in oracle.graph(tmp_path / "out").initializer}
    suffix = "nvfp4_weight" if "fp4" in kind else "fp8_weight"
    for module in ("0.linear_attn.in_proj_qkv", "0.linear_attn.out_proj", "3.self_attn.q_proj", "3.self_attn.k_proj"):
        assert f"model.layers.{module}.{suffix}" in names


def test_a_module_whose_scales_span_too_much_is_reported(tiny: TinyFactory, tmp_path: Path) -> None:
    """The one that is carried as float, exactly, and why; in either graph."""

    def edit(tensors: Tensors, config: Config) -> None:
        tensors[f"{GATE}.weight_scale"][0, :] = 100, 120

    folder = tiny("modelopt", Tiny(projections="mxfp4"), edit)
    report = builder.export(folder, tmp_path / "out").to_json()["graphs"]
    assert report["target"]["dequantized"] == {GATE: SPAN} and report["mtp"]["dequantized"] == {}
    assert report["target"]["matmuls"] == {"nvfp4": 0, "fp8": 0, "mxfp4": 25, "float": 7}
    value = oracle.initializer(tmp_path / "out", f"{GATE}.weight")
    assert value.dtype == np.float32 and np.array_equal(value, oracle.weight(oracle.read_checkpoint(folder), GATE))
    assert np.isfinite(answers(tmp_path / "out")["logits"]).all()


def test_the_smallest_scales_of_a_gate_lose_nothing(tiny: TinyFactory, tmp_path: Path) -> None:
    """2 ** -9 times 2 ** -17 is 0 in half precision; the float weight is written in float32."""
    name = "model.layers.0.linear_attn.in_proj_b"

    def edit(tensors: Tensors, config: Config) -> None:
        tensors[f"{name}.weight"] = np.resize(np.arange(256, dtype=np.uint8), (4, 32))
        tensors[f"{name}.weight_scale"].view(np.uint8)[:] = 0x01
        tensors[f"{name}.weight_scale_2"][...] = 2.0**-17

    folder = tiny("modelopt", Tiny(gates="nvfp4"), edit)
    builder.export(folder, tmp_path / "out")
    value = oracle.initializer(tmp_path / "out", f"{name}.weight")
    codes = oracle.e2m1(np.resize(np.arange(256, dtype=np.uint8), (4, 32)))
    assert np.array_equal(value, codes * 2.0**-26) and np.count_nonzero(value) == np.count_nonzero(codes) > 200
    assert np.float16(2.0**-26) == 0 and value.dtype == np.float32


def test_exponents_stored_as_e8m0_give_the_same_package(tiny: TinyFactory, tmp_path: Path) -> None:
    def typed(tensors: Tensors, config: Config) -> None:
        for name in tensors:
            if name.endswith(".weight_scale") and tensors[name].dtype == np.uint8:
                tensors[name] = tensors[name].view(ml_dtypes.float8_e8m0fnu)

    for kind in ("mxfp8", "mxfp4"):
        options = Tiny(projections=kind, gates=kind)  # type: ignore[arg-type]
        builder.export(tiny("modelopt", options), tmp_path / f"{kind} U8", COPY)
        builder.export(tiny("modelopt", options, typed), tmp_path / f"{kind} E8M0", COPY)
        for name in ("weights.data", "model.onnx", "genai_config.json"):
            one, other = (tmp_path / f"{kind} {dtype}" / name for dtype in ("U8", "E8M0"))
            assert one.read_bytes() == other.read_bytes(), name
