"""The parts of `v41-flash-slim` on a card (imported only where Triton is): gates, weights once a process, a case at a time.

Knows no list of cases and keeps no rows.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Collection

import torch

from benchmarks.gpu_timing import BF16_FLOPS_PER_S, HBM_BYTES_PER_S
from benchmarks.slim import THROUGH, Case, Measured, Wanted, prefill_flops
from benchmarks.slim_cases import gate, measure, table_rows
from benchmarks.slim_hits import measure_hit
from benchmarks.slim_models import pass_floor_ms
from benchmarks.slim_pages import measure_pages
from benchmarks.slim_prefill import measure_prefill, measure_replay, prefill_gate
from benchmarks.slim_speculation import measure_speculation, measure_verify
from kvist.config import ModelConfig
from kvist.engine.card import cost
from kvist.engine.card.random_weights import random_weights

Said = Callable[[str], None]


class Bench:
    """Weights on the card, behind the gates of the parts that will be measured. Raises `WrongResult`."""

    def __init__(self, config: ModelConfig, parts: Collection[str], wanted: Wanted, said: Said) -> None:
        self.config, self.said, self.chunk = config, said, wanted.chunk
        device = torch.device("cuda")
        gate(device, said)
        if {"prefill", "replay", "restore"} & set(parts):
            prefill_gate(device, said)
        rows = table_rows(config, wanted.engram_gb)
        self.weights = random_weights(config, table_rows=rows, device=device)
        torch.cuda.synchronize()
        said(f"weights drawn: {torch.cuda.memory_allocated() / 1e9:.1f} GB on the card; Engram tables: {rows:,} rows")

    def measure(self, case: Case) -> Measured:
        """One case. Raises `WrongResult`."""
        # Graphs and state of the case before are gone by now; what they held goes back before a larger one is made.
        gc.collect()
        torch.cuda.empty_cache()
        return getattr(self, f"_{case.part}")(case)

    def _decode(self, case: Case) -> Measured:
        times_ms, counts = measure(self.weights, case, self.said)
        value, floor = statistics.median(times_ms), self._step_floor(case, 1)
        launches = ", ".join(f"{role} {count}" for role, count in counts.items())
        spread = f"of {len(times_ms)}: {min(times_ms):.3f} to {max(times_ms):.3f}"
        text = (
            f"{value:.3f} ms a step ({spread}), floor {floor:.3f} ({100 * floor / value:.1f} %), "
            f"{1e3 * case.batch / value:,.1f} tokens/s; launches: {launches}"
        )
        return Measured(value=value, floor=floor, text=text)

    def _verify(self, case: Case) -> Measured:
        found = measure_verify(self.weights, case, self.said)
        most = max(found)
        floor = self._step_floor(case, most)
        peers = {f"{rows} rows": value for rows, value in found.items() if rows != most}
        text = f"{most} rows a request {found[most]:.3f} ms, floor {floor:.3f}; " + ", ".join(
            f"{name} {value:.3f}" for name, value in peers.items()
        )
        return Measured(value=found[most], floor=floor, text=text, peers=peers)

    def _speculation(self, case: Case) -> Measured:
        found = measure_speculation(self.weights, case, self.said)
        text = (
            f"{found.speculative_ms:.3f} ms a token of a request, plain {found.plain_ms:.3f} "
            f"({found.plain_ms / found.speculative_ms:.2f}x); {found.tokens_a_cycle:.2f} tokens and {found.rows_a_request:.2f} "
            f"rows a cycle, drafting {found.drafting_ms:.3f} ms"
        )
        return Measured(value=found.speculative_ms, text=text, peers={"plain": found.plain_ms})

    def _prefill(self, case: Case) -> Measured:
        floor = 1e3 * prefill_flops(self.config, case.context) / BF16_FLOPS_PER_S
        value, text = measure_prefill(self.weights, case, self.chunk, self.said)
        return Measured(value=value, floor=floor, text=f"{text}, floor {floor:,.0f} ms ({100 * floor / value:.1f} %)")

    def _replay(self, case: Case) -> Measured:
        value, stored, text = measure_replay(self.weights, case, self.said)
        rows = cost.replay_rows(self.config, case.batch, case.suffix)
        floor, resumed = (pass_floor_ms(self.config, both) for both in rows)
        text += f"; floors {floor:.1f} ({100 * floor / value:.0f} %) and {resumed:.1f} ms ({100 * resumed / stored:.0f} %): "
        text += f"{floor / resumed:.2f}x"
        return Measured(value=value, floor=floor, text=text, peers={"resumed with stored windows": stored})

    def _restore(self, case: Case) -> Measured:
        if case.place == THROUGH:
            value, peers, text = measure_hit(self.weights, case, self.said)
            return Measured(value=value, text=text, peers=peers)
        value, floor, peers, text = measure_pages(self.weights, case, self.said)
        return Measured(value=value, floor=floor, text=text, peers=peers)

    def _step_floor(self, case: Case, rows: int) -> float:
        """Milliseconds that the bytes of a step of `rows` rows a request take; keys and windows are read once a request."""
        weights = cost.step_bytes(self.config, case.batch * rows, 0)
        kept = cost.step_bytes(self.config, case.batch, case.context) - cost.step_bytes(self.config, case.batch, 0)
        return 1e3 * (weights + kept) / HBM_BYTES_PER_S
