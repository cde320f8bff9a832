"""to_prometheus(): an engine's counters as Prometheus text, through the official client.

Whole-engine figures only: a label for each request would grow without end. Request.stats has those.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from runtime.engine import Engine, Load
from runtime.telemetry import Stats

PREFIX = "draftsmith_"
LABELS = {
    "accepted_by_position": "position",
    "evaluated_by_position": "position",
    "acceptance_length_histogram": "accepted",
}
"""Counters that are lists, and what an index of theirs means."""


def to_prometheus(engine: Engine) -> str:
    """Text exposition format, version 0.0.4. Counters end in _total; draft_seconds_total is in seconds."""
    registry = CollectorRegistry()
    registry.register(_Collector(engine.stats, engine.load))
    return generate_latest(registry).decode()


class _Collector(Collector):
    def __init__(self, stats: Stats, load: Load) -> None:
        self._stats = stats
        self._load = load

    def collect(self) -> Iterable[Metric]:
        yield from _counters(self._stats)
        for name, value in vars(self._load).items():
            yield GaugeMetricFamily(PREFIX + name, f"{name.replace('_', ' ')} now", value=value)


def _counters(stats: Stats) -> Iterator[Metric]:
    values = {field.name: getattr(stats, field.name) for field in fields(stats)}
    values["draft_seconds"] = values.pop("total_draft_ms") / 1000
    for name, value in values.items():
        help_text = name.replace("_", " ")
        if name in LABELS:
            family = CounterMetricFamily(PREFIX + name, f"{help_text}, cumulative", labels=[LABELS[name]])
            for index, count in enumerate(value):
                family.add_metric([str(index)], count)
            yield family
        else:
            yield CounterMetricFamily(PREFIX + name, f"{help_text}, cumulative", value=value)
