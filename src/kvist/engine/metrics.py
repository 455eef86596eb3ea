"""What an engine has done, in plain counters, and how Prometheus reads them.

Owns the counters' names. `prometheus_client` is optional: only `collector` needs it. Must not know how work is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


@dataclass(kw_only=True)
class Metrics:
    """Totals since the engine was made."""

    requests: int = 0
    ended: dict[str, int] = field(default_factory=dict)
    steps: int = 0
    step_seconds: float = 0.0
    prefill_rows: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    draft_failures: int = 0
    adopted_pages: int = 0

    def counters(self) -> dict[str, float]:
        """Name -> total."""
        return {name: value for name, value in vars(self).items() if isinstance(value, int | float)}


def collector(metrics: Metrics, gauges: Callable[[], Mapping[str, float]]) -> Any:
    """An object for a Prometheus registry: all counters, and gauges read when it is asked. ImportError without the client."""
    core = import_module("prometheus_client.core")

    class Collector:
        def collect(self) -> Iterator[Any]:
            for name, value in metrics.counters().items():
                yield core.CounterMetricFamily(f"kvist_{name}", f"{name.replace('_', ' ')} since start", value=value)
            ended = core.CounterMetricFamily("kvist_ended", "requests ended, by reason", labels=["reason"])
            for reason, count in metrics.ended.items():
                ended.add_metric([reason], count)
            yield ended
            for name, value in gauges().items():
                yield core.GaugeMetricFamily(f"kvist_{name}", name.replace("_", " "), value=value)

    return Collector()
