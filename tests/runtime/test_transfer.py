"""One copy for all arrays of a run, here into a CPU's memory addressed as a GPU's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
import pytest

from runtime.place import DeviceArray
from runtime.transfer import COMPARED_BYTES, Block
from tests.runtime.conftest import ADDRESSED


def values(part: DeviceArray) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    start = part.address - part.owner.data_ptr()
    found = part.owner.numpy()[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
    return np.asarray(found, np.float64)


def test_every_array_arrives_in_its_place() -> None:
    arrays = {
        "ids": np.arange(3, dtype=np.int64),
        "table": np.array([[1, -1], [2, 3]], np.int32),
        "rows": np.array([[0.5, -2]], ml_dtypes.bfloat16),
        "half": np.full(300, 1.5, np.float16),
    }
    block = Block(arrays, ADDRESSED)
    assert all(part.address % 16 == 0 for part in block.parts.values())
    assert block.send()
    for name, array in arrays.items():
        assert block.parts[name].dtype == array.dtype
        np.testing.assert_array_equal(values(block.parts[name]), array.astype(np.float64))


def test_only_what_changed_is_sent() -> None:
    first, second = np.arange(3), np.zeros(2, np.float32)
    block = Block({"first": first, "second": second}, ADDRESSED)
    assert block.send()
    assert not block.send()
    second[1] = 7
    assert block.send()
    np.testing.assert_array_equal(values(block.parts["second"]), [0, 7])
    np.testing.assert_array_equal(values(block.parts["first"]), [0, 1, 2])
    assert not block.send()


def test_what_failed_is_sent_again() -> None:
    """Also when the array has not changed since: a step that was interrupted in its copy is repeated as it was."""

    class Failing:
        def __init__(self, memory: ort.OrtValue) -> None:
            self.memory = memory

        def update_inplace(self, array: np.ndarray[Any, Any]) -> None:
            raise KeyboardInterrupt

    array = np.arange(3)
    block = Block({"array": array}, ADDRESSED)
    assert block.send()
    array[0], memory = 9, block._memory
    block._memory = Failing(memory)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        block.send()
    block._memory = memory
    assert block.send()
    np.testing.assert_array_equal(values(block.parts["array"]), [9, 1, 2])


def test_what_was_sent_has_arrived_before_a_run_may_start() -> None:
    """Reading back waits for the copy."""
    seen: list[str] = []

    class Spy:
        def __init__(self, name: str) -> None:
            self.name = name

        def update_inplace(self, array: np.ndarray[Any, Any]) -> None:
            seen.append(f"send to {self.name}")

        def numpy(self) -> None:
            seen.append(f"read {self.name}")

    block = Block({"array": np.arange(3)}, ADDRESSED)
    block._memory, block._mark = Spy("memory"), Spy("mark")  # type: ignore[assignment]
    block.send()
    assert seen == ["send to memory", "read mark"]


def test_bytes_are_compared() -> None:
    array = np.array([0.0, np.nan])
    block = Block({"array": array}, ADDRESSED)
    assert block.send()
    assert not block.send(), "NaN is what it was"
    array[0] = -0.0
    assert block.send()


def test_zeros_are_sent_the_first_time_too() -> None:
    """Memory may hold anything before."""
    zeros = np.zeros(2)
    block = Block({"zeros": zeros}, ADDRESSED)
    block._memory.update_inplace(np.full(block._bytes.size, 9, np.uint8))
    assert block.send()
    np.testing.assert_array_equal(values(block.parts["zeros"]), [0, 0])


@pytest.mark.parametrize("size", [COMPARED_BYTES // 8, COMPARED_BYTES // 8 + 1])
def test_large_arrays_always_go(size: int) -> None:
    array = np.ones(size)
    block = Block({"array": array}, ADDRESSED)
    assert block.send()
    assert block.send() == (array.nbytes > COMPARED_BYTES)
    array[-1] = 2
    assert block.send()
    assert values(block.parts["array"])[-1] == 2


def test_what_a_device_wrote_comes_back() -> None:
    ids, logits = np.zeros(2, np.int64), np.zeros((2, 1), np.float16)
    block = Block({"ids": ids, "logits": logits}, ADDRESSED)
    written = np.zeros(block._bytes.size, np.uint8)
    written[:16] = np.array([4, -1]).view(np.uint8)
    written[256:260] = np.array([0.5, np.inf], np.float16).view(np.uint8)
    block._memory.update_inplace(written)
    block.fetch()
    assert ids.tolist() == [4, -1]
    assert logits.tolist() == [[0.5], [np.inf]]
