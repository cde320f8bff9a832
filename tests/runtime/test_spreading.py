"""Rows that attention takes for sequences of their own: the same tokens from the same cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from builder import contract
from runtime import Engine, EngineOptions, packing
from runtime.loading import LoadedPackage
from runtime.lowering.spreading import ATTENDED_LENGTHS, LENGTHS, MAX_SPREAD_ROWS, spread_attention
from runtime.packing import PackedBatch, Segment, shape_of
from tests.runtime.answers import counts_of, oracle_counts, run_to_the_end

TWO = (Segment([5, 6, 7], 4, [2, 0]), Segment([8], 9, [1, 3, 4]))


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of any length."""
    monkeypatch.setattr(packing, "SPREAD_CONTEXT", 0)


@pytest.mark.usefixtures("at_once")
def test_each_row_is_a_sequence_over_the_blocks_of_its_request() -> None:
    shape = shape_of(TWO, spread=True)
    assert shape == (4, 2, 4, 4)
    batch = PackedBatch(shape, spread=True)
    batch.fill(TWO)
    table = [[2, 0, -1, -1]] * 3 + [[1, 3, 4, -1]]
    assert batch.arrays[contract.BLOCK_TABLE].tolist() == table
    assert batch.arrays[contract.PAST_LENGTHS].tolist() == [4, 5, 6, 9]
    assert batch.arrays[ATTENDED_LENGTHS].tolist() == [0, 1, 2, 3, 4]
    assert batch.arrays[contract.CUMULATIVE_LENGTHS].tolist() == [0, 3, 4], "states know requests alone"
    assert batch.arrays[contract.ATTENTION_METADATA].tolist() == [1, 10, 10]
    batch.fill(TWO, block_size=16)
    assert batch.arrays[contract.ATTENTION_METADATA].tolist() == [1, 64, 1], "what any such step may have"
    batch.fill((Segment([5, 6, 7], 4, [3]), Segment([8], 9, [1, 2])))
    assert batch.arrays[contract.BLOCK_TABLE].tolist() == [[3, -1, -1, -1]] * 3 + [[1, 2, -1, -1]]


@pytest.mark.parametrize("spread", [False, True])
def test_short_texts_and_prompts_are_attended_as_requests(spread: bool) -> None:
    shape = shape_of(TWO, spread=spread)
    assert shape == (4, 2, 4 if spread else 3, 2)
    batch = PackedBatch(shape, spread=spread)
    batch.fill(TWO)
    assert batch.arrays[contract.PAST_LENGTHS].tolist() == [4, 9]
    assert batch.arrays[contract.ATTENTION_METADATA].tolist() == [3, 10, 10]
    assert (ATTENDED_LENGTHS in batch.arrays) == spread
    if spread:
        assert batch.arrays[ATTENDED_LENGTHS].tolist() == batch.arrays[contract.CUMULATIVE_LENGTHS].tolist()
    batch.fill(TWO, block_size=16)
    longest = 16 * (4 if spread else 3)
    assert batch.arrays[contract.ATTENTION_METADATA].tolist() == [3, longest, 1], (
        "one row may have all that others lack"
    )
    batch.fill((Segment([5, 6, 7], 4, [3]), Segment([8], 9, [1, 2])))
    assert batch.arrays[contract.BLOCK_TABLE][:, :3].tolist() == [[3, -1, -1], [1, 2, -1]]


@pytest.mark.parametrize(("rows", "sequences"), [(MAX_SPREAD_ROWS, MAX_SPREAD_ROWS + 1), (MAX_SPREAD_ROWS + 1, 2)])
def test_more_rows_than_a_step_verifies_are_a_prompt(rows: int, sequences: int) -> None:
    long = Segment(range(rows), 10_000, range(700))
    assert shape_of([long, TWO[1]], spread=True).num_sequences == sequences


@pytest.mark.parametrize(("blocks", "columns"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_tables_are_as_wide_as_the_next_power_of_two(blocks: int, columns: int) -> None:
    assert shape_of([Segment([1], 5, range(blocks))], spread=True).num_columns == columns
    assert shape_of([Segment([1], 5, range(blocks))], spread=False).num_columns == blocks


@pytest.mark.parametrize("block_size", [None, 16])
def test_what_a_recorded_run_was_told_stands_still(block_size: int | None) -> None:
    one = [Segment([8], 9, [1, 3])]
    batch = PackedBatch(shape_of(one, spread=True), spread=True)
    batch.fill(one, block_size)
    before = batch.arrays[contract.ATTENTION_METADATA].tolist()
    batch.advance([7])
    assert batch.arrays[contract.PAST_LENGTHS].tolist() == [10]
    after = before if block_size else [1, 11, 11]
    assert batch.arrays[contract.ATTENTION_METADATA].tolist() == after


def test_a_long_text_makes_the_whole_step_spread() -> None:
    long = Segment([1, 2], packing.SPREAD_CONTEXT, range(129))
    assert shape_of([*TWO, long], spread=True) == (6, 3, 256, 6)
    assert shape_of([*TWO, long], spread=False) == (6, 3, 129, 3)


@pytest.mark.parametrize(("context", "batch"), [(0, 1), (0, 8), (60, 8)])
def test_drafts_are_verified_row_by_row(
    addressed: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    context: int,
    batch: int,
) -> None:
    """From the first token on, and from the 60th on, which falls in the middle of texts."""
    monkeypatch.setattr(packing, "SPREAD_CONTEXT", context)
    engine = Engine(addressed, EngineOptions(num_blocks=64, block_size=16, max_batch_size=batch))
    requests = run_to_the_end(engine, prompts)
    assert [request.token_ids for request in requests] == greedy_tokens
    assert counts_of(requests) == oracle_counts(reference)
    assert engine.proposer
    targets = [key[0] for key in engine.target._runs._kept]
    firsts = [key[1] for key in engine.proposer.head._runs._kept if key[0] == "device" and key[3] == 0]
    assert True in spread_of(targets)
    assert spread_of(firsts) == ({False, True} if context else {True})


def spread_of(shapes: list[Any]) -> set[bool]:
    """Of the shapes with several rows a request: which kinds there are."""
    return {shape.num_sequences > shape.batch_size for shape in shapes if shape.num_tokens > shape.batch_size}


def test_attention_alone_reads_the_new_lengths(trained: LoadedPackage) -> None:
    model = ir.load(trained.package.target.path)
    spread_attention(model)
    inputs = {value.name: value for value in model.graph.inputs}
    readers = {use.node.op_type for use in inputs[ATTENDED_LENGTHS].uses()}
    assert readers == {"PagedAttention"}
    assert {use.node.op_type for use in inputs[contract.BLOCK_TABLE].uses()} == readers
    assert {use.node.op_type for use in inputs[contract.PAST_LENGTHS].uses()} == readers
    assert "PagedAttention" not in {use.node.op_type for use in inputs[contract.CUMULATIVE_LENGTHS].uses()}
    assert {use.idx for use in inputs[ATTENDED_LENGTHS].uses()} == {LENGTHS}
    assert np.array_equal([str(dim) for dim in inputs[contract.BLOCK_TABLE].shape or ()][:1], ["num_sequences"])


def test_the_bound_is_crossed_in_the_middle_of_a_text(
    trained: LoadedPackage, addressed: LoadedPackage, prompts: list[list[int]]
) -> None:
    """As it stands, with texts as long: one of them sets out 16 tokens below."""
    tokens = [token for prompt in prompts for token in prompt]
    long = (tokens * (1 + packing.SPREAD_CONTEXT // len(tokens)))[: packing.SPREAD_CONTEXT - 16]
    found = []
    for loaded in (trained, addressed):
        engine = Engine(loaded, EngineOptions(max_batch_size=2, num_blocks=12))
        requests = [engine.submit(prompt, 40, 3, ()) for prompt in (long, prompts[0])]
        while engine.has_work:
            engine.step()
        found.append(([request.token_ids for request in requests], counts_of(requests)))
    assert found[0] == found[1]
    assert spread_of([key[0] for key in engine.target._runs._kept if key[0].num_tokens <= 8]) == {False, True}  # type: ignore[attr-defined]
