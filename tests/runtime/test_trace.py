"""Trace: the stream of a sound package is transformers', and the first layer that is off is named."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

import builder
import runtime
from builder import contract
from builder.errors import MachineError, Refused
from fixtures import LAYERS, TRACED
from runtime import VerifyOptions, loading, session, verify
from runtime import reference as reference_module
from runtime import trace as trace_module
from runtime.lowering import Edit, NoKernel
from runtime.lowering.tapping import ADD_AND_NORM, TAP, tap_residuals
from runtime.place import HOST
from runtime.recording import dump
from runtime.rounding import Rounding, relative_error
from runtime.trace import Point, describe, trace
from runtime.verification import UsageError
from tests.damage import Damage, damaged, doubled_norm, swapped
from tests.runtime.conftest import ADDRESSED

NUM_LAYERS = 4

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def arrays() -> Arrays:
    """transformers' answers, layers included."""
    return {**np.load(TRACED / "reference.npz"), **np.load(LAYERS)}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace") / "package"
    builder.export(TRACED, folder)
    return folder


def write(path: Path, arrays: Arrays) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def ids(arrays: Arrays) -> list[int]:
    return [int(token) for token in arrays["input_ids"].ravel()]


def named(points: list[Point]) -> str | None:
    """The place that describe() names, None for a sound stream."""
    try:
        describe(points, "")
    except Refused as refusal:
        return str(refusal.subject)
    return None


# Against transformers


def test_the_stream_of_a_sound_package_is_transformers(package: Path, arrays: Arrays) -> None:
    points, _ = trace(runtime.load(package), ids(arrays), arrays["layer_hidden_states"])
    assert [(point.layer, point.part) for point in points] == [(layer, "layer") for layer in range(NUM_LAYERS)]
    assert [point.kind for point in points] == ["linear_attention"] * 3 + ["full_attention"]
    assert all(0 < point.error < 2e-6 for point in points), "32 roundings of float32"
    assert named(points) is None


FAULTS: Mapping[str, tuple[Damage, int]] = {
    "norm before GatedDeltaNet": (doubled_norm("model.layers.1.input_layernorm.weight"), 1),
    "norm before attention": (doubled_norm("model.layers.3.input_layernorm.weight"), 3),
    "norm before an MLP": (doubled_norm("model.layers.2.post_attention_layernorm.weight"), 2),
    "gate and up": (swapped("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"), 0),
    "keys and values": (swapped("model.layers.3.self_attn.k_proj.weight", "model.layers.3.self_attn.v_proj.weight"), 3),
    "two layers' decay": (
        swapped("model.layers.1.linear_attn.in_proj_a.weight", "model.layers.2.linear_attn.in_proj_a.weight"),
        1,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_layer_that_was_damaged_is_named(fault: str, arrays: Arrays, tmp_path: Path) -> None:
    damage, layer = FAULTS[fault]
    builder.export(damaged(TRACED, tmp_path / "checkpoint", damage), tmp_path / "package")
    points, _ = trace(runtime.load(tmp_path / "package"), ids(arrays), arrays["layer_hidden_states"])
    assert named(points) == f"layer {layer} ({points[layer].kind})"
    assert points[layer].error > 100 * points[layer].limit


@pytest.mark.parametrize("part", ["without the last layer", "with a batch of one", "as transformers' own list"])
def test_layers_may_be_given_in_several_ways(part: str, package: Path, arrays: Arrays, tmp_path: Path) -> None:
    layers = arrays["layer_hidden_states"]
    arrays["layer_hidden_states"] = {
        "without the last layer": layers[:-1],
        "with a batch of one": layers[:, None],
        "as transformers' own list": layers[:-1, None],
    }[part]
    found = verify(package, VerifyOptions(reference=write(tmp_path / "r.npz", arrays), trace=True))
    assert found.ok and len(found.trace) == len(arrays["layer_hidden_states"])
    (check,) = [check for check in found.checks if check.name == "trace"]
    largest = max(found.trace, key=lambda point: point.error)
    assert check.detail.startswith(f"largest relative error {largest.error:.1e} of at most {largest.limit:.1e}, layer")
    assert largest.place in check.detail and check.detail.endswith("; against the reference, 24 tokens")
    assert found.to_json()["trace"] == [vars(point) for point in found.trace]


def test_a_failed_trace_is_a_failed_check_with_the_whole_table(package: Path, arrays: Arrays, tmp_path: Path) -> None:
    arrays["layer_hidden_states"][2:] *= 1.01
    found = verify(package, VerifyOptions(reference=write(tmp_path / "r.npz", arrays), trace=True))
    (wrong,) = [check for check in found.checks if not check.ok]
    assert wrong.name == "trace" and found.exit_code == 1
    assert wrong.detail.startswith("layer 2 (linear_attention): expected a relative error of at most ")
    assert [point.ok for point in found.trace] == [True, True, False, False]


def test_without_being_asked_for_there_is_none(package: Path, arrays: Arrays, tmp_path: Path) -> None:
    found = verify(package, VerifyOptions(reference=write(tmp_path / "r.npz", arrays)))
    assert found.ok and found.to_json()["trace"] == [] and "trace" not in [check.name for check in found.checks]


@pytest.mark.parametrize("shape", [(NUM_LAYERS + 1, 24, 128), (NUM_LAYERS - 2, 24, 128), (NUM_LAYERS, 24, 64)])
def test_layers_of_another_model_are_a_failed_check(
    shape: tuple[int, ...], package: Path, arrays: Arrays, tmp_path: Path
) -> None:
    arrays["layer_hidden_states"] = np.zeros(shape, np.float32)
    found = verify(package, VerifyOptions(reference=write(tmp_path / "r.npz", arrays), trace=True))
    (wrong,) = [check for check in found.checks if not check.ok]
    assert wrong.detail.startswith("layer_hidden_states: expected 4 or 3 layers of [24, 128]") and not found.trace


def test_numbers_that_are_none_are_no_agreement(package: Path, arrays: Arrays, tmp_path: Path) -> None:
    arrays["layer_hidden_states"][1, 3] = np.nan
    found = verify(package, VerifyOptions(reference=write(tmp_path / "r.npz", arrays), trace=True))
    (wrong,) = [check for check in found.checks if not check.ok]
    assert wrong.detail.startswith("layer 1 (linear_attention)") and found.to_json()["trace"][1]["error"] is None


REFUSED: Mapping[str, tuple[Callable[[NDArray[Any]], NDArray[Any]], str]] = {
    "integers": (lambda layers: layers.astype(np.int64), "layer_hidden_states: expected floating-point numbers"),
    "one layer alone": (lambda layers: layers[0], "layer_hidden_states: expected 3 or 4 dimensions, found [24, 128]"),
    "no layer": (lambda layers: layers[:0], "expected layers of [24] rows, one for each of input_ids"),
    "other rows": (lambda layers: layers[:, :-1], "expected layers of [24] rows, one for each of input_ids"),
    "two prompts": (lambda layers: np.stack([layers, layers], 1), "expected layers of [1, 24] rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_of_another_type_or_shape_are_refused(name: str, arrays: Arrays, tmp_path: Path) -> None:
    change, words = REFUSED[name]
    arrays["layer_hidden_states"] = change(arrays["layer_hidden_states"])
    with pytest.raises(Refused, match=re.escape(words)):
        reference_module.read(write(tmp_path / "r.npz", arrays))


def test_a_last_layer_behind_the_final_norm_is_refused(arrays: Arrays, tmp_path: Path) -> None:
    """As transformers' output_hidden_states has it."""
    arrays["layer_hidden_states"][-1] = arrays["last_hidden_state"][0]
    with pytest.raises(Refused, match=r"before the final norm .* found last_hidden_state as the last"):
        reference_module.read(write(tmp_path / "r.npz", arrays))


def test_layers_without_their_prompt_are_refused(arrays: Arrays, tmp_path: Path) -> None:
    del arrays["input_ids"]
    with pytest.raises(Refused, match="layer_hidden_states: expected input_ids and logits beside it"):
        reference_module.read(write(tmp_path / "r.npz", arrays))


# Against float32 on the CPU


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for on a GPU runs over memory that is addressed as a GPU's is."""
    for module in (session, loading):
        monkeypatch.setattr(module, "place_for", lambda ep: HOST if ep == "cpu" else ADDRESSED)


def faulty(number: int) -> Edit:
    """Doubles the norm of the n-th add, as a kernel that is wrong there would."""

    def edit(model: ir.Model) -> None:
        node = [node for node in model.graph if node.op_type == ADD_AND_NORM][number]
        twice = ir.node("Add", [node.inputs[2], node.inputs[2]])
        model.graph.insert_before(node, twice)
        node.replace_input_with(2, twice.outputs[0])

    return edit


@pytest.mark.usefixtures("device")
def test_a_device_that_computes_rightly_has_nothing_to_name(trained_folder: Path) -> None:
    found = verify(trained_folder, VerifyOptions(ep="cuda", trace=True))
    assert found.ok and [point.part for point in found.trace] == ["mixer", "mlp"] * 8
    assert all(point.error < 2e-6 for point in found.trace)
    (detail,) = [check.detail for check in found.checks if check.name == "trace"]
    assert "; against float32 on the CPU, " in detail


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("number", "place"),
    [
        (0, "layer 0 mlp (linear_attention)"),
        (1, "layer 1 mixer (linear_attention)"),
        (5, "layer 3 mixer (full_attention)"),
        (6, "layer 3 mlp (full_attention)"),
    ],
)
def test_a_device_that_is_off_is_named_by_layer_and_part(
    number: int, place: str, trained_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The n-th add's norm feeds what comes behind that add."""

    def open_session(graph: Any, ep: Any, edit: Edit, place: Any) -> Any:
        def both(model: ir.Model) -> None:
            edit(model)
            if ep != "cpu":
                faulty(number)(model)

        return loading.open_session(graph, ep, both, place)

    monkeypatch.setattr(trace_module, "open_session", open_session)
    found = verify(trained_folder, VerifyOptions(ep="cuda", trace=True))
    (wrong,) = [check for check in found.checks if not check.ok]
    assert wrong.name == "trace" and wrong.detail.startswith(f"{place}: expected a relative error of at most ")
    assert "against float32 on the CPU, " in wrong.detail


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(("error", "falls_back"), [(NoKernel, True), (MachineError, False)])
def test_where_the_cpu_lacks_a_kernel_the_device_says_it_in_float32(
    trained_folder: Path, monkeypatch: pytest.MonkeyPatch, error: type[MachineError], falls_back: bool
) -> None:
    """The device runs in half precision, as far as its place says. Too little memory is no reason to ask it."""
    places = []

    def open_session(graph: Any, ep: Any, edit: Edit, place: Any) -> Any:
        places.append(place)
        if ep == "cpu":
            raise error("not here")
        return loading.open_session(graph, ep, edit, ADDRESSED)

    monkeypatch.setattr(trace_module, "open_session", open_session)
    loaded = runtime.load(trained_folder, "cuda")
    loaded.target.place = replace(ADDRESSED, widened=False)
    if falls_back:
        points, against = trace(loaded, [1, 2, 3], None)
        assert against == "float32 on the GPU, for want of a kernel on the CPU, 3 tokens"
        assert places == [None, None, ADDRESSED]
        assert points[0].limit == Rounding("float16", 1, mixture=False).limit
    else:
        with pytest.raises(MachineError, match="not here"):
            trace(loaded, [1, 2, 3], None)


def test_rows_beside_a_large_one_count() -> None:
    """As those of attention sinks are: a hundred times the others."""
    rng = np.random.default_rng(0)
    theirs = rng.standard_normal((24, 64))
    theirs[0] *= 1000
    ours = theirs.copy()
    ours[1:] = rng.standard_normal((23, 64))
    dense = Rounding("bfloat16", 8, mixture=False)
    assert relative_error(ours, theirs) < dense.limit
    assert trace_module._error(ours, theirs, dense) > 1
    assert trace_module._error(theirs, theirs, dense) == 0
    ours[0] = np.nan
    assert np.isnan(trace_module._error(ours, theirs, dense))


@pytest.mark.usefixtures("device")
def test_a_references_prompt_is_traced_where_it_has_no_layers(package: Path, arrays: Arrays, tmp_path: Path) -> None:
    del arrays["layer_hidden_states"]
    found = verify(package, VerifyOptions(ep="cuda", trace=True, reference=write(tmp_path / "r.npz", arrays)))
    (detail,) = [check.detail for check in found.checks if check.name == "trace"]
    assert found.ok and detail.endswith("against float32 on the CPU, 24 tokens")


def test_on_a_cpu_there_must_be_layers_to_compare_with(package: Path) -> None:
    for options in (
        VerifyOptions(trace=True),
        VerifyOptions(trace=True, ep="cpu", reference=TRACED / "reference.npz"),
    ):
        with pytest.raises(UsageError, match="--trace: expected a --reference with layer_hidden_states, or a GPU"):
            verify(package, options)


# Where the stream is found


def streams(model: ir.Model, feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
    tap_residuals(model, num_layers=2)
    run = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    return [np.asarray(found) for found in run.run([TAP.format(number) for number in range(4)], dict(feeds))]


def two_layers(*, residual_first: bool) -> ir.Model:
    """Two layers whose branches are the normed stream itself; the final norm keeps no sum, as in a package."""

    def value(name: str) -> ir.Value:
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(["T", 8]))

    x, scale = value("x"), ir.Value(name="s", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([8]))
    first = ir.node("SimplifiedLayerNormalization", [x, scale], {"axis": -1, "epsilon": 0.0})
    nodes, stream, branch = [first], x, first.outputs[0]
    for number in range(4):
        outputs = [value(f"n{number}"), ir.Value(name=""), ir.Value(name=""), value(f"t{number}")]
        pair = [stream, branch] if residual_first else [branch, stream]
        last = number == 3
        node = ir.node(
            ADD_AND_NORM,
            [*pair, scale],
            {"epsilon": 0.0},
            domain="com.microsoft",
            outputs=outputs[:1] if last else outputs,
        )
        nodes.append(node)
        stream, branch = outputs[3], outputs[0]
    branch.name = contract.HIDDEN_STATES
    graph = ir.Graph([x, scale], [branch], nodes=nodes, opset_imports={"": 21, "com.microsoft": 1}, name="g")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("residual_first", [True, False])
def test_the_sums_are_found_by_structure(residual_first: bool) -> None:
    """Against float64: each branch is the stream divided by its root mean square."""
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    found = streams(two_layers(residual_first=residual_first), {"x": x, "s": np.ones(8, np.float32)})
    stream = x.astype(np.float64)
    for taken in found:
        stream = stream + stream / np.sqrt((stream**2).mean(-1, keepdims=True))
        np.testing.assert_allclose(taken, stream, rtol=1e-5)


def test_a_graph_that_adds_elsewhere_is_refused(package: Path, arrays: Arrays, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=f"hidden_states: expected 6 nodes {ADD_AND_NORM} in a row, two a layer, found 4"):
        tap_residuals(two_layers(residual_first=True), num_layers=3)


def test_tapping_leaves_the_other_outputs_as_they_are(package: Path, arrays: Arrays) -> None:
    loaded = runtime.load(package)
    options = runtime.EngineOptions(num_blocks=1, max_batch_size=1)
    plain = dump(loaded, ids(arrays), 3, options)
    loaded.target = loading.open_session(loaded.package.target, "cpu", partial(tap_residuals, num_layers=NUM_LAYERS))
    tapped = dump(loaded, ids(arrays), 3, options)
    for name, array in plain.items():
        np.testing.assert_array_equal(tapped[name], array)
