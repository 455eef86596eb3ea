"""The draft blocks on a card: windows filled from target states, and a block of tokens proposed behind each request's newest.

The meaning stands in `model/dspark.py`. Everything stays on the device, so that a proposal can be captured in a CUDA graph. A
block's own entries stand in the rings behind the window until the positions are computed: rings are long enough (`most_rows`).
Must not know verification, acceptance or costs. Shapes: N rows, R requests, B drafts of a block, D model width, S streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.engine.card.device_model import BUCKETS, DeviceModel, captured
from kvist.engine.card.layers import Chosen, wide_product
from kvist.engine.card.one_row import Output, left
from kvist.engine.card.places import Places
from kvist.kernels.best_token.gpu import best_token_gpu
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.linear.gpu import linear_gpu
from kvist.kernels.quantise.gpu import rows_gpu, write_rows
from kvist.kernels.row_places import RowPlaces, row_places

FILLS = (16, 128, 1024)
"""Rows that `fill` runs at once: few sizes, since every size may need kernels of its own."""


class Proposed(NamedTuple):
    """float32 logits [R,B,V] before the token before each place is known, int64 tokens [R,B], and float32 [R,B] logits of the
    confidence that each is accepted if those before it are."""

    base_RBV: Tensor
    tokens_RB: Tensor
    confidence_RB: Tensor


class CardDrafts:
    """The draft blocks of a model with such weights. Raises ValueError without, or where rings are too short for a block."""

    def __init__(self, model: DeviceModel) -> None:
        weights, config, state = model.weights.drafts, model.config, model.state
        if weights is None:
            raise ValueError("this model's weights have no draft blocks")
        size, rows = config.dspark_block_size, state.most_rows
        if rows < size:
            raise ValueError(f"a block of {size} drafts needs a state that takes back as many rows; this one takes back {rows}")
        self.model, self.weights, self.config, self.state = model, weights, config, state
        self.block = config.dspark_block_size
        self._captured: dict[int, tuple[Tensor, Proposed, torch.cuda.CUDAGraph]] = {}

    @torch.inference_mode()
    def observe(self, targets_NX: Tensor, position_N: Tensor, slot_N: Tensor) -> None:
        """Fill the blocks' windows at these positions from target states, bfloat16 [N, targets*D]."""
        c, w = self.config, self.weights
        main_ND = linear_gpu(rows_gpu(targets_NX, form="fp8"), w.main, None, 1)
        context_ND = rows_gpu(main_ND, form="fp8", norm=(w.main_norm, c.norm_eps))
        stood = self._stand(position_N, slot_N)
        for block, entry in zip(w.blocks, w.entries, strict=True):
            ring = self.state.ring(block.spec.index)
            assert ring.scales is not None
            write_rows(
                linear_gpu(context_ND, entry, None, 1), ring.values, ring.scales, slot_N, stood.cell_N, form="fp8",
                norm=(block.attention.entry_norm, c.norm_eps), table=stood.plain,
            )  # fmt: skip

    def fill(self, slots: Sequence[int], positions: Sequence[int]) -> None:
        """Fill the blocks' windows at these places from the target states that passes have kept in the state."""
        targets, spare = self.state.targets, self.state.spare
        for first in range(0, len(slots), FILLS[-1]):
            count = min(len(slots) - first, FILLS[-1])
            padding = [0] * (next(size for size in FILLS if size >= count) - count)
            lines = [[*slots[first : first + count], *(spare for _ in padding)], [*positions[first : first + count], *padding]]
            slot_N, position_N = torch.tensor(lines, device=self.state.device)
            self.observe(targets[slot_N, position_N % targets.shape[1]], position_N, slot_N)

    def prepare(self) -> None:
        """Build what `fill` will need, on the spare slot: the first use of each size would wait for it."""
        for size in FILLS:
            self.fill([self.state.spare] * size, [0] * size)

    @torch.inference_mode()
    def proposed(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int]) -> Proposed:
        """`propose` for requests as the host knows them; captured once a bucket of requests where the model captures steps."""
        count, spare = len(tokens), self.state.spare
        if not self.model.graphs or count > BUCKETS[-1]:
            return self.propose(*torch.tensor([tokens, positions, slots], device=self.state.device))
        bucket = next(size for size in BUCKETS if size >= count)
        padding = [0] * (bucket - count)
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(bucket)
        input_3R, made, graph = self._captured[bucket]
        input_3R.copy_(torch.tensor([[*tokens, *padding], [*positions, *padding], [*slots, *(spare for _ in padding)]]))
        graph.replay()
        # The next replay writes there again.
        return Proposed(*(part[:count].clone() for part in made))

    def _capture(self, requests: int) -> tuple[Tensor, Proposed, torch.cuda.CUDAGraph]:
        """What a graph reads, what it leaves, and the graph."""
        input_3R = torch.zeros(3, requests, dtype=torch.int64, device=self.state.device)
        input_3R[2] = self.state.spare
        made: list[Proposed] = []
        graph = captured(lambda: self.propose(*input_3R), lambda: made.append(self.propose(*input_3R)), self.model.pool)
        return input_3R, made[0], graph

    @torch.inference_mode()
    def propose(self, first_R: Tensor, position_R: Tensor, slot_R: Tensor) -> Proposed:
        """A block a request behind the accepted `position_R` (whose window is filled), given the token at the next position."""
        c, requests = self.config, len(first_R)
        ids_RB = torch.full((requests, self.block), c.dspark_noise_token_id, dtype=torch.int64, device=first_R.device)
        ids_RB[:, 0] = first_R
        at, x_NSD = self._places(position_R, slot_R), self.model.streams(ids_RB.flatten())
        first_NS = torch.zeros(len(x_NSD), c.hc_mult, device=x_NSD.device)
        first_NS[:, 0] = 1.0
        mix, chosen = Mix(first_NS, first_NS, first_NS), Chosen()
        y_ND: Output = None
        for block in self.weights.blocks:
            x_NSD, mix, y_ND, chosen = self.model.step_layer(block, at, {}, x_NSD, mix, y_ND, chosen, None)
        x_NSD = left(y_ND, x_NSD, mix)
        x_ND = (x_NSD.float() * mix.pre_NS.unsqueeze(2)).sum(1).bfloat16()
        return self._heads(x_ND, first_R)

    def _heads(self, x_ND: Tensor, first_R: Tensor) -> Proposed:
        """Logits of all places, then the places in turn, each corrected by the token before it."""
        w, requests = self.weights, len(first_R)
        base_NV = wide_product(rows_gpu(x_ND, norm=(w.norm, self.config.norm_eps)), self.model.weights.head)
        base_RBV = base_NV.unflatten(0, (requests, self.block))
        previous_R, tokens, embedded = first_R, [], []
        for place in range(self.block):
            e_RM = w.markov_embed[previous_R]
            previous_R = best_token_gpu(base_RBV[:, place], (e_RM, w.markov_head))
            tokens.append(previous_R)
            embedded.append(e_RM)
        state_RBX = torch.cat([x_ND.unflatten(0, (requests, self.block)), torch.stack(embedded, 1)], 2)
        return Proposed(base_RBV, torch.stack(tokens, 1), (state_RBX.float() * w.confidence).sum(2))

    def _places(self, position_R: Tensor, slot_R: Tensor) -> Places:
        """All rows of a block see the window before it and the whole block."""
        size, window = self.block, self.config.plan.window
        position_N = (position_R.unsqueeze(1) + torch.arange(1, size + 1, device=position_R.device)).flatten()
        slot_N = slot_R.repeat_interleave(size)
        stop_R = position_R + size + 1
        span_R2 = torch.stack([(position_R + 1 - window).clamp_min(0), stop_R], 1)
        stood = self._stand(position_N, slot_N)
        return Places(
            slot_N=stood.slot_N, slot_long_N=slot_N, span_N2=span_R2.repeat_interleave(size, 0), cell_N=stood.cell_N,
            text_N=torch.ones_like(slot_N, dtype=torch.bool), groups_G2=slot_N.new_zeros(0, 2, dtype=torch.int32),
            rope={False: stood.plain}, head_rope=None, visible={}, page={}, row={}, group_rope={}, position_N=position_N,
            offset_N=torch.zeros_like(slot_N), tokens=0, longest=window + size,
        )  # fmt: skip

    def _stand(self, position_N: Tensor, slot_N: Tensor) -> RowPlaces:
        state, c = self.state, self.config
        return row_places(
            position_N, slot_N, state.rows.table_device, state.freq_2P, ratios=(), window=c.plan.window,
            cells=state.codes.shape[2], page_tokens=state.layout.page_tokens, heads=1, impl="gpu",
        )  # fmt: skip
