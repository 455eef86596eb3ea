"""One reply: run on the engine, shown as it comes, counted; and what a terminal must not be sent.

Owns the account of a reply. Must not know commands or saved sessions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from kvist.server.generation import Generation, Piece, Work
from kvist.server.served import Served
from kvist.text import ContentDelta, Event, ReasoningDelta, Reply, collect

Show = Callable[[str, bool], None]
"""Takes text and whether it is reasoning."""


@dataclass(kw_only=True)
class Said:
    """A reply as far as it came: its events and tokens, and what it took. `reason` is None where it was stopped."""

    prompt_tokens: int
    events: list[Event] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: dict[str, int] = field(default_factory=dict)
    replayed: int = 0
    first_s: float | None = None
    seconds: float = 0.0
    reason: str | None = None

    @property
    def reply(self) -> Reply:
        """The reply, put together."""
        return collect(self.events)

    def account(self) -> str:
        """One line: where the prompt's tokens came from, how long until the first token, and the rate after it."""
        found = sum(self.cached.values())
        tiers = ", ".join(f"{count:,} {tier}" for tier, count in self.cached.items() if count)
        cached = f"{found:,} cached ({tiers})" if tiers else "0 cached"
        wait = "" if self.first_s is None else f"; first token after {self.first_s * 1000:,.0f} ms"
        left = self.seconds - (self.first_s or 0.0)
        rate = f", {(len(self.tokens) - 1) / left:,.1f} tokens/s" if len(self.tokens) > 1 and left > 0 else ""
        prompt = f"{self.prompt_tokens:,} prompt tokens: {cached}, {self.replayed:,} replayed"
        return f"{prompt}{wait}; {len(self.tokens):,} new{rate}"


async def talk(served: Served, work: Work, said: Said, show: Show) -> None:
    """Run a reply into `said`, showing it. Cancelling ends the engine's request; `said` then holds what came. Raises ApiError."""
    began = time.perf_counter()
    generation = Generation(served, [work])
    events = generation.run()
    trace = generation.traces[0]
    try:
        async for item in events:
            if isinstance(item, Piece):
                if said.first_s is None:
                    said.first_s = time.perf_counter() - began
                said.events += item.events
                for event in item.events:
                    if isinstance(event, ContentDelta | ReasoningDelta):
                        show(event.text, isinstance(event, ReasoningDelta))
            else:
                said.reason = item.reason
            await asyncio.sleep(0)  # a key that stops the reply is looked at between pieces
    finally:
        await events.aclose()  # type: ignore[attr-defined]
        said.tokens = list(trace.tokens)
        said.cached, said.replayed = dict(trace.progress.usage.cached), trace.progress.usage.replayed_tokens
        said.seconds = time.perf_counter() - began
        if said.first_s is None and trace.tokens:
            said.first_s = said.seconds


def harmless(text: str) -> str:
    """Text without control characters, which could move the cursor or retitle a terminal; line ends and tabs stay."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}" for character in text
    )
