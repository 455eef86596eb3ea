"""A position run again under observation: what every layer chose and weighed for it. The served model stays untouched.

Owns the two places that look: a memory that keeps the last query of every layer, and a second view of the model whose
routers and Engram layers tell what they decide. Must not know requests, HTTP or how it is shown. All runs on a memory of its
own, so that nothing here reaches a page, a slot or a served token.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from kvist.engine.replay import Replay, check_replay, decoder_tail
from kvist.engine.session import ImageSpan, Progress, Session
from kvist.engine.session import Sequence as Tokens
from kvist.kernels.index_select import Selection
from kvist.model.block import Block
from kvist.model.engram import Engram
from kvist.model.memory import DenseMemory
from kvist.model.rows import Rows
from kvist.model.transformer import Transformer

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What one layer's attention had before it for one query.

    `q_HC` rotated query; `window_TC` the window entries it saw, its own last; `topk_K` the ids of the rows it attended,
    ascending, and `rows_KC` the rows; `sink_H`; `pool_B` the candidate blocks that it selected inside, `kept_B` those that it
    kept for later layers.
    """

    q_HC: Tensor
    window_TC: Tensor
    topk_K: Tensor
    rows_KC: Tensor
    sink_H: Tensor
    pool_B: Tensor | None
    kept_B: Tensor | None


class Routed(NamedTuple):
    """The experts that a router chose for one row, ascending int64 [K], and their weights, float32 [K]."""

    experts_K: Tensor
    weights_K: Tensor


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One position: attention and routing of every layer in order, Engram gates [S] by layer, the logits [V] behind it."""

    position: int
    attended: tuple[Attended, ...]
    routed: tuple[Routed, ...]
    gates: dict[int, Tensor]
    logits_V: Tensor


class _Query(NamedTuple):
    q_HC: Tensor
    sink_H: Tensor
    source: int | None
    topk_K: Tensor | None
    pool_B: Tensor | None
    kept_B: Tensor | None


class WatchedMemory(DenseMemory):
    """A dense memory that keeps the last query of every layer's last pass: that of the newest position of its one request."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.config, model.numerics)
        self._queries: dict[int, _Query] = {}
        self._chosen: tuple[Tensor | None, Tensor | None] = (None, None)

    def select(
        self, source: int, rows: Rows, q_NJI: Tensor, weight_NJ: Tensor, pool_NB: Tensor | None, publish: bool
    ) -> Selection:
        """See `SharedMemory.select`."""
        picked = super().select(source, rows, q_NJI, weight_NJ, pool_NB, publish)
        self._chosen = _last(pool_NB), _last(picked.candidates_NB)
        return picked

    def attend(
        self, layer: int, source: int | None, rows: Rows, q_NHC: Tensor, window_NC: Tensor, topk_NK: Tensor | None, sink_H: Tensor
    ) -> Tensor:
        """See `SharedMemory.attend`."""
        # A layer selects right before it attends, or not at all.
        (pool_B, kept_B), self._chosen = self._chosen, (None, None)
        self._queries[layer] = _Query(q_NHC[-1].clone(), sink_H.detach(), source, _last(topk_NK), pool_B, kept_B)
        return super().attend(layer, source, rows, q_NHC, window_NC, topk_NK, sink_H)

    def attended(self, slot: int) -> tuple[Attended, ...]:
        """What every layer had before it at the newest position of the request in `slot`."""
        state = self.slot(slot)
        found = []
        for spec in self.plan.layers:
            query = self._queries[spec.index]
            topk_K = torch.empty(0, dtype=torch.int64) if query.topk_K is None else query.topk_K[query.topk_K >= 0]
            rows_KC = query.q_HC.new_zeros(0, self.config.head_dim)
            if query.source is not None and len(topk_K):
                rows_KC = state.main[query.source].read()[topk_K]
            found.append(
                Attended(
                    q_HC=query.q_HC,
                    window_TC=state.windows[spec.index],
                    topk_K=topk_K,
                    rows_KC=rows_KC,
                    sink_H=query.sink_H,
                    pool_B=_valid(query.pool_B),
                    kept_B=_valid(query.kept_B),
                )
            )
        return tuple(found)


def _last(choice_NK: Tensor | None) -> Tensor | None:
    return None if choice_NK is None else choice_NK[-1].clone()


def _valid(ids: Tensor | None) -> Tensor | None:
    return None if ids is None else ids[ids >= 0]


class Watched(NamedTuple):
    """A second view of a model, and what its layers told of the last row of their last pass."""

    model: Transformer
    routed: dict[int, Routed]
    gates: dict[int, Tensor]


def watched(model: Transformer) -> Watched:
    """A model of the same weights, tables and banks with observers of its own; the given one learns nothing of it.

    It has no draft blocks: nobody asks it for tokens.
    """
    seen = Watched(_twin(model), {}, {})
    view = seen.model
    view.mtp, view.targets = None, frozenset()
    layers = []
    for layer, block in enumerate(model.layers):
        assert isinstance(block, Block)
        twin = _twin(block)
        twin.ffn = _twin(block.ffn)
        twin.ffn.gate = _twin(block.ffn.gate)
        twin.ffn.gate.register_forward_hook(partial(_note_routing, seen.routed, layer))
        if block.engram is not None:
            twin.engram = _twin(block.engram)
            twin.engram.register_forward_hook(partial(_note_gates, seen.gates, layer))
        layers.append(twin)
    view.layers = nn.ModuleList(layers)
    return seen


def _twin(module: M) -> M:
    """Another module object over the same parameters and children; new children and observers stay its own."""
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    twin._forward_hooks = OrderedDict()
    return twin


def _note_routing(routed: dict[int, Routed], layer: int, router: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    ids_NK, weights_NK = output
    if len(ids_NK):
        routed[layer] = Routed(ids_NK[-1].clone(), weights_NK[-1].clone())


def _note_gates(gates: dict[int, Tensor], layer: int, engram: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    assert isinstance(engram, Engram)
    x_NSD, ids_NX, text_N = inputs
    if len(ids_NX):
        gates[layer] = engram.gates(x_NSD[-1:], ids_NX[-1:], text_N[-1:])[0][0]


def record(
    model: Transformer,
    prompt_T: Tensor,
    output_T: Tensor,
    *,
    images: Sequence[ImageSpan] = (),
    replay: Replay = "bounded",
    chunk: int = 512,
    proceed: Callable[[Progress], None] | None = None,
) -> Recording:
    """Run a prompt and the tokens that followed it as the engine does without a cache, and keep what the last position did.

    The prompt runs as a prefill (the decoder half on its last positions only), `output_T` through all layers; the last one is
    the position that is kept (`output_T` empty: the prompt's last). `proceed` is called between chunks and may raise to stop.
    Raises what `Session.check` raises, ValueError for a replay that does not exist.
    """
    check_replay(model.plan, replay)
    seen = watched(model)
    memory = WatchedMemory(model)
    session = Session(seen.model, memory=memory, chunk=chunk)
    session.tail = decoder_tail(model.plan, replay)
    with session.slot() as slot:
        tokens = Tokens(slot, prompt_T, tuple(images))
        logits_V = session.prefill([tokens], proceed)[0]
        if len(output_T):
            logits_V = session.extend(tokens, output_T, proceed)
        return Recording(
            position=len(tokens) - 1,
            attended=memory.attended(slot),
            routed=tuple(seen.routed[layer] for layer in range(len(model.plan.layers))),
            gates=dict(seen.gates),
            logits_V=logits_V,
        )
