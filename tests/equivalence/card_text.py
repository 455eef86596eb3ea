"""A model's text on two devices: logits under teacher forcing, and each layer on the other's own inputs.

Owns the measures; knows no bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.greedy_company import book
from kvist.checkpoint import build_model, locate
from kvist.engine.session import Session
from kvist.engine.terminal import book_text
from kvist.kernels.index_select import Selection
from kvist.model.block import Block
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment, consecutive_rows
from kvist.model.transformer import Flow, Transformer

TOKENS = 3000


@cache
def nano(device: str, dtype: torch.dtype, impl: str, *, whole_peaks: bool = False) -> Transformer:
    return build_model(locate("nano"), numerics=Numerics(dtype=dtype, impl=impl, whole_peaks=whole_peaks), device=device)


@cache
def text() -> Tensor:
    """The opening of the shipped book behind the begin token."""
    return torch.tensor([nano("cpu", torch.float32, "cpu").config.bos_token_id, *book()[: TOKENS - 1]])


@cache
def logits(device: str, dtype: torch.dtype, impl: str) -> Tensor:
    """float32 [T,V] on the host."""
    return Session(nano(device, dtype, impl), chunk=512).score(text()).cpu()


def bits_per_byte(device: str, dtype: torch.dtype, impl: str) -> float:
    """Of the text, under its own logits."""
    size = len(book_text().encode()) * TOKENS / len(book())
    nats = torch.nn.functional.cross_entropy(logits(device, dtype, impl)[:-1], text()[1:], reduction="sum")
    return float(nats) / math.log(2) / size


@dataclass(frozen=True, kw_only=True)
class Apart:
    """How far logits are off, relative to each row's norm, and the share of rows with the same best token."""

    median: float
    p90: float
    worst: float
    same: float


def apart(got: tuple[str, torch.dtype, str], want: tuple[str, torch.dtype, str]) -> Apart:
    a, b = logits(*got), logits(*want)
    off = (a - b).norm(dim=1) / b.norm(dim=1)
    same = float((a.argmax(1) == b.argmax(1)).float().mean())
    return Apart(median=float(off.median()), p90=float(off.quantile(0.9)), worst=float(off.max()), same=same)


class ExactScores(DenseMemory):
    """Index scores that are not rounded between steps, as the card's kernels make them; bfloat16 makes ties of near ones."""

    def index_keys(self, source: int, segment: Segment) -> Tensor:
        """See `DenseMemory`."""
        return super().index_keys(source, segment).float()

    def select(
        self, source: int, rows: Rows, q_NJI: Tensor, weight_NJ: Tensor, pool_NB: Tensor | None, publish: bool
    ) -> Selection:
        """See `SharedMemory`."""
        return super().select(source, rows, q_NJI.float(), weight_NJ.float(), pool_NB, publish)


@torch.inference_mode()
def layers_apart(device: str, dtype: torch.dtype, impl: str, tokens: int = 768) -> Tensor:
    """Relative error of the streams [layers, tokens] behind each layer, given what the CPU's reference has before it.

    For the kernels that reference does not round index scores: neither do they, and which of two rows with one rounded score is
    taken says nothing about a layer. It also rounds probabilities where they do (`whole_peaks`).
    """
    want, got = nano("cpu", dtype, "ref", whole_peaks=impl == "gpu"), nano(device, dtype, impl)
    rows, there = _rows(want, tokens), _rows(got, tokens)
    memory = (ExactScores if impl == "gpu" else DenseMemory)(want.config, want.numerics)
    other = DenseMemory(got.config, got.numerics)
    flow, shared, errors = want.begin(rows), got.begin(there).shared, []
    for block, twin in zip(want.layers, got.layers, strict=True):
        assert isinstance(block, Block) and isinstance(twin, Block)
        given = Flow(flow.x_NSD.to(device), flow.pre_NS.to(device), shared)
        x_NSD, pre_NS, chosen = block(block.remember(flow.x_NSD, rows), flow.pre_NS, rows, memory, flow.shared)
        made_NSD, _, shared = twin(twin.remember(given.x_NSD, there), given.pre_NS, there, other, shared)
        off_NX = (made_NSD.cpu().float() - x_NSD.float()).flatten(1)
        errors.append(off_NX.norm(dim=1) / x_NSD.float().flatten(1).norm(dim=1))
        flow = Flow(x_NSD, pre_NS, chosen)
    return torch.stack(errors)


def _rows(model: Transformer, tokens: int) -> Rows:
    device = model.embed.weight.device
    ids_N, positions_N, segments = consecutive_rows([(0, 0, text()[:tokens])])
    text_N = torch.ones(tokens, dtype=torch.bool, device=device)
    return Rows(
        token_ids_N=ids_N.to(device), positions_N=positions_N.to(device), text_N=text_N, segments=segments,
        engram_LNX=model.engram_ids(ids_N.to(device), text_N),
    )  # fmt: skip
