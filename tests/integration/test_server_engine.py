"""The server on a whole engine whose model is a script: figures of replies that end inside a block of drafts, clients that go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import httpx
import pytest

from kvist.config import replace
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.request import Job
from kvist.engine.speculation import FixedPolicy
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset
from kvist.text.marks import END_THINK
from tests.engine_fakes import Scripted
from tests.server_fakes import END_ID, TOKENIZER, Live, scripted, serving

BLOCK = 6
LIMIT = 64
ASK = {"model": "nano", "messages": [{"role": "user", "content": "hello"}], "max_tokens": LIMIT, "temperature": 0}
END_OF_THOUGHT = TOKENIZER.special_id(END_THINK)


@cache
def sized() -> Transformer:
    """The toy with the shipped tokenizer's ids."""
    return random_model(replace(preset("tiny"), vocab_size=7168, max_seq_len=4096), Numerics(), 0)


class Chat:
    """A scripted engine behind the server. `reply`: what the model says of any prompt, token by token; then always the end."""

    def __init__(self, config: EngineConfig, *, width: int) -> None:
        self.reply: list[int] = []
        self.pause_s = 0.0
        self.fake = Scripted(config, self.next_token, model=sized(), drafter=self.propose, policy=FixedPolicy(width))
        self.width = width
        run = self.fake.engine.runner.run

        def slowly(pieces):  # type: ignore[no-untyped-def]
            time.sleep(self.pause_s)
            return run(pieces)

        self.fake.engine.runner.run = slowly  # type: ignore[method-assign]

    def next_token(self, tokens: Sequence[int]) -> int:
        made = len(tokens) - self.starts(tokens)
        return self.reply[made] if made < len(self.reply) else END_ID

    def starts(self, tokens: Sequence[int]) -> int:
        """Where the reply to these tokens begins: they are a prompt of some running job."""
        jobs = list(self.fake.engine.jobs.values())
        return next(
            job.prompt_length for job in jobs if job.tokens.ids[: job.prompt_length].tolist() == list(tokens[: job.prompt_length])
        )

    def propose(self, jobs: Sequence[Job]) -> list[Proposal]:
        """Everything right, also behind the end."""
        ahead = [(self.reply[job.new_tokens :] + [END_ID] * self.width)[: self.width] for job in jobs]
        return [Proposal(tokens, [1.0] * self.width) for tokens in ahead]


@contextlib.contextmanager
def chatting(width: int, **budgets: object) -> Iterator[tuple[Chat, Live]]:
    values: dict[str, object] = {"pages": 600, "page_tokens": 4, "max_running": 4, "speculation": width or "off"}
    chat = Chat(EngineConfig(**{**values, **budgets}), width=width)  # type: ignore[arg-type]
    engine = AsyncEngine(chat.fake.engine)
    served = dataclasses.replace(scripted(lambda request: ()), engine=engine, context=4096)
    with serving(served) as live:
        yield chat, live
    assert not engine.alive or not chat.fake.engine.jobs


def figures(live: Live, stream: bool) -> tuple[int, int, int, int, str]:
    """Prompt, completion, reasoning and total tokens, and why it ended."""
    client = live.openai()
    if stream:
        *chunks, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ASK)  # type: ignore[call-overload]
        usage, reason = last.usage, next(c.choices[0].finish_reason for c in reversed(chunks) if c.choices)
    else:
        answer = client.chat.completions.create(**ASK)  # type: ignore[call-overload]
        usage, reason = answer.usage, answer.choices[0].finish_reason
    reasoning = usage.completion_tokens_details.reasoning_tokens
    return usage.prompt_tokens, usage.completion_tokens, reasoning, usage.total_tokens, reason


OFFSETS = [*range(46, 46 + BLOCK), *range(LIMIT - 3, LIMIT + 2)]
MORE = [end for end in range(1, LIMIT + 8) if end not in OFFSETS]


@pytest.mark.parametrize("ends", [OFFSETS, pytest.param(MORE, marks=pytest.mark.long)], ids=["blocks", "everywhere"])
@pytest.mark.parametrize("thought", ["ends early", "ends in the last block", "never ends"])
def test_figures_count_what_was_said(thought: str, ends: list[int]) -> None:
    """SPC-11: the end at every offset of a block of six, and at the limit; nothing behind it is counted, streamed or not."""
    with chatting(BLOCK - 1) as (chat, live):
        for end in ends:
            close = {"ends early": 5, "ends in the last block": max(0, end - 3), "never ends": LIMIT + 50}[thought]
            # What stands behind the end is reasoning and content again: it would be counted as such.
            said = [300 + i for i in range(LIMIT + 40)]
            said[close:close] = [END_OF_THOUGHT]
            chat.reply = [*said[:end], END_ID, *said[end:]]
            completion = min(end + 1, LIMIT)
            reasoning = min(completion, close + 1 if close < end else completion)
            before = chat.fake.engine.metrics.accepted_tokens
            for stream in (False, True):
                prompt, made, thought_tokens, total, reason = figures(live, stream)
                assert (made, thought_tokens) == (completion, reasoning), (end, stream)
                assert 0 <= thought_tokens <= made
                assert prompt + made == total
                assert reason == ("stop" if end < LIMIT else "length"), (end, stream)
            assert end < BLOCK or chat.fake.engine.metrics.accepted_tokens > before, "no draft was accepted"


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.005)


def asking(live: Live, body: dict[str, object]) -> socket.socket:
    """A connection on which a request was sent and nothing is read."""
    url, data = httpx.URL(live.url), json.dumps(body).encode()
    client = socket.create_connection((url.host, url.port or 80))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.netloc.decode()}\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    return client


@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize(("rounds", "wait_s"), [(3, 0.05), pytest.param(20, 0.5, marks=pytest.mark.long)], ids=["few", "twenty"])
def test_clients_that_close_without_streaming_leave_no_slot(rounds: int, wait_s: float, width: int) -> None:
    """SRV-05: two slots, four long requests whose clients close in the middle (two run, two wait), then a normal one, again
    and again: it is answered as fast as on an empty machine, nothing runs on, free pages are what they were."""
    with chatting(width, max_running=2, pages=1200) as (chat, live):
        chat.pause_s = 0.002
        chat.reply = [END_OF_THOUGHT, *(300 + i % 1000 for i in range(3000))]
        pool, scheduler = chat.fake.engine.pages.pool, chat.fake.engine.scheduler

        def normal() -> float:
            began = time.monotonic()
            answer = live.openai().chat.completions.create(**{**ASK, "max_tokens": 6})  # type: ignore[call-overload]
            assert answer.usage.completion_tokens == 6
            return time.monotonic() - began

        normal()
        usual, spare = normal(), pool.free + pool.cached
        for number in range(rounds):
            clients = [asking(live, {**ASK, "max_tokens": 2000, "user": f"{number} {which}"}) for which in range(4)]
            wait_until(lambda: len(scheduler.running) == 2 and scheduler.waiting == 2)
            time.sleep(wait_s)
            for client in clients:
                client.close()
            assert normal() < 20 * usual + 0.5, "who left is still served"
            wait_until(lambda: not scheduler.running and not scheduler.waiting and live.service.admission.running == 0)
            assert not chat.fake.engine.jobs
            assert len(scheduler.slots) == 2
            assert pool.owned == 0
            assert pool.free + pool.cached == spare
        assert chat.fake.engine.metrics.ended["cancelled"] == 4 * rounds
