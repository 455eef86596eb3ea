"""`replay`: what bounded replay changes in nano's answers, by replay length: KL divergence of the next token to exact replay,
greedy tokens in common, a code copied from several depths, and drift over 50 turns that build on bounded pages.

A curve, not a gate: the checks only say that exact replay is its own reference and that hits were hits.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.cases import Benchmark, Case, CountedCase, Options, WrongResult
from benchmarks.engine_speed import text_prompts
from benchmarks.nano_model import nano, weights_label
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.replay import Replay
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.engine.runner import StepResult
from kvist.engine.scheduler import Piece

PREFIX, SUFFIX, REPLY = 900, 24, 24
DEPTHS = (100, 400, 800)


class Asked:
    """What one request gave: the logits of its first token, its tokens, and its end."""

    def __init__(self) -> None:
        self.first_V: Tensor | None = None
        self.tokens: list[int] = []
        self.end: FinishedEvent | None = None


class Bench:
    """An engine with one replay mode that keeps the logits of first tokens."""

    def __init__(self, replay: Replay) -> None:
        config = EngineConfig(pages=400, page_tokens=32, max_running=4, step_cost=1 << 12, replay=replay, speculation="off")
        self.engine = Engine(nano("cpu"), config)
        self.last: StepResult | None = None
        run = self.engine.runner.run

        def keep(pieces: Sequence[Piece]) -> StepResult:
            self.last = run(pieces)
            return self.last

        self.engine.runner.run = keep  # type: ignore[method-assign]

    def ask(self, prompt: list[int], tokens: int, salt: bytes) -> Asked:
        """Run one request alone."""
        asked = Asked()
        for event in self.engine.generate(Request(prompt=prompt, max_tokens=tokens, ignore_end=True, salt=salt)):
            if isinstance(event, TokenEvent):
                if asked.first_V is None and self.last is not None:
                    asked.first_V = self.last.logits_WV[-1].clone()
                asked.tokens += event.tokens
            else:
                asked.end = event
        return asked


def divergence(exact: Asked, other: Asked) -> float:
    """KL(exact || other) of the first token's distribution, nats."""
    assert exact.first_V is not None and other.first_V is not None
    p, q = (torch.log_softmax(x.double(), 0) for x in (exact.first_V, other.first_V))
    return float((p.exp() * (p - q)).sum())


def common(exact: Asked, other: Asked) -> float:
    """Share of the reply before the first different token."""
    same = 0
    while same < len(exact.tokens) and exact.tokens[same] == other.tokens[same]:
        same += 1
    return same / len(exact.tokens)


def texts(benches: dict[str, Bench], count: int) -> dict[str, list[Asked]]:
    """Warm prefixes of 900 tokens of documentation, then a suffix: a reply from each mode for each text."""
    found: dict[str, list[Asked]] = {name: [] for name in benches}
    for number, ids in enumerate(text_prompts(count, PREFIX + SUFFIX)):
        salt = b"text" + number.to_bytes(2, "little")
        for name, bench in benches.items():
            bench.ask(ids[:PREFIX], 1, salt)
            asked = bench.ask(ids, REPLY, salt)
            if asked.end is None or asked.end.usage.cached_tokens < PREFIX - 32:
                raise WrongResult(f"{name}: text {number} hit {asked.end and asked.end.usage.cached_tokens} of {PREFIX} tokens")
            found[name].append(asked)
    return found


def codes(bench: Bench, depth: int, count: int) -> float:
    """Share of codes that are copied: eight tokens stand once at this depth, and their first four again at the end."""
    dice, right = random.Random(depth), 0
    for number, ids in enumerate(text_prompts(count, PREFIX)):
        code = [dice.randrange(1000, 7000) for _ in range(8)]
        prompt = ids[: PREFIX - depth] + code + ids[PREFIX - depth :]
        salt = b"code" + depth.to_bytes(2, "little") + number.to_bytes(2, "little")
        bench.ask(prompt, 1, salt)
        right += bench.ask(prompt + code[:4], 1, salt).tokens == code[4:5]
    return right / count


def drift(exact: Bench, bounded: Bench, turns: int) -> list[float]:
    """KL after each of so many turns of 40 tokens, every one on the pages of the one before."""
    ids = text_prompts(1, 300 + 40 * turns)[0]
    return [
        divergence(*(bench.ask(ids[: 300 + 40 * turn], 1, b"drift") for bench in (exact, bounded)))
        for turn in range(1, turns + 1)
    ]


def _case(name: str, value: float, unit: str, better: str, peers: dict[str, float] | None = None) -> CountedCase:
    return CountedCase(
        name=f"{name}, {weights_label()}",
        count=lambda: value,
        check=lambda: None,
        unit=unit,
        better="higher" if better == "higher" else "lower",
        peers=peers,
    )


def _build(options: Options) -> Iterator[Case]:
    window = nano("cpu").plan.window
    lengths: dict[str, Replay] = {"bounded": "bounded", **{str(k * window): k * window for k in (2, 4, 8)}, "exact": "exact"}
    benches = {name: Bench(replay) for name, replay in lengths.items()}
    count = 4 if options.quick else 16
    found = texts(benches, count)
    for name in lengths:
        kl = [divergence(a, b) for a, b in zip(found["exact"], found[name], strict=True)]
        share = statistics.mean(common(a, b) for a, b in zip(found["exact"], found[name], strict=True))
        if name == "exact" and (max(kl) > 0 or share < 1):
            raise WrongResult("exact replay differs from itself")
        if name != "exact":
            yield _case(f"KL to exact, replay {name}", statistics.mean(kl), "nats", "lower", {"worst": max(kl)})
            yield _case(f"tokens in common with exact, replay {name}", share, "share", "higher")
    for depth in DEPTHS:
        scores = {name: codes(benches[name], depth, count) for name in ("bounded", "exact")}
        yield _case(
            f"codes copied from {depth} tokens back, bounded", scores["bounded"], "share", "higher", {"exact": scores["exact"]}
        )
    turns = 8 if options.quick else 50
    kl = drift(benches["exact"], benches["bounded"], turns)
    half = turns // 2
    yield _case(
        f"KL to exact over turns {half + 1}..{turns}", statistics.mean(kl[half:]), "nats", "lower",
        {"first half": statistics.mean(kl[:half]), "worst": max(kl)},
    )  # fmt: skip


BENCHMARK = Benchmark(
    name="replay",
    summary="bounded replay's effect on nano's answers by replay length, depth and number of turns",
    build=_build,
)
