"""Counters as Prometheus reads them: by the official client's own parser."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from runtime import Engine, EngineOptions, to_prometheus
from tests.runtime.fakes import FakeHead, fake_package


def samples(engine: Engine) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(to_prometheus(engine))
        for sample in family.samples
    }


def test_every_counter_is_exposed_and_grows() -> None:
    engine = Engine(fake_package(), EngineOptions(num_blocks=16, max_batch_size=2))
    empty = samples(engine)
    assert empty[("draftsmith_rounds_total", ())] == 0
    for prompt in ([1, 2, 3], [4, 5], [6]):
        engine.submit(prompt, 12, 4)
    while engine.load.waiting_requests:
        engine.step()
    found, stats = samples(engine), engine.stats
    expected = {
        **{(f"draftsmith_{name}_total", ()): value for name, value in vars(stats).items() if isinstance(value, int)},
        ("draftsmith_draft_seconds_total", ()): stats.total_draft_ms / 1000,
        ("draftsmith_running_requests", ()): 1,
        ("draftsmith_waiting_requests", ()): 0,
        ("draftsmith_free_blocks", ()): engine._pool.num_free,
        ("draftsmith_num_blocks", ()): 16,
    }
    for name, label in (
        ("accepted_by_position", "position"),
        ("evaluated_by_position", "position"),
        ("acceptance_length_histogram", "accepted"),
    ):
        for index, count in enumerate(getattr(stats, name)):
            expected[(f"draftsmith_{name}_total", ((label, str(index)),))] = count
    assert found == expected
    assert stats.draft_tokens_accepted > 0
    assert all(found[key] >= value for key, value in empty.items() if key[0].endswith("_total"))


def test_requests_counters_add_up_to_the_engines() -> None:
    engine = Engine(fake_package(), EngineOptions(num_blocks=5, max_batch_size=3))
    requests = [engine.submit([i + 1] * 5, 12, i + 1, stop_token_ids=[7]) for i in range(4)]
    while engine.has_work:
        engine.step()
    for name, total in engine.stats.to_json().items():
        values = [getattr(request.stats, name, None) for request in requests]
        if isinstance(total, int) and name not in ("draft_forward_passes", "target_forward_passes", "aborted_steps"):
            assert sum(values) == total, name  # type: ignore[arg-type]
    stats = engine.stats
    assert stats.tokens_queued == stats.tokens_emitted + stats.tokens_discarded
    assert sum(stats.acceptance_length_histogram) == stats.rounds
    assert sum(i * count for i, count in enumerate(stats.acceptance_length_histogram)) == stats.draft_tokens_accepted
    assert stats.completed_rounds <= stats.rounds
    assert stats.preemptions > 0


def test_the_time_of_the_head_is_counted_also_where_nothing_is_drafted() -> None:
    """A head that takes 5 ms a run; the second request's K is 0, and the head follows it all the same."""

    class SlowHead(FakeHead):
        def compute(self, inputs: Any, outputs: Any) -> None:
            time.sleep(0.005)
            super().compute(inputs, outputs)

    for drafts in (3, 0):
        engine = Engine(fake_package(head=SlowHead()), EngineOptions(num_blocks=16, max_batch_size=1))
        request = engine.submit([1], 8, drafts)
        while engine.has_work:
            engine.step()
        stats = engine.stats
        assert 5 * stats.draft_forward_passes <= stats.total_draft_ms < 5 * stats.draft_forward_passes + 500
        assert stats.draft_forward_passes > 3
        assert (request.stats.total_draft_ms > 0) == (drafts > 0)
