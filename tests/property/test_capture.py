"""A capture tells the truth: its choices and masses are those of a float64 recomputation, and of what was served.

The oracle is one plain forward over all positions with observers on the real modules: no second view, no chunks, no early stop.
From what it saw, scores, selections, pools, attention, routing and gates are computed again in float64 by the formulas of the
report, position by position, and compared with the capture of any position under any chunking.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvist.config import LayerSpec, ModelConfig, VisionConfig
from kvist.engine.budget import EngineConfig
from kvist.engine.capture import Attended, Recording, record
from kvist.engine.engine import Engine
from kvist.engine.errors import RequestTooLong
from kvist.engine.microscope import LayerView, Microscope, layer_views, masses
from kvist.engine.request import FinishedEvent, ImageInput, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from kvist.engine.session import ImageSpan, Sequence, Session
from kvist.kernels.native import calls
from kvist.model.block import Block
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset

NEAR = 1e-5
"""Scores closer than this share of the largest one may swap between float32 and float64."""


@lru_cache(maxsize=4)
def toy(seed: int) -> Transformer:
    """`tiny` in deterministic mode; odd seeds run native operators, even ones the reference."""
    model = random_model(preset("tiny"), Numerics(deterministic=True, impl="cpu" if seed % 2 else "ref"), seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attn_sink"):  # zeros would leave the sink's part untested
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return model


class Everything(DenseMemory):
    """Keeps what every layer asked for, for all rows of one pass."""

    def __init__(self, model: Transformer) -> None:
        super().__init__(model.config, model.numerics)
        self.scored: list[Any] = []
        self.asked: dict[int, Any] = {}

    def select(self, source, rows, q_NJI, weight_NJ, pool_NB, publish):  # type: ignore[no-untyped-def]
        picked = super().select(source, rows, q_NJI, weight_NJ, pool_NB, publish)
        self.scored = [q_NJI, weight_NJ, pool_NB, picked]
        return picked

    def attend(self, layer, source, rows, q_NHC, window_NC, topk_NK, sink_H):  # type: ignore[no-untyped-def]
        self.asked[layer] = (source, q_NHC, window_NC, topk_NK, sink_H, self.scored)
        self.scored = []
        return super().attend(layer, source, rows, q_NHC, window_NC, topk_NK, sink_H)


class Oracle:
    """One forward over all positions, everything kept."""

    def __init__(self, model: Transformer, ids: list[int]) -> None:
        self.model, self.memory = model, Everything(model)
        self.router_inputs: dict[int, Tensor] = {}
        self.engram_inputs: dict[int, Any] = {}
        handles = []
        for layer, block in enumerate(model.layers):
            assert isinstance(block, Block)

            def route(_: Any, inputs: Any, __: Any, layer: int = layer) -> None:
                self.router_inputs[layer] = inputs[0]

            def remember(_: Any, inputs: Any, __: Any, layer: int = layer) -> None:
                self.engram_inputs[layer] = inputs

            handles.append(block.ffn.gate.register_forward_hook(route))
            if block.engram is not None:
                handles.append(block.engram.register_forward_hook(remember))
        try:
            session = Session(model, memory=self.memory, chunk=10_000, ced=False)
            self.logits_V = session.prefill([Sequence(0, torch.tensor(ids))])[0]
        finally:
            for handle in handles:
                handle.remove()

    def scores(self, spec: LayerSpec, position: int) -> Tensor:
        """Index scores of all visible rows, float64."""
        q_NJI, weight_NJ, _, _ = self.memory.asked[spec.index][5]
        assert spec.kv_source is not None
        keys_MI = self.memory.slot(0).keys[spec.kv_source].read()[: (position + 1) // spec.ratio].double()
        products_JM = (q_NJI[position].double() @ keys_MI.T).clamp_min(0)
        return (products_JM * weight_NJ[position].double().unsqueeze(1)).sum(0)

    def attention(self, spec: LayerSpec, position: int, rows: list[int]) -> tuple[Tensor, Tensor, float]:
        """Masses of window entries, of the given rows, and of the sink, float64, by explicit exponentials."""
        source, q_NHC, window_NC, _, sink_H, _ = self.memory.asked[spec.index]
        first = max(0, position + 1 - self.model.plan.window)
        keys = window_NC[first : position + 1].double()
        if rows:
            keys = torch.cat([keys, self.memory.slot(0).main[source].read()[rows].double()])
        q_HC = q_NHC[position].double()
        weights_HL = ((q_HC @ keys.T) * q_HC.shape[1] ** -0.5).exp()
        sink = sink_H.detach().double().exp()
        share_HL = weights_HL / (weights_HL.sum(1) + sink).unsqueeze(1)
        taken = float((sink / (weights_HL.sum(1) + sink)).mean())
        mean_L = share_HL.mean(0)
        return mean_L[: position + 1 - first], mean_L[position + 1 - first :], taken


def check_choice(chosen: list[int], score: Tensor, allowed: list[int], k: int) -> None:
    """`chosen` are the k best of `allowed`, lower ids first among equals, up to scores that float32 cannot tell apart."""
    best = sorted(allowed, key=lambda row: (-float(score[row]), row))[:k]
    if sorted(best) == chosen:
        return
    assert len(chosen) == len(best), (chosen, best)
    cut, room = float(score[best[-1]]), NEAR * float(score.abs().max())
    assert set(chosen) <= set(allowed)
    for row in set(chosen) ^ set(best):
        assert abs(float(score[row]) - cut) <= room, (row, chosen, best)


def check_selection(oracle: Oracle, config: ModelConfig, spec: LayerSpec, seen: Attended, recording: Recording) -> None:
    if not spec.selects:
        assert seen.pool_B is seen.kept_B is None
        return
    position, size = recording.position, config.candidate_block_size
    visible = (position + 1) // spec.ratio
    score = oracle.scores(spec, position)
    allowed = list(range(visible))
    if spec.candidate_source is not None:
        assert seen.pool_B is not None
        pool = recording.attended[spec.candidate_source].kept_B
        assert pool is not None
        assert torch.equal(seen.pool_B, pool), "a Reindex layer chooses inside the pool that its source kept"
        allowed = [row for row in allowed if row // size in seen.pool_B.tolist()]
    check_choice(seen.topk_K.tolist(), score, allowed, config.index_topk)
    if spec.publishes_candidates and visible:
        blocks = -(-visible // size)
        best = torch.stack([score[block * size : (block + 1) * size].max() for block in range(blocks)])
        best[blocks - 1] = 2 * score.abs().max() + 1  # the newest block is always kept
        assert seen.kept_B is not None
        check_choice(seen.kept_B.tolist(), best, list(range(blocks)), config.candidate_topk_blocks)


def check_routing(oracle: Oracle, model: Transformer, layer: int, recording: Recording) -> None:
    block = model.layers[layer]
    assert isinstance(block, Block)
    gate, x_D = block.ffn.gate, oracle.router_inputs[layer][recording.position].double()
    score_E = torch.nn.functional.softplus(gate.weight.double() @ x_D / gate.temperature).sqrt()
    chosen, weights_K = recording.routed[layer]
    check_choice(chosen.tolist(), score_E + gate.bias.double(), list(range(len(score_E))), gate.n_active)
    expected = score_E[chosen] / (score_E[chosen].sum() if gate.normalise else 1) * gate.scale
    assert torch.allclose(weights_K.double(), expected, atol=1e-5), "routing weights"


def check_gate(oracle: Oracle, model: Transformer, layer: int, recording: Recording) -> None:
    block = model.layers[layer]
    assert isinstance(block, Block)
    if block.engram is None:
        assert layer not in recording.gates
        return
    engram, at = block.engram, recording.position
    assert engram.reader is not None
    x_NSD, ids_NX, _ = oracle.engram_inputs[layer]
    kv_SD = engram.wkv(engram.reader.rows(ids_NX[at : at + 1]).flatten(1)).unflatten(1, (-1, x_NSD.shape[2]))[0].double()
    x_SD, key_SD, eps = x_NSD[at].double(), kv_SD[:-1], model.config.norm_eps
    norm_S = ((x_SD.square().mean(1) + eps) * (key_SD.square().mean(1) + eps)).rsqrt() * x_SD.shape[1] ** -0.5
    dot_S = (x_SD * engram.q_weight.double() * engram.k_weight.double() * key_SD).sum(1) * norm_S
    gate_S = torch.sigmoid(dot_S.sign() * dot_S.abs().clamp_min(1e-6).sqrt())
    assert torch.allclose(recording.gates[layer].double(), gate_S, atol=1e-5), "Engram gates"


def check_views(oracle: Oracle, config: ModelConfig, recording: Recording, views: list[LayerView]) -> None:
    """Figures against float64, and what ties the layers together."""
    at = recording.position
    for spec, seen, view in zip(config.plan.layers, recording.attended, views, strict=True):
        window_T, rows_K, sink = oracle.attention(spec, at, seen.topk_K.tolist())
        assert [mass for _, mass in view.window_positions] == pytest.approx(window_T.tolist(), abs=1e-9)
        assert [position for position, _ in view.window_positions] == list(range(max(0, at + 1 - config.window_size), at + 1))
        assert [mass for *_, mass in view.rows] == pytest.approx(rows_K.tolist(), abs=1e-9)
        assert view.sink_mass == pytest.approx(sink, abs=1e-9)
        assert view.window_mass + view.row_mass + view.sink_mass == pytest.approx(1, abs=1e-9)
        assert [(a, b) for a, b, _ in view.rows] == [
            (r * spec.ratio, r * spec.ratio + spec.ratio - 1) for r in seen.topk_K.tolist()
        ]
        assert all(b <= at for _, b, _ in view.rows), "a row stands for tokens that were there"
        for a, b in view.pool or ():
            assert 0 <= a <= b <= at
        if view.role == "reuse":
            assert view.selection_from is not None
            assert view.rows == [(a, b, m) for (a, b, _), (*_, m) in zip(views[view.selection_from].rows, view.rows, strict=True)]
            assert view.overlap == (1.0 if view.rows else None)


def check(seed: int, prompt: list[int], output: list[int], chunk: int) -> None:
    model = toy(seed)
    config = model.config
    oracle = Oracle(model, prompt + output)
    recording = record(model, torch.tensor(prompt), torch.tensor(output, dtype=torch.int64), replay="exact", chunk=chunk)
    at = recording.position
    assert at == len(prompt) + len(output) - 1
    with torch.inference_mode():
        for spec, seen in zip(config.plan.layers, recording.attended, strict=True):
            _, q_NHC, _, topk_NK, _, _ = oracle.memory.asked[spec.index]
            assert torch.equal(seen.q_HC, q_NHC[at]), f"layer {spec.index}: the query's bits"
            if topk_NK is not None:
                assert torch.equal(seen.topk_K, topk_NK[at][topk_NK[at] >= 0]), f"layer {spec.index}: the selection"
            check_selection(oracle, config, spec, seen, recording)
            check_routing(oracle, model, spec.index, recording)
            check_gate(oracle, model, spec.index, recording)
        check_views(oracle, config, recording, layer_views(config, recording))
    assert torch.equal(recording.logits_V, oracle.logits_V), "the logits behind the position"


CASES = {
    "seed": st.integers(0, 3),
    "length": st.integers(1, 90),
    "made": st.integers(0, 12),
    "chunk": st.integers(1, 64),
    "ids": st.randoms(use_true_random=False),
}


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**CASES)
def test_captures_equal_a_recomputation(seed: int, length: int, made: int, chunk: int, ids: random.Random) -> None:
    check(seed, [ids.randrange(4, 256) for _ in range(length)], [ids.randrange(4, 256) for _ in range(made)], chunk)


@pytest.mark.long
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**CASES)
def test_hundreds_of_captures(seed: int, length: int, made: int, chunk: int, ids: random.Random) -> None:
    check(seed, [ids.randrange(4, 256) for _ in range(length)], [ids.randrange(4, 256) for _ in range(made)], chunk)


def test_cases_that_must_occur() -> None:
    """A pruned pool, a full window, rows behind it, a partial overlap: what the property leaves to chance."""
    model = toy(0)
    ids = torch.randint(4, 256, (90,), generator=torch.Generator().manual_seed(5))
    views = layer_views(model.config, record(model, ids, torch.empty(0, dtype=torch.int64), replay="exact"))
    assert [view.role for view in views] == ["window", "window", "full", "reuse", "full", "reuse", "reindex", "reuse"]
    assert [view.half for view in views] == ["encoder"] * 4 + ["decoder"] * 4
    assert [view.source for view in views] == [None, None, 2, 2, 4, 4, 4, 4]
    assert [view.candidates_from for view in views] == [None] * 6 + [4, None]
    assert [view.keeps_pool for view in views] == [False] * 4 + [True] + [False] * 3
    assert views[4].pool == views[6].pool
    assert len(views[4].pool or ()) == 2, "two of many blocks"
    assert len(views[4].window_positions) == 8
    assert [view.engram is not None for view in views] == [False, True, False, True] + [False] * 4
    overlaps = [view.overlap for view in views]
    assert overlaps[:3] == [None] * 3
    assert any(share not in (None, 0.0, 1.0) for share in overlaps)


# ---- what was served


class ServedQueries:
    """An engine whose memory tells, by job, layer and position, the query and selection of every row that it served."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.seen = engine, {}
        self._attend = engine.memory.attend
        engine.memory.attend = self._watch  # type: ignore[method-assign]
        # Whole-layer calls pass no query through Python; the operators one by one have the same bits.
        engine.memory.places = lambda rows, *, block=False: None  # type: ignore[method-assign]

    def _watch(self, layer, source, rows, q_NHC, window_NC, topk_NK, sink_H):  # type: ignore[no-untyped-def]
        jobs = {job.slot: job.id for job in self.engine.scheduler.running.values()}
        for segment in rows.segments:
            for row in range(segment.length):
                at = segment.start + row
                topk = None if topk_NK is None else topk_NK[at].clone()
                self.seen[jobs[segment.slot], layer, segment.position + row] = q_NHC[at].clone(), topk
        return self._attend(layer, source, rows, q_NHC, window_NC, topk_NK, sink_H)

    def run(self, requests: list[Request]) -> list[list[int]]:
        numbers = [self.engine.add(request) for request in requests]
        tokens: dict[int, list[int]] = {number: [] for number in numbers}
        while not self.engine.idle:
            for event in self.engine.step():
                if isinstance(event, TokenEvent):
                    tokens[event.id] += event.tokens
                else:
                    assert isinstance(event, FinishedEvent)
                    assert event.reason == "length", event
        return [tokens[number] for number in numbers]


@pytest.mark.parametrize(("seed", "replay"), [(0, "bounded"), (1, "bounded"), (1, "exact"), (1, 20)])
def test_captures_equal_what_was_served(seed: int, replay: str | int) -> None:
    """Requests side by side, in small chunks, with drafts: every output token's capture has the served queries' bits."""
    model, rng = toy(seed), random.Random(seed)
    config = EngineConfig(pages=64, page_tokens=4, max_running=3, step_cost=24, mixed_cost=12, replay=replay, speculation=2)
    served = ServedQueries(Engine(model, config))
    lengths = (41, 3, 26)
    requests = [
        Request(
            prompt=[rng.randrange(4, 256) for _ in range(length)],
            max_tokens=4,
            sampling=SamplingParams(temperature=0.8, seed=number),
            ignore_end=True,
        )
        for number, length in enumerate(lengths)
    ]
    replies = served.run(requests)
    for number, (request, reply) in enumerate(zip(requests, replies, strict=True)):
        for token in range(len(reply)):
            prompt, fed = torch.tensor(request.prompt), torch.tensor(reply[:token], dtype=torch.int64)
            recording = record(model, prompt, fed, replay=replay, chunk=17)
            for layer, seen in enumerate(recording.attended):
                q_HC, topk_K = served.seen[number, layer, recording.position]
                assert torch.equal(seen.q_HC, q_HC), (number, token, layer)
                if topk_K is not None:
                    assert torch.equal(seen.topk_K, topk_K[topk_K >= 0]), (number, token, layer)


def test_pictures_are_looked_at_too() -> None:
    """A prompt with a picture: embeddings in place of its tokens, router biases and n-gram barriers of images."""
    vision = VisionConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    config = replace(preset("tiny"), vision=vision, image_token_id=3)
    model = random_model(config, Numerics(deterministic=True, impl="cpu"), 1)
    span = torch.randn(9, config.dim, generator=torch.Generator().manual_seed(2))
    picture = ImageInput(start=5, tokens=9, content=b"p" * 32, embed=lambda: span)
    prompt = [4, 5, 6, 7, 8, *[3] * 9, *range(20, 45)]
    served = ServedQueries(Engine(model, EngineConfig(pages=32, page_tokens=4, max_running=1, step_cost=24)))
    sampling = SamplingParams(temperature=0)
    (reply,) = served.run([Request(prompt=prompt, max_tokens=4, images=(picture,), sampling=sampling, ignore_end=True)])
    for token in range(4):
        fed = torch.tensor(reply[:token], dtype=torch.int64)
        recording = record(model, torch.tensor(prompt), fed, images=[ImageSpan(start=5, embeddings_SD=span)])
        for layer, seen in enumerate(recording.attended):
            assert torch.equal(seen.q_HC, served.seen[0, layer, recording.position][0]), (token, layer)
        assert recording.logits_V.argmax() == reply[token]
    microscope = Microscope(model, replay="bounded")
    assert microscope.look(prompt, reply, images=[picture]).rank == 0
    assert microscope.look(prompt, reply).logprob != microscope.look(prompt, reply, images=[picture]).logprob
    assert microscope.image_token_bytes == 4 * 3 * (14 * 3) ** 2
    assert Microscope(toy(0), replay="bounded").image_token_bytes == 0


def test_a_look_leaves_the_model_as_it_was() -> None:
    model = toy(0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    parts = {name: id(module) for name, module in model.named_modules()}
    microscope = Microscope(model, replay="exact")
    view = microscope.look([5] * 30, [7, 9, 11])
    assert view.position == 31
    assert 0 <= view.rank < 256
    assert view.logprob < 0
    assert {name: id(module) for name, module in model.named_modules()} == parts
    assert not any(module._forward_hooks for module in model.modules())
    assert model.mtp is not None
    assert model.targets
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_look_leaves_native_threads_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, native calls of the looking thread use one thread; another thread's, and those afterwards, all."""
    monkeypatch.setattr(calls, "_threads", 4)
    seen: list[tuple[int, int]] = []

    def proceed() -> None:
        with ThreadPoolExecutor(1) as other:
            seen.append((calls.threads(), other.submit(calls.threads).result()))

    Microscope(toy(1), replay="bounded").look([5] * 30, [7], proceed=proceed)
    assert seen == [(1, 4)]
    assert calls.threads() == 4
    with calls.at_most_threads(3), calls.at_most_threads(9):
        assert calls.threads() == 3


def test_what_cannot_be_looked_at() -> None:
    microscope = Microscope(toy(0), replay="bounded")
    with pytest.raises(ValueError, match="no token was produced"):
        microscope.look([5], [])
    with pytest.raises(RequestTooLong, match="exceed the context of 1024"):
        microscope.look([5] * 1024, [5, 6])
    with pytest.raises(ValueError, match="token id 999"):
        microscope.look([999], [5])

    class Enough(Exception):
        """The caller has gone."""

    calls = 0

    def proceed() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise Enough

    with pytest.raises(Enough):
        Microscope(toy(0), replay="bounded", chunk=8).look([5] * 100, [5, 6], proceed=proceed)
    assert calls == 2, "it stops at the next chunk"


def test_masses_without_rows_and_with_large_scores() -> None:
    """The softmax is stable where plain exponentials overflow."""
    seen = Attended(
        q_HC=torch.full((2, 4), 500.0),
        window_TC=torch.full((1, 4), 500.0),
        topk_K=torch.empty(0, dtype=torch.int64),
        rows_KC=torch.empty(0, 4),
        sink_H=torch.zeros(2),
        pool_B=None,
        kept_B=None,
    )
    window_T, rows_K, sink = masses(seen)
    assert window_T.tolist() == [1.0]
    assert not len(rows_K)
    assert sink == 0.0
