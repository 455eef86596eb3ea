"""The model of one card: weights, state, persistent buffers a batch bucket, and a decode step captured in one CUDA graph each.

A graph is captured for a batch bucket and a bound on positions; replaying it needs nothing from the host but new ids, and
`decode_on` not even those. Without a GPU (Triton's interpreter, for tests) steps run as they are. Must not know requests,
sampling beyond the best token, or HTTP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.engine.card.layers import Chosen, Layers, Places, Table, enter, wide_product
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import CardWeights, EngramWeights, LayerWeights, MixWeights
from kvist.kernels.device import require_gpu
from kvist.kernels.engram.gpu import add_memory, gather_rows
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import leave_gpu
from kvist.kernels.linear.gpu import linear_gpu
from kvist.model.layers import inverse_frequencies, rotary_table

Given = tuple[Tensor, Tensor, Chosen]
"""What a layer takes: streams [N,S,D], collapse weights [N,S], what was published before it."""
BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SHORTEST_REACH = 1024


class BatchTooLarge(ValueError):
    """More rows than the largest bucket has; the message names both."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One new token a request: ids, positions and slots, equally many. Positions are 0-based, of the tokens given."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]


class Buffers:
    """What a bucket's graphs read and write, never moved: int64 [M] tokens, positions, slots, best; float32 logits [M,V]."""

    def __init__(self, size: int, config: ModelConfig, state: CardState) -> None:
        self.size, self.device = size, state.device
        self.input_3M = torch.zeros(3, size, dtype=torch.int64, device=state.device)
        self.staged_3M = torch.zeros(3, size, dtype=torch.int64, pin_memory=state.device.type == "cuda")
        self.taken = torch.cuda.Event() if state.device.type == "cuda" else None
        self.best_M = torch.zeros(size, dtype=torch.int64, device=state.device)
        self.logits_MV = torch.zeros(size, config.vocab_size, device=state.device)
        self.text_M = torch.ones(size, dtype=torch.bool, device=state.device)
        alone = torch.arange(size, dtype=torch.int32, device=state.device)
        self.groups_G2 = torch.stack([alone, torch.ones_like(alone)], 1).contiguous()
        self.first_MS = torch.zeros(size, config.hc_mult, device=state.device)
        self.first_MS[:, 0] = 1.0

    @property
    def tokens_M(self) -> Tensor:
        """Ids of the step's tokens."""
        return self.input_3M[0]

    @property
    def positions_M(self) -> Tensor:
        """Their positions."""
        return self.input_3M[1]

    @property
    def slots_M(self) -> Tensor:
        """Their requests' slots."""
        return self.input_3M[2]

    def fill(self, batch: Batch, spare: int) -> None:
        """Put a batch in; rows beyond it are padding on the spare slot, at position 0."""
        if self.taken is not None:
            # The copy before this one must have read the staging memory.
            self.taken.synchronize()
        self.staged_3M.zero_()
        self.staged_3M[2] = spare
        lines = (batch.tokens, batch.positions, batch.slots)
        self.staged_3M[:, : len(batch.tokens)] = torch.tensor(lines, dtype=torch.int64)
        self.input_3M.copy_(self.staged_3M, non_blocking=True)
        if self.taken is not None:
            self.taken.record()


class DeviceModel:
    """Decode steps of a packed model over a card's state.

    `graphs`: capture steps (on a card; refused elsewhere). `overlap`: the shared expert runs on a stream of its own, beside the
    routed ones. Raises GpuUnavailable where the operators cannot run.
    """

    def __init__(self, weights: CardWeights, state: CardState, *, graphs: bool | None = None, overlap: bool = False) -> None:
        require_gpu()
        self.weights, self.state, self.config = weights, state, weights.config
        on_card = state.device.type == "cuda"
        if graphs and not on_card:
            raise ValueError(f"graphs are captured on a CUDA device, the state lies on {state.device}; pass graphs=False")
        self.graphs = on_card if graphs is None else graphs
        self.layers = Layers(self.config, state, torch.cuda.Stream(state.device) if on_card and overlap else None)
        self.side = torch.cuda.Stream(state.device) if on_card else None
        self._buffers: dict[int, Buffers] = {}
        self._captured: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        # Layers with rows share one theta and YaRN, layers without another theta.
        self._freq = {spec.ratio > 0: inverse_frequencies(self.config, spec).to(state.device) for spec in self.config.plan.layers}

    def buffers(self, rows: int) -> Buffers:
        """The smallest bucket with room for `rows`. Raises `BatchTooLarge`."""
        if not 1 <= rows <= BUCKETS[-1]:
            raise BatchTooLarge(f"{rows} rows in one step; buckets hold 1 to {BUCKETS[-1]}")
        size = next(bucket for bucket in BUCKETS if bucket >= rows)
        if size not in self._buffers:
            self._buffers[size] = Buffers(size, self.config, self.state)
        return self._buffers[size]

    def decode(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Run one step: float32 logits [N,V] and the best ids [N] (the lower of equals), views valid until the next step.

        Raises `BatchTooLarge`, or ValueError for ids, slots or positions that are not there.
        """
        self._check(batch)
        held = self.buffers(len(batch.tokens))
        held.fill(batch, self.state.spare)
        self.runner(held, max(batch.positions) + 1, advance=False)()
        return held.logits_MV[: len(batch.tokens)], held.best_M[: len(batch.tokens)]

    @torch.inference_mode()
    def layer_by_layer(self, batch: Batch, given: list[Given]) -> list[Tensor]:
        """The streams that each layer makes of the inputs it is given, for checks.

        Writes what the step writes but not the n-gram history, so that the step may follow.
        """
        self._check(batch)
        held = self.buffers(len(batch.tokens))
        held.fill(batch, self.state.spare)
        found, at, outs = self.remember(held), self.places(held, self.reach_of(max(batch.positions) + 1)), []
        for layer, (x_NSD, pre_NS, chosen) in zip(self.weights.layers, given, strict=True):
            room = (0, held.size - len(x_NSD))
            x_MSD, pre_MS = (torch.nn.functional.pad(part, (0, 0) * (part.dim() - 1) + room) for part in (x_NSD, pre_NS))
            published = replace(chosen, topk_NK=_padded(chosen.topk_NK, held.size), pool_NB=_padded(chosen.pool_NB, held.size))
            mix = Mix(pre_MS, pre_MS, pre_MS)
            out = self.layer(layer, at, found, x_MSD, mix, None, published)
            outs.append(leave_gpu(out[2], out[0], out[1])[: len(x_NSD)])
        return outs

    def runner(self, held: Buffers, tokens: int, *, advance: bool) -> Callable[[], None]:
        """One step as a call, on what the buffers hold, for contexts of up to `tokens`; captured if graphs are wanted.

        `advance`: the step ends by making its best ids the next step's tokens, one position on: a greedy loop of nothing but
        replays. The caller sees to it that pages hold what is written and that no position passes `tokens`.
        """
        reach = self.reach_of(tokens)
        if not self.graphs:
            return lambda: self.step(held, reach, advance)
        key = (held.size, reach, advance)
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
        if not len(batch.tokens) == len(batch.positions) == len(batch.slots):
            raise ValueError(
                f"{len(batch.tokens)} tokens, {len(batch.positions)} positions, {len(batch.slots)} slots; a row needs one of each"
            )
        if len(set(batch.slots)) != len(batch.slots):
            raise ValueError(f"slots {list(batch.slots)} repeat; a step takes one token a request")
        limit = self.config.vocab_size if self.weights.class_V is None else len(self.weights.class_V)
        for token, position, slot in zip(batch.tokens, batch.positions, batch.slots, strict=True):
            if not 0 <= token < min(limit, self.config.vocab_size):
                raise ValueError(f"token id {token} is outside the vocabulary 0..{min(limit, self.config.vocab_size) - 1}")
            if not 0 <= slot < self.state.slots:
                raise ValueError(f"slot {slot} is outside 0..{self.state.slots - 1}")
            self.state.rows.require(slot, position + 1)

    def _capture(self, held: Buffers, reach: int, advance: bool) -> torch.cuda.CUDAGraph:
        """Two plain steps on padding (operators build and keep what a graph must find), then the capture."""
        kept = held.input_3M.clone()
        held.input_3M.zero_()
        held.input_3M[2] = self.state.spare
        for _ in range(2):
            self.step(held, reach, advance=False)
        torch.cuda.synchronize(self.state.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step(held, reach, advance)
        held.input_3M.copy_(kept)
        return graph

    @torch.inference_mode()
    def step(self, held: Buffers, reach: int, advance: bool) -> None:
        found = self.remember(held)
        at = self.places(held, reach)
        c = self.config
        x_NSD = self.weights.embed[held.tokens_M].unsqueeze(1).repeat(1, c.hc_mult, 1)
        mix, chosen, y_ND = Mix(held.first_MS, held.first_MS, held.first_MS), Chosen(), None
        for layer in self.weights.layers:
            x_NSD, mix, y_ND, chosen = self.layer(layer, at, found, x_NSD, mix, y_ND, chosen)
        last = self.weights.layers[-1].moe_mix
        # The pass that leaves the last layer also collapses and norms: its coefficients are not used.
        ended = enter(c, _with_norm(last, self.weights.norm), y_ND, x_NSD, mix)
        held.logits_MV.copy_(wide_product(ended.h_ND, self.weights.head))
        torch.argmax(held.logits_MV, 1, out=held.best_M)
        self._advance_history(held)
        if advance:
            held.tokens_M.copy_(held.best_M)
            held.positions_M.add_(1)

    def layer(
        self,
        layer: LayerWeights,
        at: Places,
        found: dict[int, Tensor],
        x_NSD: Tensor,
        mix: Mix,
        y_ND: Tensor | None,
        chosen: Chosen,
    ) -> tuple[Tensor, Mix, Tensor, Chosen]:
        """Both halves; the output of the second is folded into the streams by whoever enters next."""
        c = self.config
        if layer.engram is not None:
            if y_ND is not None:
                x_NSD, y_ND = leave_gpu(y_ND, x_NSD, mix), None
            self._add_engram(layer.engram, found[layer.spec.index], x_NSD)
        entered = enter(c, layer.attention_mix, y_ND, x_NSD, mix)
        y_ND, chosen = self.layers.attention(layer, at, entered, chosen)
        entered = enter(c, layer.moe_mix, y_ND, entered.x_NSD, entered.mix)
        return entered.x_NSD, entered.mix, self.layers.moe(layer.moe, at, entered), chosen

    def remember(self, held: Buffers) -> dict[int, Tensor]:
        """Start reading the step's Engram rows on the side stream: ids depend on tokens alone, so all layers read at once."""
        wanted = [layer for layer in self.weights.layers if layer.engram is not None]
        if not wanted:
            return {}
        if self.side is None:
            return {layer.spec.index: self._rows_of(layer, held) for layer in wanted}
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            return {layer.spec.index: self._rows_of(layer, held) for layer in wanted}

    def _rows_of(self, layer: LayerWeights, held: Buffers) -> Tensor:
        assert layer.engram is not None and self.weights.class_V is not None, "a model with Engram has token classes"
        return gather_rows(
            held.tokens_M, self.weights.class_V, self.state.history, held.slots_M, layer.engram.hashes, layer.engram.stored,
            self.config.engram_n_heads,
        )  # fmt: skip

    def _add_engram(self, weights: EngramWeights, rows_NX: Tensor, x_NSD: Tensor) -> None:
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
            # A plain kernel after the join: operators launched early wait for the one launch before them on their own stream.
            rows_NX = rows_NX * 1.0
        add_memory(x_NSD, linear_gpu(rows_NX, weights.project, None, 1), weights.gates, self.config.norm_eps)

    def _advance_history(self, held: Buffers) -> None:
        if self.weights.class_V is None:
            return
        back = self.state.history.shape[1]
        new_M1 = self.weights.class_V[held.tokens_M].unsqueeze(1)
        self.state.history[held.slots_M] = torch.cat([new_M1, self.state.history[held.slots_M]], 1)[:, :back]

    def places(self, held: Buffers, reach: int) -> Places:
        plan, position_M, slot_M = self.config.plan, held.positions_M, held.slots_M
        ratios = sorted({spec.ratio for spec in plan.kv_sources})
        page_tokens = self.state.layout.page_tokens
        page_M = self.state.rows.table_device[slot_M, position_M // page_tokens]
        rope = {has_rows: rotary_table(position_M, freq_P) for has_rows, freq_P in self._freq.items()}
        head_rope: Table | None = None
        if ratios:
            cos, sin = (part.repeat_interleave(self.config.index_n_heads, 0) for part in rope[True])
            head_rope = (cos, sin)
        page, row, group_rope, visible = {}, {}, {}, {}
        for ratio in ratios:
            ended_M = (position_M + 1) % ratio == 0
            page[ratio] = page_M if ratio == 1 else torch.where(ended_M, page_M, -1)
            row[ratio] = position_M % page_tokens // ratio
            visible[ratio] = (position_M + 1) // ratio
            if ratio == 1:
                group_rope[ratio] = rope[True]
            else:
                first_M = (position_M + 1 - ratio).clamp_min(0)
                group_rope[ratio] = rotary_table(first_M, self._freq[True])
        stop_M = position_M + 1
        return Places(
            slot_N=slot_M.int(), slot_long_N=slot_M, position_N=position_M,
            span_N2=torch.stack([(stop_M - plan.window).clamp_min(0), stop_M], 1), cell_N=position_M % plan.window,
            text_N=held.text_M, groups_G2=held.groups_G2, rope=rope, head_rope=head_rope, visible=visible, page=page, row=row,
            group_rope=group_rope, tokens=reach,
        )  # fmt: skip


def _with_norm(mix: MixWeights, norm_D: Tensor) -> MixWeights:
    return replace(mix, norm=norm_D)


def _padded(ids: Tensor | None, rows: int) -> Tensor | None:
    """Ids of padding rows are none."""
    return None if ids is None else torch.nn.functional.pad(ids, (0, 0, 0, rows - len(ids)), value=-1)
