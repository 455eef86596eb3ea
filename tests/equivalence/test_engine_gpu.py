"""The engine on one GPU through the same code, in its default mode: the shipped model beside the CPU, batches, hits, drafts.

Skipped without a GPU. Bits that do not depend on company are promised on the CPU only: torch's reductions on a card are not
such, and `deterministic` there is refused.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from kvist.checkpoint import build_model, locate
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from kvist.engine.session import Session
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cache
def nano_on(device: str, dtype: torch.dtype) -> Transformer:
    impl = "cpu" if device == "cpu" else "ref"
    return build_model(locate("nano"), numerics=Numerics(dtype=dtype, impl=impl), device=device)


def replies(model: Transformer, prompts: list[list[int]], speculation: str | int) -> list[list[int]]:
    config = EngineConfig(memory_bytes=1 << 28, context=2048, max_running=8, speculation=speculation)
    engine = Engine(model, config)
    greedy = SamplingParams(temperature=0.0)
    numbers = [engine.add(Request(prompt=p, max_tokens=24, sampling=greedy, ignore_end=True)) for p in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    while not engine.idle:
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens[event.id] += event.tokens
            elif isinstance(event, FinishedEvent):
                assert event.reason == "length"
    return [tokens[number] for number in numbers]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(300, 7000, (n,), generator=generator).tolist() for n in (3, 64, 65, 130, 700)]


def test_nano_is_as_near_on_the_card_as_two_sets_of_operators_on_the_cpu() -> None:
    """float32: a rounding that falls the other way moves what follows it, by how much the CPU's own operators show.

    Random tokens, flat distributions: 6.0% of the logits' norm and 0.886 of the best tokens between the CPU's two sets;
    6.1% and 0.883 to an H200.
    """
    line = torch.tensor(prompts()[-1])
    native = Session(nano_on("cpu", torch.float32), chunk=128).score(line)
    ref = Session(build_model(locate("nano"), numerics=Numerics()), chunk=128).score(line)
    card = Session(nano_on("cuda", torch.float32), chunk=128).score(line).cpu()

    def apart(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
        return float((a - b).norm() / a.norm()), float((a.argmax(1) == b.argmax(1)).float().mean())

    (allowed, alike), (away, same) = apart(native, ref), apart(native, card)
    print(f"logits {away:.2e} apart ({allowed:.2e} on the CPU), {same:.4f} of {len(line)} best tokens agree ({alike:.4f})")
    assert away < 1.2 * allowed
    assert same > alike - 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_and_speculation_on_the_card(dtype: torch.dtype) -> None:
    """Five ragged requests with adaptive speculation against each alone without it: greedy tokens agree but for close calls."""
    model = nano_on("cuda", dtype)
    together = replies(model, prompts(), "adaptive")
    alone = [replies(model, [p], "off")[0] for p in prompts()]
    same = sum(a == b for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True))
    total = sum(len(x) for x in alone)
    print(f"{same} of {total} greedy tokens agree ({dtype})")
    assert same / total > 0.4
    assert sum(x[0] == y[0] for x, y in zip(together, alone, strict=True)) > 2


def test_a_prefix_hit_on_the_card() -> None:
    """The second of two equal prompts finds the first one's pages and says nearly what it said."""
    prompt = prompts()[-1]
    engine = Engine(nano_on("cuda", torch.float32), EngineConfig(memory_bytes=1 << 28, context=2048, replay="exact"))
    said: list[list[int]] = []
    for _ in range(2):
        engine.add(Request(prompt=prompt, max_tokens=8, sampling=SamplingParams(temperature=0.0), ignore_end=True))
        tokens: list[int] = []
        while not engine.idle:
            for event in engine.step():
                if isinstance(event, TokenEvent):
                    tokens += event.tokens
                else:
                    cached = event.usage.cached_tokens
        said.append(tokens)
    assert cached > 600
    assert said[0][0] == said[1][0]


def test_deterministic_is_refused_on_the_card() -> None:
    model = build_model(locate("nano"), numerics=Numerics(deterministic=True), device="cuda")
    with pytest.raises(ValueError, match="deterministic"):
        Engine(model, EngineConfig(memory_bytes=1 << 28, context=2048))
    with pytest.raises(ValueError, match="deterministic"):
        Session(model)
