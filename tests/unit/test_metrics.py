"""Counters and gauges of an engine, as a Prometheus registry reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from kvist.engine.budget import EngineConfig
from kvist.engine.gauges import gauges
from kvist.engine.metrics import collector
from kvist.engine.request import Request
from tests.engine_fakes import Scripted


def served() -> Scripted:
    fake = Scripted(EngineConfig(pages=50, page_tokens=4, speculation="off"))
    for _ in range(2):
        list(fake.engine.generate(Request(prompt=[(7 * i) % 200 + 4 for i in range(30)], max_tokens=5, ignore_end=True)))
    return fake


def test_counters_add_up() -> None:
    engine = served().engine
    counters = engine.metrics.counters()
    assert counters["requests"] == 2
    assert engine.metrics.ended == {"length": 2}
    assert counters["generated_tokens"] == 10
    assert counters["cached_tokens"] == 28, "whole pages"
    assert counters["replayed_tokens"] == 8
    assert counters["prefill_rows"] == 30 + 2 + 8
    figures = gauges(engine)
    assert figures["requests_running"] == figures["requests_waiting"] == figures["pages_owned"] == 0
    assert figures["prefix_hits"] == 1


def test_prometheus_reads_them() -> None:
    engine = served().engine
    registry = CollectorRegistry()
    registry.register(collector(engine.metrics, lambda: gauges(engine)))
    text = generate_latest(registry).decode()
    assert "kvist_generated_tokens_total 10.0" in text
    assert 'kvist_ended_total{reason="length"} 2.0' in text
    assert "kvist_pages_total" in text
