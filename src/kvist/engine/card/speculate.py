"""Speculative greedy decode on a card: draft, verify and accept as captured graphs, with the engine's choice of verify length.

A verify step of (requests, rows) is one graph from the newest tokens and their drafts to the accepted counts and the next newest
tokens; the host reads the counts and nothing else. Acceptance may be simulated (`Luck`), for weights that are noise. Must not
know how the length is chosen (`engine/speculation.py`), text or HTTP. Shapes: R requests, L rows of a run, B drafts of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvist.engine.card.device_model import Buffers, DeviceModel, captured
from kvist.engine.card.draft import CardDrafts
from kvist.engine.speculation import VerifyPolicy
from kvist.kernels.keyed_uniform import uniform_stream

KEYS = 4096


class Luck:
    """Simulated acceptance: the draft at depth i, behind position p, is right with probability `rates[i]`, keyed by (seed, p).

    `survival`: the probability that each draft and all before it are right.
    """

    def __init__(self, rates: Sequence[float], device: torch.device, seed: int = 0) -> None:
        drawn = np.stack([uniform_stream(seed, position, len(rates)) for position in range(KEYS)])
        self.survival = np.cumprod(rates).tolist()
        self.right_PB = torch.from_numpy(drawn < np.array(rates)).to(device)

    def __call__(self, position_R: Tensor) -> Tensor:
        """bool [R,B]; requests at one position draw from different keys."""
        own_R = torch.arange(len(position_R), device=position_R.device) * 1031
        return self.right_PB[(position_R + own_R) % KEYS]


class Cycle(NamedTuple):
    """What one cycle did: tokens gained by all requests, rows that were verified, seconds of drafting and of verifying."""

    tokens: int
    rows: int
    drafting: float
    verifying: float


class Speculation:
    """Requests that decode together, each with one newest token whose row is not computed yet.

    `policy` says when to draft and how many drafts to verify; `luck` None: drafts are judged by the model's best ids. Raises
    ValueError for a model without draft blocks, or a state whose rings do not take back a block.
    """

    def __init__(self, model: DeviceModel, policy: VerifyPolicy, requests: int, *, reach: int, luck: Luck | None = None) -> None:
        self.model, self.policy, self.luck, self.drafts = model, policy, luck, CardDrafts(model)
        self.reach, self.requests = model.reach_of(reach), requests
        self.bucket = model.buffers(requests).requests
        device, block = model.state.device, self.drafts.block
        self.heads_4R = torch.zeros(4, self.bucket, dtype=torch.int64, device=device)
        self.tokens_RB = torch.zeros(self.bucket, block, dtype=torch.int64, device=device)
        self.confidence_RB = torch.zeros(self.bucket, block, device=device)
        self.accepted_R = torch.zeros(self.bucket, dtype=torch.int64, device=device)
        self.positions = [0] * requests
        self._slots = [0] * requests
        self._unseen = 0
        self._graphs: dict[tuple[str, int], torch.cuda.CUDAGraph] = {}

    @property
    def most(self) -> int:
        """Drafts of a request that a step can verify."""
        return min(self.drafts.block, self.model.state.most_rows - 1)

    def begin(self, tokens: Sequence[int], positions: Sequence[int], slots: Sequence[int], *, filled: bool) -> None:
        """Newest tokens, their positions and slots. `filled`: draft windows hold what stands before them; else they are computed
        from the state's target states, as many as a window holds."""
        spare = self.model.state.spare
        heads = torch.tensor([tokens, positions, slots, [1] * len(tokens)], dtype=torch.int64)
        self.heads_4R.zero_()
        self.heads_4R[2] = spare
        self.heads_4R[:, : len(tokens)] = heads.to(self.heads_4R.device)
        self.positions, self._slots = list(positions), list(slots)
        self._unseen = 0 if filled else self.model.config.plan.window

    def prepare(self) -> None:
        """Capture every graph and build what fills windows now: the first use of each would wait for it. Call before `begin`."""
        spare = self.model.state.spare
        self._slots, self._unseen = [spare] * self.requests, 0
        self.drafts.prepare()
        for rows in range(1, self.most + 2):
            self.positions = [self.model.config.plan.window] * self.requests
            self.heads_4R.zero_()
            self.heads_4R[2] = spare
            self.verify([rows - 1] * self.requests)
        self._unseen = 0
        self.draft()

    def draft(self) -> None:
        """Propose behind every newest token, into `tokens_RB` and `confidence_RB`."""
        self._fill()
        self._run("draft", 0, self._draft)

    def verify(self, lengths: Sequence[int]) -> list[int]:
        """Verify so many drafts of each request; how many of each were accepted. The newest tokens are then the ones behind."""
        rows, observe = 1 + max(lengths), any(lengths)
        if observe:
            self._fill()
            self.heads_4R[3, : self.requests] = torch.tensor(lengths, dtype=torch.int64, device="cpu").add_(1)
        held = self.model.buffers(self.requests, rows)
        self._run("verify" if observe else "plain", rows, lambda: self._verify(held, observe))
        accepted = self.accepted_R[: self.requests].tolist()
        self.positions = [position + count + 1 for position, count in zip(self.positions, accepted, strict=True)]
        self._unseen += 0 if observe else 1
        return accepted

    def cycle(self) -> Cycle:
        """Draft if that pays, verify as many as pay, tell the policy what it took."""
        survival: list[list[float]] = [[] for _ in range(self.requests)]
        drafting = 0.0
        if self.policy.wants_drafts(self.requests):
            drafting, _ = self._timed(self.draft)
            self.policy.saw_drafting(self.requests, drafting)
            survival = self.survival()
        lengths = self.policy.lengths(survival) if survival[0] else [0] * self.requests
        lengths = [min(length, self.most) for length in lengths]
        verifying, accepted = self._timed(lambda: self.verify(lengths))
        tokens, rows = sum(accepted) + self.requests, self.requests + sum(lengths)
        self.policy.saw_step(self.requests, rows, tokens, verifying)
        for line, length, count in zip(survival, lengths, accepted, strict=True):
            if length:
                self.policy.saw_acceptance(line[:length], count)
        return Cycle(tokens, rows, drafting, verifying)

    def survival(self) -> list[list[float]]:
        """The probability that each draft and all before it will be accepted, as the drafts claim (or luck has it)."""
        if self.luck is not None:
            return [self.luck.survival[: self.most] for _ in range(self.requests)]
        lines_RB = torch.nan_to_num(torch.sigmoid(self.confidence_RB[: self.requests, : self.most]), nan=0.0).cumprod(1)
        return [[float(value) for value in line] for line in lines_RB.tolist()]

    def _timed(self, work: Callable[[], list[int] | None]) -> tuple[float, list[int]]:
        start = time.perf_counter()
        made = work()
        if self.heads_4R.is_cuda:
            torch.cuda.synchronize(self.heads_4R.device)
        return time.perf_counter() - start, made or []

    def _fill(self) -> None:
        """Compute the draft windows of steps that did not."""
        if not self._unseen:
            return
        window = self.model.config.plan.window
        parts = [
            (slot, at)
            for slot, position in zip(self._slots, self.positions, strict=True)
            for at in range(max(0, position - min(self._unseen, window)), position)
        ]
        self.drafts.fill([slot for slot, _ in parts], [at for _, at in parts])
        self._unseen = 0

    def _run(self, kind: str, rows: int, work: Callable[[], None]) -> None:
        if not self.model.graphs:
            work()
            return
        key = (kind, rows)
        if key not in self._graphs:
            kept = [part.clone() for part in (self.heads_4R, self.tokens_RB, self.confidence_RB)]
            self.heads_4R.zero_()
            self.heads_4R[2] = self.model.state.spare
            self.heads_4R[3] = 1
            self._graphs[key] = captured(work, work)
            for part, value in zip((self.heads_4R, self.tokens_RB, self.confidence_RB), kept, strict=True):
                part.copy_(value)
        self._graphs[key].replay()

    @torch.inference_mode()
    def _draft(self) -> None:
        token_R, position_R, slot_R, _ = self.heads_4R
        # Before the first position there is nothing to condition on: only padding stands there.
        made = self.drafts.propose(token_R, (position_R - 1).clamp_min(0), slot_R)
        self.tokens_RB.copy_(made.tokens_RB)
        self.confidence_RB.copy_(made.confidence_RB)

    @torch.inference_mode()
    def _verify(self, held: Buffers, observe: bool) -> None:
        """The whole step on the device: rows, layers, draft windows, acceptance, the next newest tokens."""
        token_R, position_R, slot_R, length_R = self.heads_4R
        rows, spare = held.rows, self.model.state.spare
        at_L = torch.arange(rows, device=held.device)
        live_RL = at_L < length_R.unsqueeze(1) if rows > 1 else torch.ones_like(token_R, dtype=torch.bool).unsqueeze(1)
        offered_RL = torch.cat([token_R.unsqueeze(1), self.tokens_RB[:, : rows - 1]], 1)
        stands_RL = position_R.unsqueeze(1) + at_L
        for line, value, blank in ((0, offered_RL, 0), (1, stands_RL, 0), (2, slot_R.unsqueeze(1), spare), (3, at_L, 0)):
            held.input_4M[line].view(-1, rows).copy_(torch.where(live_RL, value, blank))
        targets_NX = self.model.step(held, self.reach, False)
        if observe:
            assert targets_NX is not None
            self.drafts.observe(targets_NX, held.positions_M, held.slots_M)
        best_RL = held.best_M.view(-1, rows)
        if self.luck is None:
            right_RB = best_RL[:, :-1] == offered_RL[:, 1:]
        else:
            right_RB = self.luck(position_R)[:, : rows - 1]
        self.accepted_R.copy_((right_RB & live_RL[:, 1:]).long().cumprod(1).sum(1))
        token_R.copy_(best_RL.gather(1, self.accepted_R.unsqueeze(1)).squeeze(1))
        position_R.add_(torch.where(slot_R == spare, 0, self.accepted_R + 1))
