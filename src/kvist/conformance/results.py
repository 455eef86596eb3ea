"""Pairs what was recorded here with what the case holds, run by run, by name and position.

Owns alignment: which positions a recorded tensor covers, shape checks, the layers of a quantity. Must not judge.
Shapes: N positions of a run, R recorded rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.config import LayerPlan
from kvist.conformance.case import Case, Run
from kvist.conformance.errors import CaseError
from kvist.conformance.prompt import Prompt
from kvist.conformance.recording import PER_PROMPT, Recording

SELECTIONS = ("topk", "candidates", "experts")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One tensor of one run: `got` and `want` of equal shape; `at` are the positions of their rows (or row numbers)."""

    name: str
    got: Tensor
    want: Tensor
    at: Tensor

    @property
    def layer(self) -> int:
        """The number after the name's dot; -1 if it has none."""
        return int(self.name.rsplit(".", 1)[1]) if "." in self.name else -1


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run of a case: the prompt and everything that was recorded while the model ran it."""

    case: Case
    run: Run
    prompt: Prompt
    recording: Recording
    model_plan: LayerPlan
    image_token_id: int | None

    def pairs(self, quantity: str) -> Iterator[Pair]:
        """Every recorded tensor named `quantity` or `quantity.<layer>`. Raises `CaseError` if shapes do not meet."""
        for name in self.names(quantity):
            yield self.pair(name)

    def names(self, quantity: str) -> list[str]:
        """The names under which the case holds a quantity, in layer order."""
        prefix = f"{self.run.name}/{quantity}"
        found = [name for name in self.case.expected if name == prefix]
        numbered = [n for n in self.case.expected if n.startswith(prefix + ".") and n[len(prefix) + 1 :].isdigit()]
        ordered = found + sorted(numbered, key=lambda n: int(n[len(prefix) + 1 :]))
        return [name[len(self.run.name) + 1 :] for name in ordered]

    def pair(self, name: str) -> Pair:
        """One recorded tensor with the rows of ours that belong to it."""
        want, got = self.case.must(self.run, name), self.recording.get(name)
        quantity = name.split(".")[0]
        if got is None:
            raise CaseError(f"{self.where}: {name!r} is recorded, but a model of this config.json has no such tensor")
        at = torch.arange(len(got))
        if quantity == "logits":
            at = self.positions("logit_positions", len(want), self.run.length)
        elif quantity in PER_PROMPT:
            at = self.positions("residual_positions", len(want), self.run.prompt_len)
        elif quantity.startswith("draft_") and quantity != "draft_window_kv":
            at = self.positions("draft_positions", len(want), self.run.length)
            return self._checked(Pair(name=name, got=got, want=want, at=at))
        if quantity in SELECTIONS and want.dim() == 2 and len(want) == len(got):
            return Pair(name=name, got=got, want=want.long(), at=at)  # sets: how far they are padded says nothing
        return self._checked(Pair(name=name, got=got[at], want=want, at=at))

    def positions(self, name: str, count: int, limit: int) -> Tensor:
        """A list of positions, int64; all of them in order where the case does not hold the list."""
        key = f"{self.run.name}/{name}"
        listed = self.case.expected.get(key, self.case.inputs.get(key))
        at = torch.arange(limit) if listed is None else listed.long().flatten()
        if len(at) != count or (count and not 0 <= int(at.min()) <= int(at.max()) < limit):
            raise CaseError(f"{self.where}: {name!r} must name {count} positions below {limit}, got {at.tolist()[:8]}...")
        return at

    @property
    def where(self) -> str:
        """Folder and run, for messages."""
        return f"{self.case.folder}: run {self.run.name!r}"

    def _checked(self, pair: Pair) -> Pair:
        if pair.got.shape != pair.want.shape:
            raise CaseError(
                f"{self.where}: {pair.name!r} has shape {list(pair.want.shape)}; the model of this config.json gives "
                f"{list(pair.got.shape)}"
            )
        return pair
