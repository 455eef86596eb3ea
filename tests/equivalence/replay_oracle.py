"""What bounded replay means, computed the plain way: one request, one pass, dense memory, window state that begins at the replay.

Owns the oracle of the conventions in the fault collection: global rows as first computed, window attention of query i limited
to keys [max(s, i - window + 1), i], s the first replayed position of that half. Knows no pages, batches or chunks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvist.engine.replay import ReplaySpan
from kvist.engine.request import ImageInput
from kvist.model.memory import DenseMemory, Shared, Slot
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Flow, Transformer


class ReplayMemory(DenseMemory):
    """Dense memory that keeps existing global rows when rows below `publish_from` come by."""

    def _group_one(self, slot, source, segment, ratio, kv_tC, gate_tC):  # type: ignore[no-untyped-def]
        cut = min(max(0, segment.publish_from - segment.position), segment.length)
        segment = replace(segment, position=segment.position + cut, length=segment.length - cut)
        return super()._group_one(slot, source, segment, ratio, kv_tC[cut:], None if gate_tC is None else gate_tC[cut:])


class Oracle:
    """Runs requests one after another; `rows` of one may be the cached prefix of the next."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.plan = model, model.plan

    @torch.inference_mode()
    def logits(
        self,
        prompt: list[int],
        reply: list[int],
        span: ReplaySpan,
        cached: Slot | None,
        images: tuple[ImageInput, ...] = (),
    ) -> tuple[list[Tensor], Slot]:
        """Logits behind the prompt and behind each reply token but the last, and the request's global rows."""
        memory = ReplayMemory(self.model.config, self.model.numerics)
        if span.hit:
            assert cached is not None
            memory.slots[0] = self._prefix(cached, span.hit)
        ids = torch.tensor(prompt + reply)
        text = torch.ones(len(ids), dtype=torch.bool)
        for image in images:
            text[image.start : image.start + image.tokens] = False
        rows = self._rows(ids, text, images, span.start, len(prompt), span.hit)
        flow = self.model.run(self.model.begin(rows), rows, memory, 0, self.plan.decoder_start)
        self.model.publish(flow, rows, memory)
        keep = slice(max(0, span.decode_from - span.start), len(rows.positions_N))
        tail = self._rows(ids, text, (), span.start + keep.start, len(prompt), 0)
        deep = Flow(flow.x_NSD[keep], flow.pre_NS[keep], Shared())
        deep = self.model.run(deep, tail, memory, self.plan.decoder_start, len(self.plan.layers), publish=False)
        found = [self.model.logits(deep)[-1]]
        for position in range(len(prompt), len(ids) - 1):
            step = self._rows(ids, text, (), position, position + 1, 0)
            found.append(self.model.logits(self.model(step, memory))[-1])
        return found, memory.slots[0]

    def _prefix(self, cached: Slot, tokens: int) -> Slot:
        """The first `tokens` tokens' global rows and nothing else."""
        slot = cached.fork()
        slot.windows, slot.tails = {}, {}
        for spec in self.plan.kv_sources:
            slot.main[spec.index].truncate(tokens // spec.ratio)
            slot.keys[spec.index].truncate(tokens // spec.ratio)
        return slot

    def _rows(self, ids: Tensor, text: Tensor, images: tuple[ImageInput, ...], start: int, stop: int, hit: int) -> Rows:
        values, places = [], []
        for image in images:
            low, high = max(image.start, start), min(image.start + image.tokens, stop)
            if low < high:
                values.append(image.embed()[low - image.start : high - image.start])
                places.append(torch.arange(low - start, high - start))
        return Rows(
            token_ids_N=ids[start:stop],
            positions_N=torch.arange(start, stop),
            text_N=text[start:stop],
            segments=(Segment(slot=0, start=0, length=stop - start, position=start, publish_from=hit),),
            engram_LNX=self.model.engram_ids(ids[:stop], text[:stop], start),
            features_FD=torch.cat(values) if values else None,
            feature_rows_F=torch.cat(places) if places else None,
        )
