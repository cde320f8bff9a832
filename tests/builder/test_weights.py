"""Where weights go: alignment, sharing, memory, and what does not fit float16."""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import xxhash
from numpy.typing import NDArray
from safetensors.numpy import save_file

import builder
from builder import files, package, weights
from builder.checkpoint import TensorRef, read_header
from builder.errors import Refused
from builder.exporter import ExportOptions
from builder.files import NewFile
from builder.weights import Computed, Placed, Placement, Stored, Weight, check_in_place, place

MEGABYTE = 1 << 20
BF16 = np.dtype(ml_dtypes.bfloat16)
ONNX = {"F32": ir.DataType.FLOAT, "BF16": ir.DataType.BFLOAT16, "F16": ir.DataType.FLOAT16, "U8": ir.DataType.UINT8}


def stored(folder: Path, arrays: dict[str, NDArray[Any]]) -> list[Stored]:
    """The arrays in a safetensors file, as weights in the order given."""
    folder.mkdir(exist_ok=True)
    save_file(arrays, folder / "x.safetensors")
    refs = read_header(folder / "x.safetensors")
    return [Stored(refs[name], ONNX[refs[name].dtype], refs[name].shape) for name in arrays]


def computed(name: str, array: NDArray[np.float32]) -> Computed:
    return Computed(name, (), array.shape, lambda: array)


def source(name: str, offset: int = 0) -> TensorRef:
    """A tensor that nobody reads; where it lies tells it from another."""
    return TensorRef(name, Path("x.safetensors"), "F32", (1,), offset, 4)


def placed(items: list[Weight], narrowed: set[object] | None = None) -> tuple[bytes, dict[object, Placement]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.data"
        with NewFile(path, "xxh3_128") as file:
            places = place(items, file, path.name, narrowed or set()).places
        data = path.read_bytes()
    assert file.size == len(data) and file.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    return data, places


def warnings(items: list[Weight], narrowed: set[object], path: Path) -> list[str]:
    """Of weights that are written; those that stay where they are give the same."""
    with NewFile(path, "xxh3_128") as file:
        found = place(items, file, path.name, narrowed).warnings
    path.unlink()
    in_place = [item for item in items if isinstance(item, Stored)]
    assert check_in_place(in_place, narrowed) == found
    return found


def test_bytes_arrive_at_their_places_without_needless_gaps(tmp_path: Path) -> None:
    """Large tensors start at 64 KiB, small ones at 256 bytes, and only alignment and zeros lie between."""
    rng = np.random.default_rng(0)
    sizes = (1, 255, 256, 257, 65535, 65536, 65537, 3, 200_000, 10)
    arrays = {f"t{i}": rng.integers(1, 256, size, np.uint8) for i, size in enumerate(sizes)}
    items: list[Weight] = [*stored(tmp_path, arrays), computed("half", np.full((5, 7), 0.5, np.float32))]
    data, places = placed(items)
    expected = [*(array.tobytes() for array in arrays.values()), np.full(35, 0.5, np.float32).tobytes()]
    end = 0
    for item, content in zip(items, expected, strict=True):
        at = places[item.key]
        assert at.file == "weights.data" and at.length == len(content) == item.nbytes
        alignment = 65536 if at.length >= 65536 else 256
        assert at.offset == -(-end // alignment) * alignment
        assert data[end : at.offset] == bytes(at.offset - end)
        assert data[at.offset : at.offset + at.length] == content
        end = at.offset + at.length
    assert len(data) == end


def test_one_source_has_one_place(tmp_path: Path) -> None:
    """Read as another type or shape it is still the same bytes; another tensor with equal bytes is not."""
    a, b = stored(tmp_path, {"a": np.arange(8, dtype=np.uint8), "b": np.arange(8, dtype=np.uint8)})
    same = Stored(a.ref, ir.DataType.UINT8, (2, 4))
    data, places = placed([a, b, same, a])
    assert same.key == a.key != b.key
    assert len(places) == 2 and len(data) == 256 + 8


def test_a_transform_is_computed_once(tmp_path: Path) -> None:
    calls = []
    x, y = source("x"), source("y", 4)
    first = Computed("plus_one", (x,), (1,), lambda: calls.append(1) or np.ones(1, np.float32))  # type: ignore[func-returns-value]
    again = Computed("plus_one", (x,), (1,), lambda: calls.append(2) or np.zeros(1, np.float32))  # type: ignore[func-returns-value]
    other = Computed("plus_one", (y,), (1,), lambda: calls.append(3) or np.zeros(1, np.float32))  # type: ignore[func-returns-value]
    _, places = placed([first, again, other])
    assert calls == [1, 3] and len(places) == 2


@pytest.mark.parametrize("array", [np.ones((2, 1), np.float32), np.ones((2, 2), np.float64)], ids=["shape", "type"])
def test_a_transform_that_breaks_its_promise_is_a_bug(array: NDArray[Any]) -> None:
    with pytest.raises(AssertionError, match="plus_one of x gave"):
        placed([Computed("plus_one", (source("x"),), (2, 2), lambda: array)])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    ("dtype", "fits", "beyond"),
    [(np.float32, 65504.0, 65505.0), (ml_dtypes.bfloat16, 65280.0, 65536.0)],  # neighbours in bfloat16
    ids=["F32", "BF16"],
)
def test_values_beyond_float16_are_refused_by_name(
    tmp_path: Path, dtype: type, fits: float, beyond: float, sign: int
) -> None:
    array = np.zeros((4, 4), dtype)
    array[2, 3] = sign * fits
    (item,) = stored(tmp_path / "fits", {"blown.weight": array})
    placed([item], {item.key})
    array[2, 3] = sign * beyond
    (item,) = stored(tmp_path / "beyond", {"blown.weight": array})
    placed([item])  # nobody narrows it
    with pytest.raises(Refused) as caught:
        placed([item], {item.key})
    assert f"tensor blown.weight: expected values within 65504 for float16, found {beyond}" in str(caught.value)
    assert "--dtype bfloat16" in str(caught.value)


def test_the_float16_check_sees_every_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 64)
    array = np.zeros(1000, np.float32)
    array[-1] = 1e9
    (item,) = stored(tmp_path, {"x": array})
    data, _ = placed([item])
    assert data == array.tobytes()
    for checking in (placed, check_in_place):
        with pytest.raises(Refused, match="tensor x"):
            checking([item], {item.key})


def test_nan_is_no_number(tmp_path: Path) -> None:
    array = np.zeros(4, ml_dtypes.bfloat16)
    array[1] = np.nan
    (item,) = stored(tmp_path, {"x": array})
    with pytest.raises(Refused, match="tensor x: expected finite numbers, found NaN"):
        placed([item], {item.key})


def test_narrowed_transforms_are_checked_too() -> None:
    item = Computed("plus_one", (source("norm.weight"),), (1,), lambda: np.array([70000], np.float32))
    with pytest.raises(Refused, match=r"tensor norm\.weight"):
        placed([item], {item.key})


@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_values_that_float16_turns_into_zero_are_counted(tmp_path: Path, dtype: Any) -> None:
    """2 ** -25 is half of float16's smallest number and rounds to 0, as NumPy's own conversion shows."""
    values = np.full(4000, 0.5, dtype)
    values[:100] = 0
    small = np.array([2.0**-25, -(2.0**-25), 2.0**-26, 1e-30, 2.0**-24, -3e-8], np.float32).astype(dtype)
    values[1000:1006] = small
    lost = int(np.count_nonzero(values) - np.count_nonzero(values.astype(np.float16)))
    assert lost == np.count_nonzero(small) - np.count_nonzero(small.astype(np.float16)) >= 4
    (item,) = stored(tmp_path, {"x": values})
    assert warnings([item], {item.key}, tmp_path / "data") == [
        f"{lost} of 3900 values of x are too small for float16 and become 0; --dtype bfloat16 keeps them"
    ]
    assert warnings([item], set(), tmp_path / "data") == []


def test_as_many_small_values_as_chance_has_are_not_worth_a_word(tmp_path: Path) -> None:
    """Of a million values with a deviation of 0.001, some 24 are below 2 ** -25."""
    values = (np.random.default_rng(0).standard_normal(1_000_000) / 1000).astype(np.float32)
    assert np.count_nonzero(values.astype(np.float16) == 0) > 10
    (item,) = stored(tmp_path, {"x": values})
    assert warnings([item], {item.key}, tmp_path / "data") == []


@pytest.mark.parametrize("place_of_nan", [0, weights.CHUNK_BYTES // 4 - 1, weights.CHUNK_BYTES // 4 + 70_000])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_nan_is_found_wherever_it_stands(place_of_nan: int, bad: float) -> None:
    values = np.zeros(weights.CHUNK_BYTES // 4 + 100_000, np.float32)
    values[place_of_nan] = bad
    with pytest.raises(Refused, match="expected finite numbers, found NaN or infinity"):
        placed([Computed("test", (source("x"),), values.shape, lambda: values)])


@pytest.mark.parametrize("index", [0, files.PIECE_BYTES // 2 - 1, files.PIECE_BYTES // 2, 99_999, 299_999])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_nan_is_found_wherever_it_is_stored(tmp_path: Path, index: int, dtype: Any) -> None:
    """Also where pieces meet, whether the tensor is copied or stays in its shard."""
    values = np.zeros(300_000, dtype)
    values[index] = np.nan
    (item,) = stored(tmp_path, {"x": values})
    for checking in (placed, check_in_place):
        with pytest.raises(Refused, match="tensor x: expected finite numbers, found NaN or infinity"):
            checking([item], set())


def test_float16_weights_need_no_check(tmp_path: Path) -> None:
    (item,) = stored(tmp_path, {"x": np.full(3, 65504, np.float16)})
    data, _ = placed([item], {item.key})
    assert np.frombuffer(data[:6], np.float16).tolist() == [65504] * 3


def test_a_file_that_shrank_meanwhile_is_refused(tmp_path: Path) -> None:
    (item,) = stored(tmp_path, {"x": np.zeros(100, np.float32)})
    os.truncate(item.ref.file, item.ref.offset + 40)
    with pytest.raises(Refused, match="tensor x: expected 400 bytes, found 40; the file changed while it was read"):
        placed([item])


def test_tensors_larger_than_a_chunk_are_written_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One write of more than 2 GB fails on some systems, and a whole tensor need never be in memory."""
    sizes: list[int] = []
    write, copy = os.write, os.copy_file_range

    def recorded_write(descriptor: int, data: memoryview) -> int:
        sizes.append(len(data))
        return write(descriptor, data)

    def recorded_copy(source: int, target: int, count: int, offset: int) -> int:
        sizes.append(count)
        return copy(source, target, count, offset)

    monkeypatch.setattr(os, "write", recorded_write)
    monkeypatch.setattr(os, "copy_file_range", recorded_copy)
    path = tmp_path / "file"
    path.write_bytes(b"x" * (100 * MEGABYTE))
    ref = TensorRef("big", path, "U8", (100 * MEGABYTE,), 0, 100 * MEGABYTE)
    array = np.ones(10 * MEGABYTE, np.float32)
    big = Stored(ref, ir.DataType.UINT8, ref.shape)
    for item, most in ((big, 64 * MEGABYTE), (Computed("ones", (), array.shape, lambda: array), 16 * MEGABYTE)):
        sizes.clear()
        with NewFile(tmp_path / "out", "xxh3_128") as file:
            place([item], file, "out", set())
        assert sum(sizes) == item.nbytes and max(sizes) == most
        (tmp_path / "out").unlink()


def test_a_hole_stays_a_hole(tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    path.touch()
    os.truncate(path, 100 * MEGABYTE)
    with path.open("r+b") as file:
        file.seek(50 * MEGABYTE)
        file.write(b"y" * 4096)
    ref = TensorRef("big", path, "U8", (100 * MEGABYTE,), 0, 100 * MEGABYTE)
    with NewFile(tmp_path / "out", "xxh3_128") as written:
        place([Stored(ref, ir.DataType.UINT8, ref.shape)], written, "out", set())
    data = path.read_bytes()
    assert (tmp_path / "out").read_bytes() == data
    assert written.digest == f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}"
    if path.stat().st_blocks * 512 < MEGABYTE:  # the file system has holes
        assert (tmp_path / "out").stat().st_blocks * 512 < MEGABYTE


def test_a_full_disk_is_not_taken_for_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a copy between two files fails with may be either's fault; the system's word is passed on."""

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "copy_file_range", full)
    (item,) = stored(tmp_path, {"x": np.zeros(100, np.float32) + 1})
    with pytest.raises(OSError, match="No space left"):
        placed([item])


def peak_bytes(items: list[Weight], narrowed: set[object], path: Path) -> int:
    with NewFile(path, "xxh3_128") as file:
        tracemalloc.start()
        try:
            place(items, file, "weights.data", narrowed)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """64 stored and 64 computed tensors of 1 MB each: never more than a few of them at once."""
    path = tmp_path / "ones"
    path.write_bytes(np.ones(32 * MEGABYTE, BF16).tobytes())  # of a sparse file nothing would be read
    refs = [TensorRef(f"t{i}", path, "BF16", (MEGABYTE // 2,), i * MEGABYTE, MEGABYTE) for i in range(64)]
    items: list[Weight] = [Stored(ref, ir.DataType.BFLOAT16, ref.shape) for ref in refs]
    narrowed = {item.key for item in items}  # which widens each for its check
    items += [
        Computed("plus_one", (ref,), ref.shape, lambda ref=ref: ref.read().astype(np.float32) + np.float32(1))
        for ref in refs
    ]
    assert peak_bytes(items, narrowed, tmp_path / "data") < 8 * MEGABYTE


def test_an_export_writes_within_the_memory_of_its_largest_tensor(
    trained_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real graphs' promises hold no arrays: 7.6 MB of weights, the largest 1 MB."""
    peaks: list[int] = []
    largest: list[int] = []

    def traced(items: Any, file: NewFile, file_name: str, narrowed: set[object]) -> Placed:
        tracemalloc.start()
        try:
            placed = place(items, file, file_name, narrowed)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        largest.append(max(at.length for at in placed.places.values()))
        return placed

    monkeypatch.setattr(package, "place", traced)
    report = builder.export(trained_checkpoint, tmp_path / "out", ExportOptions(weights="copy"))
    assert report.weights["copied_bytes"] > 7 * largest[0]
    assert peaks[0] < 3 * largest[0] + MEGABYTE


TASKS = {
    "copy": (ExportOptions(weights="copy"), ["writing weights"]),
    "link": (ExportOptions(weights="link"), ["checking linked weights", "writing weights"]),
    "hash": (
        ExportOptions(weights="link", hash=True),
        [f"reading model_{part}.safetensors" for part in ("backbone", "mtp")]
        + ["checking linked weights", "writing weights"],
    ),
}


@pytest.mark.parametrize("case", TASKS)
def test_progress_counts_the_bytes(trained_checkpoint: Path, tmp_path: Path, case: str) -> None:
    """Task by task, each up to its own total."""
    options, tasks = TASKS[case]
    seen: list[tuple[str, int, int]] = []
    builder.export(trained_checkpoint, tmp_path / "out", options, progress=lambda *step: seen.append(step))
    assert [task for task, _ in itertools.groupby(seen, key=lambda step: step[0])] == tasks
    for task in tasks:
        done, totals = zip(*((step[1], step[2]) for step in seen if step[0] == task), strict=True)
        assert len(set(totals)) == 1 and done[-1] == totals[0]
        assert all(a < b for a, b in itertools.pairwise(done))
