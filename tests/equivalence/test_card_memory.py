"""What captured passes and steps take on a card, beside what was planned for them: released widths, few layers and experts.

Only on a GPU: the interpreter captures nothing.
"""

from __future__ import annotations

import gc
import importlib.util

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not torch.cuda.is_available(), reason="needs Triton and a GPU"
)
LAYERS, EXPERTS, SLOTS, ROWS = 6, 16, 16, 2
PASSES, STEPS = ((1, 130), (8, 240)), (1, 16)
"""Requests and tokens of passes, requests of steps."""


def reserved() -> int:
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@torch.inference_mode()
def test_graphs_take_what_was_planned_for_them() -> None:
    from benchmarks.slim_models import measured
    from kvist.engine.card import cost, passes
    from kvist.engine.card.device_model import DeviceModel
    from kvist.engine.card.random_weights import random_weights
    from kvist.engine.card.small_passes import SmallPasses, WatchedPrefill
    from kvist.engine.card.state import CardState
    from kvist.engine.replay import replay_span

    device, config = torch.device("cuda"), measured(EXPERTS, LAYERS)
    weights = random_weights(config, table_rows=10_000, device=device)
    each = 2048 // config.plan.page_tokens
    state = CardState(config, slots=SLOTS, pages=SLOTS * each, most_tokens=2048, device=device, rows=ROWS)
    for slot in range(SLOTS):
        state.open(slot, range(slot * each, (slot + 1) * each))
    model = DeviceModel(weights, state)
    small, before = SmallPasses(WatchedPrefill(model)), reserved()
    for requests, tokens in PASSES:
        span = replay_span(state.plan, tokens, 0, "bounded")
        prompts = [passes.Prompt.replayed(slot, np.arange(tokens) + 4, span) for slot in range(requests)]
        pieces = [passes.Piece(prompt=prompt, start=0, stop=tokens) for prompt in prompts]
        for _ in range(2):
            small.run(passes.plan_pass(pieces, small.bringer.sizes))
    for requests in STEPS:
        held = model.buffers(requests, ROWS)
        held.slots_M.fill_(state.spare)
        model.runner(held, 1, advance=False)()
    assert len(small._graphs) == len(PASSES)
    planned = cost.graph_bytes(config, requests=STEPS, rows=ROWS, passes=len(PASSES), widest=2048, ends=8)
    taken = reserved() - before
    print(f"{taken:,} bytes for graphs and their logits, planned {planned}")
    assert sum(planned.values()) / 3 < taken <= sum(planned.values())


def test_an_engine_plans_for_the_room_that_its_steps_need() -> None:
    """A pass of 512 rows has spare ones too, so it takes the room of 768."""
    from kvist.engine.budget import EngineConfig
    from kvist.engine.card.cost import graph_bytes
    from kvist.engine.card.serving import graph_needs
    from kvist.presets import preset

    config = preset("v41-flash-slim")
    engine = EngineConfig(pages=1, max_running=5, step_cost=512, speculation=1)
    found = graph_needs(config, engine)
    assert found == graph_bytes(config, requests=(1, 2, 4, 8), rows=2, passes=32, widest=768, ends=8)
