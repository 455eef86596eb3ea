"""DSpark draft: three window-only blocks that propose a whole block of tokens at once, a Markov head and a confidence head.

Must not know verification, acceptance or scheduling. Report 2.4.3; facts section 9.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kvist.config import ModelConfig
from kvist.kernels.group_pool import Groups
from kvist.kernels.hyper_connections.ref import collapse
from kvist.kernels.index_select import Selection
from kvist.model.block import Block
from kvist.model.layers import Linear, QuantLinear, RMSNorm, embedding
from kvist.model.memory import DraftMemory, LayerPlaces, Shared
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, consecutive_rows
from kvist.model.whole_layer import WindowEntries


class Draft(NamedTuple):
    """One proposal a request: base and Markov-corrected logits [R,B,V], greedy tokens [R,B], confidence logits [R,B]."""

    base_RBV: Tensor
    logits_RBV: Tensor
    tokens_RB: Tensor
    confidence_RB: Tensor


class DraftView:
    """The draft blocks' memory: every query sees the request's window and its whole block, in both directions."""

    def __init__(self, memory: DraftMemory) -> None:
        self.memory = memory

    def attend(
        self, layer: int, source: int | None, rows: Rows, q_NHC: Tensor, window_NC: Tensor, topk_NK: Tensor | None, sink_H: Tensor
    ) -> Tensor:
        """Attend ring entries and block entries; nothing is kept."""
        assert source is None and topk_NK is None
        return self.memory.attend_block(layer, rows, q_NHC, window_NC, sink_H)

    def places(self, rows: Rows) -> LayerPlaces | None:
        """The memory's, for whole blocks."""
        return self.memory.places(rows, block=True)

    def group(self, source: int, rows: Rows, ratio: int, kv_NC: Tensor, gate_NC: Tensor | None) -> Groups:
        """Draft blocks own no rows."""
        raise AssertionError("a draft block has no compressor")

    def append(self, source: int, rows: Rows, groups: Groups, main_GC: Tensor, key_GI: Tensor) -> None:
        """Draft blocks own no rows."""
        raise AssertionError("a draft block has no compressor")

    def select(
        self, source: int, rows: Rows, q_NJI: Tensor, weight_NJ: Tensor, pool_NB: Tensor | None, publish: bool
    ) -> Selection:
        """Draft blocks own no indexer."""
        raise AssertionError("a draft block has no indexer")


class MarkovHead(nn.Module):
    """A low-rank bias on the next slot's logits from the token before it."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.embed = embedding(config.vocab_size, config.dspark_markov_rank, numerics.dtype)
        self.head = Linear(config.dspark_markov_rank, config.vocab_size, numerics)


class ConfidenceHead(nn.Module):
    """The logit that a slot will be accepted, from its collapsed state and the previous token's Markov embedding."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.proj = Linear(config.dim + config.dspark_markov_rank, 1, numerics, wide=True)


class DraftBlock(Block):
    """A window-only block of the draft; the first and last own the input projection and the heads."""

    def __init__(self, config: ModelConfig, numerics: Numerics, index: int, *, own_experts: bool = True) -> None:
        spec = config.plan.drafts[index]
        routed, active = config.dspark_n_routed_experts, config.dspark_n_activated_experts
        super().__init__(config, spec, numerics, routed, active, own_experts=own_experts)
        if index == 0:
            self.main_proj = QuantLinear(len(config.dspark_target_layer_ids) * config.dim, config.dim, numerics)
            self.main_norm = RMSNorm(config.dim, config.norm_eps)
        if index == config.n_mtp_layers - 1:
            self.norm = RMSNorm(config.dim, config.norm_eps)
            self.markov_head = MarkovHead(config, numerics)
            self.confidence_head = ConfidenceHead(config, numerics)


class DraftBlocks(nn.ModuleList):
    """All draft blocks under their released names (`mtp.0`, ...)."""

    def __init__(self, config: ModelConfig, numerics: Numerics, *, own_experts: bool = True) -> None:
        super().__init__(DraftBlock(config, numerics, index, own_experts=own_experts) for index in range(config.n_mtp_layers))
        self.config, self.numerics = config, numerics
        self._native: WindowEntries | None = None

    def context(self, targets: tuple[Tensor, ...]) -> Tensor:
        """Stream means of the target layers' inputs, each [N,D] -> the vector c [N,D] all blocks condition on."""
        first = self[0]
        assert isinstance(first, DraftBlock)
        return first.main_norm(first.main_proj(torch.cat(targets, 1)))

    def observe(self, targets: tuple[Tensor, ...], rows: Rows, memory: DraftMemory) -> None:
        """Fill the draft windows from accepted tokens' target states."""
        context_ND = self.context(targets)
        if self._keep_natively(context_ND, rows, memory):
            return
        for block in self:
            assert isinstance(block, DraftBlock)
            memory.write_window(block.spec.index, rows, block.attn.window_entries(context_ND, rows))

    def _keep_natively(self, context_ND: Tensor, rows: Rows, memory: DraftMemory) -> bool:
        """All blocks' entries in one native call, where memory and numerics allow it."""
        first = self[0]
        assert isinstance(first, DraftBlock)
        if not first.servable or torch.is_grad_enabled() or not len(context_ND):
            return False
        places = memory.places(rows, block=False)
        if places is None:
            return False
        if self._native is None or not self._native.current(moved=rows.many):
            self._native = WindowEntries([block for block in self if isinstance(block, DraftBlock)])
        if self._native.watched:
            return False
        self._native.write(context_ND, rows, places)
        return True

    def forward(
        self,
        first_ids_R: Tensor,
        positions_R: Tensor,
        slots: list[int],
        memory: DraftMemory,
        embed: nn.Embedding,
        head: Linear,
        sample: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Draft:
        """Propose a block a request after accepted positions [R], given the token at the next position.

        `sample(logits_RV, slot)` picks the tokens (default: argmax, the lower id wins ties).
        """
        size, noise = self.config.dspark_block_size, self.config.dspark_noise_token_id
        starts = []
        for slot, position, first in zip(slots, positions_R.tolist(), first_ids_R.tolist(), strict=True):
            ids = torch.full((size,), noise, dtype=torch.int64, device=first_ids_R.device)
            ids[0] = first
            starts.append((slot, position + 1, ids))
        ids_N, positions_N, segments = consecutive_rows(starts)
        text_N = torch.ones_like(ids_N, dtype=torch.bool)
        rows = Rows(token_ids_N=ids_N, positions_N=positions_N, text_N=text_N, segments=segments)
        x_NSD = embed(ids_N).to(self.numerics.dtype).unsqueeze(1).repeat(1, self.config.hc_mult, 1)
        pre_NS = torch.zeros(len(ids_N), self.config.hc_mult, device=ids_N.device)
        pre_NS[:, 0] = 1.0
        shared, view = Shared(), DraftView(memory)
        for block in self:
            x_NSD, pre_NS, shared = block(x_NSD, pre_NS, rows, view, shared)
        x_RBD = collapse(x_NSD, pre_NS).unflatten(0, (-1, size))
        return self.propose(x_RBD, first_ids_R, head, sample)

    def propose(
        self,
        x_RBD: Tensor,
        first_ids_R: Tensor,
        head: Linear,
        sample: Callable[[Tensor, int], Tensor] | None = None,
    ) -> Draft:
        """The heads: logits of all slots, then the slots in order, each corrected by the token before it."""
        last = self[-1]
        assert isinstance(last, DraftBlock)
        base_RBV = head(last.norm(x_RBD))
        previous_R, logits, tokens, confidence = first_ids_R, [], [], []
        for slot in range(x_RBD.shape[1]):
            e_RM = last.markov_head.embed(previous_R)
            logits_RV = base_RBV[:, slot] + last.markov_head.head(e_RM).float()
            previous_R = logits_RV.argmax(1) if sample is None else sample(logits_RV, slot)
            state = torch.cat([x_RBD[:, slot].float(), e_RM.float()], 1)
            confidence.append(last.confidence_head.proj(state).squeeze(1))
            logits.append(logits_RV)
            tokens.append(previous_R)
        return Draft(base_RBV, torch.stack(logits, 1), torch.stack(tokens, 1), torch.stack(confidence, 1))
