"""The engine on a card's own runner, small: chunked and ragged prompts, decode, drafts, a hit, against the dense reference.

Runs on a GPU with graphs, or anywhere under Triton's interpreter (TRITON_INTERPRET=1) without; elsewhere it skips and says so.
Bound of logits: as in `test_card_decode.py`, from how far the reference moves when its sums are ordered otherwise.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from kvist.cache.prefix import PrefixQuery
from kvist.cache.record import HEADER_BYTES
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.config import ModelConfig, replace
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine, store_model
from kvist.engine.generate import alone
from kvist.engine.request import Job, Request
from kvist.engine.sampler import SamplingParams
from kvist.engine.session import Progress, Sequence, Session
from kvist.kernels.device import GpuUnavailable
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.page_layout import PageLayout
from kvist.presets import preset
from tests.equivalence.engine_traces import Outcome, Watched

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1",
)
DEVICE = "cpu" if INTERPRETED else "cuda"
FINGERPRINT = bytes(32)
LONG = [(7 * number) % 90 + 4 for number in range(43)]
PROMPTS = ([5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17], [40, 41, 42])


def config(*, drafts: bool) -> ModelConfig:
    """`tiny` in widths that the operators take."""
    whole = replace(preset("tiny"), o_lora_rank=64)
    if drafts:
        return whole
    return replace(whole, n_mtp_layers=0, dspark_target_layer_ids=(), compress_ratios=whole.compress_ratios[: whole.n_layers])


def model(of: ModelConfig, impl: str) -> Transformer:
    # A reference that judges the card rounds probabilities where the card does.
    made = random_model(of, Numerics(dtype=torch.bfloat16, impl=impl, whole_peaks=impl != "gpu"))
    if impl == "gpu":
        assert made.token_classes_V is not None
        made, made.token_classes_V = made.to(DEVICE), made.token_classes_V.to(DEVICE)
    return made


def start(of: ModelConfig, speculation: str | int, tiers: Tiers | None = None) -> Watched:
    from kvist.engine.card.serving import CardExecutor

    budget = EngineConfig(
        pages=20, page_tokens=8, context=64, max_running=2, speculation=speculation, step_cost=9, replay="exact"
    )
    engine = Engine(model(of, "gpu"), budget, fingerprint=FINGERPRINT, tiers=tiers)
    assert isinstance(engine.runner, CardExecutor)
    return Watched(engine)


def ask(watched: Watched, prompts: tuple[list[int], ...], count: int) -> list[Outcome]:
    greedy = SamplingParams(temperature=0.0)
    numbers = [watched.add(Request(prompt=p, max_tokens=count, sampling=greedy, ignore_end=True)) for p in prompts]
    watched.finish(100)
    return [watched.outcomes[number] for number in numbers]


def near(reference: Transformer, outcome: Outcome) -> None:
    """Every row of logits against one full forward over prompt and reply."""
    assert outcome.end is not None
    assert outcome.end.reason == "length", outcome.end.error
    full = Session(reference).score(torch.tensor([*outcome.request.prompt, *outcome.tokens]))
    first = len(outcome.request.prompt)
    for position in range(first, first + len(outcome.tokens)):
        want_V = full[position - 1]
        off = float((outcome.logits[position].cpu() - want_V).norm() / want_V.norm())
        assert off < 0.5, f"logits for position {position} are off by {off:.2f}"


def test_ragged_prompts_in_chunks_and_a_hit() -> None:
    of = config(drafts=False)
    watched, reference = start(of, "off"), model(of, "wide")
    for outcome in ask(watched, PROMPTS, 3):
        near(reference, outcome)
    assert (watched.engine.runner.rows, watched.engine.runner.tail_rows > 0) == (16 + 4, True)
    (again,) = ask(watched, (PROMPTS[0],), 2)
    assert again.end is not None
    assert again.end.usage.cached_tokens == 12
    near(reference, again)


def held(watched: Watched, ids: list[int]) -> torch.Tensor:
    """The bytes of the whole pages that the card has of these tokens."""
    pages = watched.engine.pages
    job = Job(0, Request(prompt=ids, max_tokens=1), 0.0)
    pages.enter(job)
    assert job.chain is not None
    found = pages.index.match(PrefixQuery(job.chain, job.replay_length, tiers=False))
    pages.release(found.retained)
    return watched.engine.memory.bytes_PB[found.pages].cpu()


@pytest.mark.skipif(INTERPRETED, reason="ten prompts of 43 tokens take the interpreter many minutes; needs a GPU")
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_hit_from_host_memory_and_from_disk(tmp_path: Path, host_bytes: int) -> None:
    """Runs of pages leave the card and come back, bytes and tokens as they were; behind a damaged one the prompt is computed."""
    of = config(drafts=False)
    root = store_model(Numerics(dtype=torch.bfloat16, impl="gpu"), FINGERPRINT, 8)
    size = PageLayout.of(of, 8).page_bytes

    def fresh(host: int) -> tuple[Watched, Tiers]:
        tiers = Tiers(host_bytes=host, store=PageStore.open(tmp_path, model=root, page_bytes=size, page_tokens=8))
        return start(of, "off", tiers), tiers

    watched, tiers = fresh(host_bytes)
    (cold,) = ask(watched, (LONG,), 2)
    near(model(of, "wide"), cold)
    bytes_PB = held(watched, LONG)
    assert len(bytes_PB) == 5
    assert tiers.flush(10)

    def again(watched: Watched) -> dict[str, int]:
        while watched.engine.pages.index.evict_one() is not None:
            pass
        watched.engine.memory.bytes_PB.zero_()
        (warm,) = ask(watched, (LONG,), 2)
        assert warm.end is not None
        assert warm.tokens == cold.tokens
        assert torch.equal(
            held(watched, LONG)[: warm.end.usage.cached_tokens // 8], bytes_PB[: warm.end.usage.cached_tokens // 8]
        )
        near(model(of, "wide"), warm)
        return {tier: tokens for tier, tokens in warm.end.usage.cached.items() if tokens}

    assert again(watched) == {"host" if host_bytes else "disk": 40}
    tiers.close()
    watched, tiers = fresh(host_bytes)
    # What was read ahead may have come to host memory before it is asked for.
    assert sum(again(watched).values()) == 40
    assert tiers.counters.prefetched == 5
    assert tiers.store is not None
    slot = tiers.store.geometry.slot_bytes
    tiers.close()
    file = tmp_path / "pages.kv"
    raw = bytearray(file.read_bytes())
    raw[len(raw) - 3 * slot + HEADER_BYTES + 3] ^= 1
    file.write_bytes(raw)
    watched, tiers = fresh(host_bytes)
    assert sum(again(watched).values()) < 40
    assert tiers.store is not None
    assert tiers.store.counters.corrupt == {"checksum": 1}
    tiers.close()


def test_drafts_are_verified() -> None:
    of = config(drafts=True)
    watched, reference = start(of, 2), model(of, "wide")
    for outcome in ask(watched, PROMPTS, 4):
        near(reference, outcome)
    assert watched.engine.metrics.draft_failures == 0
    assert watched.engine.metrics.drafted_tokens > 0


def test_a_scored_prompt_has_all_its_logits() -> None:
    """Every row runs all layers; the rows wanted of a pass are not only prompts' last ones."""
    of = config(drafts=False)
    watched, reference = start(of, "off"), model(of, "wide")
    number = watched.add(Request(prompt=PROMPTS[0], max_tokens=1, ignore_end=True, prompt_logprobs=0))
    watched.finish(20)
    outcome = watched.outcomes[number]
    assert outcome.end is not None
    scores = outcome.end.prompt_logprobs
    assert scores is not None
    full = Session(reference).score(torch.tensor(PROMPTS[0]))
    assert scores[0] is None
    for position, score in enumerate(scores[1:], start=1):
        assert score is not None
        assert score.token == PROMPTS[0][position]
        got_V, want_V = outcome.logits[position].cpu(), full[position - 1]
        assert float((got_V - want_V).norm() / want_V.norm()) < 0.5
        assert abs(score.logprob - float(got_V.log_softmax(0)[score.token])) < 1e-5


@pytest.mark.skipif(INTERPRETED, reason="pages of the default size are too much for the interpreter; needs a GPU")
def test_a_request_alone_as_generate_runs_it() -> None:
    """The engine's logits, bit for bit, where the prompt is one pass; another chunk gives the same up to roundings."""
    from kvist.engine.card.alone import CardSession

    of, prompt = config(drafts=False), PROMPTS[1]
    made = model(of, "gpu")
    budget = EngineConfig(pages=8, page_tokens=8, context=64, max_running=1, speculation="off", step_cost=99, replay="exact")
    (want,) = ask(Watched(Engine(made, budget)), (prompt,), 2)
    for chunk, done in ((64, [3]), (2, [2, 3])):
        seen = list[Progress]()
        own = alone(Session(made, chunk=chunk, replay="exact"), len(prompt) + 1)
        assert isinstance(own, CardSession)
        sequence = Sequence(0, torch.tensor(prompt))
        logits = [own.prefill([sequence], seen.append)[0].clone()]
        for token in want.tokens[:1] if len(done) == 1 else ():
            sequence.append(token)
            logits.append(own.decode([sequence])[0].clone())
        assert [one.done for one in seen] == done
        assert sequence.computed == len(sequence)
        for position, got_V in enumerate(logits, start=len(prompt)):
            off = float((got_V - want.logits[position]).norm() / want.logits[position].norm())
            assert off == 0.0 if len(done) == 1 else off < 0.5


def test_a_latent_that_kernels_do_not_take() -> None:
    """Refused before a request, with what runs instead; not by the first request that meets it."""
    tiny = preset("tiny")
    assert tiny.o_lora_rank % 64
    with pytest.raises(GpuUnavailable, match=r"groups of a multiple of 64.*impl 'ref' runs it"):
        Engine(model(tiny, "gpu"), EngineConfig(pages=8, page_tokens=8, context=32, max_running=1, speculation="off"))
