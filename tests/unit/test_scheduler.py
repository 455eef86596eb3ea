"""The scheduler's rules one by one on a scripted engine: latency bound, costs, fairness, priorities, deadlines, queue."""

from __future__ import annotations

import statistics

import pytest

from kvist.engine.budget import EngineConfig, plan_memory
from kvist.engine.errors import BudgetTooSmall, DeadlineExceeded, QueueFull
from kvist.engine.request import FinishedEvent, Request, State, TokenEvent
from kvist.engine.scheduler import Piece, StepPlan
from kvist.presets import preset
from tests.engine_fakes import Scripted, follow


def scripted(**budgets: object) -> Scripted:
    values: dict[str, object] = {
        "pages": 400, "page_tokens": 4, "max_running": 4, "step_cost": 32, "mixed_cost": 8, "speculation": "off",
    }  # fmt: skip
    return Scripted(EngineConfig(**{**values, **budgets}))  # type: ignore[arg-type]


def ask(prompt: list[int], count: int = 8, **more: object) -> Request:
    return Request(prompt=prompt, max_tokens=count, ignore_end=True, **more)  # type: ignore[arg-type]


def watch(fake: Scripted) -> list[StepPlan]:
    """Every plan that is made from now on."""
    plans: list[StepPlan] = []
    own = fake.engine.scheduler.plan

    def plan(now: float) -> StepPlan:
        plans.append(own(now))
        return plans[-1]

    fake.engine.scheduler.plan = plan  # type: ignore[method-assign]
    return plans


def drain(fake: Scripted) -> list[TokenEvent | FinishedEvent]:
    events = []
    while not fake.engine.idle:
        events += fake.engine.step()
    return events


def cost_of(fake: Scripted, pieces: list[Piece]) -> float:
    return sum(fake.engine.scheduler.cost(piece) for piece in pieces)


def test_decode_is_never_behind_more_than_the_mixed_budget() -> None:
    """32 long prompts stream in beside 8 decoding requests: every decoding request gets a row in every step, and the rest of
    the step costs at most `mixed_cost`."""
    fake = scripted(max_running=16, max_waiting=64, pages=2000, mixed_cost=12)
    plans = watch(fake)
    first = {fake.engine.add(ask([4 + i], 100)) for i in range(8)}
    for _ in range(4):
        fake.engine.step()
    for i in range(32):
        fake.engine.add(ask([(7 * i + j) % 250 + 4 for j in range(200)], 4))
    plans.clear()
    gaps: dict[int, int] = {}
    for _ in range(80):
        events = fake.engine.step()
        heard = {event.id for event in events if isinstance(event, TokenEvent)}
        assert first <= heard, "a decoding request waited"
        prefill = [piece for piece in plans[-1].pieces if piece.decode_from != piece.start or piece.publish_from != piece.start]
        assert cost_of(fake, prefill) <= 12
        gaps[len(prefill)] = gaps.get(len(prefill), 0) + 1
    assert gaps.get(0, 0) == 0, "prompts made progress in every step"
    drain(fake)


def test_rows_cost_what_they_run() -> None:
    """A prompt row before the tail costs 1, one of the tail 1 + decoder / encoder layers; budgets are filled, never exceeded."""
    fake = scripted(step_cost=20)
    plans = watch(fake)
    fake.engine.add(ask([5] * 40, 1))
    drain(fake)
    plan = preset("tiny").plan
    share = (8 - plan.decoder_start) / plan.decoder_start
    pieces = [plan.pieces[0] for plan in plans if plan.pieces]
    assert [(p.start, p.stop) for p in pieces] == [(0, 20), (20, 36), (36, 40)]
    assert [p.decoded for p in pieces] == [0, 4, 4]
    assert [fake.engine.scheduler.cost(p) for p in pieces] == [20, 16 + 4 * share, 4 * (1 + share)]


def test_tenants_share() -> None:
    """One tenant queues forty requests first; another's single one does not wait for them."""
    fake = scripted(max_running=2)
    order: list[int] = []
    many = [fake.engine.add(ask([5, i + 4], 4, tenant="many")) for i in range(40)]
    one = fake.engine.add(ask([6, 7], 4, tenant="one"))
    for event in drain(fake):
        if isinstance(event, FinishedEvent):
            order.append(event.id)
    assert order.index(one) <= 4
    assert sorted(order) == sorted([*many, one])


def test_a_tenant_that_slept_gets_no_credit() -> None:
    fake = scripted(max_running=1)
    for i in range(10):
        fake.engine.add(ask([5, i + 4], 4, tenant="busy"))
    for _ in range(20):
        fake.engine.step()
    for i in range(10):
        fake.engine.add(ask([9, i + 4], 4, tenant="new"))
    ends = [event.id for event in drain(fake) if isinstance(event, FinishedEvent)]
    new = [ends.index(number) for number in range(10, 20)]
    busy = [ends.index(number) for number in range(10) if number in ends]
    assert statistics.mean(new) > statistics.mean(busy) - 6, "the newcomer took over"


def test_priority_goes_first_and_preempts() -> None:
    fake = scripted(max_running=1)
    low = fake.engine.add(ask([5, 6, 7, 8], 60))
    for _ in range(10):
        fake.engine.step()
    high = fake.engine.add(ask([9, 9], 4, priority=5))
    events = drain(fake)
    ends = [event for event in events if isinstance(event, FinishedEvent)]
    assert [end.id for end in ends] == [high, low]
    assert ends[1].usage.preemptions == 1
    assert ends[1].usage.completion_tokens == 60


def test_preempted_jobs_resume_from_their_pages() -> None:
    fake = scripted(max_running=1)
    number = fake.engine.add(ask([(3 * i) % 250 + 4 for i in range(60)], 30))
    for _ in range(12):
        fake.engine.step()
    job = fake.engine.jobs[number]
    made, before = len(job), fake.rows
    fake.engine.scheduler.preempt(job)
    fake.engine.step()
    assert job.state in (State.PREFILL, State.DECODE)
    assert job.span is not None
    assert job.span.hit >= made - 2
    assert fake.rows - before <= 8 + 2, "it replays a window and the token that was not computed"
    tokens = [token for event in drain(fake) if isinstance(event, TokenEvent) for token in event.tokens]
    assert job.new_tokens == 30
    assert tokens == follow(job.tokens.ids[:60].tolist(), 30)[-len(tokens) :]


def test_memory_pressure_preempts_the_youngest_and_everything_ends() -> None:
    fake = scripted(pages=12, max_running=4)
    numbers = [fake.engine.add(ask([20 + i], 40)) for i in range(4)]
    ends = {event.id: event for event in drain(fake) if isinstance(event, FinishedEvent)}
    assert ends.keys() == set(numbers)
    assert ends[numbers[0]].usage.preemptions == 0
    assert sum(end.usage.preemptions for end in ends.values()) > 0
    assert all(end.usage.completion_tokens == 40 for end in ends.values())


def test_nobody_is_admitted_into_the_pages_that_those_who_decode_need_next() -> None:
    fake = scripted(pages=6)
    first = fake.engine.add(ask([5, 6, 7, 8], 12))
    for _ in range(2):
        fake.engine.step()
    second = fake.engine.add(ask([9 + i for i in range(16)], 2))
    ends = {event.id: event for event in drain(fake) if isinstance(event, FinishedEvent)}
    assert [ends[number].usage.preemptions for number in (first, second)] == [0, 0]


@pytest.mark.parametrize("step_cost", [16, 4096])
def test_equal_prompts_that_arrive_together_are_computed_once(step_cost: int) -> None:
    fake = scripted(step_cost=step_cost)
    prompt = [(3 * i) % 250 + 4 for i in range(120)]
    for _ in range(4):
        fake.engine.add(ask(prompt, 2))
    ends = [event for event in drain(fake) if isinstance(event, FinishedEvent)]
    assert [end.usage.cached_tokens for end in ends] == [0, 120, 120, 120]
    assert fake.rows <= 120 + 3 * 8 + 4


def test_who_waited_for_a_prompt_that_was_cancelled_computes_it_itself() -> None:
    fake = scripted(step_cost=16)
    prompt = [(3 * i) % 250 + 4 for i in range(120)]
    first, second = fake.engine.add(ask(prompt, 2)), fake.engine.add(ask(prompt, 2))
    fake.engine.step()
    fake.engine.abort(first)
    ends = {event.id: event for event in drain(fake) if isinstance(event, FinishedEvent)}
    assert ends[second].reason == "length"
    assert ends[second].usage.cached_tokens == 16


def test_deadlines_end_waiting_and_running_requests() -> None:
    now = [0.0]
    fake = Scripted(EngineConfig(pages=100, page_tokens=4, max_running=1, speculation="off"), clock=lambda: now[0])
    running = fake.engine.add(ask([5], 100, deadline_s=5.0))
    waiting = fake.engine.add(ask([6], 4, deadline_s=2.0))
    patient = fake.engine.add(ask([7], 4))
    ends = {}
    while not fake.engine.idle:
        now[0] += 0.5
        for event in fake.engine.step():
            if isinstance(event, FinishedEvent):
                ends[event.id] = event
    assert isinstance(ends[running].error, DeadlineExceeded)
    assert isinstance(ends[waiting].error, DeadlineExceeded)
    assert "5.0 s" in str(ends[running].error)
    assert ends[patient].reason == "length"
    assert fake.engine.pages.pool.owned == 0


def test_the_queue_is_bounded() -> None:
    fake = scripted(max_waiting=3, max_running=1)
    for i in range(3):
        fake.engine.add(ask([5 + i], 4))
    with pytest.raises(QueueFull, match="3 requests wait, the limit is 3"):
        fake.engine.add(ask([9], 4))
    drain(fake)
    fake.engine.add(ask([9], 4))


def test_who_is_cancelled_behind_a_head_that_waits_leaves_the_queue() -> None:
    """With all its tokens: clients may come and go for as long as the head waits."""
    fake = scripted(max_running=1, max_waiting=8)
    fake.engine.add(ask([1], 60))
    fake.engine.step()
    head = fake.engine.add(ask([2], 3))
    queue = fake.engine.scheduler.queue
    for number in range(30):
        gone = fake.engine.add(ask([3 + number] * 9, 3, tenant="ab"[number % 2]))
        fake.engine.step()
        fake.engine.abort(gone)
        assert sum(len(line) for level in queue.levels.values() for line in level.values()) == queue.count == 1
    ends = [event.id for event in drain(fake) if isinstance(event, FinishedEvent) and event.reason == "length"]
    assert ends == [0, head]


def test_cancelling_in_every_state() -> None:
    fake = scripted(max_running=1)
    waiting, running = fake.engine.add(ask([5] * 50, 9)), fake.engine.add(ask([6] * 50, 9))
    fake.engine.abort(waiting)
    events = fake.engine.step()
    fake.engine.abort(running)
    fake.engine.abort(running)
    fake.engine.abort(12345)
    ends = [event for event in [*events, *drain(fake)] if isinstance(event, FinishedEvent)]
    assert sorted(end.id for end in ends) == [waiting, running]
    assert all(end.reason == "cancelled" for end in ends)
    assert fake.engine.pages.pool.owned == 0


def test_the_plan_is_printed_and_too_small_budgets_are_refused() -> None:
    config = preset("v41-flash")
    engine = EngineConfig(memory_bytes=40 << 30, max_running=16)
    plan = plan_memory(config, engine, dtype_bytes=2)
    text = plan.render({"host": 64 << 30})
    assert plan.total_bytes <= 40 << 30
    assert "890 B a token" in text
    assert f"{plan.tokens:,}" in text
    with pytest.raises(BudgetTooSmall, match="needs 8192"):
        plan_memory(config, EngineConfig(memory_bytes=1 << 30, context=1 << 20), dtype_bytes=2)
    with pytest.raises(BudgetTooSmall, match="give at least"):
        plan_memory(preset("tiny"), EngineConfig(memory_bytes=1 << 20), dtype_bytes=4)


def test_the_plan_is_what_is_allocated() -> None:
    fake = scripted(pages=37, page_tokens=8, max_running=3, speculation=5)
    memory, plan = fake.engine.memory, fake.engine.plan
    assert memory.bytes_PB.nbytes == plan.page_bytes
    # Each ring keeps three counters a layer besides its entries.
    assert 0 <= memory.slot_bytes - plan.slot_bytes <= 3 * 8 * 11


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"speculation": 6}, "propose 1 to 5"),
        ({"speculation": 0}, "propose 1 to 5"),
        ({"speculation": "sometimes"}, "adaptive"),
        ({"draft": 7}, "propose 1 to 5"),
        ({"replay": 5}, "below the window of 8"),
        ({"replay": "none"}, "bounded"),
        ({"mixed_cost": 1}, "must allow one full row"),
        ({"acceptance": "hope"}, "keyed"),
        ({"page_tokens": 3}, "multiple of 2"),
    ],
)
def test_bad_settings_are_named(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scripted(**{"speculation": "adaptive", **wrong})
