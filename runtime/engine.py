"""Engine: several requests in one packed batch, step by step, with speculative decoding.

A step: plan, reserve, draft with the head, run the target once, accept, commit. Requests join between steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from builder.errors import Refused
from builder.reader import Package
from runtime import limits
from runtime.blocks import BlockPool
from runtime.limits import EngineOptions
from runtime.loading import LoadedPackage
from runtime.packing import Array
from runtime.proposer import MtpProposer
from runtime.request import Request
from runtime.sampling import greedy, verified
from runtime.scheduler import RowPlan, plan_step
from runtime.target import TargetModel
from runtime.telemetry import Stats
from runtime.transaction import Transaction


class Engine:
    """One target, perhaps its head, and the requests between them."""

    def __init__(self, package: LoadedPackage, options: EngineOptions | None = None) -> None:
        options = options or EngineOptions()
        self.package: Package = package.package
        self.options = options
        self.stats = Stats()
        self.max_draft_tokens = limits.draft_limit(self.package, options.max_draft_tokens)
        block_size = self.package.block_size if options.block_size is None else options.block_size
        limits.check_sizes(options, block_size)
        num_blocks = options.num_blocks or -(-self.package.context_length // block_size)
        limits.require_memory(self.package, num_blocks * block_size, options.max_batch_size, self.max_draft_tokens > 0)
        self._pool = BlockPool(num_blocks, block_size)
        self.target = TargetModel(self.package, package.target, num_blocks, block_size, options.max_batch_size)
        self.proposer: MtpProposer | None = None
        if self.max_draft_tokens and self.package.mtp:
            self.proposer = MtpProposer(self.package.mtp, package.mtp(), num_blocks, block_size)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._max_tokens = limits.step_tokens(self.package, options.max_scheduled_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int = 64,
        draft_tokens: int = 0,
        stop_token_ids: Sequence[int] | None = None,
    ) -> Request:
        """Queues a prompt. stop_token_ids: None is the package's. Raises Refused for one that can never be served."""
        self.check(token_ids, max_new_tokens, draft_tokens)
        prompt = tuple(int(token) for token in token_ids)
        stops = self.package.eos_token_ids if stop_token_ids is None else stop_token_ids
        room = self.package.context_length - len(prompt)
        request = Request(prompt, min(max_new_tokens, room), draft_tokens, frozenset(stops), self.package.vocab_size)
        if room:
            self._waiting.append(request)
        else:
            request.finish_reason = "length"
        return request

    def check(self, token_ids: Sequence[int], max_new_tokens: int, draft_tokens: int) -> None:
        """Raises Refused for a request that can never be served."""
        limits.check_request(token_ids, max_new_tokens, self.package)
        if not 0 <= draft_tokens <= self.max_draft_tokens:
            raise Refused(
                "--draft-tokens",
                expected=f"0 to {self.max_draft_tokens}, the limit of package and engine",
                found=draft_tokens,
                remedy="ask for fewer",
            )
        needed = self._pool.blocks_for(min(len(token_ids) + max_new_tokens, self.package.context_length) - 1)
        if needed > self._pool.num_blocks:
            raise Refused(
                "--num-blocks",
                expected=f"{needed} blocks of {self._pool.block_size} tokens for this request",
                found=self._pool.num_blocks,
                remedy="give it more blocks",
            )

    def step(self) -> dict[Request, list[int]]:
        """Runs one step; returns the tokens that each request gained in it."""
        self._retire()
        self._admit()
        if not self._running:
            return {}
        plan = plan_step(self._running, self._max_tokens, self.max_draft_tokens)
        plan.sort(key=lambda row: row.request.slot or 0)
        with Transaction(plan, self.target.states) as transaction:
            drafts = self._draft(plan)
            logits, hidden = self.target.run(
                transaction.segments(drafts), transaction.view, transaction.capture_counts()
            )
            gained = _accept(plan, drafts, logits)
            kept = [row.num_tokens + max(0, len(gained.get(row.request, ())) - 1) for row in plan]
            transaction.commit(kept)
        self.stats.target_forward_passes += 1
        for row in plan:
            self._deliver(row, drafts.get(row.request, []), gained.get(row.request, []))
        if self.proposer:
            self._feed_head(self.proposer, plan, kept, hidden)
        self._retire()
        return gained

    def _admit(self) -> None:
        """Takes waiting requests in order while a slot and their blocks can be had."""
        while self._waiting and len(self._running) < self.options.max_batch_size:
            table = self._pool.open_table(self._waiting[0].max_cached)
            if table is None:
                return
            request = self._waiting.popleft()
            request.table = table
            companion = self._running[0].slot if self._running else None
            request.slot = self.target.states.take(companion) if self.target.states else None
            self._running.append(request)

    def _retire(self) -> None:
        for request in [request for request in self._running if request.finish_reason]:
            self._running.remove(request)
            if request.table:
                request.table.close()
            if self.target.states and request.slot is not None:
                self.target.states.give_back(request.slot)
            request.unread_hidden = []
        self._waiting = deque(request for request in self._waiting if not request.finish_reason)

    def _draft(self, plan: Sequence[RowPlan]) -> dict[Request, list[int]]:
        """Drafts of every decode row: the caller's own where given, else the head's."""
        decodes = [row for row in plan if not row.is_prefill]
        own = {row.request: list(row.request.proposed[: row.num_drafts]) for row in decodes if row.request.proposed}
        drafts = {request: tokens for request, tokens in own.items() if tokens}
        if self.proposer and decodes:
            rows = [replace(row, num_drafts=0) if row.request in own else row for row in decodes]
            drafts |= self.proposer.draft(rows, self.stats)
        return drafts

    def _deliver(self, row: RowPlan, drafts: list[int], tokens: list[int]) -> None:
        request = row.request
        request.token_ids += tokens
        if not row.is_prefill:
            request.proposed = None  # meant for this step, also where it had no room for drafts
        if drafts:
            accepted = sum(1 for draft, token in zip(drafts, tokens, strict=False) if draft == token)
            stopped = accepted == len(tokens)
            evaluated = self.stats.record_round(len(drafts), accepted, stopped=stopped)
            request.counts.proposed += len(drafts)
            request.counts.evaluated += evaluated
            request.counts.accepted += accepted
        if tokens and tokens[-1] in request.stop_token_ids:
            request.finish_reason = "stop"
        elif len(request.token_ids) == request.max_new_tokens:
            request.finish_reason = "length"

    def _feed_head(self, proposer: MtpProposer, plan: Sequence[RowPlan], kept: Sequence[int], hidden: Array) -> None:
        """Hands committed hidden rows to the head: prompt rows are fed at once, decode rows wait for the next stage 0.

        So does the last row of a prompt, whose next token has only just been chosen.
        """
        start = 0
        for row, count in zip(plan, kept, strict=True):
            if not row.request.finish_reason:
                row.request.unread_hidden.append(hidden[start : start + count].copy())
            start += row.length
        proposer.prime([row.request for row in plan if row.is_prefill], self.stats)


def _accept(plan: Sequence[RowPlan], drafts: Mapping[Request, list[int]], logits: Array) -> dict[Request, list[int]]:
    """The tokens each request gains: verified drafts and the target's next one, cut after the first stop id."""
    ends = accumulate(row.length for row in plan)
    wanted = [
        range(end - 1 - row.num_drafts, end) if row.samples else range(0) for row, end in zip(plan, ends, strict=True)
    ]
    indices = [index for rows in wanted for index in rows]
    chosen = iter(greedy(logits if len(indices) == len(logits) else logits[indices]))
    gained: dict[Request, list[int]] = {}
    for row, rows in zip(plan, wanted, strict=True):
        if row.samples:
            tokens = verified(drafts.get(row.request, ()), [next(chosen) for _ in rows])
            stop = next((i for i, token in enumerate(tokens) if token in row.request.stop_token_ids), len(tokens))
            gained[row.request] = tokens[: stop + 1]
    return gained
