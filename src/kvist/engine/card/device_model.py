"""The model of one card: weights, state, persistent buffers a bucket of runs, and steps captured in one CUDA graph each.

A graph is captured for a batch bucket, rows a request and a bound on positions; replaying it needs nothing from the host but
new ids, and a greedy loop not even those. Without a GPU (Triton's interpreter, for tests) steps run as they are. Must not know
requests, sampling beyond the best token, or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.engine.card.few_rows import FewRows
from kvist.engine.card.few_rows import fits as few_fit
from kvist.engine.card.layers import Chosen, Layers, Targets, enter, wide_product
from kvist.engine.card.one_row import OneRow, Output, fits, left
from kvist.engine.card.places import CardRows, Places, places_of
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import CardWeights, EngramWeights, LayerWeights
from kvist.kernels.best_token.gpu import best_token_gpu
from kvist.kernels.device import require_gpu
from kvist.kernels.device.row import Parts
from kvist.kernels.engram.gpu import add_memory, gather_rows, keep_classes
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import leave_gpu
from kvist.kernels.index_select.gpu import groups_of
from kvist.kernels.index_select.hopper import GROUP
from kvist.kernels.linear.gpu import linear_gpu
from kvist.kernels.linear.rows import MOST_ROWS
from kvist.kernels.streams.gpu import embed_streams_gpu

Given = tuple[Tensor, Tensor, Chosen]
"""What a layer takes: streams [N,S,D], collapse weights [N,S], what was published before it."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SHORTEST_REACH = 1024


class Recalled(NamedTuple):
    """An Engram layer's projected table rows [N,X], and when they are made (None: on the stream that asks)."""

    memory_NX: Tensor
    made: torch.cuda.Event | None


class BatchTooLarge(ValueError):
    """More requests than the largest bucket has; the message names both."""


class RunTooLong(ValueError):
    """More rows of a request than a step can take back; the message names both."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Runs of consecutive new tokens, one a request: `tokens` of all runs in turn, each run's first position (0-based, of the
    token given), slot and length (None: one token each).
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    lengths: tuple[int, ...] | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each run."""
        return (1,) * len(self.positions) if self.lengths is None else self.lengths


class Buffers:
    """What a bucket's graphs read and write, never moved, for `requests` runs of `rows` rows: M rows, run by run.

    int64 [M] tokens, positions, slots, offsets in the run, and best ids; float32 logits [M,V].
    """

    def __init__(self, requests: int, rows: int, config: ModelConfig, state: CardState) -> None:
        self.requests, self.rows, self.size, self.device = requests, rows, requests * rows, state.device
        size, device = self.size, state.device
        self.input_4M = torch.zeros(4, size, dtype=torch.int64, device=device)
        self.staged_4M = torch.zeros(4, size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.taken = torch.cuda.Event() if device.type == "cuda" else None
        self.best_M = torch.zeros(size, dtype=torch.int64, device=device)
        self.logits_MV = torch.zeros(size, config.vocab_size, device=device)
        self.card_rows = CardRows(
            tokens_N=self.input_4M[0], positions_N=self.input_4M[1], slots_N=self.input_4M[2], offsets_N=self.input_4M[3],
            text_N=torch.ones(size, dtype=torch.bool, device=device), groups_G2=groups_of([rows] * requests, GROUP, device),
        )  # fmt: skip
        self.first_MS = torch.zeros(size, config.hc_mult, device=device)
        self.first_MS[:, 0] = 1.0

    @property
    def tokens_M(self) -> Tensor:
        """Ids of the step's tokens."""
        return self.input_4M[0]

    @property
    def positions_M(self) -> Tensor:
        """Their positions."""
        return self.input_4M[1]

    @property
    def slots_M(self) -> Tensor:
        """Their requests' slots."""
        return self.input_4M[2]

    def places(self, batch: Batch) -> list[int]:
        """Where the batch's rows stand among the M."""
        return [run * self.rows + at for run, count in enumerate(batch.counts) for at in range(count)]

    def fill(self, batch: Batch, spare: int) -> None:
        """Put a batch in; other rows are padding on the spare slot, at position 0."""
        if self.taken is not None:
            # The copy before this one must have read the staging memory.
            self.taken.synchronize()
        self.staged_4M.zero_()
        self.staged_4M[2] = spare
        lines = [
            (first + at, slot, at)
            for first, slot, count in zip(batch.positions, batch.slots, batch.counts, strict=True)
            for at in range(count)
        ]
        of_rows = torch.tensor([(token, *line) for token, line in zip(batch.tokens, lines, strict=True)], dtype=torch.int64)
        self.staged_4M[:, self.places(batch)] = of_rows.t()
        self.input_4M.copy_(self.staged_4M, non_blocking=True)
        if self.taken is not None:
            self.taken.record()


def captured(warm: Callable[[], object], work: Callable[[], object], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A graph of `work`, after two plain runs of `warm`: operators build and keep what a graph must find. `pool`: memory that it
    shares with graphs that never run with it; what each leaves there is taken before another runs."""
    for _ in range(2):
        warm()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        work()
    return graph


class DeviceModel:
    """Decode steps of a packed model over a card's state.

    `graphs`: capture steps (on a card; refused elsewhere). `overlap`: on a stream of its own run the shared expert, beside the
    routed ones, where rows are enough for that to pay, and a few rows' keys, beside their queries. `one_row`: steps of one row,
    and of up to eight, take the launches made for them, where they fit. Raises GpuUnavailable where the operators cannot run.
    """

    def __init__(
        self, weights: CardWeights, state: CardState, *, graphs: bool | None = None, overlap: bool = True, one_row: bool = True
    ) -> None:
        require_gpu()
        self.weights, self.state, self.config = weights, state, weights.config
        on_card = state.device.type == "cuda"
        if graphs and not on_card:
            raise ValueError(f"graphs are captured on a CUDA device, the state lies on {state.device}; pass graphs=False")
        self.graphs = on_card if graphs is None else graphs
        self.layers = Layers(self.config, state, torch.cuda.Stream(state.device) if on_card and overlap else None)
        self.one_row = OneRow(self.layers) if one_row and fits(weights, state.codes) else None
        self.few_rows = FewRows(self.layers) if one_row and few_fit(weights, state.codes) else None
        self.side = torch.cuda.Stream(state.device) if on_card else None
        self.pool = torch.cuda.graph_pool_handle() if on_card else None
        self._buffers: dict[tuple[int, int], Buffers] = {}
        self._captured: dict[tuple[int, int, int, bool], torch.cuda.CUDAGraph] = {}

    def buffers(self, requests: int, rows: int = 1) -> Buffers:
        """The smallest bucket with room for `requests` runs of `rows` rows. Raises `BatchTooLarge`, `RunTooLong`."""
        if not 1 <= requests <= BUCKETS[-1]:
            raise BatchTooLarge(f"{requests} requests in one step; buckets hold 1 to {BUCKETS[-1]}")
        if not 1 <= rows <= self.state.most_rows:
            raise RunTooLong(f"{rows} rows of a request in one step; this state can take back 1 to {self.state.most_rows}")
        key = (next(bucket for bucket in BUCKETS if bucket >= requests), rows)
        if key not in self._buffers:
            self._buffers[key] = Buffers(*key, self.config, self.state)
        return self._buffers[key]

    def decode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run one step: float32 logits [N,V] and the best ids [N] (the lower of equals), row by row of the batch, valid until
        the next step.

        Raises `BatchTooLarge`, `RunTooLong`, or ValueError for ids, slots or positions that are not there.
        """
        self._check(batch)
        held = self.buffers(len(batch.slots), max(batch.counts))
        held.fill(batch, self.state.spare)
        stop = max(first + count for first, count in zip(batch.positions, batch.counts, strict=True))
        self.runner(held, stop, advance=False)()
        at = held.places(batch)
        if at == list(range(len(at))):
            return held.logits_MV[: len(at)], held.best_M[: len(at)]
        index = torch.tensor(at, device=held.device)
        return held.logits_MV[index], held.best_M[index]

    @torch.inference_mode()
    def layer_by_layer(self, batch: Batch, given: list[Given]) -> list[tuple[Tensor, Tensor]]:
        """The streams that each layer makes of the inputs it is given, and their collapse weights, for checks. Writes what the
        step writes."""
        self._check(batch)
        held = self.buffers(len(batch.slots), max(batch.counts))
        held.fill(batch, self.state.spare)
        rows, where = held.card_rows, torch.tensor(held.places(batch), device=held.device)
        stop = max(first + count for first, count in zip(batch.positions, batch.counts, strict=True))
        found, at, outs = self.remember(rows), self.places(rows, self.reach_of(stop)), []

        def spread(part: Tensor | None, blank: float) -> Tensor | None:
            if part is None:
                return None
            return part.new_full((held.size, *part.shape[1:]), blank).index_copy_(0, where, part)

        for layer, (x_NSD, pre_NS, chosen) in zip(self.weights.layers, given, strict=True):
            x_MSD, pre_MS = spread(x_NSD, 0.0), spread(pre_NS, 0.0)
            assert x_MSD is not None and pre_MS is not None
            published = replace(chosen, topk_NK=spread(chosen.topk_NK, -1), pool_NB=spread(chosen.pool_NB, -1))
            out = self.step_layer(layer, at, found, x_MSD, Mix(pre_MS, pre_MS, pre_MS), None, published, None)
            outs.append((left(out[2], out[0], out[1])[where], out[1].pre_NS[where]))
        return outs

    def runner(self, held: Buffers, tokens: int, *, advance: bool) -> Callable[[], object]:
        """One step as a call, on what the buffers hold, for contexts of up to `tokens`; captured if graphs are wanted.

        `advance`: the step ends by making its best ids the next step's tokens, one position on: a greedy loop of nothing but
        replays (runs of one row). The caller sees to it that pages hold what is written and that no position passes `tokens`.
        """
        assert held.rows == 1 or not advance, "a run of several rows does not say by itself what comes next"
        reach = self.reach_of(tokens)
        if not self.graphs:
            return lambda: self.step(held, reach, advance)
        key = (held.requests, held.rows, reach, advance)
        if key not in self._captured:
            self._captured[key] = self._capture(held, reach, advance)
        return self._captured[key].replay

    def reach_of(self, tokens: int) -> int:
        """The bound on positions that a graph is captured for: powers of two, at most what a page table holds."""
        most = self.state.rows.table.shape[1] * self.state.layout.page_tokens
        if tokens > most:
            raise ValueError(f"a context of {tokens} tokens; the page tables hold {most}")
        reach = min(SHORTEST_REACH, most)
        while reach < tokens:
            reach = min(2 * reach, most)
        return reach

    def _check(self, batch: Batch) -> None:
        counts = batch.counts
        if not len(batch.positions) == len(batch.slots) == len(counts) or sum(counts) != len(batch.tokens) or not all(counts):
            raise ValueError(
                f"{len(batch.tokens)} tokens, {len(batch.positions)} positions, {len(batch.slots)} slots, runs of {[*counts]}; "
                "a run needs a position, a slot and tokens"
            )
        if len(set(batch.slots)) != len(batch.slots):
            raise ValueError(f"slots {list(batch.slots)} repeat; a step takes one run a request")
        limit = self.config.vocab_size if self.weights.class_V is None else len(self.weights.class_V)
        for token in batch.tokens:
            if not 0 <= token < min(limit, self.config.vocab_size):
                raise ValueError(f"token id {token} is outside the vocabulary 0..{min(limit, self.config.vocab_size) - 1}")
        for position, slot, count in zip(batch.positions, batch.slots, counts, strict=True):
            if not 0 <= slot < self.state.slots:
                raise ValueError(f"slot {slot} is outside 0..{self.state.slots - 1}")
            self.state.rows.require(slot, position + count)

    def _capture(self, held: Buffers, reach: int, advance: bool) -> torch.cuda.CUDAGraph:
        """Capture a step, after two on padding."""
        kept = held.input_4M.clone()
        held.input_4M.zero_()
        held.input_4M[2] = self.state.spare
        graph = captured(lambda: self.step(held, reach, advance=False), lambda: self.step(held, reach, advance), self.pool)
        held.input_4M.copy_(kept)
        return graph

    @torch.inference_mode()
    def step(self, held: Buffers, reach: int, advance: bool) -> Tensor | None:
        """One step on what the buffers hold; the rows' target states [M, targets*D] if there are draft blocks."""
        rows = held.card_rows
        found, at = self.remember(rows), self.places(rows, reach)
        x_NSD, mix, chosen = self.streams(rows.tokens_N), Mix(held.first_MS, held.first_MS, held.first_MS), Chosen()
        y_ND: Output = None
        targets = None if self.weights.drafts is None else Targets(self.config, self.state, at)
        for layer in self.weights.layers:
            x_NSD, mix, y_ND, chosen = self.step_layer(layer, at, found, x_NSD, mix, y_ND, chosen, targets)
        if isinstance(y_ND, Parts):
            x_NSD, y_ND = left(y_ND, x_NSD, mix), None
        self.logits(x_NSD, mix, y_ND, held.logits_MV)
        best_token_gpu(held.logits_MV, None, held.best_M)
        self.keep_history(rows)
        if advance:
            held.tokens_M.copy_(held.best_M)
            held.positions_M.add_(1)
        return None if targets is None else targets.states_NX

    def streams(self, token_N: Tensor) -> Tensor:
        """Embedded tokens, copied to all streams [N,S,D]."""
        return embed_streams_gpu(token_N, self.weights.embed, self.config.hc_mult)

    def logits(self, x_NSD: Tensor, mix: Mix, y_ND: Tensor | None, out: Tensor | None = None) -> Tensor:
        """float32 [N,V] behind the last layer's streams, coefficients and output (None: folded in already), in `out` if given."""
        # The pass that leaves the last layer also collapses and norms: its coefficients are not used.
        ended = enter(self.config, replace(self.weights.layers[-1].moe_mix, norm=self.weights.norm), y_ND, x_NSD, mix)
        return wide_product(ended.h_ND, self.weights.head, out)

    def step_layer(
        self,
        layer: LayerWeights,
        at: Places,
        found: dict[int, Recalled],
        x_NSD: Tensor,
        mix: Mix,
        y_ND: Output,
        chosen: Chosen,
        targets: Targets | None,
    ) -> tuple[Tensor, Mix, Output, Chosen]:
        """`layer`, or its launches for one row or a few."""
        few = self.few_rows if 2 <= len(x_NSD) <= MOST_ROWS else self.one_row if len(x_NSD) == 1 else None
        if few is None:
            assert not isinstance(y_ND, Parts)
            return self.layer(layer, at, found, x_NSD, mix, y_ND, chosen, targets)
        if layer.engram is not None:
            x_NSD, y_ND = left(y_ND, x_NSD, mix), None
            self._add_engram(layer.engram, at, found[layer.spec.index], x_NSD)
        return few.layer(layer, at, x_NSD, mix, y_ND, chosen, targets)

    def layer(
        self,
        layer: LayerWeights,
        at: Places,
        found: dict[int, Recalled],
        x_NSD: Tensor,
        mix: Mix,
        y_ND: Tensor | None,
        chosen: Chosen,
        targets: Targets | None = None,
    ) -> tuple[Tensor, Mix, Tensor, Chosen]:
        """Both halves; the output of the second is folded into the streams by whoever enters next.

        `targets` takes what the draft blocks look at.
        """
        c = self.config
        if layer.engram is not None:
            if y_ND is not None:
                x_NSD, y_ND = leave_gpu(y_ND, x_NSD, mix), None
            self._add_engram(layer.engram, at, found[layer.spec.index], x_NSD)
        entered = enter(c, layer.attention_mix, y_ND, x_NSD, mix)
        if targets is not None:
            targets.see(layer.spec.index, entered.x_NSD)
        y_ND, chosen = self.layers.attention(layer, at, entered, chosen)
        entered = enter(c, layer.moe_mix, y_ND, entered.x_NSD, entered.mix)
        return entered.x_NSD, entered.mix, self.layers.moe(layer.moe, at, entered), chosen

    def remember(self, rows: CardRows) -> dict[int, Recalled]:
        """Start reading and projecting the pass's Engram rows on the side stream: ids depend on tokens alone, and the layers
        before leave the memory idle half of their time."""
        wanted = [layer for layer in self.weights.layers if layer.engram is not None]
        if not wanted:
            return {}
        if self.side is None:
            return {layer.spec.index: Recalled(self._recalled(layer, rows), None) for layer in wanted}
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            return {layer.spec.index: Recalled(self._recalled(layer, rows), self.side.record_event()) for layer in wanted}

    def _recalled(self, layer: LayerWeights, rows: CardRows) -> Tensor:
        assert layer.engram is not None and self.weights.class_V is not None, "a model with Engram has token classes"
        rows_NX = gather_rows(
            rows.tokens_N, rows.positions_N, rows.offsets_N, rows.text_N, self.weights.class_V, self.state.history, rows.slots_N,
            layer.engram.hashes, layer.engram.stored, self.config.engram_n_heads,
        )  # fmt: skip
        return linear_gpu(rows_NX, layer.engram.project, None, 1)

    def _add_engram(self, weights: EngramWeights, at: Places, recalled: Recalled, x_NSD: Tensor) -> None:
        if recalled.made is not None:
            # `add_memory` is a plain launch: one made early would wait for the launch before it on its own stream alone.
            torch.cuda.current_stream().wait_event(recalled.made)
        add_memory(x_NSD, recalled.memory_NX, weights.gates, at.text_N, self.config.norm_eps)

    def keep_history(self, rows: CardRows) -> None:
        """Keep the classes of a step's tokens for the n-grams of later ones."""
        if self.weights.class_V is None:
            return
        keep_classes(
            rows.tokens_N, rows.positions_N, rows.text_N, self.weights.class_V, self.state.history, rows.slots_N
        )  # fmt: skip

    def places(self, rows: CardRows, reach: int) -> Places:
        """Where the rows of a pass stand; `reach` from `reach_of`."""
        return places_of(rows, self.state, self.config, reach)
