"""`engine`: nano at 16 concurrent requests against the foundation's one stream, speculation against plain decode, and the gap
between tokens while long prompts stream in, against the bound that the scheduler states.

The checks: replies do not change with company (where no operator's order of sums does), and no gap is beyond the bound.
"""

from __future__ import annotations

import statistics
import time
from collections import abc
from collections.abc import Iterator

import torch

from benchmarks.cases import Benchmark, Case, CountedCase, Options, TimedCase, WrongResult
from benchmarks.nano_model import nano, prompt, weights_label
from benchmarks.rows import ROOT
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Drafter, Proposal
from kvist.engine.engine import Engine
from kvist.engine.request import Job, Request, TokenEvent
from kvist.engine.session import Sequence, Session
from kvist.text.tokenizer import Tokenizer

STREAMS, CONTEXT, TOKENS = 16, 512, 32
GAPS = 80


def text_prompts(count: int, length: int) -> list[list[int]]:
    """Different stretches of this repository's documentation, tokenised: text like the model's training text."""
    tokenizer = Tokenizer(ROOT / "models" / "nano")
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text)
    step = max(1, (len(ids) - length) // count)
    return [ids[i * step : i * step + length] for i in range(count)]


def engine(**budgets: object) -> Engine:
    """nano with native operators and room for everything here."""
    values: dict[str, object] = {"pages": 16 * 24, "max_running": STREAMS, "step_cost": 1024, "speculation": "off"}
    return Engine(nano("cpu"), EngineConfig(**{**values, **budgets}))  # type: ignore[arg-type]


def started(prompts: list[list[int]], tokens: int, **budgets: object) -> Engine:
    """An engine in which all prompts are read and decode."""
    made = engine(**budgets)
    for ids in prompts:
        made.add(Request(prompt=ids, max_tokens=tokens, ignore_end=True))
    while any(len(job) == job.prompt_length for job in made.jobs.values()):
        made.step()
    return made


def decode(made: Engine, tokens: int) -> int:
    """Run steps until this many more tokens have come; how many did."""
    done = 0
    while done < tokens:
        done += sum(len(event.tokens) for event in made.step() if isinstance(event, TokenEvent))
    return done


def one_by_one(sequences: list[tuple[Session, Sequence]], tokens: int) -> None:
    """The foundation's one stream: the same tokens, a request at a time."""
    for session, sequence in sequences:
        for step in range(tokens):
            sequence.append(100 + step)
            session.decode([sequence])


def check_company() -> None:
    """16 requests in one engine give the tokens that each gives alone, for at least the first tokens of nearly all."""
    prompts = text_prompts(STREAMS, 64)
    together = list_tokens(engine(), prompts, 8)
    alone = [list_tokens(engine(), [ids], 8)[0] for ids in prompts]
    same = sum(a == b for a, b in zip(alone, together, strict=True))
    if same < STREAMS // 2:
        raise WrongResult(f"{same} of {STREAMS} replies of 8 greedy tokens are the same alone and together")


def list_tokens(made: Engine, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    """Replies of requests that run together."""
    numbers = [made.add(Request(prompt=ids, max_tokens=tokens, ignore_end=True)) for ids in prompts]
    replies: dict[int, list[int]] = {number: [] for number in numbers}
    while not made.idle:
        for event in made.step():
            if isinstance(event, TokenEvent):
                replies[event.id] += event.tokens
    return [replies[number] for number in numbers]


def _throughput(options: Options) -> Iterator[Case]:
    prompts = [prompt(CONTEXT + 40 * i)[40 * i :].tolist() for i in range(STREAMS)]
    budget = (options.rounds + 2) * TOKENS * 2
    many = started(prompts, budget)
    ones = []
    for ids in prompts:
        session, sequence = Session(nano("cpu")), Sequence(0, torch.tensor(ids))
        session.prefill([sequence])
        ones.append((session, sequence))
    yield TimedCase(
        name=f"decode, {STREAMS} requests at {CONTEXT}, {weights_label()}",
        variants={
            "engine": lambda: decode(many, STREAMS * TOKENS),
            "one stream (foundation)": lambda: one_by_one(ones, TOKENS),
        },
        subject="engine",
        check=check_company,
        work=STREAMS * TOKENS,
        unit="tokens/s",
    )


class Spoiled:
    """Drafts that cost what they cost and are never right: the least that adaptive speculation can be worth."""

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.drafter, self.vocabulary = drafter, vocabulary

    def __call__(self, jobs: abc.Sequence[Job]) -> list[Proposal]:
        """See `Drafter`. What is proposed is the token that the blocks thought of plus a thousand."""
        proposals = self.drafter(jobs)
        return [p._replace(tokens=[(token + 1000) % self.vocabulary for token in p.tokens]) for p in proposals]


def _speculation(options: Options) -> Iterator[Case]:
    """Decode of prose in three ways, then with drafts that are never right; all have decoded the same tokens before they are
    timed (their contexts are equally long), and the adaptive ones have learned by that, as a server's has."""
    for count in (1, STREAMS):
        tokens, warm = (256, 1024) if count == 1 else (1024, 3072)
        budget = ((options.rounds + 2) * tokens * 2 + warm) // count + 200
        prompts = text_prompts(count, 128)
        for spoiled in (False, True):
            ways: tuple[str | int, ...] = ("adaptive", "off") if spoiled else ("adaptive", "off", 5)
            engines = {way: started(prompts, budget, speculation=way, pages=STREAMS * 80) for way in ways}
            if spoiled:
                engines["adaptive"].drafter = Spoiled(engines["adaptive"].drafter, nano("cpu").config.vocab_size)
            for made in engines.values():
                decode(made, warm)
            names = {"adaptive": "adaptive", "off": "plain", 5: "always 5"}
            yield TimedCase(
                name=f"speculation{', drafts never right' * spoiled}, {count} request{'s' * (count > 1)}, {weights_label()}",
                variants={names[way]: (lambda made=made, tokens=tokens: decode(made, tokens)) for way, made in engines.items()},  # type: ignore[misc]
                subject="adaptive",
                check=lambda: None,
                work=tokens,
                unit="tokens/s",
            )


def gaps_beside_prompts(made: Engine, decoding: int, steps: int) -> list[float]:
    """Seconds between tokens of so many decoding requests while 32 prompts of 1,500 tokens stream in."""
    for ids in text_prompts(decoding, 100):
        made.add(Request(prompt=ids, max_tokens=1200, ignore_end=True))
    while any(len(job) == job.prompt_length for job in made.jobs.values()):
        made.step()
    for i in range(32):
        made.add(Request(prompt=prompt(1500 + 7 * i)[7 * i :].tolist(), max_tokens=4, ignore_end=True))
    last: dict[int, float] = {}
    gaps = []
    for _ in range(steps):
        for event in made.step():
            if isinstance(event, TokenEvent) and event.id < decoding:
                now = time.perf_counter()
                if event.id in last:
                    gaps.append(now - last[event.id])
                last[event.id] = now
    return gaps


def _latency(options: Options) -> Iterator[Case]:
    for mixed in (64, 256):
        # The bound is a step of as many full rows as may run and the whole mixed budget: measured with one slot for prompts,
        # before and after, since the machine may be slower at one of the three times.
        full = [gaps_beside_prompts(engine(mixed_cost=mixed, pages=16 * 40), STREAMS - 1, GAPS // 2)]
        gaps = gaps_beside_prompts(engine(mixed_cost=mixed, pages=16 * 40), 8, GAPS)
        full.append(gaps_beside_prompts(engine(mixed_cost=mixed, pages=16 * 40), STREAMS - 1, GAPS // 2))
        bound = 1e3 * max(map(max, full))
        p50, p95 = (1e3 * value for value in (statistics.median(gaps), statistics.quantiles(gaps, n=20)[-1]))

        def check(p95: float = p95, bound: float = bound, count: int = len(gaps)) -> None:
            if count < GAPS * 7 or p95 > bound:
                raise WrongResult(f"{count} gaps, p95 {p95:.1f} ms; the bound, a full step, is {bound:.1f} ms")

        yield CountedCase(
            name=f"p95 gap, 8 decode beside 32 prompts, {mixed} rows a step",
            count=lambda p95=p95: p95,  # type: ignore[misc]
            check=check,
            unit="ms",
            better="lower",
            peers={"median": p50, "bound": bound},
        )
        yield from _first_tokens(mixed)


def _first_tokens(mixed: int) -> Iterator[Case]:
    """Time to the first token of short prompts that arrive, ten a second in engine steps, in a busy engine."""
    made = engine(mixed_cost=mixed, pages=16 * 40)
    for ids in text_prompts(6, 100):
        made.add(Request(prompt=ids, max_tokens=400, ignore_end=True))
    born, waits = {}, []
    for step in range(60):
        if step % 3 == 0 and step < 48:
            number = made.add(Request(prompt=prompt(80 + step)[step:].tolist(), max_tokens=6, ignore_end=True))
            born[number] = time.perf_counter()
        for event in made.step():
            if isinstance(event, TokenEvent) and event.id in born:
                waits.append(time.perf_counter() - born.pop(event.id))
    yield CountedCase(
        name=f"p95 time to first token, 80-token prompts in a busy engine, {mixed} rows a step",
        count=lambda: 1e3 * statistics.quantiles(waits, n=20)[-1],
        check=lambda: None,
        unit="ms",
        better="lower",
        peers={"median": 1e3 * statistics.median(waits)},
    )


def _build(options: Options) -> Iterator[Case]:
    yield from _throughput(options)
    yield from _speculation(options)
    yield from _latency(options)


BENCHMARK = Benchmark(
    name="engine",
    summary="nano: 16 requests against one stream, speculation against plain decode, gaps beside long prompts",
    build=_build,
)
