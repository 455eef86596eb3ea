"""A pass's numbers on the device: one copy of all integers, what layers derive from them, and the pass's Engram rows.

Owns staging memory and the order of writes to the n-gram history. Must not know layers' operators.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvist.engine.card.passes import Pass, Sizes
from kvist.engine.card.places import CardRows, Places, Table, places_of
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import CardWeights
from kvist.kernels.engram.gpu import gather_rows
from kvist.kernels.index_select.hopper import GROUP
from kvist.model.layers import inverse_frequencies, rotary_table


@dataclass(frozen=True, kw_only=True)
class Half:
    """Rows of one half of the model: where they stand, and what moves between the pass's window buffer and the rings.

    In `at`, spans and cells are those of the buffer, which has `cells` of them. Rings count as one list of slots x cells: their
    `carry_from` (-1: zeros, which nobody sees) go into the buffer's `carry_to`, the buffer's `keep_from`, which are those of the
    rows `keep_row`, into their `keep_to`.
    """

    at: Places
    cells: int
    carry_from: Tensor
    carry_to: Tensor
    keep_row: Tensor
    keep_from: Tensor
    keep_to: Tensor


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Groups of one ratio that end in a pass: `members` [G,R] among its rows but for the flat places `early`, which lie in the
    tails' `early_cell`; pages, rows and tables of what they become; rows to `keep` in the tails' `keep_cell`."""

    members: Tensor
    early: Tensor
    early_cell: Tensor
    keep: Tensor
    keep_cell: Tensor
    page: Tensor
    row: Tensor
    rope: Table


@dataclass(frozen=True, kw_only=True)
class OnCard:
    """A pass on the device: token ids, rows of the decoder half among them, rows whose logits are wanted among those."""

    tokens: Tensor
    deep: Tensor
    wanted: Tensor
    encoder: Half
    decoder: Half
    groups: dict[int, Groups]
    remembered: dict[int, Tensor]


class Staging:
    """Host memory that an asynchronous copy leaves from, grown as needed."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.host = device, torch.empty(0, dtype=torch.int64)
        self.taken = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, numbers: np.ndarray, out: Tensor | None = None) -> Tensor:
        """The numbers on the device, int64 [n] (into `out` if given), copied on the current stream."""
        if self.taken is not None:
            # What was sent before must have left.
            self.taken.synchronize()
        if len(self.host) < len(numbers):
            self.host = torch.empty(2 * len(numbers), dtype=torch.int64, pin_memory=self.taken is not None)
        self.host[: len(numbers)].numpy()[:] = numbers
        if out is None:
            out = torch.empty(len(numbers), dtype=torch.int64, device=self.device)
        out.copy_(self.host[: len(numbers)], non_blocking=True)
        if self.taken is not None:
            self.taken.record()
        return out


class Bringer:
    """Brings passes of a model to a card's state; two may be under way."""

    def __init__(self, weights: CardWeights, state: CardState) -> None:
        self.weights, self.state, self.config, self.plan = weights, state, weights.config, state.plan
        tails = {self.plan.layers[source].ratio: tail.shape[1] for source, tail in state.tails.items()}
        self.ratios = sorted({spec.ratio for spec in self.plan.kv_sources})
        engram = bool(self.config.engram_layer_ids)
        self.sizes = Sizes(
            window=self.plan.window, ring=state.codes.shape[2], tails={ratio: tails.get(ratio, 0) for ratio in self.ratios},
            history=state.history.shape[1] if engram else 0, back=self.config.engram_max_ngram_size - 1, together=GROUP,
        )  # fmt: skip
        self._staging = [Staging(state.device) for _ in range(2)]
        self._freq = {spec.ratio > 0: inverse_frequencies(self.config, spec).to(state.device) for spec in self.plan.layers}

    def send(self, planned: Pass, out: Tensor | None = None) -> Tensor:
        """All integers of a pass, int64 [n]."""
        self._staging.reverse()
        return self._staging[0].send(planned.packed(), out)

    def derive(self, planned: Pass, flat: Tensor) -> OnCard:
        """Everything that layers read, from the integers; Engram rows are read and the n-gram history goes on. Only device work
        whose shapes `planned.shape` says, so that it may be captured."""
        arrays, at = {}, 0
        for name, shape in planned.shape:
            size = int(np.prod(shape))
            arrays[name] = flat[at : at + size].view(shape)
            at += size
        encoder, rows = self._half("encoder", arrays, planned)
        decoder, _ = self._half("decoder", arrays, planned)
        return OnCard(
            tokens=arrays["tokens"], deep=arrays["deep"], wanted=arrays["wanted"], encoder=encoder, decoder=decoder,
            groups={ratio: self._groups(ratio, arrays) for ratio in self.ratios}, remembered=self._remember(arrays, rows),
        )  # fmt: skip

    def _half(self, name: str, arrays: dict[str, Tensor], planned: Pass) -> tuple[Half, CardRows]:
        position_N, slot_N, stop_N = (arrays[f"{name} {kind}"] for kind in ("position", "slot", "stop"))
        deep = arrays["deep"] if name == "decoder" else slice(None)
        rows = CardRows(
            tokens_N=arrays["tokens"][deep], positions_N=position_N, slots_N=slot_N, offsets_N=arrays["offset"][deep],
            text_N=torch.ones_like(slot_N, dtype=torch.bool), groups_G2=arrays[f"{name} together"].int(),
        )  # fmt: skip
        at = places_of(rows, self.state, self.config, planned.reach)
        at = replace(at, span_N2=torch.stack([arrays[f"{name} first"], stop_N], 1), cell_N=stop_N - 1)
        moved = {kind: arrays[f"{name} {kind}"] for kind in ("carry_from", "carry_to", "keep_row", "keep_from", "keep_to")}
        return Half(at=at, cells=planned.cells[name], **moved), rows

    def _groups(self, ratio: int, arrays: dict[str, Tensor]) -> Groups:
        size = self.state.layout.page_tokens
        slot_G, position_G = arrays[f"group {ratio} slot"], arrays[f"group {ratio} position"]
        named = {name: arrays[f"group {ratio} {name}"] for name in ("members", "early", "early_cell", "keep", "keep_cell")}
        return Groups(
            page=self.state.rows.table_device[slot_G, position_G // size], row=position_G % size // ratio,
            rope=rotary_table(position_G, self._freq[True]), **named,
        )  # fmt: skip

    def _remember(self, arrays: dict[str, Tensor], rows: CardRows) -> dict[int, Tensor]:
        """Engram rows of all tokens, a layer each. The history gets the tokens before each run first, its newest ones last."""
        wanted = [layer for layer in self.weights.layers if layer.engram is not None]
        if not wanted:
            return {}
        class_V, found = self.weights.class_V, {}
        assert class_V is not None, "a model with Engram has token classes"
        self._note(arrays, "before", class_V)
        for layer in wanted:
            assert layer.engram is not None
            found[layer.spec.index] = gather_rows(
                rows.tokens_N, rows.positions_N, rows.offsets_N, rows.text_N, class_V, self.state.history, rows.slots_N,
                layer.engram.hashes, layer.engram.stored, self.config.engram_n_heads,
            )  # fmt: skip
        self._note(arrays, "newest", class_V)
        return found

    def _note(self, arrays: dict[str, Tensor], name: str, class_V: Tensor) -> None:
        place = arrays[f"{name} slot"], arrays[f"{name} cell"]
        self.state.history[place] = class_V[arrays[f"{name} id"]]
