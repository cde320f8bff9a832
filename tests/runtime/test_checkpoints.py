"""Dense checkpoints of the trained checkpoint: every accepted prefix, whole generations, and steps without drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnxruntime_genai import Config

import builder
import runtime
from builder import contract
from builder.errors import MachineError
from fixtures import TRAINED
from runtime import Engine, EngineOptions, memory
from runtime.fixed_state import FixedStates, StateGeometry
from runtime.loading import LoadedPackage
from runtime.packing import Segment
from runtime.target import TargetModel
from tests.runtime.answers import counts_of, oracle_counts
from tests.runtime.test_engine import TOTALS, finish, run_all

LENGTHS = (4, 2, 1, 3)
"""Tokens of the verify step of four requests; the third one drafts nothing."""
PAST = 5


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dense") / "package"
    builder.export(TRAINED, folder, builder.ExportOptions(checkpoints="dense"))
    return folder


@pytest.fixture(scope="module")
def dense(dense_folder: Path) -> LoadedPackage:
    return runtime.load(dense_folder)


def started(package: LoadedPackage, prompts: Sequence[Sequence[int]]) -> tuple[TargetModel, FixedStates]:
    """A model whose slots have seen PAST tokens of one prompt each."""
    model = TargetModel(package.package, package.target, len(prompts), block_size=64, num_slots=len(prompts))
    assert model.states is not None
    slots = [model.states.take() for _ in prompts]
    view = model.states.view(slots)
    model.run([Segment(prompt[:PAST], 0, [slot]) for slot, prompt in zip(slots, prompts, strict=True)], view, [0] * 4)
    model.states.prepare(view, [PAST] * len(slots), [PAST] * len(slots))
    model.states.commit(view)
    return model, model.states


def segments(prompts: Sequence[Sequence[int]], order: Sequence[int], lengths: Sequence[int]) -> list[Segment]:
    return [Segment(prompts[slot][PAST : PAST + lengths[slot]], PAST, [slot]) for slot in order]


def active(states: FixedStates) -> tuple[NDArray[Any], NDArray[Any]]:
    """Committed states by slot: [slot, layer, ...]."""
    banks = states._active
    pick = [(bank, slice(None), slot) for slot, bank in enumerate(banks)]
    return np.stack([states._conv[at] for at in pick]), np.stack([states._recurrent[at] for at in pick])


def committed(
    package: LoadedPackage, prompts: Sequence[Sequence[int]], order: Sequence[int], kept: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """States after a verify step of LENGTHS of which kept[slot] tokens stay, rows in this order of slots."""
    model, states = started(package, prompts)
    view = states.view(order)
    lengths = [LENGTHS[slot] for slot in order]
    model.run(segments(prompts, order, LENGTHS), view, [length if length > 1 else 0 for length in lengths])
    states.prepare(view, [kept[slot] for slot in order], lengths)
    states.commit(view)
    return active(states)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=["views", "gathered"])
@pytest.mark.parametrize("short", [0, 1, 2, 3])
def test_every_prefix_is_its_replay_and_the_run_of_its_tokens(
    dense: LoadedPackage, trained: LoadedPackage, prompts: list[list[int]], short: int, order: Sequence[int]
) -> None:
    """All but `short` tokens stay, in one batch of rows of 4, 2, 1 and 3 tokens: each prefix of each occurs."""
    kept = [max(1, length - short) for length in LENGTHS]
    found = committed(dense, prompts[:4], order, kept)
    replayed = committed(trained, prompts[:4], order, kept)
    for own, other in zip(found, replayed, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-7)
    model, states = started(trained, prompts[:4])
    for slot, count in enumerate(kept):
        view = states.view([slot])
        model.run([Segment(prompts[slot][PAST : PAST + count], PAST, [slot])], view, [0])
        states.commit(view)
    for own, other in zip(found, active(states), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)


def bound(package: LoadedPackage, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, NDArray[Any]], FixedStates]:
    """Checkpoints of one verify step of LENGTHS, as the graph writes them over NaN."""
    model, states = started(package, prompts)
    view = states.view(range(4))
    series = states.checkpoints(view)
    for array in series.values():
        array[:] = np.nan
    model.run(segments(prompts, range(4), LENGTHS), view, [4, 2, 0, 3])
    return series, states


def test_convolutions_lie_from_the_left_and_recurrences_from_the_right(
    dense: LoadedPackage, prompts: list[list[int]]
) -> None:
    """Slot by slot against runs of each prefix alone, so that an alignment that both sides share cannot pass."""
    series, _ = bound(dense, prompts[:4])
    layers = dense.package.linear_layers
    for slot, length in enumerate(LENGTHS):
        for count in range(1, length + 1) if length > 1 else ():
            model, states = started(dense, prompts[:4])
            view = states.view([slot])
            model.run([Segment(prompts[slot][PAST : PAST + count], PAST, [slot])], view, [0])
            for layer in layers:
                conv, recurrent = (series[name][slot] for name in contract.checkpoint_names([layer]))
                alone = (
                    view.outputs[name.format(layer)][0] for name in (contract.PRESENT_CONV, contract.PRESENT_RECURRENT)
                )
                for own, other in zip((conv[count - 1], recurrent[4 - length + count - 1]), alone, strict=True):
                    np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-5)
    first = contract.checkpoint_names(layers[:1])
    apart = [np.abs(np.diff(series[name][0], axis=0)).max() for name in first]
    assert min(apart) > 1e-2, "states of neighbouring slots differ by more than the tolerance"


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_tokens_and_draft_counts_are_those_of_a_package_without(
    dense: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    reference: Mapping[str, NDArray[Any]],
    drafts: int,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' tokens and the oracle's counts, as test_engine.py finds them for a compact package; no replay."""

    def forbidden(*arguments: Any) -> None:
        raise AssertionError("replayed")

    monkeypatch.setattr(FixedStates, "_replay", forbidden)
    requests, engine = run_all(dense, prompts, drafts, batch)
    assert [request.token_ids for request in requests] == greedy_tokens
    if drafts:
        counts = counts_of(requests)
        assert counts == oracle_counts(reference, drafts)
        assert (engine.stats.draft_tokens_accepted, engine.stats.draft_tokens_evaluated) == TOTALS[drafts]


def test_a_compact_package_is_rolled_back_by_replay(
    trained: LoadedPackage, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, calls = FixedStates._replay, []
    monkeypatch.setattr(FixedStates, "_replay", lambda *arguments: (calls.append(1), replay(*arguments)))
    run_all(trained, prompts[:2], 3, 1, 16)
    assert calls


def test_any_drafter_gives_the_same_tokens(
    dense: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]
) -> None:
    """Half of the caller's drafts are right, half are random, so that every prefix is committed many times."""
    random = np.random.default_rng(3)
    engine = Engine(dense, EngineOptions(num_blocks=1, max_batch_size=1, max_draft_tokens=3))
    request = engine.submit(prompts[3], 64, 0)
    lengths = set()
    while engine.has_work:
        known = len(request.token_ids)
        right = greedy_tokens[3][known : known + int(random.integers(0, 4))]
        request.propose([*right, *random.integers(0, 2048, 3 - len(right)).tolist()])
        engine.step()
        lengths.add(len(request.token_ids) - known)
    assert request.token_ids == greedy_tokens[3] and lengths >= {1, 2, 3, 4}


def test_a_checkpoint_of_the_next_token_is_named_by_verify(dense_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot too far, none at all, or the recurrence's from the left in rows that are shorter than the series."""
    pick = FixedStates._pick
    wrong: dict[str, tuple[int, Any]] = {
        "one too far": (3, lambda self, row, slot, kept, length: pick(self, row, slot, kept + 1, length)),
        "none": (3, lambda self, row, slot, kept, length: None),
        "from the left": (2, lambda self, row, slot, kept, length: pick(self, row, slot, kept, 4)),
    }
    assert runtime.verify(dense_folder).ok
    for name, (drafts, fault) in wrong.items():
        monkeypatch.setattr(FixedStates, "_pick", fault)
        found = runtime.verify(dense_folder, runtime.VerifyOptions(draft_tokens=drafts))
        failed = [check.name for check in found.checks if not check.ok]
        assert failed and all(check.startswith("speculative equals plain") for check in failed), name


# Steps without drafts, and packages that are run by somebody who does not know of checkpoints


def test_checkpoints_are_bound_where_a_step_drafts_and_nowhere_else(
    dense: LoadedPackage, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, bool]] = []
    run = TargetModel.run
    names = set(contract.checkpoint_names(dense.package.linear_layers))

    def watched(self: TargetModel, rows: Any, view: Any, counts: Any, **more: Any) -> Any:
        outputs = run(self, rows, view, counts, **more)
        prepared = next(reversed(self._runs._kept.values()))
        seen.append((any(counts), names <= set(prepared.bound.outputs)))
        return outputs

    monkeypatch.setattr(TargetModel, "run", watched)
    _, engine = run_all(dense, prompts[:2], 0, 2, 8)
    assert engine.target.states is not None and engine.target.states._series is None, "not even their memory is taken"
    assert set(seen) == {(False, False)}
    seen.clear()
    run_all(dense, prompts[:2], 3, 2, 12)
    assert set(seen) == {(False, False), (True, True)}


@pytest.mark.parametrize("drafted", [True, False])
def test_logits_and_states_are_the_same_bits_whether_checkpoints_are_fetched_or_not(
    dense: LoadedPackage,
    trained: LoadedPackage,
    prompts: list[list[int]],
    drafted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of a compact package: what is added reads and never writes."""

    def outputs(package: LoadedPackage) -> list[NDArray[Any]]:
        model, states = started(package, prompts[:4])
        view = states.view(range(4))
        counts = [length if length > 1 and drafted else 0 for length in LENGTHS]
        run = model.run(segments(prompts, range(4), LENGTHS), view, counts)
        return [run.logits.copy(), run.hidden.copy(), *(array.copy() for array in view.outputs.values())]

    fetched = outputs(dense)
    compact = outputs(trained)
    monkeypatch.setattr(FixedStates, "checkpoints", lambda self, view: {})
    unfetched = outputs(dense)
    for own, other, plain in zip(fetched, unfetched, compact, strict=True):
        np.testing.assert_array_equal(own, other)
        np.testing.assert_array_equal(own, plain)


@pytest.mark.parametrize(("drafted", "rows"), [(True, 4), (False, 0)])
def test_an_undrafted_step_has_no_rows_of_checkpoints(
    dense: LoadedPackage, prompts: list[list[int]], drafted: bool, rows: int
) -> None:
    """Asked for all the same, the outputs are empty: nothing was computed."""
    model, states = started(dense, prompts[:4])
    view = states.view(range(4))
    model.run(segments(prompts, range(4), LENGTHS), view, [4, 2, 0, 3] if drafted else [0] * 4)
    inputs = next(reversed(model._runs._kept.values())).bound.inputs
    found = dense.target._session.run(contract.checkpoint_names(dense.package.linear_layers), dict(inputs))
    assert {array.shape[:2] for array in found} == {(rows, 4)}


def test_onnxruntime_genai_parses_the_package_and_finds_no_new_key(dense_folder: Path, trained_folder: Path) -> None:
    Config(str(dense_folder))
    documents = [json.loads((folder / "genai_config.json").read_text()) for folder in (dense_folder, trained_folder)]
    for document in documents:
        for section in ("decoder", "mtp"):
            document["model"][section].pop("shared_initializers")  # offsets in a data file
    assert documents[0] == documents[1]


# Memory


def test_their_memory_is_counted_where_an_engine_drafts(dense: LoadedPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 states of 6 layers: 512 channels * 3 and 8 heads of 32 x 32, in four bytes, for each of 2 requests."""
    needed: list[int] = []
    monkeypatch.setattr(memory, "require", lambda count, *words: needed.append(count))
    for drafts in (0, 3):
        Engine(dense, EngineOptions(num_blocks=1, max_batch_size=2, max_draft_tokens=drafts))
    head = 2 * 2 * 64 * 256 * 4  # key and value of two heads of 64, for the tokens of one block
    assert needed[1] - needed[0] == 2 * 4 * 6 * (512 * 3 + 8 * 32 * 32) * 4 + head


def test_too_many_requests_for_the_memory_are_refused(dense: LoadedPackage, monkeypatch: pytest.MonkeyPatch) -> None:
    geometry = StateGeometry.of(dense.package)
    assert geometry is not None
    room = 8 * geometry.bytes_per_slot + 8 * geometry.checkpoint_bytes_per_slot
    monkeypatch.setattr(memory, "available_bytes", lambda: room)
    Engine(dense, EngineOptions(num_blocks=1, max_batch_size=8, max_draft_tokens=0))
    with pytest.raises(MachineError, match="caches and states need"):
        Engine(dense, EngineOptions(num_blocks=1, max_batch_size=8, max_draft_tokens=3))


def test_an_engine_that_drafts_takes_it_once(dense: LoadedPackage, prompts: list[list[int]]) -> None:
    """All views share it: one array for as many rows as there are slots."""
    engine = Engine(dense, EngineOptions(num_blocks=8, max_batch_size=4))
    for prompt in prompts[:6]:
        engine.submit(prompt, 12, 3)
    finish(engine)
    states = engine.target.states
    assert states is not None and states._series is not None
    assert sum(array.nbytes for array in states._series) == 4 * states.geometry.checkpoint_bytes_per_slot
    views = [states.checkpoints(states.view(range(rows))) for rows in (1, 4)]
    for name, array in views[0].items():
        assert np.shares_memory(array, views[1][name]) and views[1][name].flags.c_contiguous
