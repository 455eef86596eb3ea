"""`agent`: a conversation with tool calls, turn by turn: time to first token with and without prefix reuse, bounded and exact,
from memory and from disk after a restart at every turn; and bytes stored a token.

Every turn adds a reply and a tool's result of some tens of tokens to a context of 2,000. The checks: each turn after the first
finds nearly all of its context, and what the store holds is what the plan says.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cases import Benchmark, Case, CountedCase, Options, TimedCase, WrongResult
from benchmarks.engine_speed import text_prompts
from benchmarks.nano_model import nano, weights_label
from kvist.cache.store import PageStore
from kvist.cache.tiers import Tiers
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine, store_model
from kvist.engine.replay import Replay
from kvist.engine.request import FinishedEvent, Request
from kvist.page_layout import PageLayout

CONTEXT, TURNS, PAGE = 2000, 8, 128
FINGERPRINT = bytes(32)


def conversation(turns: int) -> list[list[int]]:
    """The prompt of every turn: the one before, a reply of 20 to 60 tokens, a tool's result of 30 to 90."""
    dice = random.Random(3)
    text = text_prompts(1, CONTEXT + turns * 150)[0]
    ends = [CONTEXT]
    for _ in range(turns - 1):
        ends.append(ends[-1] + dice.randrange(20, 60) + dice.randrange(30, 90))
    return [text[:end] for end in ends]


class Agent:
    """Runs conversations, each under a salt of its own, so that none finds another's pages."""

    def __init__(self, replay: Replay, *, reuse: bool = True, folder: Path | None = None) -> None:
        self.replay, self.reuse, self.folder = replay, reuse, folder
        self.salts = itertools.count()
        self.tiers = None if folder is None else Tiers(host_bytes=0, store=open_store(folder))
        self.engine = self.start()

    def start(self) -> Engine:
        """An engine with an empty device cache."""
        config = EngineConfig(
            pages=160, page_tokens=PAGE, max_running=2, step_cost=1 << 14, replay=self.replay, speculation="off"
        )
        return Engine(nano("cpu"), config, fingerprint=FINGERPRINT, tiers=self.tiers)

    def run(self, prompts: list[list[int]]) -> list[FinishedEvent]:
        """One conversation: the first token of every turn. With a folder, the process restarts between turns."""
        salt = next(self.salts).to_bytes(8, "little")
        ends = []
        for turn, ids in enumerate(prompts):
            own = salt if self.reuse else salt + turn.to_bytes(2, "little")
            events = list(self.engine.generate(Request(prompt=ids, max_tokens=1, ignore_end=True, salt=own)))
            assert isinstance(events[-1], FinishedEvent)
            ends.append(events[-1])
            if self.tiers is not None:
                self.tiers.flush()
                self.engine = self.start()
        return ends


def open_store(folder: Path) -> PageStore:
    """A page store for nano in an empty folder."""
    model = nano("cpu")
    return PageStore.open(
        folder,
        model=store_model(model.numerics, FINGERPRINT, PAGE),
        page_bytes=PageLayout.of(model.config, PAGE).page_bytes,
        page_tokens=PAGE,
        budget_bytes=256 << 20,
    )


def check(agent: Agent, prompts: list[list[int]], tier: str) -> None:
    """Turns after the first hit all of the context but a page. Raises `WrongResult`."""
    for ids, end in list(zip(prompts, agent.run(prompts), strict=True))[1:]:
        found = end.usage.cached.get(tier, 0)
        if found < len(ids) - 150 - PAGE:
            raise WrongResult(f"a turn of {len(ids)} tokens found {found} in {tier}: {end.usage}")


def _build(options: Options) -> Iterator[Case]:
    prompts = conversation(3 if options.quick else TURNS)
    with tempfile.TemporaryDirectory() as folder:
        agents = {
            "bounded, memory": Agent("bounded"),
            "exact, memory": Agent("exact"),
            "bounded, disk": Agent("bounded", folder=Path(folder)),
            "no reuse": Agent("bounded", reuse=False),
        }

        def check_all() -> None:
            for name, agent in agents.items():
                if agent.reuse:
                    check(agent, prompts, name.split(", ")[1].replace("memory", "device"))

        yield TimedCase(
            name=f"first tokens of {len(prompts)} turns, {CONTEXT} to {len(prompts[-1])} tokens, {weights_label()}",
            variants={name: (lambda agent=agent: agent.run(prompts)) for name, agent in agents.items()},  # type: ignore[misc]
            subject="bounded, memory",
            check=check_all,
        )
        tiers = agents["bounded, disk"].tiers
        assert tiers is not None and tiers.store is not None
        yield _stored(prompts, agents["bounded, disk"], tiers.store)
        tiers.close()


def _stored(prompts: list[list[int]], agent: Agent, store: PageStore) -> Case:
    """Bytes of the store a token of context that it can give back, against the plan's figure."""
    before = store.stat().pages
    ends = agent.run(prompts)
    pages = store.stat().pages - before
    planned = float(PageLayout.of(nano("cpu").config, PAGE).bytes_per_token)

    def check_bytes() -> None:
        if pages != len(prompts[-1]) // PAGE:
            raise WrongResult(f"{pages} pages stored for {len(prompts[-1])} tokens after {len(ends)} turns, once each is right")

    return CountedCase(
        name="bytes stored a token, all turns together",
        count=lambda: store.geometry.slot_bytes / PAGE,
        check=check_bytes,
        unit="bytes",
        better="lower",
        floor=planned,
    )


BENCHMARK = Benchmark(
    name="agent",
    summary="a conversation with tool calls: first tokens with and without reuse, bounded and exact, memory and disk",
    build=_build,
)
