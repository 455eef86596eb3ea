"""One request goes wrong, the others must not notice: numbers that are not finite, bad input, reads that fail, texts cut off."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvist.cache.prefix import PrefixQuery
from kvist.checkpoint.reads import ReadFailed
from kvist.engine.budget import EngineConfig
from kvist.engine.drafter import Proposal
from kvist.engine.engine import Engine
from kvist.engine.errors import EmptyPrompt, NonFiniteLogits, RequestTooLong
from kvist.engine.request import FinishedEvent, ImageInput, Job, Request
from kvist.engine.runner import StepResult
from kvist.engine.sampler import SamplingParams
from tests.engine_fakes import Scripted, follow
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Outcome, Watched, judge

PROMPTS = [[(11 * i * k + 5 * i + k) % 250 + 4 for i in range(20 + k)] for k in (1, 4, 9)]


def engine(**budgets: object) -> Watched:
    """The toy, deterministic and exact, so that an unchanged output is the same bits."""
    values: dict[str, object] = {
        "pages": 100, "page_tokens": 4, "max_running": 4, "replay": "exact", "speculation": "off", "step_cost": 64,
    }  # fmt: skip
    return Watched(Engine(toy(0, True), EngineConfig(**{**values, **budgets})))  # type: ignore[arg-type]


def ask(prompt: list[int], count: int = 7, **more: object) -> Request:
    return Request(prompt=prompt, max_tokens=count, ignore_end=True, **more)  # type: ignore[arg-type]


def sound(watched: Watched, number: int) -> Outcome:
    """An outcome that went well, judged against the dense reference."""
    outcome = watched.outcomes[number]
    assert outcome.end is not None
    assert outcome.end.reason == "length", outcome.end
    judge(toy(0, True), outcome)
    return outcome


def cached_tokens(watched: Watched, prompt: list[int], salt: bytes = b"") -> int:
    """What the prefix index would give a prompt now."""
    job = Job(10_000, ask(prompt, salt=salt), 0.0)
    watched.engine.pages.enter(job)
    assert job.chain is not None
    found = watched.engine.pages.index.match(PrefixQuery(job.chain, 8))
    watched.engine.pages.release(found.retained)
    return found.tokens


def spoil(watched: Watched, number: int, position: int, change: Callable[[torch.Tensor], None]) -> None:
    """Change the logits behind one position of one request."""
    run = watched.engine.runner.run

    def broken(pieces):  # type: ignore[no-untyped-def]
        result = run(pieces)
        logits, at = result.logits_WV.clone(), 0
        for piece, count in zip(pieces, result.counts, strict=True):
            if piece.job.id == number and piece.wanted <= position < piece.stop:
                change(logits[at + position - piece.wanted])
            at += count
        return StepResult(logits, result.counts, result.finite)

    watched.engine.runner.run = broken  # type: ignore[method-assign]


@pytest.mark.parametrize("entries", ["all", "one", "infinite"])
@pytest.mark.parametrize("step", [0, 3])
def test_logits_that_are_not_finite_end_one_request(entries: str, step: int) -> None:
    """SRV-09: at the first or the fourth token of one of three; the others keep their bits, nothing of it is published."""

    def change(row: torch.Tensor) -> None:
        row[slice(None) if entries == "all" else 17] = float("inf") if entries == "infinite" else float("nan")

    watched = engine()
    numbers = [watched.add(ask(prompt)) for prompt in PROMPTS]
    spoil(watched, numbers[1], len(PROMPTS[1]) - 1 + step, change)
    watched.finish()
    for number in (numbers[0], numbers[2]):
        sound(watched, number)
    broken = watched.outcomes[numbers[1]]
    assert broken.end is not None
    assert broken.end.reason == "error"
    assert isinstance(broken.end.error, NonFiniteLogits)
    assert len(broken.tokens) == step
    assert cached_tokens(watched, PROMPTS[1]) == 0
    assert cached_tokens(watched, PROMPTS[0]) > 0
    again = watched.add(ask(PROMPTS[1]))
    watched.finish()
    assert sound(watched, again).end.usage.cached_tokens == 0  # type: ignore[union-attr]


def test_a_chunk_that_is_not_finite_ends_its_request_at_once() -> None:
    """Rows of an early chunk may never be selected again: no logit would tell, and the page would stay for others."""
    fake = Scripted(EngineConfig(pages=60, page_tokens=4, max_running=2, step_cost=8, mixed_cost=8, speculation="off"))
    scripted = fake.engine.runner.run

    def run(pieces):  # type: ignore[no-untyped-def]
        result = scripted(pieces)
        return result._replace(finite=[piece.start > 0 for piece in pieces])

    fake.engine.runner.run = run  # type: ignore[method-assign]
    fake.engine.add(Request(prompt=[5 + i for i in range(40)], max_tokens=2, ignore_end=True))
    events = fake.engine.step()
    assert [type(event.error) for event in events if isinstance(event, FinishedEvent)] == [NonFiniteLogits]
    assert fake.engine.idle
    assert fake.engine.pages.index.pages == 0


def test_streams_that_are_not_finite_publish_nothing() -> None:
    """A NaN inside the forward pass, in one request's rows of one chunk, before any logits of it exist."""
    watched = engine(step_cost=12)
    model = watched.engine.model
    numbers = [watched.add(ask(prompt)) for prompt in PROMPTS]
    own = model.begin

    def begin(rows):  # type: ignore[no-untyped-def]
        flow = own(rows)
        for segment in rows.segments:
            if segment.slot == watched.engine.jobs[numbers[1]].slot and segment.position <= 8 < segment.position + segment.length:
                flow.x_NSD[segment.start + 8 - segment.position] = float("nan")
        return flow

    try:
        model.begin = begin  # type: ignore[method-assign]
        while numbers[1] in watched.engine.jobs:
            watched.step()
    finally:
        del model.begin
    watched.finish()
    broken = watched.outcomes[numbers[1]]
    assert broken.end is not None
    assert isinstance(broken.end.error, NonFiniteLogits)
    assert cached_tokens(watched, PROMPTS[1]) == 0
    for number in (numbers[0], numbers[2]):
        sound(watched, number)


def test_a_client_that_vanishes_changes_nothing() -> None:
    for moment in (0, 1, 3, 6):
        watched = engine(step_cost=12)
        numbers = [watched.add(ask(prompt)) for prompt in PROMPTS]
        for _ in range(moment):
            watched.step()
        watched.engine.abort(numbers[1])
        watched.finish()
        for number in (numbers[0], numbers[2]):
            sound(watched, number)
        assert watched.engine.pages.pool.owned == 0


def test_generate_left_early_aborts() -> None:
    watched = engine()
    events = watched.engine.generate(ask(PROMPTS[0], 50))
    watched.outcomes[0] = Outcome(ask(PROMPTS[0], 50))
    next(events)
    events.close()
    assert not watched.engine.jobs
    assert watched.engine.pages.pool.owned == 0


def test_what_cannot_run_is_refused_at_the_door() -> None:
    watched = engine(pages=20)
    steady = watched.add(ask(PROMPTS[0]))
    watched.step()
    image = ImageInput(start=0, tokens=4, content=bytes(32), embed=lambda: None)
    for request, error, message in (
        (ask([]), EmptyPrompt, "no tokens"),
        (ask([5] * 70, 11), RequestTooLong, "70 prompt tokens and 11 new ones exceed the longest request of 80"),
        (ask([5, 256]), ValueError, "token id 256 is outside the vocabulary 0..255"),
        (ask([5, -1]), ValueError, "token id -1"),
        (ask([5], replay=7), ValueError, "below the window of 8"),
        (ask([5], stops=("x",)), ValueError, "tokenizer"),
        (ask([5], stop_ids=(300,)), ValueError, "stop_ids names token id 300"),
        (ask([5], sampling=SamplingParams(logit_bias={999: 1.0})), ValueError, "999"),
        (ask([5] * 9, images=(image,)), ValueError, "no vision"),
    ):
        with pytest.raises(error, match=message):
            watched.engine.add(request)
    for wrong, message in (
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"stops": ()}, "0 entries"),
        ({"stops": ("x",) * 10_000}, "10000 entries"),
        ({"stops": ("",)}, "0 characters"),
    ):
        with pytest.raises(ValueError, match=message):
            Request(prompt=[5], **wrong)  # type: ignore[arg-type]
    watched.finish()
    sound(watched, steady)


def test_an_image_that_cannot_be_encoded_ends_its_request_only() -> None:
    def fail() -> None:
        raise OSError("the picture is gone")

    watched = engine()
    steady = watched.add(ask(PROMPTS[0]))
    watched.step()
    watched.engine.model.vision, before = torch.nn.Identity(), watched.engine.model.vision  # type: ignore[assignment]
    try:
        image = ImageInput(start=1, tokens=4, content=bytes(32), embed=fail)
        broken = watched.add(ask([5] * 9, images=(image,)))
        watched.finish()
    finally:
        watched.engine.model.vision = before
    end = watched.outcomes[broken].end
    assert end is not None
    assert isinstance(end.error, OSError)
    sound(watched, steady)


def test_a_pass_that_fails_ends_its_requests_and_the_engine_goes_on() -> None:
    watched = engine()
    lost = [watched.add(ask(prompt)) for prompt in PROMPTS[:2]]
    watched.step()
    run = watched.engine.runner.run

    def fail(pieces):  # type: ignore[no-untyped-def]
        raise RuntimeError("the device is out of memory")

    watched.engine.runner.run = fail  # type: ignore[method-assign]
    watched.step()
    watched.engine.runner.run = run  # type: ignore[method-assign]
    for number in lost:
        end = watched.outcomes[number].end
        assert end is not None
        assert "out of memory" in str(end.error)
    assert cached_tokens(watched, PROMPTS[0]) == 0
    sound_again = watched.add(ask(PROMPTS[0]))
    watched.finish()
    sound(watched, sound_again)


def test_a_table_row_that_cannot_be_read_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row ids of one prompt fail; they are read before the pass, so nothing of the step is lost."""
    from kvist.engine import runner as module

    watched = engine()
    runner = watched.engine.runner

    class Failing:
        def __init__(self, reader: object, bad: set[int]) -> None:
            self.reader, self.bad = reader, bad

        def rows(self, ids: torch.Tensor) -> torch.Tensor:
            if self.bad & set(ids.flatten().tolist()):
                raise ReadFailed("row cannot be read")
            return self.reader.rows(ids)  # type: ignore[attr-defined,no-any-return]

    monkeypatch.setattr(module, "StoredTable", Failing)
    ids = [torch.tensor(prompt) for prompt in PROMPTS]
    tables = [set(toy(0, True).engram_ids(x, torch.ones(len(x), dtype=torch.bool))[0].flatten().tolist()) for x in ids]  # type: ignore[index]
    bad = {min(tables[1] - tables[0] - tables[2])}
    runner.readers = [Failing(reader, bad if place == 0 else set()) for place, reader in enumerate(runner.readers)]  # type: ignore[misc]
    numbers = [watched.add(ask(prompt, 1)) for prompt in PROMPTS]
    watched.finish()
    end = watched.outcomes[numbers[1]].end
    assert end is not None
    assert isinstance(end.error, ReadFailed)
    for number in (numbers[0], numbers[2]):
        sound(watched, number)


@pytest.mark.parametrize(
    ("at", "limit", "reason", "count"), [(2, 5, "stop", 3), (4, 5, "stop", 5), (5, 5, "length", 5), (0, 5, "stop", 1)]
)
def test_a_stop_inside_an_accepted_block(at: int, limit: int, reason: str, count: int) -> None:
    """SPC-09, SPC-11: all drafts are right and the stop token stands among them, at the limit or behind it."""
    script = lambda tokens: 200 if len(tokens) == 3 + at else 10 + len(tokens)  # noqa: E731
    fake = Scripted(EngineConfig(pages=50, page_tokens=4, speculation=5), script)
    fake.engine.drafter = lambda jobs: [  # type: ignore[assignment]
        Proposal(follow(job.tokens.ids.tolist(), 5, script), [1.0] * 5) for job in jobs
    ]
    events = list(fake.engine.generate(Request(prompt=[4, 5, 6], max_tokens=limit, stop_ids=(200,))))
    end = events[-1]
    tokens = [token for event in events[:-1] for token in event.tokens]  # type: ignore[union-attr]
    assert tokens == follow([4, 5, 6], count, script)
    assert end.reason == reason  # type: ignore[union-attr]
    assert end.usage.completion_tokens == count  # type: ignore[union-attr]
    assert end.usage.accepted_tokens < max(count, 2)  # type: ignore[union-attr]
