"""Passes of few rows, as a prefix hit or a short prompt is one: padded to rooms, and run by a room's graph from the second on.

The first pass of a room runs launch by launch, so that whoever has one prompt only pays for no capture; it takes the same
launches, and so the same bits. Must not know schedulers, sampling or pages' owners.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvist.engine.card.brought import OnCard
from kvist.engine.card.passes import Pass
from kvist.engine.card.prefill import Flow, Prefill
from kvist.engine.card.rooms import Room, padded, room_for

LOG = logging.getLogger(__name__)
MOST_GRAPHS = 32
"""Graphs that are kept; the one not used for longest goes, and its room is captured again when it comes again."""
Key = tuple[Room, int]
"""A room and the bound on positions."""


class WatchedPrefill(Prefill):
    """Prefill that keeps which rows of its last pass left the encoder half finite."""

    finite_N: Tensor

    def cross(self, here: OnCard, flow: Flow) -> Flow:
        """See `Prefill`."""
        parts = [flow.x_NSD.flatten(1)] if flow.y_ND is None else [flow.x_NSD.flatten(1), flow.y_ND]
        self.finite_N = torch.cat([part.isfinite().all(1, keepdim=True) for part in parts], 1).all(1)
        return super().cross(here, flow)


@dataclass(frozen=True)
class _Captured:
    """A graph, what it reads and what it leaves: integers, logits [runs,V], which rows are finite."""

    graph: torch.cuda.CUDAGraph
    flat: Tensor
    logits_RV: Tensor
    finite_N: Tensor


class SmallPasses:
    """Runs any planned pass on a model's prefill. Where there is no card nothing is padded, and nothing captured."""

    def __init__(self, prefill: WatchedPrefill) -> None:
        self.prefill, self.bringer, self.model = prefill, prefill.bringer, prefill.model
        self.on_card = prefill.state.device.type == "cuda"
        self._graphs = OrderedDict[Key, _Captured]()
        self._seen, self._refused = set[Key](), set[Key]()

    def run(self, planned: Pass) -> tuple[Tensor, Tensor]:
        """float32 logits [W,V] of a pass's wanted rows, and which of its rows are finite, bool [N]; both the caller's own."""
        room = room_for(planned, self.bringer.sizes) if self.on_card else None
        if room is None:
            return self._launched(planned)
        fitted = padded(planned, room, self.bringer.sizes, self.prefill.state.spare)
        fitted = replace(fitted, reach=self.model.reach_of(planned.reach))
        key = (room, fitted.reach)
        captured = self._graphs.pop(key, None)
        if captured is None and key in self._seen - self._refused:
            captured = self._capture(key, fitted)
        if captured is None:
            self._seen.add(key)
            logits_RV, finite_N = self._launched(fitted)
        else:
            self._graphs[key] = captured
            self.bringer.send(fitted, captured.flat)
            captured.graph.replay()
            # The next replay of any room writes there.
            logits_RV, finite_N = captured.logits_RV.clone(), captured.finite_N.clone()
        return logits_RV[: len(planned.arrays["wanted"])], finite_N[: planned.rows[0]]

    def _launched(self, planned: Pass) -> tuple[Tensor, Tensor]:
        logits_WV = self.prefill.compute(self.bringer.derive(planned, self.bringer.send(planned)))
        return logits_WV, self.prefill.finite_N

    def _capture(self, key: Key, fitted: Pass) -> _Captured | None:
        """A graph of a room whose launches have run before, None where that cannot be had. It shares its memory with all
        graphs of the model."""
        flat = self.bringer.send(fitted)
        torch.cuda.synchronize(self.prefill.state.device)
        while len(self._graphs) >= MOST_GRAPHS:
            self._graphs.popitem(last=False)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads read and pin pages meanwhile.
            with torch.cuda.graph(graph, pool=self.model.pool, capture_error_mode="thread_local"):
                logits_RV = self.prefill.compute(self.bringer.derive(fitted, flat))
        except RuntimeError as error:
            LOG.warning("card: passes of %s are launched, not captured: %s", key[0], error)
            self._refused.add(key)
            return None
        return _Captured(graph, flat, logits_RV, self.prefill.finite_N)
