"""Prefix hits to the bit: bounded replay against its own oracle, exact replay against a cold run; the rules of hits (PFX)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvist.cache.identity import image_content
from kvist.config import VisionConfig, replace
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.replay import ReplaySpan, decoder_tail, replay_span
from kvist.engine.request import ImageInput, Request
from kvist.engine.sampler import SamplingParams
from kvist.model.initialise import random_model
from kvist.model.memory import Slot
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Outcome, Watched, judge
from tests.equivalence.replay_oracle import Oracle


@pytest.fixture(params=[0, pytest.param(1, marks=pytest.mark.long)])
def seed(request: pytest.FixtureRequest) -> int:
    """Weights and prompts; the second set in the long run only."""
    return int(request.param)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random ordinary tokens."""
    return [random.Random(seed + i * 1000003).randrange(4, 256) for i in range(length)]


def serve(model: Transformer, replay: object = "bounded", *, page_tokens: int = 4, **more: object) -> Watched:
    """An engine with room for several requests."""
    values: dict[str, object] = {"pages": 512 // page_tokens, "max_running": 6, "step_cost": 64, "speculation": "off"}
    config = EngineConfig(page_tokens=page_tokens, replay=replay, **{**values, **more})  # type: ignore[arg-type]
    return Watched(Engine(model, config))


def ask(watched: Watched, prompt: list[int], count: int = 6, **more: object) -> Outcome:
    """One request, run to its end."""
    number = watched.add(Request(prompt=prompt, max_tokens=count, ignore_end=True, **more))  # type: ignore[arg-type]
    watched.finish()
    return watched.outcomes[number]


def against_oracle(model: Transformer, outcome: Outcome, span: ReplaySpan, cached: Slot | None) -> Slot:
    """Compare every logit with the oracle's; the request's global rows as the oracle computed them."""
    prompt, images = list(outcome.request.prompt), outcome.request.images
    expected, slot = Oracle(model).logits(prompt, outcome.tokens, span, cached, images)
    for index, logits in enumerate(expected):
        got = outcome.logits[len(prompt) + index]
        assert torch.equal(got, logits), f"token {index}: differs from the oracle by {float((got - logits).abs().max())}"
    return slot


def span_of(model: Transformer, outcome: Outcome, replay: object = "bounded") -> ReplaySpan:
    """The replay that the reported usage stands for."""
    assert outcome.end is not None
    span = replay_span(model.plan, len(outcome.request.prompt), outcome.end.usage.cached_tokens, replay)  # type: ignore[arg-type]
    assert span.replayed == outcome.end.usage.replayed_tokens
    return span


def test_cold_bounded_equals_the_oracle(seed: int) -> None:
    model = toy(seed, True)
    for length in (1, 5, 8, 9, 40):
        watched = serve(model, step_cost=7)
        outcome = ask(watched, prompt_of(length, seed))
        against_oracle(model, outcome, span_of(model, outcome), None)


def test_three_turns_with_bounded_replay_equal_the_oracle(seed: int) -> None:
    """Each turn hits the pages of the one before, whose rows descend from a bounded hit themselves."""
    model = toy(seed, True)
    watched = serve(model)
    history, cached = prompt_of(37, seed), None
    hits = []
    for turn in range(3):
        outcome = ask(watched, history)
        span = span_of(model, outcome)
        cached = against_oracle(model, outcome, span, cached)
        hits.append(span.hit)
        history = history + outcome.tokens + prompt_of(9, 50 + turn)
    assert hits[0] == 0
    assert hits[1] >= 40
    assert hits[2] > hits[1]
    assert all(hit % model.plan.alignment == 0 for hit in hits)


@pytest.mark.parametrize("speculation", ["off", 3])
def test_mixed_batch_of_hits_and_misses(seed: int, speculation: object) -> None:
    """PFX-05, PFX-13: warm requests with different hits, a cold long one, a short one, chunked by a small budget, all at once."""
    model = toy(seed, True)
    watched = serve(model, speculation=speculation, step_cost=11, mixed_cost=5)
    trunk = prompt_of(64, seed)
    first = ask(watched, trunk)
    cached = against_oracle(model, first, span_of(model, first), None)
    prompts = [trunk[:60] + prompt_of(5, 1), trunk[:33] + prompt_of(20, 2), prompt_of(40, 3), prompt_of(5, 4), trunk[:12] + [7]]
    numbers = [watched.add(Request(prompt=p, max_tokens=6, ignore_end=True, sampling=SamplingParams(temperature=0.8, seed=i)))
               for i, p in enumerate(prompts)]  # fmt: skip
    watched.finish()
    spans = [span_of(model, watched.outcomes[number]) for number in numbers]
    assert [span.hit for span in spans] == [60, 32, 0, 0, 12]
    for number, span in zip(numbers, spans, strict=True):
        against_oracle(model, watched.outcomes[number], span, cached)


@pytest.mark.parametrize("shared", [4, 8, 9, 12, 40])
def test_hits_around_the_window(seed: int, shared: int) -> None:
    """PFX-03: up to the window a hit is handled exactly; above it the replay starts a window before the hit."""
    model = toy(seed, True)
    watched = serve(model)
    first = ask(watched, prompt_of(50, seed))
    cached = against_oracle(model, first, span_of(model, first), None)
    outcome = ask(watched, prompt_of(50, seed)[:shared] + prompt_of(9, 77))
    assert outcome.end is not None
    usage = outcome.end.usage
    assert usage.cached_tokens == shared - shared % 2
    assert usage.replayed_tokens == min(usage.cached_tokens, model.plan.window)
    against_oracle(model, outcome, span_of(model, outcome), cached)
    if shared <= model.plan.window:
        cold = ask(serve(model), list(outcome.request.prompt))
        assert all(torch.equal(cold.logits[p], outcome.logits[p]) for p in outcome.logits)


@pytest.mark.parametrize("length", [40, 41])
@pytest.mark.parametrize("replay", ["bounded", "exact"])
def test_the_whole_prompt_is_cached(seed: int, length: int, replay: str) -> None:
    """The same prompt three times with another in between: at least one row runs, and nothing depends on the other (PFX-01)."""
    model = toy(seed, True)
    watched = serve(model, replay)
    prompt = prompt_of(length, seed)
    cold = ask(watched, prompt, 10)
    cached = None
    if replay == "bounded":
        cached = against_oracle(model, cold, span_of(model, cold), None)
    for turn in range(2):
        warm = ask(watched, prompt, 10)
        assert warm.end is not None
        assert warm.end.usage.cached_tokens == 40
        if replay == "exact":
            assert warm.tokens == cold.tokens
            assert all(torch.equal(warm.logits[p], cold.logits[p]) for p in range(length, length + 10))
        else:
            against_oracle(model, warm, span_of(model, warm), cached)
        ask(watched, prompt_of(60, 9 + turn), 2)
    branch = ask(watched, prompt[:38] + prompt_of(12, 5), 4)
    if replay == "exact":
        judge(model, branch)
    else:
        against_oracle(model, branch, span_of(model, branch), cached)


@pytest.mark.parametrize("page_tokens", [2, 4, 8])
def test_hits_are_not_coarser_than_the_ratios(page_tokens: int) -> None:
    """PFX-07: 100 tokens sent twice hit 100, whatever the page size; 99 hit whole pages at least."""
    model = toy(0, True)
    watched = serve(model, page_tokens=page_tokens)
    ask(watched, prompt_of(100), 2)
    for length in (100, 99):
        outcome = ask(watched, prompt_of(length), 2)
        assert outcome.end is not None
        least = 100 if length == 100 else length // page_tokens * page_tokens
        assert outcome.end.usage.cached_tokens >= least


@pytest.mark.parametrize("shared", [41, 40, 39, 38, 20])
def test_exact_hits_at_odd_and_even_cuts(seed: int, shared: int) -> None:
    """PFX-11: a stored state of 41 or 40 tokens, resumed with 41 ... 20 of them, in exact mode, equals a cold run."""
    model = toy(seed, True)
    for stored in (41, 40):
        watched = serve(model, "exact")
        ask(watched, prompt_of(stored, seed), 1)
        outcome = ask(watched, prompt_of(41, seed)[:shared] + prompt_of(6, 3))
        assert outcome.end is not None
        assert outcome.end.usage.cached_tokens >= min(shared, stored - 1) // 2 * 2 - 2
        judge(model, outcome)


def test_next_turn_after_each_kind_of_end(seed: int) -> None:
    """PFX-09: turns that end by a stop token, by length, and by a cut: the next turn equals a cold run."""
    model = toy(seed, True)
    for ending in ("stop", "length", "abort"):
        watched = serve(model, "exact")
        prompt = prompt_of(30, seed)
        free = ask(serve(model, "exact"), prompt, 12).tokens
        stop = (free[5],) if ending == "stop" else ()
        number = watched.add(Request(prompt=prompt, max_tokens=12, ignore_end=True, stop_ids=stop))
        while not watched.engine.idle:
            watched.step()
            if ending == "abort" and len(watched.outcomes[number].tokens) == 7:
                watched.engine.abort(number)
        reply = watched.outcomes[number].tokens
        assert reply == free[: len(reply)]
        following = ask(watched, prompt + reply + prompt_of(7, 21))
        assert following.end is not None
        # All tokens but the last were computed; the last group may be unfinished.
        assert following.end.usage.cached_tokens == (30 + len(reply) - 1) // 2 * 2
        judge(model, following)


def test_exact_requests_never_see_bounded_pages() -> None:
    model = toy(0, True)
    watched = serve(model, "bounded")
    trunk = prompt_of(40)
    ask(watched, trunk)
    second = ask(watched, trunk + prompt_of(30, 1))
    assert second.end is not None
    assert second.end.usage.cached_tokens == 40
    third = trunk + prompt_of(30, 1) + prompt_of(9, 2)
    exact = ask(watched, third, replay="exact")
    assert exact.end is not None
    assert exact.end.usage.cached_tokens == 40, "pages 40..70 descend from a bounded hit"
    judge(model, exact)
    bounded = ask(watched, third[:-1])
    assert bounded.end is not None
    assert bounded.end.usage.cached_tokens >= 70, "a bounded request takes both kinds"


def test_exact_replay_is_as_long_as_it_must_be_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """One position further back changes no bit; one fewer does (over the window's whole reach and later tokens)."""
    import kvist.engine.scheduler as scheduler

    model, changed = toy(0, True), []
    for shift in (-1, 0, 1):

        def shifted(*args, shift=shift, **kwargs):  # type: ignore[no-untyped-def]
            span = replay_span(*args, **kwargs)
            if span.hit:
                return ReplaySpan(**{**vars(span), "start": span.start + shift})
            return span

        monkeypatch.setattr(scheduler, "replay_span", shifted)
        watched = serve(model, "exact")
        trunk = prompt_of(100)
        ask(watched, trunk, 1)
        warm = ask(watched, trunk[:96] + prompt_of(4, 8), 10)
        assert warm.end is not None
        assert warm.end.usage.cached_tokens == 96
        expected = min(96, 100 - decoder_tail(model.plan, "exact")) - model.plan.exact_encoder_replay
        assert expected > 1
        assert warm.end.usage.replayed_tokens == 96 - expected - shift
        full = ask(serve(model, "exact"), list(warm.request.prompt), 10)
        changed.append(any(not torch.equal(warm.logits[p], full.logits[p]) for p in range(100, 110)))
    assert changed == [False, False, True]


def test_replay_between_bounded_and_exact(seed: int) -> None:
    model = toy(seed, True)
    watched = serve(model, 13)
    trunk = prompt_of(60, seed)
    first = ask(watched, trunk)
    cached = against_oracle(model, first, span_of(model, first, 13), None)
    warm = ask(watched, trunk[:50] + prompt_of(9, 1))
    assert warm.end is not None
    assert warm.end.usage.replayed_tokens >= 13
    against_oracle(model, warm, span_of(model, warm, 13), cached)


def test_drafts_after_a_hit_equal_the_cold_ones() -> None:
    """SPC-15: in exact mode the draft rings are rebuilt by replay, so the first proposal is the cold one's."""
    model, proposals = toy(0, True), []
    prompt = prompt_of(70)
    for warm in (False, True):
        watched = serve(model, "exact", speculation=5)
        if warm:
            ask(watched, prompt[:64], 1)
        own = watched.engine.drafter
        seen: list[list[int]] = []

        def spy(jobs, own=own, seen=seen):  # type: ignore[no-untyped-def]
            made = own(jobs)
            seen.extend(proposal.tokens for proposal in made)
            return made

        watched.engine.drafter = spy
        outcome = ask(watched, prompt, 12)
        assert outcome.end is not None
        assert outcome.end.usage.cached_tokens == (64 if warm else 0)
        judge(model, outcome)
        proposals.append(seen)
    assert proposals[0] == proposals[1]


@pytest.fixture(scope="module")
def seeing() -> Transformer:
    """The toy with a vision tower, whose prompts may hold images."""
    vision = VisionConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=32)
    return random_model(replace(preset("tiny"), vision=vision, image_token_id=2), Numerics(deterministic=True), 0)


def image(start: int, tokens: int, seed: int) -> ImageInput:
    """An image whose embeddings are random."""
    values = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(seed))
    return ImageInput(start=start, tokens=tokens, content=image_content(values.numpy()), embed=lambda: values)


@pytest.mark.parametrize("suffix_in_span", [True, False])
def test_hits_and_chunks_inside_an_image_span(seeing: Transformer, suffix_in_span: bool) -> None:
    """VIS-10: chunks cut a span, a hit ends inside one, a replay begins inside one; features are the image's every time."""
    span = image(10, 30, 1)
    text = prompt_of(60)
    prompt = text[:10] + [2] * 30 + text[10:25]
    watched = serve(seeing, step_cost=7)
    first = ask(watched, prompt, images=(span,))
    cached = against_oracle(seeing, first, span_of(seeing, first), None)
    if suffix_in_span:
        # The same image, cut by nothing, but another text behind: the hit covers the whole span and its replay lies inside.
        other = prompt[:40] + prompt_of(12, 4)
        warm = ask(watched, other, images=(span,))
        assert warm.end is not None
        assert warm.end.usage.cached_tokens == 40
    else:
        # Another image that shares nothing but its length: only the text before it may hit.
        strange = image(10, 30, 2)
        warm = ask(watched, prompt, images=(strange,))
        assert warm.end is not None
        assert warm.end.usage.cached_tokens == 8, "whole pages before the image"
    against_oracle(seeing, warm, span_of(seeing, warm), cached)
    assert watched.engine.runner.features.hits > 0


def test_features_are_encoded_again_when_the_host_cache_lost_them(seeing: Transformer) -> None:
    watched = serve(seeing, step_cost=7, feature_bytes=1)
    prompt = prompt_of(5) + [2] * 20 + prompt_of(5, 1) + [2] * 20 + prompt_of(9, 2)
    images = (image(5, 20, 1), image(30, 20, 2))
    outcome = ask(watched, prompt, images=images)
    cached = against_oracle(seeing, outcome, span_of(seeing, outcome), None)
    assert watched.engine.runner.features.misses == 2
    warm = ask(watched, prompt[:26], images=images[:1])
    against_oracle(seeing, warm, span_of(seeing, warm), cached)
    assert watched.engine.runner.features.misses == 3, "the replay of 16..24 lies in the first image"


def test_images_that_share_their_first_bytes_are_different(seeing: Transformer) -> None:
    """PFX-15: the whole digest counts, not a part of it."""
    watched = serve(seeing)
    prompt = prompt_of(4) + [2] * 20 + prompt_of(9, 1)
    base = image(4, 20, 1)
    ask(watched, prompt, images=(base,))
    for changed in (base.content[:-1] + bytes([base.content[-1] ^ 1]), bytes([base.content[0] ^ 1]) + base.content[1:]):
        other = ImageInput(start=4, tokens=20, content=changed, embed=base.embed)
        outcome = ask(watched, prompt, images=(other,))
        assert outcome.end is not None
        assert outcome.end.usage.cached_tokens == 4


def test_spans_by_brute_force() -> None:
    """Replay arithmetic against a simulation of which layer outputs have the bits of a cold run, over small plans."""
    rng = random.Random(0)
    for _ in range(60):
        window, total = rng.randrange(2, 6), rng.randrange(1, 60)
        config = replace(preset("tiny"), window_size=window)
        plan = config.plan
        hit = rng.randrange(0, total + 1) // 2 * 2
        span = replay_span(plan, total, hit, "exact")
        later = 3 * window
        assert _exact(plan.decoder_start, len(plan.layers), window, span.start, span.decode_from, total, later, hit)
        if span.start > 0:
            assert not _exact(plan.decoder_start, len(plan.layers), window, span.start + 1, span.decode_from, total, later, hit)
        bounded = replay_span(plan, total, hit, "bounded")
        assert bounded.start == max(0, min(hit - window, total - window)) or not hit
        assert bounded.exact_rows == (bounded.start == 0 or bounded.start <= hit - plan.exact_encoder_replay)


def _exact(split: int, layers: int, window: int, start: int, deep: int, total: int, later: int, hit: int) -> bool:
    """Whether all outputs that count are exact: new encoder rows, the decoder's last row, the draft inputs, later tokens."""
    stop = total + later
    good = np.arange(stop) >= start  # inputs of layer 0: whatever is run
    outputs = []
    for layer in range(layers):
        first = start if layer < split else max(start, deep)
        here = np.zeros(stop, dtype=bool)
        for p in range(first, stop):
            reach = range(max(0, p - window + 1), p + 1)
            here[p] = all(q >= first and good[q] for q in reach)
        outputs.append(here)
        good = here
    new_rows = outputs[split - 1][min(hit, stop - 1) :].all() if hit < total else True
    drafts = all(outputs[layers - 2][p] for p in range(max(0, total - window), total))
    return bool(new_rows and outputs[-1][total - 1 :].all() and drafts)
