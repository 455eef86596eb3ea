"""The engine on one GPU through the same code: the equality chain to the bit, and the shipped model beside the CPU.

Skipped without a GPU. `toy` on the card runs the reference operators on tiles of one size, as `deterministic` asks.
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
from kvist.model.initialise import TableInMemory
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from tests.equivalence.conftest import toy
from tests.equivalence.test_engine_chain import run_trace

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

AGREEING = 1e-4
"""Logits of the CPU and of the card in float32; measured below 2e-5 of 20 where no rounding flips."""


@cache
def toy_on_card(seed: int) -> Transformer:
    """`toy` with its weights, tables and token classes on the GPU."""
    model = toy(2 * seed, True).to("cuda")
    tables = {
        layer: TableInMemory(model.layers[layer].engram.reader.values_RX.cuda())  # type: ignore[union-attr]
        for layer in model.config.engram_layer_ids
    }
    model.attach_engram(torch.arange(model.config.vocab_size, device="cuda") % model.config.engram_compressed_vocab_size, tables)
    return model


@pytest.mark.parametrize("seed", range(6))
def test_random_traces_on_the_card(seed: int) -> None:
    """Alone = batched = chunked = preempted = beside cancelled neighbours = speculated = prefix hit."""
    run_trace(seed, toy_on_card(seed % 2))


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


def test_nano_says_on_the_card_what_it_says_on_the_cpu() -> None:
    """float32: whole-prompt logits within the bound at nearly every position, and the same greedy text up to a close call."""
    line = torch.tensor(prompts()[-1])
    cpu = Session(nano_on("cpu", torch.float32), chunk=128).score(line)
    card = Session(nano_on("cuda", torch.float32), chunk=128).score(line).cpu()
    far = (cpu - card).abs().amax(1) > AGREEING
    print(f"{int(far.sum())} of {len(far)} rows differ by more than {AGREEING}: roundings that fell the other way")
    assert far.float().mean() < 0.2
    assert (cpu.argmax(1) == card.argmax(1)).float().mean() > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_and_speculation_on_the_card(dtype: torch.dtype) -> None:
    """Five ragged requests with adaptive speculation against each alone without it: greedy tokens agree but for close calls."""
    model = nano_on("cuda", dtype)
    together = replies(model, prompts(), "adaptive")
    alone = [replies(model, [p], "off")[0] for p in prompts()]
    same = sum(a == b for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True))
    total = sum(len(x) for x in alone)
    print(f"{same} of {total} greedy tokens agree ({dtype})")
    assert same / total > (0.9 if dtype is torch.float32 else 0.5)
