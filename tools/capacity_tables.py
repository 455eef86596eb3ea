"""Writes the tables of docs/capacity.md anew from the arithmetic behind `kvist plan` and the engine's memory plan.

Owns which cases are shown and the markers between which they stand. `python tools/capacity_tables.py` from the repository's root.
"""

from __future__ import annotations

import re
from pathlib import Path

from kvist.config import ModelConfig
from kvist.engine.budget import EngineConfig, plan_memory, slot_bytes
from kvist.engine.errors import BudgetTooSmall
from kvist.page_layout import PageLayout
from kvist.plan import Machine, fit
from kvist.presets import preset

PAGE = Path(__file__).resolve().parents[1] / "docs" / "capacity.md"
MODELS = ("nano", "v41-flash")
CONTEXTS = (4096, 32_768, 131_072, 1_048_576)
MEMORIES = {"nano": (100, 250, 1000, 4000), "v41-flash": (8_000, 24_000, 64_000)}
STEP_COSTS = {"nano": 512, "v41-flash": 2048}
MACHINES: tuple[tuple[str, Machine], ...] = (
    ("workstation: 64 GB, one 24 GB GPU, fast NVMe", Machine(disk_gbps=7, ram_gb=64, gpu_gb=24, ram_gbps=60, disk_kiops=800)),
    ("server: 512 GB, no GPU, NVMe", Machine(disk_gbps=7, ram_gb=512, ram_gbps=200, disk_kiops=800)),
    ("server: 1 TB, one 141 GB GPU", Machine(disk_gbps=7, ram_gb=1000, gpu_gb=141, ram_gbps=300, gpu_gbps=4800, link_gbps=55)),
)


def cache_table() -> str:
    """Cache bytes a token and a request, by context."""
    head = [f"{context:,} tokens" for context in CONTEXTS]
    rows = [f"| model | bytes a token | bytes a running request | {' | '.join(head)} |", "|---|---:|---:|" + "---:|" * len(head)]
    for name in MODELS:
        config = preset(name)
        layout = PageLayout.of(config)
        slot = slot_bytes(config, 1 + EngineConfig(pages=1).drafts(config), 4)
        cells = [_megabytes(layout, context) if context <= config.max_seq_len else "beyond the model" for context in CONTEXTS]
        rows.append(f"| `{name}` | {float(layout.bytes_per_token):,g} | {slot:,} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _megabytes(layout: PageLayout, context: int) -> str:
    pages = -(-context // layout.page_tokens)
    return f"{pages * layout.page_bytes / 1e6:,.1f} MB"


def memory_table() -> str:
    """What `memory` holds: tokens in pages, the longest request, and how many of 8K tokens at once."""
    rows = ["| model | `memory` | tokens in pages | longest request | whole requests of 8,192 tokens | for other things |"]
    rows.append("|---|---:|---:|---:|---:|---:|")
    for name in MODELS:
        config = preset(name)
        rows += [_memory_row(name, config, memory) for memory in MEMORIES[name]]
    return "\n".join(rows)


def _memory_row(name: str, config: ModelConfig, memory: int) -> str:
    options = EngineConfig(memory_bytes=memory * 10**6, step_cost=STEP_COSTS[name], max_running=16)
    try:
        plan = plan_memory(config, options, dtype_bytes=4)
    except BudgetTooSmall:
        return f"| `{name}` | {memory:,} MB | too small | | | |"
    other = plan.total_bytes - plan.page_bytes
    fits = plan.pages // -(-8192 // plan.layout.page_tokens)
    cells = (f"{plan.tokens:,}", f"{plan.context:,}", f"{fits:,}", f"{other / 1e6:,.0f} MB")
    return f"| `{name}` | {memory:,} MB | {' | '.join(cells)} |"


def machine_table() -> str:
    """What the bytes of the release allow on three machines, one stream and sixteen."""
    rows = ["| machine | streams | dense weights in | experts read from | tokens/s, all streams |", "|---|---:|---|---|---:|"]
    config = preset("v41-flash")
    for name, machine in MACHINES:
        for streams in (1, 16):
            found = fit(config, machine, held="stored", context=32_768, streams=streams)
            if found.lacking:
                rows.append(f"| {name} | {streams} | {found.lacking / 1e9:,.0f} GB are lacking | | |")
                continue
            tiers = ", ".join(f"{tier.name} {100 * tier.share:.0f}%" for tier in found.tiers if tier.share)
            rows.append(f"| {name} | {streams} | {found.resident_in} | {tiers} | {found.low:,.1f} to {found.high:,.1f} |")
    return "\n".join(rows)


TABLES = {"cache": cache_table, "memory": memory_table, "machines": machine_table}


def written(text: str) -> str:
    """The page with every table as the code has it now. ValueError for markers that are not there once."""
    for name, table in TABLES.items():
        made = table()
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end of {name} -->)"
        text, count = re.subn(pattern, lambda found, made=made: found[1] + made + found[2], text, flags=re.DOTALL)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"{PAGE} has {count} pairs of markers for {name}; it needs one")
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
