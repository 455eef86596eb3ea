"""Options of requests side by side in one engine: sampling mixes, log-probabilities, stop strings, grammars, both acceptances."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
import torch

from kvist.checkpoint import build_model
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.engine import Engine
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.engine.sampler import SamplingParams
from kvist.engine.sampling.grammar_text import Grammar, GrammarUnsatisfiable
from kvist.engine.session import Session
from kvist.model.numerics import Numerics
from kvist.text.tokenizer import Tokenizer
from tests.engine_fakes import Scripted, follow
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Watched

NANO = Path(__file__).resolve().parents[2] / "models" / "nano"
PROMPT = [(11 * i * i + 5 * i) % 250 + 4 for i in range(17)]


def engine(**budgets: object) -> Watched:
    values: dict[str, object] = {"pages": 100, "page_tokens": 4, "max_running": 8, "replay": "exact", "step_cost": 16}
    return Watched(Engine(toy(0, True), EngineConfig(**{**values, **budgets})))  # type: ignore[arg-type]


MIX = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=4, logit_bias={5: 100.0}),
    SamplingParams(temperature=0.7, seed=1, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, logprobs=3),
    SamplingParams(temperature=1.2, seed=2, top_k=20, top_p=0.9, min_p=0.01),
]


@pytest.mark.parametrize("speculation", ["off", 4])
def test_mixed_options_equal_their_solo_results(speculation: object) -> None:
    """SRV-07: greedy, biased, penalised and filtered requests in one batch, arriving during each other's prefill."""
    solo = []
    for params in MIX:
        watched = engine(speculation="off")
        watched.add(Request(prompt=PROMPT, max_tokens=10, ignore_end=True, sampling=params))
        watched.finish()
        solo.append(watched.outcomes[0].tokens)
    assert solo[1] == [5] * 10
    together = engine(speculation=speculation)
    for params in MIX:
        together.add(Request(prompt=PROMPT, max_tokens=10, ignore_end=True, sampling=params))
        together.step()
    together.finish()
    assert [together.outcomes[number].tokens for number in range(len(MIX))] == solo


def test_log_probabilities_of_reply_and_prompt_are_the_models() -> None:
    watched = engine(speculation=3, step_cost=7)
    request = Request(prompt=PROMPT, max_tokens=6, ignore_end=True, sampling=SamplingParams(logprobs=2), prompt_logprobs=1)
    number, details = watched.engine.add(request), []
    watched.outcomes[number] = type("Outcome", (), {"logits": {}})()
    end = None
    while end is None:
        for event in watched.engine.step():
            if isinstance(event, TokenEvent):
                assert event.logprobs is not None
                details += event.logprobs
            else:
                end = event
    tokens = [entry.token for entry in details if entry is not None]
    full = torch.log_softmax(Session(toy(0, True), chunk=999).score(torch.tensor(PROMPT + tokens)).double(), 1)
    assert len(tokens) == 6
    for index, entry in enumerate(details):
        assert entry is not None
        assert entry.logprob == pytest.approx(float(full[16 + index, entry.token]), abs=1e-12)
        assert [place for place, _ in entry.top] == full[16 + index].topk(2).indices.tolist()
    scores = end.prompt_logprobs
    assert scores is not None
    assert scores[0] is None
    assert len(scores) == len(PROMPT)
    for position, score in enumerate(scores[1:], 1):
        assert score is not None
        assert score.token == PROMPT[position]
        assert score.logprob == pytest.approx(float(full[position - 1, PROMPT[position]]), abs=1e-12)


def test_scoring_ignores_the_cache_and_feeds_it() -> None:
    watched = engine()
    for expected, more in ((0, {}), (0, {"prompt_logprobs": 0}), (16, {})):
        number = watched.add(Request(prompt=PROMPT, max_tokens=1, ignore_end=True, **more))  # type: ignore[arg-type]
        watched.finish()
        end = watched.outcomes[number].end
        assert end is not None
        assert end.usage.cached_tokens == expected


def scripted_text(
    text: str, stops: tuple[str, ...] | None, *, width: int = 0, limit: int = 100
) -> tuple[list[str], FinishedEvent]:
    """Deltas and end of a request whose script spells `text` one character at a time."""
    tokenizer = Tokenizer(NANO)
    spelled = [token for character in text for token in tokenizer.encode(character)]
    script = lambda tokens: spelled[len(tokens) - 3] if len(tokens) - 3 < len(spelled) else 1  # noqa: E731
    config = EngineConfig(pages=60, page_tokens=4, speculation=width or "off")
    fake = Scripted(config, script, tokenizer=tokenizer)
    fake.engine.drafter = lambda jobs: [  # type: ignore[assignment]
        Proposal(follow(job.tokens.ids.tolist(), 5, script), [1.0] * 5) for job in jobs
    ]
    deltas, end = [], None
    for event in fake.engine.generate(Request(prompt=[40, 41, 42], max_tokens=limit, stops=stops)):
        if isinstance(event, TokenEvent):
            deltas.append(event.text)
        else:
            end = event
    assert end is not None
    return deltas, end


@pytest.mark.parametrize("width", [0, 1, 5])
@pytest.mark.parametrize(
    ("text", "stops", "shown", "reason"),
    [
        ("alpha beta gamma delta", ("beta gamma",), "alpha ", "stop"),
        ("a brown fox", ("own fox",), "a br", "stop"),
        ("hello\nUser: you", ("\nUser:",), "hello", "stop"),
        ("stop", ("stop",), "", "stop"),
        ("xyz", ("x",), "", "stop"),
        ("one two", ("two", "tw"), "one ", "stop"),
        ("almost beta gam", ("beta gamma",), "almost beta gam", "stop"),
        ("grün €", ("ün",), "gr", "stop"),
        ("nothing here", None, "nothing here", "stop"),
    ],
)
def test_stop_strings_whatever_the_drafts(width: int, text: str, stops: tuple[str, ...] | None, shown: str, reason: str) -> None:
    """SRV-01, SPC-09: the text shown ends before the leftmost match, held text comes out when none follows."""
    deltas, end = scripted_text(text, stops, width=width)
    assert "".join(deltas) == shown
    assert end.reason == reason
    if shown != text:
        assert end.stop in (stops or ())
    else:
        assert end.stop == 1, "the end token"


def test_a_cut_character_is_replaced_once() -> None:
    """SRV-03: max_tokens cuts a three-byte character; one replacement character comes out at the end."""
    deltas, end = scripted_text("a€", None, limit=3)
    assert end.reason == "length"
    assert "".join(deltas) == "a\ufffd"
    assert end.usage.completion_tokens == 3


@cache
def nano_engine(speculation: str | int, acceptance: str = "keyed") -> Engine:
    model = build_model(NANO, numerics=Numerics(impl="cpu"))
    config = EngineConfig(pages=60, page_tokens=32, max_running=4, speculation=speculation, acceptance=acceptance)
    return Engine(model, config, tokenizer=Tokenizer(NANO))


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(("speculation", "acceptance"), [("off", "keyed"), (5, "keyed"), (5, "rejection")])
def test_grammars_hold_beside_free_requests(speculation: str | int, acceptance: str) -> None:
    served = nano_engine(speculation, acceptance)
    tokenizer = served.tokenizer
    assert tokenizer is not None
    prompt = tokenizer.encode("A record in JSON: ")
    grammar = Grammar.json_schema(SCHEMA)
    numbers = [
        served.add(Request(prompt=prompt, max_tokens=120, grammar=grammar, sampling=SamplingParams(temperature=0.8, seed=seed)))
        for seed in range(2)
    ]
    free = served.add(Request(prompt=prompt, max_tokens=20, ignore_end=True, sampling=SamplingParams(temperature=0.8)))
    texts: dict[int, str] = dict.fromkeys([*numbers, free], "")
    ends: dict[int, FinishedEvent] = {}
    while len(ends) < 3:
        for event in served.step():
            if isinstance(event, TokenEvent):
                texts[event.id] += event.text
            else:
                ends[event.id] = event
    for number in numbers:
        assert ends[number].reason == "stop", (ends[number], texts[number])
        value = json.loads(texts[number])
        assert set(value) == {"name", "count"}
        assert 0 <= value["count"] <= 99
    assert ends[free].usage.completion_tokens == 20
    if speculation != "off":
        assert sum(end.usage.drafted_tokens for end in ends.values()) > 0


def test_a_grammar_behind_a_marker_with_and_without_drafts() -> None:
    """Free text that must not end (the bias of the end would end it at once), a word of it, the grammar; drafts or not."""
    replies: dict[str | int, list[list[int]]] = {}
    for speculation in ("off", 5):
        served = nano_engine(speculation)
        tokenizer = served.tokenizer
        assert tokenizer is not None
        (mark,) = tokenizer.encode(" the")
        replies[speculation] = []
        for seed in range(3):
            request = Request(
                prompt=tokenizer.encode("The old man looked at the sea, and then he went"),
                max_tokens=100,
                grammar=Grammar.regex("[a-z]{2,5}( [a-z]{2,5}){2}"),
                grammar_after=(mark,),
                sampling=SamplingParams(temperature=0.8, seed=seed, logit_bias={1: 40.0}),
            )
            *made, end = served.generate(request)
            assert isinstance(end, FinishedEvent)
            assert (end.reason, end.stop) == ("stop", 1), end
            tokens = [token for event in made if isinstance(event, TokenEvent) for token in event.tokens]
            at = tokens.index(mark)
            assert not any(tokenizer.is_control(token) for token in tokens[:at])
            assert re.fullmatch("[a-z]{2,5}( [a-z]{2,5}){2}", tokenizer.decode(tokens[at + 1 : -1]))
            replies[speculation].append(tokens)
        assert speculation == "off" or served.metrics.drafted_tokens > 0
    assert replies["off"] == replies[5]
    assert max(tokens.index(mark) for tokens in replies["off"]) > 0, "some text came before it"


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"grammar_after": (7,)}, "there is no grammar"),
        ({"grammar_after": (7,) * 65, "grammar": Grammar.regex("a")}, "65 ids, at most 64"),
        ({"grammar_after": (99_999,), "grammar": Grammar.regex("a")}, "token id 99999"),
    ],
)
def test_a_marker_that_cannot_come_is_refused(wish: dict[str, object], message: str) -> None:
    served = nano_engine("off")
    with pytest.raises(ValueError, match=message):
        served.add(Request(prompt=[40], **wish))  # type: ignore[arg-type]
    assert served.idle


def test_a_grammar_that_nothing_satisfies_is_refused_at_the_door() -> None:
    served = nano_engine("off")
    with pytest.raises(GrammarUnsatisfiable):
        served.add(Request(prompt=[40], grammar=Grammar.json_schema(False)))
    assert served.idle


def test_rejection_accepts_drafts_and_keeps_counts_right() -> None:
    """Random traces of the rejection rule on the toy: every reply has its length, counts are consistent, nothing leaks."""
    watched = engine(speculation=5, acceptance="rejection")
    for seed in range(6):
        sampling = SamplingParams(temperature=3.0, seed=seed)
        watched.add(Request(prompt=PROMPT[: 3 + seed], max_tokens=12, ignore_end=True, sampling=sampling))
    watched.finish()
    accepted = 0
    for outcome in watched.outcomes.values():
        assert outcome.end is not None
        assert outcome.end.reason == "length"
        assert len(outcome.tokens) == 12
        assert 0 <= outcome.end.usage.accepted_tokens <= outcome.end.usage.drafted_tokens
        accepted += outcome.end.usage.accepted_tokens
    assert accepted > 0
    assert watched.engine.pages.pool.owned == 0
