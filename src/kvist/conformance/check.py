"""One line of the verdict: what was compared, how close it came, what was allowed.

Owns the numbers of a comparison; must not know cases or models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

PASS, FAIL, NOTE = "pass", "FAIL", "note"


@dataclass(frozen=True, kw_only=True)
class Check:
    """One compared quantity of a case.

    `max_abs`, `cosine` (the smallest over rows), `argmax` and `topk` (shares in 0..1) are None where they say nothing.
    A `note` has no limit in the case and is not counted.
    """

    case: str
    quantity: str
    verdict: str
    max_abs: float | None = None
    cosine: float | None = None
    argmax: float | None = None
    topk: float | None = None
    detail: str = ""

    @property
    def failed(self) -> bool:
        """True if a limit was broken or nothing could be compared that must be."""
        return self.verdict == FAIL

    def of(self, case: str) -> Check:
        """The same line under a case's name."""
        return replace(self, case=case)


def judged(quantity: str, ok: bool | None, detail: str, **numbers: float | None) -> Check:
    """A line whose verdict is `ok`; None means that the case sets no limit. The case's name is filled in by the runner."""
    return Check(case="", quantity=quantity, verdict=NOTE if ok is None else PASS if ok else FAIL, detail=detail, **numbers)


def max_abs(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference; 0 if empty, inf where only one side is finite. NaN on either side counts as inf."""
    if not want.numel():
        return 0.0
    return float(row_max_abs(got.reshape(1, -1), want.reshape(1, -1)))


def row_max_abs(got: Tensor, want: Tensor) -> Tensor:
    """Largest absolute difference of each row of the first axis, float64."""
    a, b = got.double().flatten(1), want.double().flatten(1)
    gap = torch.where(a == b, 0.0, (a - b).abs())
    return gap.nan_to_num(nan=float("inf"), posinf=float("inf")).amax(1)


def row_cosine(got: Tensor, want: Tensor) -> Tensor:
    """Cosine of each row, float64; two zero rows have 1, a zero row and another 0. Not finite counts as -1."""
    a, b = got.double().flatten(1), want.double().flatten(1)
    size = a.norm(dim=1) * b.norm(dim=1)
    both_zero = (a == 0).all(1) & (b == 0).all(1)
    cosine = torch.where(size > 0, (a * b).sum(1) / size.clamp_min(1e-300), both_zero.double())
    return cosine.nan_to_num(nan=-1.0)


def row_rel_l2(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| / |want| of each row, float64; 0 where both are zero. Not finite counts as inf."""
    gap = (got.double() - want.double()).flatten(1).norm(dim=1)
    size = want.double().flatten(1).norm(dim=1)
    rel = torch.where(gap == 0, 0.0, gap / size)
    return rel.nan_to_num(nan=float("inf"), posinf=float("inf"))


def rel_l2(got: Tensor, want: Tensor) -> float:
    """Relative L2 difference of whole tensors."""
    return float(row_rel_l2(got.reshape(1, -1), want.reshape(1, -1))) if want.numel() else 0.0


def quantile(values: Tensor, q: float) -> float:
    """A linearly interpolated quantile that allows infinities. Needs at least one value."""
    ordered = values.sort().values
    at = q * (len(ordered) - 1)
    low, high = ordered[int(at)].item(), ordered[min(int(at) + 1, len(ordered) - 1)].item()
    return low if at == int(at) or low == high else low + (high - low) * (at - int(at))


def ids_found(got: Tensor, want: Tensor) -> tuple[int, int]:
    """(expected ids that were also selected, expected ids), over rows of ids padded with -1."""
    real = want >= 0
    hit = (want.unsqueeze(-1) == got.unsqueeze(-2)).any(-1) & real
    return int(hit.sum()), int(real.sum())


def same_sets(got: Tensor, want: Tensor) -> Tensor:
    """bool a row: the same ids on both sides, whatever their order and padding."""
    width = max(got.shape[1], want.shape[1])

    def canonical(ids: Tensor) -> Tensor:
        filler = ids.new_full((len(ids), width - ids.shape[1]), -1)
        return torch.cat([ids, filler], 1).sort(1).values

    return (canonical(got.long()) == canonical(want.long())).all(1)
