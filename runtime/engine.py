"""Engine: several requests in one packed batch, step by step, with speculative decoding.

A step: plan, settle, reserve, draft, run the target once, accept, let the head follow, prepare, commit. Until the
commit, any failure rolls the step back and it can be repeated. Requests join between steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from builder.contract import HIDDEN_STATES
from builder.errors import DraftsmithError, Refused
from builder.reader import Package
from runtime import limits, ngram
from runtime.acceptance import Verdict, accept, scored_rows
from runtime.blocks import BlockPool
from runtime.failures import Boundary, Watch
from runtime.head import HeadModel
from runtime.hidden_memory import HiddenMemory
from runtime.limits import EngineOptions
from runtime.loading import LoadedPackage
from runtime.packing import Array
from runtime.proposer import HeadWork, MtpProposer
from runtime.request import Request, check_drafts, slot_of
from runtime.sampling import GREEDY, SamplingOptions
from runtime.scheduler import RowPlan, StepLimits, StepPlan, plan_step
from runtime.target import TargetModel
from runtime.telemetry import Stats
from runtime.transaction import RollbackFailed, Transaction


@dataclass(frozen=True)
class _Drafted:
    """Drafts by request, what the head did for them, and the milliseconds it took."""

    tokens: Mapping[Request, Sequence[int]]
    work: HeadWork
    milliseconds: float


NO_WORK = HeadWork({}, ())
NOTHING_DRAFTED = _Drafted({}, NO_WORK, 0.0)


@dataclass(frozen=True)
class Load:
    """How full an engine is."""

    running_requests: int
    waiting_requests: int
    free_blocks: int
    num_blocks: int


class Engine:
    """One target, perhaps its head, and the requests between them.

    watch is told of every boundary of every step; what it raises fails the step there (runtime/failures.py).
    """

    def __init__(
        self, package: LoadedPackage, options: EngineOptions | None = None, watch: Watch | None = None
    ) -> None:
        options = limits.in_plain_numbers(options or EngineOptions())
        self.package: Package = package.package
        self.options = options
        self.stats = Stats()
        self.max_draft_tokens = limits.draft_limit(self.package, options.max_draft_tokens, options.proposer)
        block_size = self.package.block_size if options.block_size is None else options.block_size
        limits.check_sizes(options, block_size)
        num_blocks = options.num_blocks or -(-self.package.context_length // block_size)
        head = self.package.mtp if self.max_draft_tokens and options.proposer == "mtp" else None
        if package.target.place.is_host:
            limits.require_memory(
                self.package,
                num_blocks * block_size,
                options.max_batch_size,
                with_head=head is not None,
                drafting=self.max_draft_tokens > 0,
            )
        self._pool = BlockPool(num_blocks, block_size)
        seats, depth = options.max_batch_size, self.max_draft_tokens
        self._hidden: HiddenMemory | None = None
        if head and not package.target.place.is_host:
            spec, rows = self.package.target.io.output(HIDDEN_STATES), num_blocks * block_size
            rows = min(options.max_scheduled_tokens, rows)
            self._hidden = HiddenMemory(spec, rows, seats, depth + 1, package.target.place)
        memory, unpacked = self._hidden, package.unpacked
        self.target = TargetModel(
            self.package, package.target, num_blocks, block_size, seats, memory=memory, unpacked=unpacked
        )
        self.proposer: MtpProposer | None = None
        if head:
            model = HeadModel(
                head, package.mtp(), num_blocks, block_size, depth=depth, num_rows=seats, fed=self._hidden
            )
            self.proposer = MtpProposer(model)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._max_tokens = options.max_scheduled_tokens
        if package.target.place.is_host:
            self._max_tokens = limits.step_tokens(self.package, options.max_scheduled_tokens)
        self._watch = watch
        self._step_number = -1
        self._stepping = False
        self._broken: RollbackFailed | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def load(self) -> Load:
        return Load(len(self._running), len(self._waiting), self._pool.num_free, self._pool.num_blocks)

    def submit(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int = 64,
        draft_tokens: int = 0,
        stop_token_ids: Sequence[int] | None = None,
        sampling: SamplingOptions | None = None,
    ) -> Request:
        """Queues a prompt. stop_token_ids: None is the package's; sampling: None is greedy.

        Raises Refused for one that can never be served.
        """
        sampling = sampling or GREEDY
        self.check(token_ids, max_new_tokens, draft_tokens, sampling)
        stops = self.package.eos_token_ids if stop_token_ids is None else stop_token_ids
        limits.check_stops(stops, sampling, self.package)
        prompt = tuple(int(token) for token in token_ids)
        room = self.package.context_length - len(prompt)
        request = Request(
            prompt,
            min(int(max_new_tokens), room),
            int(draft_tokens),
            frozenset(int(token) for token in stops),
            sampling.plain(),
            self.package.vocab_size,
            self.max_draft_tokens,
        )
        if room:
            self._waiting.append(request)
        else:
            request.finish_reason = "length"
        return request

    def check(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int,
        draft_tokens: int,
        sampling: SamplingOptions | None = None,
    ) -> None:
        """Raises Refused for a request that can never be served."""
        limits.check_request(token_ids, max_new_tokens, self.package)
        (sampling or GREEDY).check()
        check_drafts(draft_tokens, self.max_draft_tokens)
        needed = self._pool.blocks_for(min(len(token_ids) + int(max_new_tokens), self.package.context_length) - 1)
        if needed > self._pool.num_blocks:
            raise Refused(
                "--num-blocks",
                expected=f"{needed} blocks of {self._pool.block_size} tokens for this request",
                found=self._pool.num_blocks,
                remedy="give it more blocks",
            )

    def step(self) -> dict[Request, list[int]]:
        """Runs one step; returns the tokens that each request gained in it.

        An exception leaves everything as before the step, but for requests that had lost their blocks to it: those
        wait to be fed anew. After RollbackFailed only `reset` helps.
        """
        if self._broken:
            raise self._broken
        self._refuse_within_step("step")
        self._step_number += 1
        self._stepping = True
        try:
            return self._step()
        except RollbackFailed as failure:
            self._broken = failure
            raise
        except BaseException:
            self.stats.aborted_steps += 1
            raise
        finally:
            self._stepping = False

    def _step(self) -> dict[Request, list[int]]:
        self._retire()
        proposals = self._known_proposals()
        plan = self._plan(proposals)
        self._settle(plan.rows)
        self._reach("plan")
        for request in plan.preempted:
            self._preempt(request)
        return self._run(plan.rows, proposals) if plan.rows else {}

    def _run(self, rows: Sequence[RowPlan], proposals: Mapping[Request, Sequence[int]]) -> dict[Request, list[int]]:
        """One transaction: everything that may fail comes before its commit."""
        with Transaction(rows, self._pool, self.target.states, self._reach) as transaction:
            transaction.reserve(self._companion(rows))
            rows = transaction.rows
            drafted = self._draft(rows, proposals)
            self._reach("draft")
            wanted = scored_rows(rows)
            run = self.target.run(
                transaction.segments(drafted.tokens),
                transaction.view,
                transaction.capture_counts(),
                scored=[index for indices in wanted for index in indices],
                with_logits=any(not row.request.sampling.is_greedy for row in rows),
                with_hidden=self.proposer is not None,
                capture=not any(row.is_prefill for row in rows),
            )
            self._reach("run")
            verdicts = accept(rows, wanted, drafted.tokens, run)
            self._reach("accept")
            followed = self._follow(rows, verdicts, run.hidden)
            self._reach("follow")
            kept = [verdict.kept for verdict in verdicts]
            transaction.prepare(kept)
            self._reach("prepare")
            self._broken = RollbackFailed("a step was interrupted while it was published; call Engine.reset()")
            transaction.commit(kept)
            if self._hidden:
                self._hidden.turn()
        self._publish(rows, verdicts)
        self._count(rows, verdicts, drafted, followed)
        self._broken = None
        self._retire()
        return {row.request: list(verdict.tokens) for row, verdict in zip(rows, verdicts, strict=True) if row.samples}

    def _settle(self, rows: Sequence[RowPlan]) -> None:
        """Moves what requests hold to where this step wants it; to them it is all the same."""
        if self._hidden:
            self._hidden.make_room(self._running)
        states, companion = self.target.states, self._companion(rows)
        if states is None or companion is None:
            return
        total, bank = len(self._running) + sum(row.admitted for row in rows), states.bank_of(companion)
        for request in (row.request for row in rows if not row.admitted):
            slot = slot_of(request)
            place = states.better_place(slot, total, bank)
            if place:
                states.copy_to(slot, place)
                self._broken = RollbackFailed("a step was interrupted while it moved states; call Engine.reset()")
                states.move_to(slot, place)
                request.slot = place[1]
                self._broken = None

    def _companion(self, rows: Sequence[RowPlan]) -> int | None:
        """The slot whose bank the others of a step take: of a request in it that has one, else of any."""
        ready = [row.request for row in rows if not row.admitted] or self._running
        return ready[0].slot if ready else None

    def preempt(self, request: Request) -> None:
        """Takes a running request's blocks and slot; it goes on, fed anew, as soon as there is room."""
        self._refuse_within_step("preempt")
        if request in self._running:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self._running.remove(request)
        self._give_back(request)
        request.forget_cached()
        request.stats.preemptions += 1
        self.stats.preemptions += 1
        self._waiting.appendleft(request)

    def reset(self) -> None:
        """Cancels every request and mends a failed rollback. Sessions, caches, prepared runs and counters stay."""
        self._refuse_within_step("reset")
        for request in (*self._waiting, *self._running):
            request.cancel()
            request.forget_cached()
        self._waiting.clear()
        self._running.clear()
        self._pool = BlockPool(self._pool.num_blocks, self._pool.block_size)
        if self.target.states:
            self.target.states.reset()
        self._broken = None

    def _refuse_within_step(self, name: str) -> None:
        if self._stepping:
            raise DraftsmithError(f"Engine.{name}() was called in the middle of a step; call it between steps")

    def _reach(self, boundary: Boundary) -> None:
        if self._watch:
            self._watch(boundary, self._step_number)

    def _plan(self, proposals: Mapping[Request, Sequence[int]]) -> StepPlan:
        def wanted(request: Request) -> int:
            if request in proposals:
                return len(proposals[request])
            return request.draft_tokens if self.proposer and self._may_draft(request) else 0

        room = StepLimits(
            self._max_tokens,
            self.options.max_batch_size,
            self.max_draft_tokens,
            self._pool.num_free,
            self._pool.block_size,
        )
        return plan_step(self._running, self._waiting, room, wanted)

    def _known_proposals(self) -> dict[Request, Sequence[int]]:
        """Drafts that are known before the step: the caller's own, else what the text itself proposes."""
        proposals: dict[Request, Sequence[int]] = {}
        for request in self._running:
            if request.proposal is not None:
                proposals[request] = request.proposal
            elif self.options.proposer == "ngram" and self._may_draft(request):
                proposals[request] = ngram.propose(request.known(0, request.num_known), request.draft_tokens)
        return proposals

    @staticmethod
    def _may_draft(request: Request) -> bool:
        return request.draft_tokens > 0 and not request.is_prefill and request.drafting_off is None

    def _draft(self, rows: Sequence[RowPlan], proposals: Mapping[Request, Sequence[int]]) -> _Drafted:
        """Drafts of every decode row: those known already where there are any, else the head's."""
        if not self.proposer and not proposals:
            return NOTHING_DRAFTED
        started = time.perf_counter()
        decodes = [row for row in rows if not row.is_prefill]
        given = {row.request: proposals[row.request][: row.num_drafts] for row in decodes if row.request in proposals}
        work = NO_WORK
        if self.proposer and decodes:
            rest = [replace(row, num_drafts=0) if row.request in given else row for row in decodes]
            work = self.proposer.draft(rest)
        milliseconds = 1000 * (time.perf_counter() - started)
        return _Drafted(
            {request: tokens for request, tokens in given.items() if tokens} | work.drafts, work, milliseconds
        )

    def _follow(self, rows: Sequence[RowPlan], verdicts: Sequence[Verdict], hidden: Array) -> HeadWork:
        """Hands hidden rows that will be kept to the head: prompt rows are fed at once, others at the next stage 0.

        So does the last row of a prompt, whose next token has only just been chosen.
        """
        if not self.proposer:
            return NO_WORK
        start = 0
        for row, verdict in zip(rows, verdicts, strict=True):
            if not verdict.finish_reason:
                row.request.unread_hidden.append(hidden[start : start + verdict.kept].copy())
            start += row.length
        return self.proposer.follow([row.request for row in rows if row.is_prefill])

    def _publish(self, rows: Sequence[RowPlan], verdicts: Sequence[Verdict]) -> None:
        """Admits the new requests and delivers the tokens."""
        for row, verdict in zip(rows, verdicts, strict=True):
            request = row.request
            if row.admitted:
                self._waiting.remove(request)
                self._running.append(request)
            if not row.is_prefill:
                request.proposed = None  # meant for this step, also where it had no room for drafts
            request.token_ids += verdict.tokens
            request.finish_reason = request.finish_reason or verdict.finish_reason

    def _count(
        self, rows: Sequence[RowPlan], verdicts: Sequence[Verdict], drafted: _Drafted, followed: HeadWork
    ) -> None:
        """Adds the committed step to the counters of engine and requests."""
        self.stats.target_forward_passes += 1
        self.stats.draft_forward_passes += len(drafted.work.runs) + len(followed.runs)
        for request in (request for run in (*drafted.work.runs, *followed.runs) for request in run):
            request.stats.draft_forward_passes += 1
        self.stats.total_draft_ms += drafted.milliseconds
        total = sum(len(verdict.drafts) for verdict in verdicts)
        for row, verdict in zip(rows, verdicts, strict=True):
            row.request.stats.target_forward_passes += 1
            if verdict.drafts:
                stopped = verdict.accepted == len(verdict.tokens)
                for stats in (self.stats, row.request.stats):
                    stats.record_round(len(verdict.drafts), verdict.accepted, verdict.discarded, stopped=stopped)
                row.request.stats.total_draft_ms += drafted.milliseconds * len(verdict.drafts) / total

    def _retire(self) -> None:
        for request in [request for request in self._running if request.finish_reason]:
            self._running.remove(request)
            self._give_back(request)
            request.unread_hidden = []
        if self._waiting:
            self._waiting = deque(request for request in self._waiting if not request.finish_reason)

    def _give_back(self, request: Request) -> None:
        if request.table:
            request.table.shrink(0)
        if self.target.states and request.slot is not None:
            self.target.states.give_back(request.slot)
