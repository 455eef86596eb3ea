"""Proposals of the draft blocks for many requests at once, chosen with each request's own noise, with their survival.

Owns how drafts are sampled: with the noise of (seed, position) that the target will meet, so that equal distributions give
equal tokens. Must not know acceptance, schedules or costs. Report 2.4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvist.engine.reply import Reply
from kvist.engine.request import Job
from kvist.engine.runner import Runner
from kvist.engine.sampler import choose
from kvist.engine.sampling.history import Ahead, History


class Proposal(NamedTuple):
    """Drafts of one request and the probability that each and all before it are accepted; its draft logits if kept."""

    tokens: list[int]
    survival: list[float]
    logits_BV: Tensor | None = None


class Drafter(Protocol):
    """Whatever proposes tokens behind the newest one of each job."""

    def __call__(self, jobs: Sequence[Job]) -> list[Proposal]:
        """One proposal a job; each job's tokens but the newest are computed."""
        ...


class BlockDrafter:
    """The model's own draft blocks."""

    def __init__(self, runner: Runner, drafts: int, *, keep_logits: bool = False) -> None:
        self.runner, self.drafts, self.keep_logits = runner, drafts, keep_logits

    def __call__(self, jobs: Sequence[Job]) -> list[Proposal]:
        """See `Drafter`. A draft whose logits are not finite counts as hopeless and stands as token 0."""
        params = [job.request.sampling for job in jobs]
        chosen: list[list[int]] = [[] for _ in jobs]

        def sample(logits_RV: Tensor, slot: int) -> Tensor:
            positions = [len(job) + slot for job in jobs]
            histories = [_history(job, before) for job, before in zip(jobs, chosen, strict=True)]
            for line, choice in zip(chosen, choose(logits_RV, params, positions, histories), strict=True):
                line.append(max(0, choice.token))
            return torch.tensor([line[-1] for line in chosen], device=logits_RV.device)

        draft = self.runner.draft(jobs, sample)
        confidence_RB = torch.nan_to_num(torch.sigmoid(draft.confidence_RB.float()), nan=0.0).cumprod(1)
        proposals = []
        for row, (tokens, survival) in enumerate(zip(chosen, confidence_RB.tolist(), strict=True)):
            kept = draft.logits_RBV[row, : self.drafts] if self.keep_logits else None
            proposals.append(Proposal(tokens[: self.drafts], survival[: self.drafts], kept))
        return proposals


def _history(job: Job, before: list[int]) -> History | Ahead | None:
    assert isinstance(job.reply, Reply)
    return job.reply.behind(before)
