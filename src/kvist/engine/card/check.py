"""Steps on a card against the reference model: the same random weights, the same tokens, logits step by step.

A gate before anything is timed, and a test. The reference runs in bfloat16 with sums in float64 over the engine's paged memory;
its prefill is what the card's state takes over. Must not know timing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.cache.paged_memory import PagedMemory
from kvist.cache.placement import BatchRows
from kvist.config import ModelConfig, replace
from kvist.engine.card.device_model import Batch, DeviceModel, Given
from kvist.engine.card.draft import CardDrafts
from kvist.engine.card.layers import Chosen
from kvist.engine.card.state import CardState
from kvist.engine.card.weights import pack
from kvist.kernels.best_token import best_token
from kvist.kernels.engram.gpu import StoredRows
from kvist.kernels.index_select import Selection
from kvist.model.block import Block
from kvist.model.engram import Engram
from kvist.model.initialise import TableInMemory, random_model
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, consecutive_rows
from kvist.model.transformer import Flow, Transformer
from kvist.presets import preset
from kvist.quant import quantise_fp8_rows

NUDGES, NUDGE = 8, 0.03
"""Ways in which `Beside.spread` moves the reference, and how far: as one rounding that falls the other way may, and a layer."""


Move = Callable[[int, Flow, Flow], tuple[Tensor, Tensor]]
"""What is added to a layer's streams and collapse weights, by its number, what went in and what came out."""

SHARES = (0.5, 1.0, 1.5)
"""Of what the card's layers are off by, in which the reference is moved: a choice that is not a tie is the same in all."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of one batch.

    `layers`: for each layer, given the reference's own inputs, how far its change of the streams is off, relative to that change
    (the worst row). `errors`: each row's relative error of logits after all layers, where roundings that fall the other way have
    moved what follows; `agree`: whether its best id is the reference's. `swayed`: how far the reference's own logits move when
    every layer is off by a share (`SHARES`) of what the card's is on given inputs; `followed`: the card's relative error against
    the nearest of those.
    """

    layers: tuple[float, ...]
    errors: tuple[float, ...]
    agree: tuple[bool, ...]
    swayed: tuple[float, ...]
    followed: tuple[float, ...]

    def judged(self, spread: tuple[float, ...], near_tie: float) -> list[float]:
        """Errors of the rows that can be judged: where the reference stands (`spread` below `near_tie`), against itself, or,
        where the card's own layers sway it so far, against what it then says."""
        rows = zip(spread, self.errors, self.swayed, self.followed, strict=True)
        return [error if swayed < near_tie else followed for own, error, swayed, followed in rows if own < near_tie]


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """One block of each request: relative errors of its base logits, the tokens, the tokens that follow from the card's own base
    logits by the reference's rule, the worst error of a confidence logit and the largest of these."""

    errors: tuple[float, ...]
    tokens: tuple[int, ...]
    follow: tuple[int, ...]
    confidence: float
    scale: float


def drafting_config() -> ModelConfig:
    """`tiny` in widths that the operators take: all four roles and Engram in 8 layers of 64 channels, and draft blocks."""
    return replace(preset("tiny"), o_lora_rank=64)


def small_config() -> ModelConfig:
    """`drafting_config` without drafts."""
    layers = preset("tiny").n_layers
    return replace(
        drafting_config(), n_mtp_layers=0, compress_ratios=preset("tiny").compress_ratios[:layers], dspark_target_layer_ids=()
    )


def released_heads_config() -> ModelConfig:
    """The released heads, window, index and page over a narrow model: the kernels of a card run as they do in the release."""
    return replace(
        small_config(), vocab_size=1024, dim=512, n_heads=64, head_dim=512, rope_head_dim=64, q_lora_rank=256, o_lora_rank=128,
        o_groups=8, window_size=128, index_n_heads=32, index_head_dim=128, index_topk=64, candidate_topk_blocks=12,
        candidate_block_size=8, moe_inter_dim=128, original_seq_len=65536, rope_factor=16.0,
    )  # fmt: skip


class ExactScores(PagedMemory):
    """The engine's memory with index scores that are not rounded between steps, as the card's are not: bfloat16 makes ties."""

    def select(
        self, source: int, rows: BatchRows, q_NJI: Tensor, weight_NJ: Tensor, pool_NB: Tensor | None, publish: bool
    ) -> Selection:
        """See `SharedMemory.select`."""
        return super().select(source, rows, q_NJI.float(), weight_NJ.float(), pool_NB, publish)


class Beside:
    """A random model in reference and on the device, fed the same tokens.

    `contexts`: tokens of each request before the first step; `rows`: tokens of each request in a step; `page_tokens` None: the
    plan's.
    """

    def __init__(
        self,
        config: ModelConfig,
        contexts: tuple[int, ...],
        steps: int,
        *,
        page_tokens: int | None,
        device: torch.device,
        rows: int = 1,
        seed: int = 0,
        overlap: bool = False,
        one_row: bool = True,
    ) -> None:
        self.config, self.contexts, self.steps, self.rows, self.device = config, contexts, steps, rows, device
        numerics = Numerics(dtype=torch.bfloat16, impl="wide", whole_peaks=True)
        self.seed, self.model = seed, random_model(config, numerics, seed).to(device)
        self._narrow: Transformer | None = None
        tables = self._tables(self.model)
        self.source = torch.Generator().manual_seed(seed + 1)
        longest = max(contexts) + steps * rows
        self.memory = ExactScores(
            config, numerics, pages=self._pages(longest, page_tokens), slots=len(contexts), verify_rows=rows,
            page_tokens=page_tokens, device=device,
        )  # fmt: skip
        size = self.memory.layout.page_tokens
        each = -(-longest // size)
        self.state = CardState(
            config,
            slots=len(contexts),
            pages=each * len(contexts),
            most_tokens=each * size,
            device=device,
            rows=max(rows, config.dspark_block_size if config.n_mtp_layers else 1),
            page_tokens=page_tokens,
        )
        self.ids = [self._draw(longest) for _ in contexts]
        for slot in range(len(contexts)):
            # The pool's pages are dealt out in turn: pages of a request do not lie side by side.
            self.memory.open(slot, list(range(slot, each * len(contexts), len(contexts))), 0)
            self.state.open(slot, list(range(slot * each, (slot + 1) * each)))
        self._prefill()
        self.card = DeviceModel(pack(self.model, tables, device), self.state, overlap=overlap, one_row=one_row)

    def _engram(self, layer: int) -> Engram:
        block = self.model.layers[layer]
        assert isinstance(block, Block) and block.engram is not None
        return block.engram

    def _pages(self, longest: int, page_tokens: int | None) -> int:
        return len(self.contexts) * -(-longest // (page_tokens or self.config.plan.page_tokens))

    def _draw(self, count: int) -> Tensor:
        return torch.randint(4, self.config.vocab_size, (count,), generator=self.source)

    def _tables(self, model: Transformer) -> dict[int, StoredRows]:
        tables = {}
        for layer in self.config.engram_layer_ids:
            reader = self._engram(layer).reader
            assert isinstance(reader, TableInMemory)
            codes, scales = (part.view(torch.uint8) for part in quantise_fp8_rows(reader.values_RX.float()))
            pin = self.device.type == "cuda"
            tables[layer] = StoredRows(codes.pin_memory(), scales.pin_memory()) if pin else StoredRows(codes, scales)
            reader.values_RX = reader.values_RX.to(self.device)
        if model.token_classes_V is not None:
            model.token_classes_V = model.token_classes_V.to(self.device)
        return tables

    def _rows_of(self, first: tuple[int, ...], stop: tuple[int, ...]) -> Rows:
        parts = [(slot, a, self.ids[slot][a:b]) for slot, (a, b) in enumerate(zip(first, stop, strict=True))]
        ids_N, positions_N, segments = consecutive_rows(parts)
        engram = None
        if self.config.engram_layer_ids:
            every = [
                self.model.engram_ids(self.ids[slot][:b].to(self.device), torch.ones(b, dtype=torch.bool, device=self.device), a)
                for slot, (a, b) in enumerate(zip(first, stop, strict=True))
            ]
            engram = torch.cat([one for one in every if one is not None], 1)
        text_N = torch.ones(len(ids_N), dtype=torch.bool, device=self.device)
        return Rows(
            token_ids_N=ids_N.to(self.device), positions_N=positions_N.to(self.device), text_N=text_N, segments=segments,
            engram_LNX=engram,
        )  # fmt: skip

    @torch.inference_mode()
    def _prefill(self) -> None:
        rows = self._rows_of((0,) * len(self.contexts), self.contexts)
        flow = self.model(rows, self.memory)
        if self.model.mtp is not None:
            self.model.mtp.observe(flow.targets, rows, self.memory)
        for slot, context in enumerate(self.contexts):
            classes = self.model.token_classes_V
            known = None if classes is None else classes[self.ids[slot][:context].to(self.device)]
            self.state.adopt(slot, self.memory, slot, context, known)

    def batch(self, number: int) -> Batch:
        """What step `number` gives to the card."""
        at = tuple(context + number * self.rows for context in self.contexts)
        tokens = tuple(int(token) for slot, a in enumerate(at) for token in self.ids[slot][a : a + self.rows])
        return Batch(tokens=tokens, positions=at, slots=tuple(range(len(at))), lengths=(self.rows,) * len(at))

    @torch.inference_mode()
    def step(self, number: int) -> Step:
        """The next tokens of every request, in both: the whole step, then layers one by one on the reference's inputs."""
        batch = self.batch(number)
        rows = self._rows_of(batch.positions, tuple(a + self.rows for a in batch.positions))
        memory = copy.deepcopy(self.memory)
        flow, seen = self.model.begin(rows), []
        for layer, block in enumerate(self.model.layers):
            assert isinstance(block, Block)
            before = flow
            flow = self.model.run(flow, rows, self.memory, layer, layer + 1)
            seen.append((before, flow))
        if self.model.mtp is not None:
            self.model.mtp.observe(flow.targets, rows, self.memory)
        want_NV = self.model.logits(flow)
        got_NV, best_N = self.card.decode(batch)
        # Layers on given inputs come last: what they write, not what a whole step wrote, is what the next step reads.
        layers = self.card.layer_by_layer(batch, [self._given(before) for before, _ in seen])
        off = tuple(self._off(*pair, got_NSD) for pair, (got_NSD, _) in zip(seen, layers, strict=True))
        moves = [
            (got_NSD.float() - after.x_NSD.float(), pre_NS - after.pre_NS)
            for (_, after), (got_NSD, pre_NS) in zip(seen, layers, strict=True)
        ]
        swayed = [self._swayed(rows, memory, moves, share) for share in SHARES]
        return Step(
            layers=off, errors=_apart(got_NV, want_NV), agree=tuple((best_N == want_NV.argmax(1)).tolist()),
            swayed=tuple(map(max, zip(*(_apart(there_NV, want_NV) for there_NV in swayed), strict=True))),
            followed=tuple(map(min, zip(*(_apart(got_NV, there_NV) for there_NV in swayed), strict=True))),
        )  # fmt: skip

    def _swayed(self, rows: Rows, memory: PagedMemory, moves: list[tuple[Tensor, Tensor]], share: float) -> Tensor:
        """Logits where each layer is moved by a share of `moves`; the memory stays as it is."""

        def move(layer: int, before: Flow, after: Flow) -> tuple[Tensor, Tensor]:
            streams_NSD, pre_NS = moves[layer]
            return share * streams_NSD, share * pre_NS

        return self._moved(self.model, rows, copy.deepcopy(memory), move)

    @torch.inference_mode()
    def spread(self, number: int, nudge: float = NUDGE) -> tuple[float, ...]:
        """How far each row's logits of the reference itself move, before step `number`, when it sums in float32 or when every
        layer's change is off by `nudge` of itself: the largest relative error of several ways.

        Where this is large a choice among near-equals (experts, rows) hangs on roundings, and nothing can be compared.
        """
        if self._narrow is None:
            self._narrow = random_model(self.config, Numerics(dtype=torch.bfloat16, whole_peaks=True), self.seed).to(self.device)
            readers = {layer: self._engram(layer).reader for layer in self.config.engram_layer_ids}
            if self.model.token_classes_V is not None:
                self._narrow.attach_engram(
                    self.model.token_classes_V, {at: one for at, one in readers.items() if one is not None}
                )
        batch = self.batch(number)
        rows = self._rows_of(batch.positions, tuple(at + self.rows for at in batch.positions))
        want_NV = self._nudged(self.model, rows)
        moved = [self._nudged(self._narrow, rows)]
        moved += [self._nudged(self.model, rows, nudge, NUDGES * number + seed) for seed in range(NUDGES if nudge else 0)]
        return tuple(map(max, zip(*(_apart(got_NV, want_NV) for got_NV in moved), strict=True)))

    def _nudged(self, model: Transformer, rows: Rows, nudge: float = 0.0, seed: int = 0) -> Tensor:
        """Logits of a pass that leaves no trace, in which each layer's change is moved at random."""
        source = torch.Generator(self.device).manual_seed(seed)

        def noise(_: int, before: Flow, after: Flow) -> tuple[Tensor, Tensor]:
            change_NSD = after.x_NSD.float() - before.x_NSD.float()
            size_N11 = change_NSD.square().mean((1, 2), keepdim=True).sqrt() * nudge
            drawn_NSD = torch.randn(change_NSD.shape, generator=source, device=self.device)
            return size_N11 * drawn_NSD, torch.zeros_like(after.pre_NS)

        return self._moved(model, rows, copy.deepcopy(self.memory), noise if nudge else None)

    @staticmethod
    def _moved(model: Transformer, rows: Rows, memory: PagedMemory, move: Move | None) -> Tensor:
        """Logits of a pass on a memory that is given away, each layer's streams and collapse weights moved."""
        memory.numerics, flow = model.numerics, model.begin(rows)
        for layer in range(len(model.layers)):
            before, flow = flow, model.run(flow, rows, memory, layer, layer + 1)
            if move is not None:
                streams_NSD, pre_NS = move(layer, before, flow)
                moved_NSD = (flow.x_NSD.float() + streams_NSD).to(flow.x_NSD.dtype)
                flow = flow._replace(x_NSD=moved_NSD, pre_NS=flow.pre_NS + pre_NS)
        return model.logits(flow)

    @torch.inference_mode()
    def draft(self, number: int) -> Drafted:
        """A block behind the token before step `number`, in both; the reference's windows are those of its own steps."""
        assert self.model.mtp is not None, "drafts are compared for models that have them"
        at = [context + number * self.rows for context in self.contexts]
        first_R = torch.tensor([int(self.ids[slot][a]) for slot, a in enumerate(at)], device=self.device)
        position_R, slot_R = (torch.tensor(part, device=self.device) for part in ([a - 1 for a in at], range(len(at))))
        got = CardDrafts(self.card).propose(first_R, position_R, slot_R)
        # The reference goes on behind the card's tokens, which may part from its own at a near-tie.
        want = self.model.mtp(
            first_R, position_R, list(range(len(at))), self.memory, self.model.embed, self.model.head,
            lambda _, place: got.tokens_RB[:, place],
        )  # fmt: skip
        errors_RB = (got.base_RBV - want.base_RBV).norm(dim=2) / want.base_RBV.norm(dim=2)
        return Drafted(
            errors=tuple(errors_RB.flatten().tolist()), tokens=tuple(got.tokens_RB.flatten().tolist()),
            follow=tuple(self._followed(first_R, got.base_RBV).flatten().tolist()),
            confidence=float((got.confidence_RB - want.confidence_RB).abs().max()), scale=float(want.confidence_RB.abs().max()),
        )  # fmt: skip

    def _followed(self, first_R: Tensor, base_RBV: Tensor) -> Tensor:
        """The tokens that follow from base logits by the reference's rule."""
        weights = self.card.weights.drafts
        assert weights is not None
        previous_R, tokens = first_R, []
        for place in range(base_RBV.shape[1]):
            previous_R = best_token(base_RBV[:, place], (weights.markov_embed[previous_R], weights.markov_head))
            tokens.append(previous_R)
        return torch.stack(tokens, 1)

    def _given(self, flow: Flow) -> Given:
        shared = flow.shared
        topk_NK = None if shared.topk_NK is None else shared.topk_NK.int()
        pool_NB = None if shared.candidates_NB is None else shared.candidates_NB.int()
        return flow.x_NSD, flow.pre_NS, Chosen(source=shared.kv_source, topk_NK=topk_NK, pool_NB=pool_NB)

    @staticmethod
    def _off(before: Flow, after: Flow, got_NSD: Tensor) -> float:
        change = (after.x_NSD.float() - before.x_NSD.float()).flatten(1).norm(dim=1)
        return float(((got_NSD.float() - after.x_NSD.float()).flatten(1).norm(dim=1) / change).max())

    def run(self) -> list[Step]:
        """All steps."""
        return [self.step(number) for number in range(self.steps)]


def _apart(got_NV: Tensor, want_NV: Tensor) -> tuple[float, ...]:
    """Relative error of each row."""
    return tuple(((got_NV - want_NV).norm(dim=1) / want_NV.norm(dim=1)).tolist())
