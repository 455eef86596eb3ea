"""Drafts that run ahead of the target across marks: a tool block proposed one token early, an end of thinking left out."""

from __future__ import annotations

import pytest

from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.engine.speculation import FixedPolicy
from tests.engine_fakes import Scripted

THINK, END_THINK, TOOL, END_TOOL, END = 250, 251, 252, 253, 1
PROMPT = [40, 41, THINK]
REPLY = [*range(60, 80), END_THINK, TOOL, *range(90, 100), END_TOOL, END]


@pytest.mark.parametrize("width", [0, 1, 3, 5])
@pytest.mark.parametrize("fault", ["one token early", "mark left out", "mark doubled"])
def test_no_draft_is_committed_without_the_target(width: int, fault: str) -> None:
    """SPC-13: the stream is the target's own, token by token; every mark comes once and in its place."""

    def target(tokens):  # type: ignore[no-untyped-def]
        at = len(tokens) - len(PROMPT)
        return REPLY[at] if tokens[len(PROMPT) :] == REPLY[:at] and at < len(REPLY) else 5

    def propose(jobs):  # type: ignore[no-untyped-def]
        made = []
        for job in jobs:
            ahead = REPLY[job.new_tokens : job.new_tokens + 8]
            if fault == "one token early" and END_THINK in ahead:
                ahead.insert(max(0, ahead.index(END_THINK) - 1), TOOL)
            elif fault == "mark left out":
                ahead = [token for token in ahead if token != END_THINK]
            elif fault == "mark doubled" and TOOL in ahead:
                ahead.insert(ahead.index(TOOL), TOOL)
            made.append(Proposal((ahead + [5] * width)[:width], [1.0] * width))
        return made

    config = EngineConfig(pages=60, page_tokens=4, speculation=width or "off")
    fake = Scripted(config, target, drafter=propose, policy=FixedPolicy(width))
    events = list(fake.engine.generate(Request(prompt=PROMPT, max_tokens=60)))
    end = events[-1]
    assert isinstance(end, FinishedEvent)
    assert [token for event in events if isinstance(event, TokenEvent) for token in event.tokens] == REPLY
    assert (end.reason, end.stop) == ("stop", END)
    if width:
        assert end.usage.accepted_tokens > 10
        assert end.usage.accepted_tokens < end.usage.drafted_tokens
