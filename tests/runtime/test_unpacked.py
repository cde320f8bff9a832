"""Weights unpacked once, for steps of many rows: their values, and the tokens they give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

import builder
import runtime
import runtime.target as target_module
import runtime.unpacked as unpacked_module
from builder.errors import MachineError
from fixtures.writer import Tiny
from runtime import Engine, EngineOptions, loading
from runtime.bound_run import BoundRun
from runtime.loading import LoadedPackage
from runtime.lowering import Edit
from runtime.lowering.unpacking import UNPACKED, packed_products, take_unpacked, unpack_all
from runtime.place import Place
from runtime.session import Session
from runtime.unpacked import PACKED_ROWS, unpack, unpacked_session
from tests.conftest import TinyFactory
from tests.runtime.answers import counts_of, oracle_counts, run_to_the_end
from tests.runtime.conftest import ADDRESSED


def stored(folder: Path, value: ir.Value) -> NDArray[Any]:
    """An initializer's values; onnx_ir reads no file that has other names, too."""
    tensor = value.const_value
    assert tensor is not None
    if not isinstance(tensor, ir.ExternalTensor):
        return np.asarray(tensor.numpy())
    found = np.fromfile(folder / str(tensor.location), np.uint8, tensor.length or 0, offset=tensor.offset or 0)
    return found.view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())


def decoded(folder: Path, node: ir.Node) -> NDArray[np.float64]:
    """A stored weight [N, K] in float64, by the numbers of its formats."""
    weight, *scales = (stored(folder, value) for value in node.inputs[1:4] if value is not None)
    if node.op_type == "MatMulBlockQuantizedFp4Weight":
        nibbles = np.stack([weight & 0x0F, weight >> 4], axis=-1).reshape(len(weight), -1)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[nibbles]
        block, shared = scales[0].view(ml_dtypes.float8_e4m3fn).astype(np.float64), float(scales[1].item())
        return np.asarray(values * np.repeat(block, node.attributes["block_size"].as_int(), axis=1) * shared)
    values = weight.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    columns = np.repeat(scales[0].astype(np.float64), node.attributes["block_size"].as_int(), axis=1)
    return np.asarray(values * columns[:, : values.shape[1]])


def test_unpacked_weights_are_what_their_formats_say(trained: LoadedPackage) -> None:
    folder, weights = trained.package.folder, unpack(trained.package.target, ADDRESSED)
    products = list(packed_products(ir.load(trained.package.target.path).graph))
    assert {UNPACKED.format(product.name) for product in products} == weights.keys()
    assert {product.node.op_type[-9:-6] for product in products} == {"Fp4", "Fp8"}
    for product in products:
        found = weights[UNPACKED.format(product.name)]
        assert found.shape == (product.num_columns, product.num_rows)
        np.testing.assert_allclose(found.read(), decoded(folder, product.node).T, rtol=1e-6, atol=0)


@pytest.fixture(scope="module")
def unpacked_weights(trained: LoadedPackage) -> Session:
    session = unpacked_session(trained.package.target, ADDRESSED)
    assert session
    return session


@pytest.mark.parametrize(("packed_rows", "batch"), [(0, 1), (0, 8), (4, 8)])
def test_tokens_and_acceptance_over_unpacked_weights(
    addressed: LoadedPackage,
    unpacked_weights: Session,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    packed_rows: int,
    batch: int,
) -> None:
    """In every step, and in those of more than four rows."""
    monkeypatch.setattr(addressed, "unpacked", unpacked_weights)
    monkeypatch.setattr(target_module, "PACKED_ROWS", packed_rows)
    steps: dict[bool, int] = {False: 0, True: 0}
    run = BoundRun.run

    def counted(self: BoundRun) -> None:
        if "block_table" in self.inputs and "past.0.conv" in self.inputs:
            steps[self._session is unpacked_weights._session] += 1
        run(self)

    monkeypatch.setattr(BoundRun, "run", counted)
    engine = Engine(addressed, EngineOptions(max_batch_size=batch))
    requests = run_to_the_end(engine, prompts)
    assert [request.token_ids for request in requests] == greedy_tokens
    assert counts_of(requests) == oracle_counts(reference)
    assert steps[True] and bool(steps[False]) == (packed_rows > 0)


def test_nothing_is_unpacked_where_nothing_is_quantized(tiny: TinyFactory, tmp_path: Path) -> None:
    builder.export(tiny(options=Tiny(projections="float")), tmp_path / "package")
    loaded = runtime.load(tmp_path / "package")
    assert unpacked_session(loaded.package.target, ADDRESSED) is None


def test_nothing_is_unpacked_on_a_host(trained_folder: Path) -> None:
    assert runtime.load(trained_folder, "cpu", unpacked_weights=True).unpacked is None


@pytest.mark.parametrize("asked", [False, True])
def test_weights_are_unpacked_on_a_device_that_is_asked_to(
    trained: LoadedPackage, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setattr(loading, "place_for", lambda _: ADDRESSED)
    loaded = LoadedPackage(trained.package, "auto", unpacked_weights=asked)
    assert (loaded.unpacked is not None) == asked
    assert Engine(loaded).target._unpacked is loaded.unpacked


@pytest.mark.parametrize(("rows", "unpacked"), [(PACKED_ROWS, False), (PACKED_ROWS + 1, True)])
def test_as_many_rows_as_pay_run_over_packed_weights(
    addressed: LoadedPackage, unpacked_weights: Session, monkeypatch: pytest.MonkeyPatch, rows: int, unpacked: bool
) -> None:
    monkeypatch.setattr(addressed, "unpacked", unpacked_weights)
    engine = Engine(addressed, EngineOptions(max_draft_tokens=0))
    engine.submit(range(1, rows + 1), 1)
    engine.step()
    (prepared,) = engine.target._runs._kept.values()
    assert (prepared.bound._session is unpacked_weights._session) == unpacked


def test_what_is_read_is_in_the_graph_and_nothing_else(trained: LoadedPackage) -> None:
    model = ir.load(trained.package.target.path)
    before = {product.name: product.node.inputs[1:] for product in packed_products(model.graph)}
    take_unpacked(model)
    assert not list(packed_products(model.graph))
    gone = {str(value.name) for stored in before.values() for value in stored if value is not None}
    assert gone.isdisjoint(model.graph.initializers)
    assert {UNPACKED.format(name) for name in before} <= {value.name for value in model.graph.inputs}


def two_products(scales: tuple[str, str], *, bias: str = "") -> ir.Model:
    """Of one FP8 weight."""
    tensors = [
        helper.make_tensor("w", TensorProto.FLOAT8E4M3FN, [8, 64], bytes(512), raw=True),
        *(helper.make_tensor(name, TensorProto.FLOAT, [8, 1], [1.0] * 8) for name in sorted(set(scales))),
        helper.make_tensor("bias", TensorProto.FLOAT16, [8], bytes(16), raw=True),
    ]
    op = "MatMulBlockQuantizedFp8Weight"
    more = [bias] if bias else []
    nodes = [
        helper.make_node(op, ["x", "w", scale, *more], [out], name=out, domain="com.microsoft", block_size=64)
        for scale, out in zip(scales, ("hidden_states", "b"), strict=True)
    ]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, ["T", 8]) for name in ("hidden_states", "b")]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["T", 64])
    graph = helper.make_graph(nodes, "g", [x], infos, tensors)
    return ir.from_proto(helper.make_model(graph, ir_version=10))


def test_a_weight_of_two_products_is_unpacked_once() -> None:
    model = two_products(("s", "s"))
    take_unpacked(model)
    assert [value.name for value in model.graph.inputs] == ["x", "unpacked.w"]
    assert [node.op_type for node in model.graph] == ["MatMul", "MatMul"]
    assert [value.name for value in model.graph.outputs] == ["hidden_states", "b"]
    model = two_products(("s", "s"))
    unpack_all(model)
    assert [value.name for value in model.graph.inputs] == ["unit_rows.64"]
    assert [value.name for value in model.graph.outputs] == ["unpacked.w"] and len(list(model.graph)) == 1


@pytest.mark.parametrize("edit", [take_unpacked, unpack_all])
def test_one_weight_with_other_scales_is_refused(edit: Edit) -> None:
    with pytest.raises(AssertionError, match="w has other scales in b"):
        edit(two_products(("s", "t")))


def test_a_product_that_does_more_stays_packed() -> None:
    assert len(list(packed_products(two_products(("s", "s")).graph))) == 2
    assert not list(packed_products(two_products(("s", "s"), bias="bias").graph))


@pytest.mark.parametrize("function", ["weighted_session", "Session"])
def test_what_cannot_be_unpacked_is_named(
    trained: LoadedPackage, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MachineError("model.onnx: ONNX Runtime cannot load it: no memory")

    monkeypatch.setattr(unpacked_module, function, fail)
    expected = "^quantized weights cannot be unpacked: model.onnx: .* no memory; leave --unpacked-weights out$"
    with pytest.raises(MachineError, match=expected):
        unpacked_session(trained.package.target, ADDRESSED)


def test_memory_that_is_not_there_is_named(trained: LoadedPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = Place.device_empty
    monkeypatch.setattr(Place, "device_empty", lambda self, shape, dtype: empty(self, [1 << 30, *shape], dtype))
    expected = (
        "^quantized weights cannot be unpacked: [0-9,]{15,} bytes of memory on cpu are needed and cannot be had; "
        "leave --unpacked-weights out$"
    )
    with pytest.raises(MachineError, match=expected):
        unpacked_session(trained.package.target, ADDRESSED)
