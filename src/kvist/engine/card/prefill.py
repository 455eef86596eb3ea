"""Many consecutive rows of requests through the card: prefill in chunks with the causal encoder-decoder split, and replay.

The encoder half runs on all rows, the decoder's source publishes rows of all, the decoder half runs on each prompt's last ones
(report 2.2; `engine/replay.py` says which). The host never waits for more than the pass before the last one; the next pass's
numbers and Engram rows come on a side stream while one runs. Must not know schedulers, sampling or pages' owners.

Shapes: N rows of a half, G groups, R tokens of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.engine.card.brought import Bringer, Half, OnCard
from kvist.engine.card.device_model import DeviceModel
from kvist.engine.card.layers import Chosen, enter, wide_product
from kvist.engine.card.passes import Pass, Piece, Prompt, cut, plan_pass
from kvist.engine.card.places import Places
from kvist.engine.card.weights import CompressorWeights, LayerWeights
from kvist.kernels.engram.gpu import add_memory
from kvist.kernels.hyper_connections import Mix
from kvist.kernels.hyper_connections.gpu import Entered, leave_gpu
from kvist.kernels.linear.gpu import linear_gpu
from kvist.kernels.quantise.gpu import rows_gpu, write_rows
from kvist.kernels.sparse_attention.gpu import WindowRows, attend_packed
from kvist.kernels.window_rows.gpu import move_rows_gpu

CHUNK = 4096
"""Rows of a pass: many enough that an expert is read for 192 rows, few enough that a pass takes 1.4 GB beside the weights."""


@dataclass(frozen=True, kw_only=True)
class Flow:
    """What travels: streams [N,S,D], coefficients of the sublayer last entered, its output not yet folded in, `Chosen`, and the
    stream means [N,D] that the draft blocks look at."""

    x_NSD: Tensor
    mix: Mix
    y_ND: Tensor | None
    chosen: Chosen
    targets: tuple[Tensor, ...] = ()


class Prefill:
    """Passes of up to `chunk` rows on a model that also decodes; memory beside weights and state grows with `chunk` alone.

    Raises ValueError for a chunk below 1.
    """

    def __init__(self, model: DeviceModel, *, chunk: int = CHUNK) -> None:
        if chunk < 1:
            raise ValueError(f"chunk is {chunk}; at least 1 row")
        self.model, self.weights, self.state, self.config, self.chunk = model, model.weights, model.state, model.config, chunk
        self.plan, self.split, self.layers = model.state.plan, model.state.plan.decoder_start, model.layers
        self.bringer = Bringer(model.weights, model.state)
        self.side = torch.cuda.Stream(model.state.device) if model.state.device.type == "cuda" else None

    def run(self, prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
        """Compute prompts up to their last tokens: float32 logits [prompts,V] of these, and the best ids.

        Slots must be open with pages enough. Raises ValueError for ids, slots or pages that are not there, before any work.
        """
        self.check(prompts)
        found: dict[int, Tensor] = {}
        for planned, logits_RV in self.passes(prompts):
            found |= {prompt.slot: logits_V for prompt, logits_V in zip(planned.finished, logits_RV, strict=True)}
        logits_RV = torch.stack([found[prompt.slot] for prompt in prompts])
        return logits_RV, logits_RV.argmax(1)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises ValueError for what cannot run."""
        slots = [prompt.slot for prompt in prompts]
        if not slots or len(set(slots)) != len(slots):
            raise ValueError(f"slots {slots}; a prompt needs one of its own, and there must be one")
        limit = self.config.vocab_size if self.weights.class_V is None else len(self.weights.class_V)
        limit = min(limit, self.config.vocab_size)
        for prompt in prompts:
            if not 0 <= prompt.slot < self.state.slots:
                raise ValueError(f"slot {prompt.slot} is outside 0..{self.state.slots - 1}")
            if len(prompt.ids) != prompt.span.total or prompt.span.start >= prompt.span.total:
                raise ValueError(
                    f"slot {prompt.slot}: {len(prompt.ids)} ids for a prompt of {prompt.span.total}, from {prompt.span.start} on"
                )
            bad = prompt.ids[(prompt.ids < 0) | (prompt.ids >= limit)]
            if len(bad):
                raise ValueError(f"token id {int(bad[0])} is outside the vocabulary 0..{limit - 1}")
            self.state.rows.require(prompt.slot, prompt.span.total)

    @torch.inference_mode()
    def passes(self, prompts: Sequence[Prompt]) -> Iterator[tuple[Pass, Tensor]]:
        """Run checked prompts pass by pass: each one's plan, and float32 logits [finished prompts, V]."""
        cuts = cut(prompts, self.chunk)
        ended: list[torch.cuda.Event] = []
        if self.side is not None:
            self.side.wait_stream(torch.cuda.current_stream())
        coming = self._bring(cuts, ended)
        while coming is not None:
            planned, here, arrived = coming
            if arrived is not None:
                torch.cuda.current_stream().wait_event(arrived)
            logits_RV = self.compute(here)
            coming = self._bring(cuts, ended)
            if self.side is not None:
                ended.append(torch.cuda.current_stream().record_event())
            del here
            yield planned, logits_RV

    def _bring(
        self, cuts: Iterator[list[Piece]], ended: list[torch.cuda.Event]
    ) -> tuple[Pass, OnCard, torch.cuda.Event | None] | None:
        """Plan the next pass and bring it, on the side stream while the one queued last runs."""
        pieces = next(cuts, None)
        if pieces is None:
            return None
        planned = plan_pass(pieces, self.bringer.sizes)
        if self.side is None:
            return planned, self.bringer.derive(planned, self.bringer.send(planned)), None
        if ended:
            # Memory of the pass before the one queued last has been given back and may be written again: it must have run.
            self.side.wait_event(ended.pop(0))
        with torch.cuda.stream(self.side):
            here = self.bringer.derive(planned, self.bringer.send(planned))
            return planned, here, self.side.record_event()

    @torch.inference_mode()
    def captured(self, prompts: Sequence[Prompt]) -> tuple[Callable[[Sequence[Prompt]], None], Tensor]:
        """A call that runs prompts of these shapes in one pass by one graph, and the logits [prompts,V] that it leaves.

        Raises ValueError for prompts of more rows than a pass, or without a card; the call, for prompts of other shapes.
        """
        if self.side is None:
            raise ValueError(f"graphs are captured on a CUDA device, the state lies on {self.state.device}; use run")
        self.check(prompts)
        (pieces, *more) = cut(prompts, self.chunk)
        if more:
            raise ValueError(f"these prompts take {1 + len(more)} passes of {self.chunk} rows; a graph holds one")
        planned = plan_pass(pieces, self.bringer.sizes)
        flat = self.bringer.send(planned)
        for _ in range(2):  # operators build and keep what a graph must find
            self.compute(self.bringer.derive(planned, flat))
        torch.cuda.synchronize(self.state.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits_RV = self.compute(self.bringer.derive(planned, flat))

        @torch.inference_mode()
        def again(prompts: Sequence[Prompt]) -> None:
            (pieces, *more) = cut(prompts, self.chunk)
            new = plan_pass(pieces, self.bringer.sizes)
            if more or new.shape != planned.shape or new.reach > planned.reach:
                raise ValueError(
                    f"a graph of {planned.rows} rows up to {planned.reach} tokens was captured; this is another pass"
                )
            self.bringer.send(new, flat)
            graph.replay()

        return again, logits_RV

    def compute(self, here: OnCard) -> Tensor:
        """All layers of a pass; float32 logits [prompts that end in it, V]."""
        flow = self.begin(here)
        for layer in self.weights.layers[: self.split]:
            flow = self.layer(layer, here, here.encoder, flow)
        if self.split < len(self.weights.layers):
            flow = self.cross(here, flow)
            for layer in self.weights.layers[self.split + 1 :]:
                flow = self.layer(layer, here, here.decoder, flow) if len(here.deep) else flow
        if flow.targets:
            half = here.decoder if self.split < len(self.weights.layers) else here.encoder
            self.state.targets.flatten(0, 1)[half.keep_to] = torch.cat(flow.targets, 1)[half.keep_row]
        return self._logits(here, flow)

    def begin(self, here: OnCard) -> Flow:
        """Embedded tokens in every stream, collapsed from the first."""
        first_NS = torch.zeros(len(here.tokens), self.config.hc_mult, device=self.state.device)
        first_NS[:, 0] = 1.0
        mix = Mix(first_NS, first_NS, first_NS)
        return Flow(x_NSD=self.model.streams(here.tokens), mix=mix, y_ND=None, chosen=Chosen())

    def cross(self, here: OnCard, flow: Flow) -> Flow:
        """From the encoder's output: the decoder source's rows of all tokens, then its layer on the last ones."""
        source, deep = self.weights.layers[self.split], here.deep
        entered = self._enter(source, here, here.encoder, flow)
        assert source.attention.compressor is not None, "the decoder half begins with a source"
        self._publish(source, source.attention.compressor, here, entered.h_ND)
        picked = _picked(entered, deep)
        if not len(deep):
            return Flow(x_NSD=picked.x_NSD, mix=picked.mix, y_ND=None, chosen=Chosen())
        return self._rest(source, here, here.decoder, picked, Chosen(), (), publish=False)

    def layer(self, layer: LayerWeights, here: OnCard, half: Half, flow: Flow) -> Flow:
        """One layer on the rows of a half."""
        return self._rest(layer, here, half, self._enter(layer, here, half, flow), flow.chosen, flow.targets, publish=True)

    def _enter(self, layer: LayerWeights, here: OnCard, half: Half, flow: Flow) -> Entered:
        x_NSD, y_ND = flow.x_NSD, flow.y_ND
        if layer.engram is not None:
            if y_ND is not None:
                x_NSD, y_ND = leave_gpu(y_ND, x_NSD, flow.mix), None
            rows_NX = here.remembered[layer.spec.index]
            rows_NX = rows_NX[here.deep] if half is here.decoder else rows_NX
            memory_NX = linear_gpu(rows_NX, layer.engram.project, None, 1)
            add_memory(x_NSD, memory_NX, layer.engram.gates, half.at.text_N, self.config.norm_eps)
        return enter(self.config, layer.attention_mix, y_ND, x_NSD, flow.mix)

    def _rest(
        self, layer: LayerWeights, here: OnCard, half: Half, entered: Entered, chosen: Chosen, targets: tuple[Tensor, ...], *,
        publish: bool,
    ) -> Flow:  # fmt: skip
        """A layer whose attention has been entered. In the last one only rows whose logits are wanted go on: others leave
        what draft blocks look at and their window entries, which come from its input alone."""
        c, w, at = self.config, layer.attention, half.at
        if self.weights.drafts is not None and layer.spec.index in self.config.dspark_target_layer_ids:
            targets = (*targets, entered.x_NSD.mean(1))
        assert entered.quantised_ND is not None
        both_NX = linear_gpu(entered.quantised_ND, w.enter, None, 1)
        window = self._window(layer, half, both_NX[:, c.q_lora_rank :], at.rope[layer.spec.ratio > 0])
        if publish and w.compressor is not None:
            self._publish(layer, w.compressor, here, entered.h_ND)
        rank_NQ = both_NX[:, : c.q_lora_rank]
        if half is here.decoder and layer is self.weights.layers[-1]:
            rows = here.wanted
            at, entered, chosen, rank_NQ = at.pick(rows), _picked(entered, rows), chosen.pick(rows), rank_NQ[rows]
            if not len(rows):
                return Flow(x_NSD=entered.x_NSD, mix=entered.mix, y_ND=None, chosen=chosen, targets=targets)
        y_ND, chosen = self._attention(layer, at, window, entered, rank_NQ, chosen)
        entered = enter(c, layer.moe_mix, y_ND, entered.x_NSD, entered.mix)
        y_ND = self.layers.moe(layer.moe, at, entered)
        return Flow(x_NSD=entered.x_NSD, mix=entered.mix, y_ND=y_ND, chosen=chosen, targets=targets)

    def _attention(
        self, layer: LayerWeights, at: Places, window: WindowRows, entered: Entered, rank_NQ: Tensor, chosen: Chosen
    ) -> tuple[Tensor, Chosen]:
        """As `Layers.attention` behind its first product, with windows in a pass's buffer."""
        c, w, spec = self.config, layer.attention, layer.spec
        rank_NQ = rows_gpu(rank_NQ, form="fp8", norm=(w.query_norm, c.norm_eps))
        q_NHC = linear_gpu(rank_NQ, w.query, None, 1).unflatten(1, (c.n_heads, c.head_dim))
        if w.indexer is not None:
            chosen = self.layers.select(w.indexer, spec, at, entered.h_ND, rank_NQ, chosen)
        pages = None if spec.ratio == 0 or chosen.source is None else self.state.pages[chosen.source]
        out_NHC = attend_packed(
            q_NHC, window, at.span_N2, at.slot_N, pages, None if pages is None else chosen.topk_NK, w.sink,
            window=self.plan.window, rope=at.rope[spec.ratio > 0],
        )  # fmt: skip
        return self.layers.out(w, out_NHC), chosen

    def _window(self, layer: LayerWeights, half: Half, kv_NC: Tensor, rope: tuple[Tensor, Tensor]) -> WindowRows:
        """Window entries of the pass's rows, behind what the rings hold before them; the newest go into the rings."""
        c, w, index = self.config, layer.attention, layer.spec.index
        codes, scales = (part[index].flatten(0, 1) for part in (self.state.codes, self.state.scales))
        rings = codes, scales
        held = codes.new_empty(half.cells, codes.shape[1]), scales.new_empty(half.cells, scales.shape[1])
        move_rows_gpu(rings, half.carry_from, held, half.carry_to)
        page_N = torch.zeros_like(half.at.cell_N)
        write_rows(
            kv_NC, held[0].unsqueeze(0), held[1].unsqueeze(0), page_N, half.at.cell_N, form="fp8",
            norm=(w.entry_norm, c.norm_eps), table=rope,
        )  # fmt: skip
        move_rows_gpu(held, half.keep_from, rings, half.keep_to)
        # Whatever a query's slot, its window lies in the one buffer.
        codes, scales = (buffer.expand(self.state.slots + 1, -1, -1) for buffer in held)
        return WindowRows(values=codes, scales=scales)

    def _publish(self, layer: LayerWeights, w: CompressorWeights, here: OnCard, h_ND: Tensor) -> None:
        """The groups that end in this pass become rows and keys; raw tokens are kept for those that do not (facts 5.1)."""
        c, spec = self.config, layer.spec
        group = here.groups[spec.ratio]
        if spec.ratio == 1:
            latent_GC = torch.nn.functional.linear(h_ND[group.members[:, 0]], w.project)
        else:
            tail = self.state.tails[spec.index].flatten(0, 1)
            both_N2C = wide_product(h_ND, w.project).unflatten(1, (2, c.head_dim))
            both_GR2C = both_N2C[group.members]
            both_GR2C.flatten(0, 1)[group.early] = tail[group.early_cell]
            tail[group.keep_cell] = both_N2C[group.keep]
            kv_GRC, gate_GRC = both_GR2C.unbind(2)
            latent_GC = (kv_GRC * gate_GRC.softmax(1)).sum(1).bfloat16()
        if not len(latent_GC):
            return
        latent_GC = rows_gpu(latent_GC, norm=(w.norm, c.norm_eps))
        planes, at = self.state.rows.sources[spec.index], (group.page, group.row)
        write_rows(latent_GC, planes.main_codes, planes.main_scales, *at, form="main_fp4", table=group.rope)
        key_GI, norm = torch.nn.functional.linear(latent_GC, w.key), (w.key_norm, c.norm_eps)
        write_rows(key_GI, planes.key_codes, planes.key_scales, *at, form="mxfp4", norm=norm, table=group.rope)

    def _logits(self, here: OnCard, flow: Flow) -> Tensor:
        """Of the last rows of prompts that end here."""
        if not len(here.wanted):
            return torch.empty(0, self.config.vocab_size, device=self.state.device)
        x_NSD, mix, y_ND = flow.x_NSD, flow.mix, flow.y_ND
        assert y_ND is not None
        if self.split == len(self.weights.layers):
            wanted = here.deep[here.wanted]
            x_NSD, mix, y_ND = x_NSD[wanted], Mix(*(part[wanted] for part in mix)), y_ND[wanted]
        return self.model.logits(x_NSD, mix, y_ND)


def _picked(entered: Entered, rows_W: Tensor) -> Entered:
    """Some of the rows that entered a sublayer."""
    x_NSD, h_ND, quantised_ND, mix = entered
    assert quantised_ND is not None
    return Entered(x_NSD[rows_W], h_ND[rows_W], quantised_ND[rows_W], Mix(*(part[rows_W] for part in mix)))
