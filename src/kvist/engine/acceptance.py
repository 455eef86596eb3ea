"""From a step's logits to tokens: one choice a row, and which drafts those choices accept, under either rule.

`keyed` (default): every row is sampled with the noise of its position and a draft is accepted if it equals that token, so drafts
never change an output. `rejection`: drafts are accepted with probability min(1, p / q), which accepts more at high temperature
and follows the same distribution, but not the same tokens. Must not know scheduling or memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvist.engine.request import Job
from kvist.engine.sampler import Choice, choose
from kvist.engine.sampling.logprobs import row_logprobs
from kvist.engine.sampling.rejection import verify


class Wanted(NamedTuple):
    """Rows `first` .. `first + drafts` of a step's logits: a job's next position and the places behind its drafts."""

    job: Job
    first: int
    drafts: int


def choices(wanted: Sequence[Wanted], logits_WV: Tensor, *, rejection: bool) -> list[list[Choice]]:
    """The choices of each entry in order of position; the last one that counts is the first that differs from its draft."""
    keyed = [entry for entry in wanted if not (rejection and entry.drafts)]
    found = dict(zip((entry.first for entry in keyed), _keyed(keyed, logits_WV), strict=True))
    return [found[entry.first] if entry.first in found else _rejecting(entry, logits_WV) for entry in wanted]


def _keyed(wanted: Sequence[Wanted], logits_WV: Tensor) -> list[list[Choice]]:
    if not wanted:
        return []
    rows = [(entry, depth) for entry in wanted for depth in range(entry.drafts + 1)]
    index = [entry.first + depth for entry, depth in rows]
    if len(index) < len(logits_WV):
        logits_WV = logits_WV[torch.tensor(index, device=logits_WV.device)]
    chosen = choose(
        logits_WV,
        [entry.job.request.sampling for entry, _ in rows],
        [len(entry.job) + depth for entry, depth in rows],
        [entry.job.reply.behind(entry.job.drafts[:depth]) for entry, depth in rows],
        [entry.job.reply.mask(depth) for entry, depth in rows],
    )
    result, at = [], 0
    for entry in wanted:
        result.append(chosen[at : at + entry.drafts + 1])
        at += entry.drafts + 1
    return result


def _rejecting(entry: Wanted, logits_WV: Tensor) -> list[Choice]:
    job, reply = entry.job, entry.job.reply
    sampling, drafts = job.request.sampling, job.drafts[: entry.drafts]
    rows_KV = logits_WV[entry.first : entry.first + entry.drafts + 1].float().cpu().numpy()
    probs = None if job.draft_probs is None else job.draft_probs[: entry.drafts]
    verdict = verify(rows_KV, drafts, probs, sampling, len(job), history=reply.history, masks=reply.masks)
    tokens = drafts[: verdict.accepted]
    if verdict.error is None:
        tokens = [*tokens, verdict.token]
    made = []
    for row_V, token in zip(rows_KV, tokens, strict=False):
        details = None if sampling.logprobs is None else row_logprobs(row_V, token, sampling.logprobs)
        made.append(Choice(token, details))
    return made if verdict.error is None else [*made, Choice(-1, None, verdict.error)]
