"""The draft stage: DSpark blocks trained alone on a frozen backbone's states and distributions, many anchors a sequence.

Owns the vectorised block pass and its loss. Must not know schedules or files. Facts section 9; the loss follows the reading
of the DSpark paper given there, with the target's most probable token in the cross-entropy (greedy acceptance is what the
shipped model is judged by).

Shapes: B sequences, T tokens, A anchors a sequence, K block slots, R = B*A*K rows, W window, C head width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from kvist.config import ModelConfig
from kvist.kernels.rotary.ref import rotate_ref as rotate
from kvist.model.layers import inverse_frequencies, rotary_table
from kvist.train import pieces
from kvist.train.attention import attend_plain
from kvist.train.network import Mode, Network, Outcome
from kvist.train.optimiser import Loads
from kvist.train.shapes import Batch, Geometry

GAMMA = 4.0


def backbone(
    config: ModelConfig, weights: Mapping[str, Tensor], geometry: Geometry, mode: Mode, batch: Batch, classes_V: Tensor | None
) -> Outcome:
    """A frozen pass that records target states; the result carries no gradient."""
    network = Network(config, weights, geometry, mode)
    network.wants_targets = True
    out = network.run(batch, classes_V, losses=False)
    h = (out.pre_NS.unsqueeze(2) * out.x_NSD.float()).sum(1).to(mode.dtype)
    hidden = pieces.norm(h, weights["norm.weight"], config.norm_eps).detach()
    return Outcome(x_NSD=hidden, pre_NS=out.pre_NS.detach(), targets=[t.detach() for t in out.targets])


def draft_loss(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    geometry: Geometry,
    mode: Mode,
    batch: Batch,
    frozen: Outcome,
    anchors_A: Tensor,
    loads: Loads,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of all anchors of all sequences, and figures: share of slots whose greedy tokens agree, expected acceptance.

    An anchor p is the last accepted position; it needs p >= 0 and p + K + 1 < T.
    """
    b, size = geometry.batch, config.dspark_block_size
    slots = anchors_A.unsqueeze(1) + 1 + torch.arange(size, device=anchors_A.device)
    at = (torch.arange(b, device=slots.device).view(b, 1, 1) * geometry.length + slots).flatten()
    x_RD, e_RM = _blocks(config, weights, geometry, mode, batch, frozen, anchors_A, slots, at, loads)
    last = f"mtp.{config.n_mtp_layers - 1}"
    target_RV = frozen.x_NSD[at].float() @ weights["head.weight"].detach().T
    confidence = torch.cat([x_RD.float(), e_RM.float()], 1) @ weights[f"{last}.confidence_head.proj.weight"].float().T
    loss_R, overlap_R, same_R = pieces.fused(_slot_losses, geometry.device.type)(
        pieces.norm(x_RD, weights[f"{last}.norm.weight"], config.norm_eps),
        weights["head.weight"].detach(),
        e_RM,
        weights[f"{last}.markov_head.head.weight"],
        confidence.squeeze(1),
        target_RV,
    )
    weight_K = torch.exp(-torch.arange(size, device=slots.device) / GAMMA)
    loss = (loss_R.unflatten(0, (-1, size)) * weight_K).mean()
    same = same_R.unflatten(0, (-1, size)).float()
    figures = {"agree": same.mean(0), "run": same.cumprod(1).sum(1).mean(), "overlap": overlap_R.unflatten(0, (-1, size)).mean(0)}
    return loss, figures


def _slot_losses(
    h_RD: Tensor, head_VD: Tensor, e_RM: Tensor, markov_VM: Tensor, confidence_R: Tensor, target_RV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    logits = h_RD.float() @ head_VD.T + F.linear(e_RM, markov_VM).float()
    logp, q = torch.log_softmax(logits, 1), torch.softmax(target_RV, 1)
    best = target_RV.argmax(1)
    variation = 0.5 * (logp.exp() - q).abs().sum(1)
    entropy = -logp.gather(1, best.unsqueeze(1)).squeeze(1)
    accepted = (1 - variation).detach()
    judged = F.binary_cross_entropy_with_logits(confidence_R, accepted, reduction="none")
    return 0.1 * entropy + 0.9 * variation + judged, accepted, logits.argmax(1) == best


def _blocks(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    geometry: Geometry,
    mode: Mode,
    batch: Batch,
    frozen: Outcome,
    anchors_A: Tensor,
    slots_AK: Tensor,
    at_R: Tensor,
    loads: Loads,
) -> tuple[Tensor, Tensor]:
    """Collapsed states [R,D] and the Markov embedding of the token before each slot [R,rank]."""
    b, size, window = geometry.batch, config.dspark_block_size, config.window_size
    network = Network(config, weights, geometry, mode)
    context = F.linear(pieces.act(torch.cat(frozen.targets, 1), mode.quantise), weights["mtp.0.main_proj.weight"])
    context = pieces.norm(context, weights["mtp.0.main_norm.weight"], config.norm_eps)
    past_AW = anchors_A.unsqueeze(1) - torch.arange(window - 1, -1, -1, device=at_R.device)
    seen = torch.cat([past_AW >= 0, torch.ones_like(slots_AK, dtype=torch.bool)], 1).repeat(b, 1)
    before = batch.tokens.flatten()[at_R]
    ids = before.unflatten(0, (-1, size)).clone()
    ids[:, 1:] = config.dspark_noise_token_id
    x = F.embedding(ids.flatten(), weights["embed.weight"].detach()).to(mode.dtype).unsqueeze(1).repeat(1, config.hc_mult, 1)
    pre = F.one_hot(torch.zeros_like(at_R), config.hc_mult).float()
    for spec in config.plan.drafts:
        prefix = f"mtp.{spec.index - config.n_layers}"
        frequencies = inverse_frequencies(config, spec).to(at_R.device)
        table = rotary_table(slots_AK.flatten().repeat(b), frequencies)
        h, after, leave = network.enter(prefix, "attn", x, pre)
        q, kv, _ = network.projections(prefix, spec, h, table)
        past = _window_entries(config, weights, prefix, context, geometry, frequencies, mode)
        held = past.unflatten(0, (b, -1))[:, past_AW.clamp_min(0)].flatten(0, 1)
        keys = torch.cat([held, kv.unflatten(0, (-1, size))], 1)
        sink = weights[f"{prefix}.attn.attn_sink"]
        done = pieces.fused(attend_plain, geometry.device.type)(
            q.unflatten(0, (-1, size)), keys, seen.unsqueeze(1).expand(-1, size, -1), sink
        )
        x, pre = leave(network.output(prefix, done.out_BTHC.flatten(0, 1), table)), after
        h, after, leave = network.enter(prefix, "ffn", x, pre)
        y, chosen, _ = network.experts(prefix, h, None, config.dspark_n_activated_experts)
        loads.add(prefix, chosen, torch.ones_like(at_R, dtype=torch.bool), None)
        x, pre = leave(y), after
    e = F.embedding(before, weights[f"mtp.{config.n_mtp_layers - 1}.markov_head.embed.weight"])
    return (pre.unsqueeze(2) * x.float()).sum(1).to(mode.dtype), e


def _window_entries(
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    prefix: str,
    context_ND: Tensor,
    geometry: Geometry,
    frequencies: Tensor,
    mode: Mode,
) -> Tensor:
    positions = torch.arange(geometry.length, device=context_ND.device).repeat(geometry.batch)
    kv = F.linear(pieces.act(context_ND, mode.quantise), weights[f"{prefix}.attn.wkv.weight"])
    kv = pieces.norm(kv, weights[f"{prefix}.attn.kv_norm.weight"], config.norm_eps)
    return pieces.act(rotate(kv, rotary_table(positions, frequencies)), mode.quantise)
