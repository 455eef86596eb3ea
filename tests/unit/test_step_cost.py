"""What a step costs beside the model and the sampler, at 64 running and 1,000 waiting requests: the issue allows 1 ms.

Judged by the tenth fastest of a hundred steps' processor time, so that what else the machine does counts little;
`python -m benchmarks step-cost` keeps the median.
"""

from __future__ import annotations

import pytest

from benchmarks.step_cost import ALLOWED_MS, MIXES, STEPS, step_times


@pytest.mark.parametrize(("speculation", "tenants", "priorities"), MIXES)
def test_a_step_of_64_running_and_1000_waiting_costs_at_most_a_millisecond(
    speculation: str | int, tenants: int, priorities: int
) -> None:
    times_ms = step_times(speculation, tenants, priorities)
    assert times_ms[STEPS // 10] < ALLOWED_MS, f"{times_ms[STEPS // 10]:.2f} ms, the fastest {times_ms[0]:.2f}"
