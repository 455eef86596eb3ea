"""The engine on a model whose experts and tables stay in the files: same replies, and a bad sector costs one request.

Layer 0 sends half of the vocabulary to other experts than the rest, so that it is known whose bytes a request needs.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from kvist.checkpoint import EngramStore, ExpertStore, FileReads, ReadFailed, build_model, open_files, save_checkpoint
from kvist.checkpoint.formats import Entry
from kvist.config import replace
from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.gauges import gauges
from kvist.engine.request import FinishedEvent, Request, TokenEvent
from kvist.inventory import parameters
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.presets import preset

CONFIG = replace(preset("tiny"), n_routed_experts=4, n_activated_experts=1)
CLASSES = torch.arange(CONFIG.vocab_size) % CONFIG.engram_compressed_vocab_size
NUMERICS = Numerics(deterministic=True)
SPLIT = 130
"""Prompts of ids below go to expert 0 of the first layer, others to expert 3."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("model") / "toy"
    model = random_model(CONFIG, Numerics(), seed=1)
    state = dict(model.state_dict())
    for layer in CONFIG.engram_layer_ids:
        state[f"layers.{layer}.engram.embed.weight"] = model.layers[layer].engram.reader.values_RX
    # Attention and its post-mix add little to stream 0 in layer 0, so the router sees the token's own embedding.
    state["layers.0.attn.wo_b.weight"] = torch.zeros_like(state["layers.0.attn.wo_b.weight"])
    embed = state["embed.weight"]
    embed[:, 0] = 12.0
    embed[SPLIT:, 0] = -12.0
    gate = torch.zeros_like(state["layers.0.ffn.gate.weight"])
    gate[0, 0], gate[3, 0] = 4.0, -4.0
    state["layers.0.ffn.gate.weight"] = gate
    state["layers.0.ffn.gate.bias"] = torch.zeros(4)
    assert set(state) == {parameter.name for parameter in parameters(CONFIG)}
    save_checkpoint(CONFIG, state, None, out)
    return out


class Disk:
    """Reads, except where `lost` lies."""

    def __init__(self) -> None:
        self.lost: Entry | None = None

    def pread(self, descriptor: int, target: memoryview, offset: int) -> int:
        lost = self.lost
        if lost is not None and offset < lost.offset + lost.nbytes and lost.offset < offset + len(target):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.preadv(descriptor, [target], offset)


def engine(folder: Path, disk: Disk | None, speculation: str | int = "off") -> Engine:
    model = build_model(folder, numerics=NUMERICS, classes=CLASSES, access="read")
    if disk is not None:
        _, config, files = open_files(folder, "read")
        reads = FileReads(pread=disk.pread)
        budget = 5 * 3500
        model = build_model(folder, numerics=NUMERICS, classes=CLASSES, access="read", expert_budget_bytes=budget)
        model.attach_experts(ExpertStore(files, config, NUMERICS, budget, reads=reads).banks)
        model.attach_engram(CLASSES, EngramStore(files, config, torch.float32, cache_bytes=4000, reads=reads).tables)
    sizes = EngineConfig(pages=100, page_tokens=4, max_running=4, replay="exact", speculation=speculation, step_cost=32)
    return Engine(model, sizes)


PROMPTS = [[5 + (7 * i * k) % 120 for i in range(14 + k)] for k in (1, 3)] + [[135 + (5 * i) % 110 for i in range(15)]]


def replies(engine: Engine, prompts: list[list[int]] = PROMPTS, count: int = 1) -> list[tuple[list[int], FinishedEvent]]:
    """Tokens and end of requests that run together, one token each: a reply may go to any expert, a prompt does not."""
    numbers = [engine.add(Request(prompt=prompt, max_tokens=count, ignore_end=True)) for prompt in prompts]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ends: dict[int, FinishedEvent] = {}
    for _ in range(200):
        for event in engine.step():
            if isinstance(event, TokenEvent):
                tokens[event.id] += event.tokens
            elif isinstance(event, FinishedEvent):
                ends[event.id] = event
        if engine.idle:
            break
    return [(tokens[number], ends[number]) for number in numbers]


def test_the_engine_gives_the_replies_of_the_resident_model(folder) -> None:
    resident = [tokens for tokens, _ in replies(engine(folder, None))]
    served = engine(folder, Disk())
    assert [tokens for tokens, _ in replies(served)] == resident
    figures = gauges(served)
    assert figures["expert_misses"] > 0
    assert figures["expert_bytes_read"] > figures["expert_held_bytes"] > 0, "five experts fit"
    assert figures["engram_read"] + figures["engram_read_ahead"] > 0
    assert "expert_device_hits" not in figures


def test_a_bad_sector_under_an_expert_ends_the_requests_that_need_it(folder) -> None:
    disk = Disk()
    served = engine(folder, disk)
    good = replies(served)
    assert all(end.reason == "length" for _, end in good)
    disk.lost = open_files(folder)[2].entry("layers.0.ffn.experts.3.w1.weight")
    fresh = [[(token + 1) for token in prompt] for prompt in PROMPTS]
    expected = [tokens for tokens, _ in replies(engine(folder, None), fresh)]
    bad = replies(served, fresh)
    assert [end.reason for _, end in bad] == ["length", "length", "error"]
    assert [tokens for tokens, _ in bad[:2]] == expected[:2]
    error = bad[2][1].error
    assert isinstance(error, ReadFailed)
    assert "expert 3 of layer 0" in str(error)
    assert "Input/output" in str(error)
    # Nothing of the failed request was kept: made whole, the disk gives the right reply to the same prompt.
    disk.lost = None
    again = replies(served, fresh)
    assert [end.reason for _, end in again] == ["length"] * 3
    assert [tokens for tokens, _ in again] == expected


def test_a_bad_sector_in_the_decoder_half_or_under_a_table(folder) -> None:
    """Whatever is lost, each request ends in its right reply or in an error that names the bytes; the engine goes on."""
    expected = [tokens for tokens, _ in replies(engine(folder, None))]
    seen = set()
    for name in ("layers.6.ffn.experts.0.w2.weight", "layers.7.ffn.experts.1.w3.weight", "layers.3.engram.embed.weight"):
        disk = Disk()
        served = engine(folder, disk)
        disk.lost = open_files(folder)[2].entry(name)
        for (tokens, end), right in zip(replies(served), expected, strict=True):
            seen.add(end.reason)
            if end.reason == "length":
                assert tokens == right
            else:
                assert isinstance(end.error, ReadFailed), end.error
                assert name.split(".")[1] in str(end.error)
        disk.lost = None
        assert [tokens for tokens, _ in replies(served)] == expected
    assert seen == {"length", "error"}


def test_a_lost_draft_expert_costs_no_reply(folder) -> None:
    """Drafts are guesses: the replies without one of their experts are those of the resident model."""
    _, _, files = open_files(folder)
    expected = [tokens for tokens, _ in replies(engine(folder, None), count=12)]
    drafted, poisoned = 0, []
    for index in range(CONFIG.dspark_n_routed_experts):
        disk = Disk()
        disk.lost = files.entry(f"mtp.1.ffn.experts.{index}.w1.weight")
        served = engine(folder, disk, speculation=3)
        store = served.runner.experts
        assert store is not None
        own = store.poisoned
        store.poisoned = lambda key, error, own=own: poisoned.append(key) or own(key, error)  # type: ignore[method-assign]
        got = replies(served, count=12)
        assert [tokens for tokens, _ in got] == expected
        drafted += sum(end.usage.drafted_tokens for _, end in got)
    assert drafted > 0
    assert {key[0] for key in poisoned} == {CONFIG.n_layers + 1}
