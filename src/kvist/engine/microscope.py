"""What each layer read at one position, in plain numbers: attention masses by position, selections, pools, experts, gates.

Owns the meaning of the figures (docs/server.md) and their arithmetic in float64. Must not know HTTP or how a request ran: it
takes token ids and computes the position anew (`capture.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvist.config import LayerSpec, ModelConfig
from kvist.engine.capture import Attended, Recording, record
from kvist.engine.errors import NonFiniteLogits
from kvist.engine.replay import Replay
from kvist.engine.request import ImageInput
from kvist.engine.session import ImageSpan
from kvist.kernels.native import at_most_threads
from kvist.model.transformer import Transformer

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class LayerView:
    """One layer at one position. Masses are means over heads of the softmax with window, rows and sink in its denominator.

    `source`: the layer whose rows it attends; `selection_from`: whose choice of rows; `candidates_from`: whose pool it chose
    inside. `window_positions` (position, mass); `rows` (first and last position of the row's tokens, mass); `pool` spans of the
    candidate blocks that it chose inside, or kept for others (`keeps_pool`). `overlap`: share of the positions behind its rows
    that the choice before it covers too. `experts` (expert, weight); `engram`: mean gate over the streams.
    """

    layer: int
    role: str
    half: str
    ratio: int
    source: int | None
    selection_from: int | None
    candidates_from: int | None
    window_mass: float
    row_mass: float
    sink_mass: float
    window_positions: list[tuple[int, float]]
    rows: list[tuple[int, int, float]]
    keeps_pool: bool
    pool: list[Span] | None
    overlap: float | None
    experts: list[tuple[int, float]]
    engram: float | None


@dataclass(frozen=True, kw_only=True)
class View:
    """A position and all layers, which see `window` positions uncompressed; `logprob` and `rank` (0: the likeliest) of the token
    that followed it."""

    position: int
    window: int
    layers: list[LayerView]
    logprob: float
    rank: int


class Microscope:
    """Looks at positions of a model on the CPU. Any thread; one look at a time is the caller's affair.

    `image_token_bytes`: what a picture kept for a later look takes, for each token of its span. Raises ValueError for a model
    elsewhere.
    """

    def __init__(self, model: Transformer, *, replay: Replay, chunk: int = 512) -> None:
        device = model.embed.weight.device
        if device.type != "cpu":
            raise ValueError(f"the microscope runs the model on the CPU, this one is on {device}; serve it with impl cpu or ref")
        self.model, self.replay, self.chunk = model, replay, chunk

    @property
    def image_token_bytes(self) -> int:
        """See the class: the float32 pixels behind one token of a span."""
        vision = self.model.config.vision
        return 0 if vision is None else 4 * 3 * (vision.patch_size * vision.downsample_ratio) ** 2

    def look(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        images: Sequence[ImageInput] = (),
        replay: Replay | None = None,
        proceed: Callable[[], None] = lambda: None,
    ) -> View:
        """The position that gave the last token of `output` (at least one). `proceed` is called every chunk; it may raise.

        Raises what `capture.record` raises, and NonFiniteLogits if the numbers went wrong.
        """
        if not output:
            raise ValueError("no token was produced yet, so there is nothing to look at")
        with at_most_threads(1):  # whoever serves beside it finds the native threads free
            recording = record(
                self.model,
                torch.tensor(prompt, dtype=torch.int64),
                torch.tensor(output[:-1], dtype=torch.int64),
                images=[ImageSpan(start=image.start, embeddings_SD=image.embed()) for image in images],
                replay=self.replay if replay is None else replay,
                chunk=self.chunk,
                proceed=lambda _: proceed(),
            )
        scores_V = recording.logits_V.double()
        if not bool(scores_V.isfinite().all()):
            raise NonFiniteLogits(f"logits behind position {recording.position} are not finite")
        chosen = scores_V[output[-1]]
        better = (scores_V > chosen) | ((scores_V == chosen) & (torch.arange(len(scores_V)) < output[-1]))
        return View(
            position=recording.position,
            window=self.model.plan.window,
            layers=layer_views(self.model.config, recording),
            logprob=float(chosen - scores_V.logsumexp(0)),
            rank=int(better.sum()),
        )


def layer_views(config: ModelConfig, recording: Recording) -> list[LayerView]:
    """Every layer of a recording as numbers."""
    views: list[LayerView] = []
    before: Tensor | None = None
    for spec, seen, routed in zip(config.plan.layers, recording.attended, recording.routed, strict=True):
        covered = _covered(seen.topk_K, spec.ratio, recording.position)
        window_T, rows_K, sink = masses(seen)
        first = recording.position + 1 - len(window_T)
        blocks_B = seen.pool_B if seen.pool_B is not None else seen.kept_B
        gate_S = recording.gates.get(spec.index)
        views.append(
            LayerView(
                layer=spec.index,
                role=spec.mode.value,
                half="encoder" if spec.index < config.plan.decoder_start else "decoder",
                ratio=spec.ratio,
                source=spec.kv_source,
                selection_from=spec.index_source,
                candidates_from=spec.candidate_source,
                window_mass=float(window_T.sum()),
                row_mass=float(rows_K.sum()),
                sink_mass=sink,
                window_positions=list(enumerate(window_T.tolist(), first)),
                rows=_row_spans(seen.topk_K, rows_K, spec.ratio),
                keeps_pool=spec.publishes_candidates,
                pool=None if blocks_B is None else _block_spans(blocks_B, spec, config, recording.position),
                overlap=_overlap(covered, before) if spec.ratio else None,
                experts=list(zip(routed.experts_K.tolist(), routed.weights_K.tolist(), strict=True)),
                engram=None if gate_S is None else float(gate_S.mean()),
            )
        )
        before = covered if spec.ratio else before
    return views


def masses(seen: Attended) -> tuple[Tensor, Tensor, float]:
    """Mean over heads of the attention to each window entry [T] and each row [K], float64, and what the sink takes."""
    keys_LC = torch.cat([seen.window_TC, seen.rows_KC]).double()
    scores_HL = seen.q_HC.double() @ keys_LC.T * seen.q_HC.shape[1] ** -0.5
    joint_HL1 = torch.cat([scores_HL, seen.sink_H.double().unsqueeze(1)], 1).softmax(1)
    share_L1 = joint_HL1.mean(0)
    window = len(seen.window_TC)
    return share_L1[:window], share_L1[window:-1], float(share_L1[-1])


def _row_spans(topk_K: Tensor, mass_K: Tensor, ratio: int) -> list[tuple[int, int, float]]:
    rows = zip(topk_K.tolist(), mass_K.tolist(), strict=True)
    return [(row * ratio, (row + 1) * ratio - 1, mass) for row, mass in rows]


def _block_spans(blocks_B: Tensor, spec: LayerSpec, config: ModelConfig, position: int) -> list[Span]:
    """Candidate blocks as spans of positions; the newest one ends with the last row that is complete."""
    size, end = config.candidate_block_size * spec.ratio, (position + 1) // spec.ratio * spec.ratio
    return [(block * size, min((block + 1) * size, end) - 1) for block in blocks_B.tolist()]


def _covered(topk_K: Tensor, ratio: int, position: int) -> Tensor:
    """Which of the positions 0..position stand behind the selected rows, bool."""
    covered = torch.zeros(position + 1, dtype=torch.bool)
    for offset in range(ratio):
        covered[topk_K * ratio + offset] = True
    return covered


def _overlap(covered: Tensor, before: Tensor | None) -> float | None:
    """Share of the covered positions that the selection before covers too; None where there is none to compare."""
    if before is None or not bool(covered.any()):
        return None
    return float((covered & before).sum() / covered.sum())
