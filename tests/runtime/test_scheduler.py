"""Plans from request states, without a model."""

from __future__ import annotations

import pytest

from runtime.blocks import BlockPool, BlockTable
from runtime.request import Request
from runtime.scheduler import StepLimits, StepPlan, plan_step


def request(
    prompt: int, cached: int, generated: int = 0, *, drafts: int = 0, limit: int = 64, blocks: int = 99
) -> Request:
    """A request with blocks in plenty, unless `blocks` says how many (0: it waits)."""
    table = BlockTable(BlockPool(1, 1), list(range(blocks))) if blocks else None
    return Request(
        (1,) * prompt, limit, drafts, max_draft_tokens=7, token_ids=[2] * generated, num_cached=cached, table=table
    )


def wanted(request: Request) -> int:
    return len(request.proposed) if request.proposed is not None else request.draft_tokens


def plan(
    running: list[Request],
    tokens: int = 100,
    drafts: int = 7,
    *,
    waiting: tuple[Request, ...] = (),
    free: int = 0,
    seats: int = 8,
    block_size: int = 4,
) -> StepPlan:
    return plan_step(running, waiting, StepLimits(tokens, seats, drafts, free, block_size), wanted)


def shapes(requests: list[Request], tokens: int, drafts: int = 7) -> list[tuple[int, int, bool]]:
    return [(row.num_tokens, row.num_drafts, row.samples) for row in plan(requests, tokens, drafts).rows]


def test_decodes_come_before_prompts() -> None:
    waiting, running = request(10, 0), request(5, 5, 1)
    assert [row.request for row in plan([waiting, running]).rows] == [running, waiting]


@pytest.mark.parametrize(
    ("cached", "budget", "expected"),
    [(0, 100, (10, 0, True)), (0, 4, (4, 0, False)), (8, 4, (2, 0, True)), (9, 4, (1, 0, True)), (4, 1, (1, 0, False))],
)
def test_chunks_of_a_prompt(cached: int, budget: int, expected: tuple[int, int, bool]) -> None:
    """Only the chunk that ends the prompt chooses a token; it may be one token long and is a prompt row still."""
    row = plan([request(10, cached, drafts=3)], budget).rows[0]
    assert (row.num_tokens, row.num_drafts, row.samples) == expected
    assert row.is_prefill


def test_any_prompt_row_defers_all_drafts() -> None:
    rows = shapes([request(5, 5, 1, drafts=3), request(5, 5, 1, drafts=2), request(10, 9)], 100)
    assert rows == [(1, 0, True), (1, 0, True), (1, 0, True)]


def test_a_prompt_that_does_not_fit_the_budget_defers_nothing() -> None:
    """What counts is the selected plan, not who is waiting."""
    assert shapes([request(5, 5, 1, drafts=3), request(10, 0)], 1) == [(1, 0, True)]
    assert shapes([request(5, 5, 1, drafts=3)], 3) == [(1, 2, True)]
    short_of_blocks = plan([request(5, 5, 1, drafts=3)], waiting=(request(10, 0, blocks=0),), free=2)
    assert [row.num_drafts for row in short_of_blocks.rows] == [3]


@pytest.mark.parametrize(
    ("generated", "limit", "expected"), [(1, 64, 3), (61, 64, 2), (62, 64, 1), (63, 64, 0), (1, 2, 0), (1, 3, 1)]
)
def test_drafts_are_clamped_to_the_tokens_left(generated: int, limit: int, expected: int) -> None:
    """D = min(K, tokens left - 1): one token of the step is the target's own."""
    row = shapes([request(5, 4 + generated, generated, drafts=3, limit=limit)], 100)[0]
    assert row[1] == expected


def test_drafts_are_clamped_to_the_engines_limit_and_the_budget() -> None:
    requests = [request(5, 5, 1, drafts=3) for _ in range(3)]
    assert [row[1] for row in shapes(requests, 100, 2)] == [2, 2, 2]
    assert [row[1] for row in shapes(requests, 7)] == [3, 1, 0], "every request has its own token first"
    assert shapes(requests, 2) == [(1, 0, True), (1, 0, True)]


def test_a_proposal_says_how_many_drafts() -> None:
    proposing = request(5, 5, 1, drafts=3)
    proposing.propose([4])
    empty = request(5, 5, 1, drafts=3)
    empty.propose([])
    assert [row[1] for row in shapes([proposing, empty], 100)] == [1, 0]


# Blocks of 4 tokens


@pytest.mark.parametrize(("free", "expected"), [(0, 2), (1, 6), (2, 7)])
def test_drafts_take_free_blocks_only(free: int, expected: int) -> None:
    """5 tokens cached and 2 blocks owned: the row's own token and two drafts fit, each block more has four."""
    row = plan([request(5, 5, 1, drafts=7, blocks=2)], free=free).rows[0]
    assert row.num_drafts == expected
    assert row.reserved_tokens == 5 + 1 + row.num_drafts


def test_drafts_are_dropped_before_a_request_goes_without_its_token() -> None:
    """Two rows need a block each for their own token; none is left for the drafts of the first."""
    first, second = (request(8, 8, 1, drafts=3, blocks=2) for _ in range(2))
    rows = plan([first, second], free=2).rows
    assert [(row.num_tokens, row.num_drafts) for row in rows] == [(1, 3), (1, 3)], "their new blocks have room"
    rows = plan([request(7, 7, 1, drafts=3, blocks=2), second], free=1).rows
    assert [(row.num_tokens, row.num_drafts) for row in rows] == [(1, 0), (1, 3)]


def test_the_last_admitted_gives_up_its_blocks_for_an_earlier_one() -> None:
    first, second, third = (request(8, 8, 1, blocks=2) for _ in range(3))
    found = plan([first, second, third])
    assert [row.request for row in found.rows] == [first, second], "two blocks serve two rows"
    assert found.preempted == (third,)
    assert found.deferred == ()


def test_a_request_that_nobody_can_give_way_to_keeps_its_blocks_and_waits() -> None:
    """An earlier prompt holds the blocks; it goes on, and the request behind it is not thrown out for nothing."""
    prompt, last = request(20, 4, blocks=5), request(8, 8, 1, blocks=2)
    found = plan([prompt, last])
    assert [row.request for row in found.rows] == [prompt]
    assert (found.preempted, found.deferred) == ((), (last,))


def test_nobody_enters_while_somebody_gives_way() -> None:
    """Two blocks of the second one are free then, and one would do for the newcomer."""
    newcomer = request(1, 0, blocks=0)
    found = plan([request(8, 8, 1, blocks=2), request(8, 8, 1, blocks=2)], waiting=(newcomer,))
    assert len(found.preempted) == 1
    assert all(row.request is not newcomer for row in found.rows)


@pytest.mark.parametrize(
    ("free", "limit", "enters"), [(1, 64, False), (2, 64, False), (3, 64, True), (2, 1, True), (1, 1, False)]
)
def test_a_prompt_enters_with_all_its_blocks_and_room_for_a_token(free: int, limit: int, enters: bool) -> None:
    """8 tokens are two blocks; the ninth needs a third unless there will be none."""
    found = plan([], 3, waiting=(request(8, 0, blocks=0, limit=limit),), free=free)
    assert len(found.rows) == enters
    if enters:
        row = found.rows[0]
        assert (row.admitted, row.num_tokens, row.samples, row.reserved_tokens) == (True, 3, False, 8)


def test_nobody_overtakes_and_seats_are_counted() -> None:
    long, short = request(40, 0, blocks=0), request(1, 0, blocks=0)
    assert plan([], waiting=(long, short), free=5).rows == ()
    assert [row.request for row in plan([], waiting=(short, long), free=5).rows] == [short]
    assert plan([request(5, 5, 1)], waiting=(short,), free=5, seats=1).rows[0].request is not short


def test_a_resumed_request_feeds_all_it_knows_as_a_prompt() -> None:
    """After losing its blocks with 4 of its tokens generated it is a prompt of 9, and the last of them samples."""
    resumed = request(5, 8, 4, drafts=3)
    resumed.forget_cached()
    assert (resumed.is_prefill, resumed.num_cached, resumed.prefill_end) == (True, 0, 9)
    row = plan([], waiting=(resumed,), free=9).rows[0]
    assert (row.num_tokens, row.is_prefill, row.samples, row.num_drafts) == (9, True, True, 0)
