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

import builder
import runtime
import runtime.target as target_module
from builder.errors import MachineError
from fixtures.writer import Tiny
from runtime import Engine, EngineOptions
from runtime.bound_run import BoundRun
from runtime.loading import LoadedPackage
from runtime.lowering.unpacking import UNPACKED, packed_products
from runtime.session import Session
from runtime.unpacked import REMEDY, unpack, unpacked_session
from tests.conftest import TinyFactory
from tests.runtime.conftest import ADDRESSED
from tests.runtime.counts import counts_of


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
def unpacked(trained: LoadedPackage) -> Session:
    session = unpacked_session(trained.package.target, ADDRESSED)
    assert session
    return session


@pytest.mark.parametrize(("packed_rows", "batch"), [(0, 1), (0, 8), (4, 8)])
def test_tokens_and_acceptance_over_unpacked_weights(
    addressed: LoadedPackage,
    unpacked: Session,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    packed_rows: int,
    batch: int,
) -> None:
    """In every step, and in those of more than four rows."""
    monkeypatch.setattr(addressed, "unpacked", unpacked)
    monkeypatch.setattr(target_module, "PACKED_ROWS", packed_rows)
    steps: dict[bool, int] = {False: 0, True: 0}
    run = BoundRun.run

    def counted(self: BoundRun) -> None:
        if "block_table" in self.inputs and "past.0.conv" in self.inputs:
            steps[self._session is unpacked._session] += 1
        run(self)

    monkeypatch.setattr(BoundRun, "run", counted)
    engine = Engine(addressed, EngineOptions(max_batch_size=batch))
    requests = [engine.submit(prompt, 64, 3) for prompt in prompts]
    while engine.has_work:
        engine.step()
    assert [request.token_ids for request in requests] == greedy_tokens
    assert counts_of(requests) == [tuple(row) for row in reference["accepted_evaluated_k3"].tolist()]
    assert steps[True] and bool(steps[False]) == (packed_rows > 0)


def test_nothing_is_unpacked_where_nothing_is_quantized(tiny: TinyFactory, tmp_path: Path) -> None:
    builder.export(tiny(options=Tiny(projections="float")), tmp_path / "package")
    loaded = runtime.load(tmp_path / "package")
    assert unpacked_session(loaded.package.target, ADDRESSED) is None


def test_nothing_is_unpacked_on_a_host(trained_folder: Path) -> None:
    assert runtime.load(trained_folder, "cpu", unpacked_weights=True).unpacked is None


def test_what_cannot_be_unpacked_is_named(trained: LoadedPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: BoundRun) -> None:
        raise MachineError("ONNX Runtime failed in the middle of a run: Failed to allocate memory")

    monkeypatch.setattr(BoundRun, "run", fail)
    expected = "quantized weights cannot be unpacked: .*Failed to allocate memory; leave --unpacked-weights out"
    with pytest.raises(MachineError, match=expected):
        unpack(trained.package.target, ADDRESSED)


def test_memory_for_them_that_is_not_there_is_named() -> None:
    expected = r"[\d,]{19,} bytes of memory on cpu are needed and cannot be had; leave --unpacked-weights out"
    with pytest.raises(MachineError, match=expected):
        ADDRESSED.device_empty((1 << 30, 1 << 30), np.dtype(np.float16), remedy=REMEDY)
