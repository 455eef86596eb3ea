"""A step takes no more memory than was planned: tensors alive at once, counted while a real engine works at its limits."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvist.cache.identity import image_content
from kvist.config import ModelConfig, VisionConfig, replace
from kvist.engine.budget import EngineConfig, plan_memory
from kvist.engine.card.cost import GRAPH_ROOM, KEPT_BYTES, graph_bytes, pass_bytes
from kvist.engine.card.page_mover import PART_BYTES, PageMover
from kvist.engine.engine import Engine
from kvist.engine.errors import BudgetTooSmall
from kvist.engine.executor import device_needs
from kvist.engine.request import ImageInput, Request
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset


class Living(TorchDispatchMode):
    """Bytes of the storages that operators have made and nobody has let go of; `peak`: the most at once."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._note(result, made=True)
        return result

    def _note(self, values: object, *, made: bool) -> None:
        for value in tree_leaves(values):
            if not isinstance(value, Tensor) or (key := (storage := value.untyped_storage())._cdata) in self.held:
                continue
            self.held[key] = storage.nbytes() if made else 0  # what an operator is given was there before
            self.now += self.held[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.held.pop(key)


TINY = replace(preset("tiny"), max_seq_len=4096)
WIDE = replace(TINY, vocab_size=40_000)
VISION = VisionConfig(
    num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=176, patch_size=4, max_image_tokens=600,
    min_pixels=16,
)  # fmt: skip
SEEING = replace(TINY, vision=VISION, image_token_id=2)
SIDE = 23
"""Image tokens a side: a span of 554 positions."""


def picture(model: Transformer, seed: int) -> ImageInput:
    """Nearly the largest picture, encoded by the model's own tower when it is wanted."""
    side = SIDE * VISION.downsample_ratio
    patches = torch.randn(side * side, 3 * VISION.patch_size**2, generator=torch.Generator().manual_seed(seed))

    def embed() -> Tensor:
        with torch.inference_mode():
            return model.encode_image(patches, side, side)

    return ImageInput(start=3, tokens=SIDE * (SIDE + 1) + 2, content=image_content(patches.numpy()), embed=embed)


def most_alive(engine: Engine, requests: list[Request]) -> int:
    """Bytes alive at once while these run; weights have been packed before."""
    list(engine.generate(Request(prompt=[5] * 20, max_tokens=3, ignore_end=True)))
    for request in requests:
        engine.add(request)
    with Living() as living:
        while not engine.idle:
            engine.step()
    return living.peak


@pytest.mark.parametrize(
    ("config", "impl", "length", "budgets"),
    [
        pytest.param(TINY, "cpu", 900, {"step_cost": 16, "mixed_cost": 2048}, id="mixed steps larger than others"),
        pytest.param(WIDE, "cpu", 400, {"step_cost": 512}, id="a scored prompt and a wide vocabulary"),
        pytest.param(SEEING, "cpu", 700, {"step_cost": 64, "feature_bytes": 1}, id="pictures"),
        pytest.param(TINY, "ref", 1800, {"step_cost": 1024}, id="index scores"),
    ],
)
def test_a_step_stays_within_the_plan(config: ModelConfig, impl: str, length: int, budgets: dict[str, int]) -> None:
    model = random_model(config, Numerics(impl=impl), 0)
    engine = Engine(model, EngineConfig(pages=400, page_tokens=64, max_running=3, **budgets))  # type: ignore[arg-type]
    requests = [
        Request(
            prompt=[(7 * number + 3 * i) % 200 + 4 for i in range(length + number)], max_tokens=6, ignore_end=True,
            prompt_logprobs=0 if config is WIDE else None, images=(picture(model, number),) if config is SEEING else (),
        )
        for number in range(3)
    ]  # fmt: skip
    workspace = dict(engine.plan.workspace)
    if impl == "cpu":
        del workspace["scores"]  # native code's own, not tensors
    peak, planned = most_alive(engine, requests), sum(workspace.values())
    assert planned / 4 < peak <= planned, f"{peak:,} bytes were alive, planned {workspace}"


def test_what_a_device_takes_besides_is_planned_and_printed() -> None:
    layout = Engine(random_model(TINY, Numerics(), 0), EngineConfig(pages=4)).plan.layout
    budget = EngineConfig(memory_bytes=40 << 20, max_running=2)
    alone = plan_memory(TINY, budget, dtype_bytes=2)
    more = plan_memory(TINY, budget, dtype_bytes=2, more={"page staging": 5 << 20, "graphs": 3 << 20})
    assert alone.pages - more.pages in {(8 << 20) // layout.page_bytes, -(-(8 << 20) // layout.page_bytes)}
    assert budget.memory_bytes is not None
    assert more.total_bytes <= budget.memory_bytes
    for line in ("page staging      5,242,880 B", "graphs            3,145,728 B"):
        assert " ".join(line.split()) in " ".join(more.render().split())
    with pytest.raises(BudgetTooSmall):
        plan_memory(TINY, budget, dtype_bytes=2, more={"graphs": 64 << 20})


@pytest.mark.parametrize("tiers", [True, False])
def test_staging_of_pages_that_move_is_what_a_card_needs_beside_a_plain_model(tiers: bool) -> None:
    card = SimpleNamespace(embed=SimpleNamespace(weight=torch.empty(0, device="meta")), numerics=Numerics())
    assert device_needs(cast("Transformer", card), EngineConfig(pages=4), tiers=tiers) == {}
    card.embed.weight = SimpleNamespace(device=torch.device("cuda"))
    needs = device_needs(cast("Transformer", card), EngineConfig(pages=4), tiers=tiers)
    pool_PB = torch.empty(PART_BYTES // 4096 + 100, 4096, dtype=torch.uint8)
    assert needs == ({"page staging": PageMover(pool_PB).nbytes} if tiers else {})


def test_graphs_of_a_card_take_the_widest_and_the_logits_of_all() -> None:
    slim = preset("v41-flash-slim")
    few = graph_bytes(slim, requests=(1,), rows=1, passes=32, widest=768, ends=8)
    logit = 4 * slim.vocab_size
    assert few["step logits"] == logit
    assert few["graphs"] == pytest.approx(KEPT_BYTES + GRAPH_ROOM * pass_bytes(slim, 768) + 32 * 8 * logit)
    many = graph_bytes(slim, requests=(1, 2, 4, 64), rows=6, passes=32, widest=160, ends=8)
    assert many["step logits"] == 71 * 21 * logit
    drafts = 71 * slim.dspark_block_size * logit
    assert many["graphs"] == pytest.approx(KEPT_BYTES + GRAPH_ROOM * pass_bytes(slim, 64 * 6) + 32 * 8 * logit + drafts)
