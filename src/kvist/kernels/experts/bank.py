"""Where experts' weights come from: the protocol that the operator reads through, and banks whose experts are all there.

Must not know files or layers. Design section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from kvist.kernels.native import Packed

Triple = tuple[Tensor, Tensor, Tensor] | tuple[Packed, Packed, Packed]
"""(w1 [F,D] gate, w2 [D,F] down, w3 [F,D] up) of one expert, or the same three packed for the native operator."""


Portion = AbstractContextManager[Sequence[tuple[int, Triple]]]
"""(expert id, weights) of some experts, valid inside the context only. Entering it may wait, or raise a named error."""


class ExpertBank(Protocol):
    """Experts of one layer: in memory, in a file, on another device."""

    def portions(self, ids: Sequence[int]) -> Sequence[Portion]:
        """Distinct expert ids, in the order given, cut into runs that can be held at once. Entered in turn, never together."""
        ...


class ResidentBank:
    """A bank whose experts are all in memory: one portion, nothing to wait for. Subclasses give `expert`."""

    def expert(self, index: int) -> Triple:
        """Weights of one expert."""
        raise AssertionError(f"{type(self).__name__} must say where expert {index} is")

    def portions(self, ids: Sequence[int]) -> Sequence[Portion]:
        """See `ExpertBank`."""
        return [nullcontext([(index, self.expert(index)) for index in ids])] if ids else []


class PackedBank(ResidentBank):
    """Experts packed once for the native operator (four bits a weight, or as their values are); nothing else is kept."""

    def __init__(self, triples: Sequence[tuple[Packed, Packed, Packed]]) -> None:
        self.triples = tuple(triples)

    def expert(self, index: int) -> Triple:
        """See `ResidentBank`."""
        return self.triples[index]
