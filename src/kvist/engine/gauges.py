"""The figures of an engine at this moment, by name: requests, pages, prefix hits, tiers, features, table and expert reads.

Owns the names only; every figure is read from the part that counts it. Must not know Prometheus or HTTP.
"""

from __future__ import annotations

from dataclasses import asdict

from kvist.checkpoint.engram_store import StoredTable
from kvist.engine.engine import Engine


def gauges(engine: Engine) -> dict[str, float]:
    """Name -> value. Cheap enough for every scrape; call it between steps or accept a figure of a moment ago."""
    pool, features = engine.pages.pool, engine.runner.features
    figures: dict[str, float] = {
        "requests_running": len(engine.scheduler.running),
        "requests_waiting": engine.scheduler.waiting,
        "pages_total": pool.total,
        "pages_free": pool.free,
        "pages_owned": pool.owned,
        "pages_cached": pool.cached,
        "encoder_rows": engine.runner.rows,
        "decoder_rows": engine.runner.tail_rows,
        "image_feature_bytes": features.held,
        "image_feature_hits": features.hits,
        "image_feature_misses": features.misses,
    }
    figures |= {f"prefix_{name}": value for name, value in vars(engine.pages.index.counters).items()}
    if engine.pages.tiers is not None:
        figures |= {f"tier_{name}": value for name, value in asdict(engine.pages.tiers.counters).items()}
        figures["tier_host_bytes"] = engine.pages.tiers.host.used_bytes
        figures["tier_queued_bytes"] = engine.pages.tiers.queued_bytes
        if engine.pages.tiers.store is not None:
            store = engine.pages.tiers.store.counters
            figures |= {f"store_{name}": value for name, value in vars(store).items() if isinstance(value, int)}
            figures["store_corrupt"] = sum(store.corrupt.values())
    for reader in engine.runner.readers:
        if isinstance(reader, StoredTable):
            for name, value in asdict(reader.counters).items():
                figures[f"engram_{name}"] = figures.get(f"engram_{name}", 0) + value
    if engine.runner.experts is not None:
        banks = {"expert": engine.runner.experts.counters(), "expert_device": engine.runner.experts.device_counters()}
        for bank, counted in banks.items():
            figures |= {} if counted is None else {f"{bank}_{name}": value for name, value in asdict(counted).items()}
    return {name: float(value) for name, value in figures.items()}
