"""The server's figures for Prometheus: requests, seconds to the first token and between tokens, what runs.

Owns names and buckets. Engine figures come from its own collector. Must not know routes. One registry a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)
_LOOK = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_WHOLE = (0.005, 0.05, 0.25, 1, 2.5, 5, 10, 30, 60, 300, 600)


class Figures:
    """Counters, histograms and gauges of one server."""

    def __init__(self, collectors: Iterable[Any], gauges: Mapping[str, Callable[[], float]]) -> None:
        self.registry = CollectorRegistry()
        for collector in collectors:
            self.registry.register(collector)
        for name, value in gauges.items():
            self.gauge(name, value)
        self._requests = Counter(
            "kvist_server_requests", "requests that ended", ["route", "method", "status"], registry=self.registry
        )
        self._seconds = Histogram(
            "kvist_server_request_seconds", "whole requests", ["route"], buckets=_WHOLE, registry=self.registry
        )
        self.first = Histogram(
            "kvist_server_first_token_seconds", "arrival to first token", buckets=_FIRST, registry=self.registry
        )
        self.between = Histogram(
            "kvist_server_between_tokens_seconds", "between pieces of a reply", buckets=_BETWEEN, registry=self.registry
        )
        self._captures = Counter(
            "kvist_server_captures", "looks through the microscope that ended", ["outcome"], registry=self.registry
        )
        self._capture_seconds = Histogram(
            "kvist_server_capture_seconds", "looks through the microscope", buckets=_LOOK, registry=self.registry
        )
        self.prompt = Counter("kvist_server_prompt_tokens", "prompt tokens", registry=self.registry)
        self.reply = Counter("kvist_server_reply_tokens", "reply tokens", registry=self.registry)

    def gauge(self, name: str, value: Callable[[], float]) -> None:
        """One more figure that is read when it is asked for."""
        Gauge(f"kvist_server_{name}", name.replace("_", " "), registry=self.registry).set_function(value)

    def ended(self, route: str, method: str, status: int, seconds: float) -> None:
        """Count a request. `route` is a route's own path and `method` a known one, so that labels stay few."""
        self._requests.labels(route, method, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def capture(self, outcome: str, seconds: float) -> None:
        """Count a look through the microscope: `seen`, `failed`, or `left` by its client."""
        self._captures.labels(outcome).inc()
        self._capture_seconds.observe(seconds)

    def text(self) -> bytes:
        """All figures in Prometheus' text form."""
        return generate_latest(self.registry)
