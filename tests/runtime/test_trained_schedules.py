"""Random schedules on the trained checkpoint through real sessions; TRAINED_SCHEDULES says how many.

Tokens must be transformers'. After every commit the head's cache must be that of a head which read the whole text in
one pass, and every draft the one that this head makes at that place: so acceptance after a pause, a preemption or a
failed step is acceptance without it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from builder.contract import PAST_KEY, PAST_VALUE
from runtime import Engine, EngineOptions, FailAt, InjectedFailure, Request
from runtime.head import HeadModel
from runtime.loading import LoadedPackage
from runtime.packing import Segment
from runtime.request import table_of
from runtime.target import TargetModel

SCHEDULES = int(os.environ.get("TRAINED_SCHEDULES", "25"))
TOLERANCE = 1e-4
TIE = 1e-3
"""Two best logits nearer than this may change places with the shape of a batch."""
DRAFTS = 3
LENGTH = 40


@dataclass(frozen=True)
class Teacher:
    """The head on one known text: cache rows [P, heads, dim] of keys and values, and DRAFTS drafts after each row, with
    how far the best logit of each is above the second.
    """

    caches: dict[str, NDArray[Any]]
    drafts: list[list[int]]
    leads: list[list[float]]


def teach(package: LoadedPackage, text: Sequence[int]) -> Teacher:
    """Runs target and head over the text in one pass each, then the chain of drafts from every row on."""
    blocks = list(range(-(-(len(text) + DRAFTS) // 256)))
    target = TargetModel(package.package, package.target, len(blocks), 256, 1)
    assert target.states and package.package.mtp
    view = target.states.view([target.states.take()])
    hidden = target.run([Segment(text, 0, blocks)], view, [0]).hidden.copy()
    head = HeadModel(package.package.mtp, package.mtp(), len(blocks), 256)
    head.run([Segment(text[1:], 0, blocks)], [hidden[:-1]])
    names = PAST_KEY.format(0), PAST_VALUE.format(0)
    caches = {name: head._cache.inputs[name].reshape(-1, *head._cache.inputs[name].shape[2:]).copy() for name in names}
    drafts: list[list[int]] = []
    leads: list[list[float]] = []
    for row in range(len(text) - 1):
        token, state = text[row + 1], hidden[row : row + 1]
        drafts.append([])
        leads.append([])
        for stage in range(DRAFTS):
            run = head.run([Segment([token], row + stage, blocks)], [state])
            best = np.sort(run.logits[0])[-2:]
            token, state = int(run.logits[0].argmax()), run.hidden.copy()
            drafts[-1].append(token)
            leads[-1].append(float(best[1] - best[0]))
    return Teacher(caches, drafts, leads)


@pytest.fixture(scope="module")
def teachers(trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]]) -> list[Teacher]:
    return [teach(trained, [*prompt, *greedy]) for prompt, greedy in zip(prompts, greedy_tokens, strict=True)]


def check_head(engine: Engine, request: Request, teacher: Teacher) -> None:
    assert engine.proposer
    for name, rows in teacher.caches.items():
        array = engine.proposer.head._cache.inputs[name]
        ours = array[table_of(request).blocks].reshape(-1, *array.shape[2:])[: request.head_length]
        np.testing.assert_allclose(ours, rows[: request.head_length], atol=TOLERANCE, rtol=0)


def check_drafts(request: Request, drafts: Sequence[int], teacher: Teacher) -> bool:
    """Whether the drafts are the teacher's; where they fork it must be at a tie."""
    row = request.num_known - 2
    expected = teacher.drafts[row][: len(drafts)]
    fork = next((i for i, (ours, theirs) in enumerate(zip(drafts, expected, strict=True)) if ours != theirs), None)
    if fork is None:
        return True
    assert teacher.leads[row][fork] < TIE, f"draft {fork} after row {row}: {drafts}, the teacher has {expected}"
    return False


def test_random_schedules(
    trained: LoadedPackage, prompts: list[list[int]], greedy_tokens: list[list[int]], teachers: list[Teacher]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SCHEDULES):
        try:
            run_schedule(trained, prompts, greedy_tokens, teachers, seen, seed)
        except Exception as error:
            error.add_note(f"in schedule {seed}")
            raise
    print(f"near-ties of drafts: {seen['ties']}")
    assert min(seen[name] for name in ("drafts", "preemptions", "failures", "rejected")) >= SCHEDULES / 3, seen


def some_engine(trained: LoadedPackage, prompts: list[list[int]], random: np.random.Generator) -> Engine:
    """Blocks, batch and token budget from narrow to plenty."""
    block_size = int(random.choice([3, 7, 16, 32]))
    needed = max(-(-(len(prompt) + LENGTH) // block_size) for prompt in prompts)
    options = EngineOptions(
        num_blocks=int(needed * random.choice([1, 1.5, 3, 9])),
        block_size=block_size,
        max_batch_size=int(random.choice([2, 4, 8])),
        max_scheduled_tokens=int(random.choice([6, 23, 64, 2048])),
        proposer="mtp",
    )
    return Engine(trained, options)


def disturb(engine: Engine, step: int, random: np.random.Generator) -> None:
    """Changes of K, a preemption, a failure in this step: each now and then."""
    for request in list(engine._running):
        if random.random() < 0.05:
            request.set_draft_tokens(int(random.integers(0, DRAFTS + 1)))
    if engine._running and random.random() < 0.03:
        engine.preempt(engine._running[int(random.integers(len(engine._running)))])
    if random.random() < 0.05:
        engine._watch = FailAt(random.choice(["reserve", "draft", "run", "accept", "follow", "prepare"]), step)


def run_schedule(
    trained: LoadedPackage,
    prompts: list[list[int]],
    greedy_tokens: list[list[int]],
    teachers: list[Teacher],
    seen: Counter[str],
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    engine = some_engine(trained, prompts, random)
    make_drafts = engine._draft
    rounds: list[dict[Request, tuple[int, ...]]] = []

    def watched(*arguments: Any) -> Any:
        drafted = make_drafts(*arguments)
        rounds.append({request: tuple(tokens) for request, tokens in drafted.tokens.items()})
        return drafted

    engine._draft = watched  # type: ignore[method-assign]
    arrivals = sorted((int(random.integers(0, 25)), int(random.integers(0, 8))) for _ in range(8))
    which: dict[Request, int] = {}
    ties = 0
    step = 0
    while arrivals or engine.has_work:
        while arrivals and arrivals[0][0] <= step:
            index = arrivals.pop(0)[1]
            length = int(random.choice([5, 17, LENGTH]))
            which[engine.submit(prompts[index], length, int(random.integers(0, DRAFTS + 1)))] = index
        disturb(engine, step, random)
        rounds.clear()
        try:
            known = {request: request.num_known for request in which}
            engine.step()
        except InjectedFailure:
            assert known == {request: request.num_known for request in known}
        else:
            for request, drafts in (rounds[0] if rounds else {}).items():
                grown, request.token_ids = request.token_ids, request.token_ids[: known[request] - len(request.prompt)]
                ties += not check_drafts(request, drafts, teachers[which[request]])
                request.token_ids = grown
        for request in engine._running:
            check_head(engine, request, teachers[which[request]])
        step += 1
        assert step < 2000
    for request, index in which.items():
        assert request.token_ids == greedy_tokens[index][: request.max_new_tokens], f"prompt {index}"
    seen.update(
        drafts=engine.stats.draft_tokens_proposed,
        preemptions=engine.stats.preemptions,
        failures=engine.stats.aborted_steps,
        rejected=engine.stats.correction_tokens,
        ties=ties,
    )
    assert engine._pool.num_free == engine._pool.num_blocks
