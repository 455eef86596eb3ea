"""Proposals of the draft blocks for many requests at once, chosen with each request's own noise, with their survival.

Owns how drafts are sampled: with the noise of (seed, position) that the target will meet, so that equal distributions give
equal tokens; or drawn independently for the rejection rule. Must not know acceptance, schedules or costs. Report 2.4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kvist.engine.reply import Reply
from kvist.engine.request import Job
from kvist.engine.sampler import choose
from kvist.engine.sampling.history import Ahead, History
from kvist.engine.sampling.rejection import propose
from kvist.kernels.keyed_uniform import Floats
from kvist.model.dspark import Draft


class Proposal(NamedTuple):
    """Drafts of one request, the probability that each and all before it are accepted, and what each was drawn from."""

    tokens: list[int]
    survival: list[float]
    probs: list[Floats] | None = None


class Blocks(Protocol):
    """Who runs the draft blocks: the engine's executor."""

    def draft(self, jobs: Sequence[Job], sample: Callable[[Tensor, int], Tensor]) -> Draft:
        """A block of draft tokens behind each job's newest token, chosen by `sample(logits [R,V], place)`."""
        ...


class Drafter(Protocol):
    """Whatever proposes tokens behind the newest one of each job."""

    def __call__(self, jobs: Sequence[Job]) -> list[Proposal]:
        """One proposal a job; each job's tokens but the newest are computed."""
        ...


def proposals(drafter: Drafter, jobs: Sequence[Job], vocabulary: int) -> list[Proposal]:
    """What a drafter proposes, looked at before it may reach a batch, where a wrong id would end everybody's step.

    Raises what the drafter raises, and ValueError for what is no proposal: not one a job, an id outside the vocabulary, or a
    draft without survival or without the distribution it was drawn from.
    """
    made = list(drafter(jobs))
    if len(made) != len(jobs):
        raise ValueError(f"the drafter made {len(made)} proposals for {len(jobs)} requests; it must make one each")
    for tokens, survival, probs in made:
        if len(survival) != len(tokens) or (probs is not None and len(probs) != len(tokens)):
            drawn = "none" if probs is None else len(probs)
            raise ValueError(f"{len(tokens)} drafts came with {len(survival)} survivals and {drawn} distributions; one a draft")
        if bad := [token for token in tokens if not 0 <= token < vocabulary]:
            raise ValueError(f"the drafter proposed token id {bad[0]}; the vocabulary is 0..{vocabulary - 1}")
    return made


class BlockDrafter:
    """The model's own draft blocks. `draw`: drafts are drawn with noise of their own, and their distributions kept, for the
    rejection rule; else they are chosen with the target's noise."""

    def __init__(self, runner: Blocks, drafts: int, *, draw: bool = False) -> None:
        self.runner, self.drafts, self.draw = runner, drafts, draw

    def __call__(self, jobs: Sequence[Job]) -> list[Proposal]:
        """See `Drafter`. A draft whose logits are not finite counts as hopeless and stands as token 0."""
        chosen: list[list[int]] = [[] for _ in jobs]
        probs: list[list[Floats]] = [[] for _ in jobs]

        def sample(logits_RV: Tensor, slot: int) -> Tensor:
            if self.draw:
                self._drawn(jobs, logits_RV, slot, chosen, probs)
            else:
                self._chosen(jobs, logits_RV, slot, chosen)
            return torch.tensor([line[-1] for line in chosen], device=logits_RV.device)

        draft = self.runner.draft(jobs, sample)
        survival_RB = torch.nan_to_num(torch.sigmoid(draft.confidence_RB.float()), nan=0.0).cumprod(1)[:, : self.drafts].tolist()
        return [
            Proposal(tokens[: self.drafts], survival, kept[: self.drafts] if self.draw else None)
            for tokens, survival, kept in zip(chosen, survival_RB, probs, strict=True)
        ]

    def _chosen(self, jobs: Sequence[Job], logits_RV: Tensor, slot: int, chosen: list[list[int]]) -> None:
        params, positions = [job.request.sampling for job in jobs], [len(job) + slot for job in jobs]
        histories = [_history(job, before) for job, before in zip(jobs, chosen, strict=True)]
        for line, choice in zip(chosen, choose(logits_RV, params, positions, histories), strict=True):
            line.append(max(0, choice.token))

    def _drawn(
        self, jobs: Sequence[Job], logits_RV: Tensor, slot: int, chosen: list[list[int]], probs: list[list[Floats]]
    ) -> None:
        rows_RV = logits_RV.float().cpu().numpy()
        for job, row_V, line, kept in zip(jobs, rows_RV, chosen, probs, strict=True):
            if np.isfinite(row_V).all():
                token, probs_V = propose(row_V, job.request.sampling, len(job) + slot)
            else:
                token, probs_V = 0, np.zeros(len(row_V))
                probs_V[0] = 1.0
            line.append(token)
            kept.append(probs_V)


def _history(job: Job, before: list[int]) -> History | Ahead | None:
    assert isinstance(job.reply, Reply)
    return job.reply.behind(before)
