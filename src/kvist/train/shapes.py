"""A uniform batch and what follows from its shape: positions, visibility, rotary tables, Engram rows.

Owns `Batch` and `Geometry` (everything that depends only on B, T and the configuration, made once a stage).
Must not know weights or losses. Shapes: B sequences, T tokens, N = B*T rows, M compressed rows, X Engram columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvist.config import LayerSpec, ModelConfig
from kvist.model.engram import hash_plan
from kvist.model.layers import inverse_frequencies, rotary_table


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens int64 [B,T], next tokens int64 [B,T], counted bool [B,T], tier of each sequence int64 [B].

    `text` bool [B,T] is False inside an image span; None means text everywhere.
    """

    tokens: Tensor
    targets: Tensor
    counted: Tensor
    tier: Tensor
    text: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        text = None if self.text is None else self.text.to(device)
        parts = (value.to(device, non_blocking=True) for value in (self.tokens, self.targets, self.counted, self.tier))
        tokens, targets, counted, tier = parts
        return Batch(tokens=tokens, targets=targets, counted=counted, tier=tier, text=text)

    def rows(self, part: slice) -> Batch:
        """Some of the sequences."""
        text = None if self.text is None else self.text[part]
        return Batch(
            tokens=self.tokens[part], targets=self.targets[part], counted=self.counted[part], tier=self.tier[part], text=text
        )


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What depends on the shape of the batch alone."""

    config: ModelConfig
    batch: int
    length: int
    device: torch.device
    _tables: dict[tuple[float, bool, int], tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)
    _masks: dict[tuple[str, int], object] = field(default_factory=dict, compare=False, repr=False)

    def rotary(self, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """(cos, sin) [N, P] of one layer."""
        return self._table(spec, 1, repeat=self.batch)

    def row_rotary(self, spec: LayerSpec) -> tuple[Tensor, Tensor]:
        """(cos, sin) [B*M, P] of compressed rows: each stands at the first position of its group."""
        return self._table(spec, spec.ratio, repeat=self.batch)

    def _table(self, spec: LayerSpec, step: int, repeat: int) -> tuple[Tensor, Tensor]:
        key = (spec.rope_theta, spec.yarn, step)
        if key not in self._tables:
            positions = torch.arange(0, self.length // step * step, step, device=self.device)
            cos, sin = rotary_table(positions, inverse_frequencies(self.config, spec).to(self.device))
            self._tables[key] = (cos.repeat(repeat, 1), sin.repeat(repeat, 1))
        return self._tables[key]

    def visible(self, ratio: int) -> Tensor:
        """Rows that each position sees, bool [T, M]."""
        key = ("visible", ratio)
        if key not in self._masks:
            at = torch.arange(self.length, device=self.device).unsqueeze(1)
            self._masks[key] = torch.arange(self.length // ratio, device=self.device) < (at + 1) // ratio
        mask = self._masks[key]
        assert isinstance(mask, Tensor)
        return mask

    def banded(self) -> Tensor:
        """Window entries that each position sees, bool [T, T]."""
        key = ("banded", 0)
        if key not in self._masks:
            at = torch.arange(self.length, device=self.device)
            back = at.unsqueeze(1) - at
            self._masks[key] = (back >= 0) & (back < self.config.window_size)
        mask = self._masks[key]
        assert isinstance(mask, Tensor)
        return mask

    def memo(self, key: tuple[str, int], make: object) -> object:
        """A value made once for this shape."""
        if key not in self._masks:
            assert callable(make)
            self._masks[key] = make()
        return self._masks[key]


def engram_rows(config: ModelConfig, classes_BT: Tensor, text_BT: Tensor | None, pad_class: int) -> Tensor:
    """Table rows of whole sequences, int64 [layers, B, T, X]: `kvist.model.engram.hash_rows` for a uniform batch."""
    plan, device = hash_plan(config), classes_BT.device
    primes, offsets, multipliers = (torch.from_numpy(a).to(device) for a in (plan.primes, plan.offsets, plan.multipliers))
    opened = torch.ones_like(classes_BT, dtype=torch.bool) if text_BT is None else text_BT
    text = opened
    mixed: Tensor | None = None
    columns = []
    for back in range(config.engram_max_ngram_size):
        if back:
            pad = torch.zeros_like(text[:, :back])
            opened = opened & torch.cat([pad, text[:, :-back]], 1)
        moved = torch.roll(classes_BT, back, 1)
        term = torch.where(opened, moved, pad_class) * multipliers[:, back].view(-1, 1, 1)
        mixed = term if mixed is None else mixed ^ term
        if back:
            rest = mixed.unsqueeze(3) % primes[:, back - 1].view(len(primes), 1, 1, -1)
            columns.append(rest + offsets[:, back - 1].view(len(primes), 1, 1, -1))
    return torch.cat(columns, 3)
