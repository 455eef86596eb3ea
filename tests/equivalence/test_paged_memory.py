"""Paged memory gives the bits of the dense packed memory: chunks, ragged batches, decode, replay, rollback, copies.

Pages of 4 to 16 tokens, so that rows, pages and groups end at different places. Cases CMP, IDX, PFX and SPC of the shared list.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvist.cache.maintenance import export
from kvist.cache.page_file import HEAD_BYTES
from kvist.cache.paged_memory import PagedMemory
from kvist.cache.record import HEADER_BYTES, Page
from kvist.cache.store import PageStore
from kvist.config import ConfigError, replace
from kvist.engine.budget import slot_bytes
from kvist.engine.session import Sequence, Session
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory, Slot
from kvist.model.numerics import Numerics
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Transformer
from kvist.page_layout import PageLayout
from kvist.plan.cache_bytes import CacheRow
from kvist.presets import preset
from kvist.quant import fake_main_fp4, fake_mxfp4

VERIFY = 6
SPARE = range(128, 136)
NUMERICS = {
    "ref": Numerics(),
    "deterministic": Numerics(deterministic=True),
    "cpu": Numerics(impl="cpu"),
    "bfloat16": Numerics(dtype=torch.bfloat16),
    "cpu bfloat16": Numerics(impl="cpu", dtype=torch.bfloat16),
}
BATCH_FREE = ("deterministic", "cpu")
"""Numerics in which a row's bits do not depend on its batch or chunk: by promise, and native float32 operators in fact."""
_models: dict[str, Transformer] = {}


def model_of(name: str) -> Transformer:
    """`tiny` with one set of random weights in one numerics."""
    if name not in _models:
        _models[name] = random_model(preset("tiny"), NUMERICS[name], 3)
    return _models[name]


def paged(model: Transformer, page_tokens: int = 8, slots: int = 8, pages: int = 128) -> PagedMemory:
    """A memory whose slots share `pages` pages, taken from the pool in a scattered order; `SPARE` more belong to none."""
    memory = PagedMemory(
        model.config, model.numerics, pages=pages + len(SPARE), slots=slots, verify_rows=VERIFY, page_tokens=page_tokens
    )
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(1)).tolist()
    each = pages // slots
    for slot in range(slots):
        memory.open(slot, free[slot * each : (slot + 1) * each], 0)
    return memory


def dense(model: Transformer) -> DenseMemory:
    return DenseMemory(model.config, model.numerics, packed=True)


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(4, 256, (count,), generator=torch.Generator().manual_seed(seed))


CHUNKS = [(4, 1), (8, 3), (16, 7), (6, 64), (8, 16)]
CASES = [("cpu", *chunk) for chunk in CHUNKS] + [("deterministic", *chunk) for chunk in CHUNKS[::2]]
CASES += [("ref", 8, 3), ("ref", 6, 64), ("bfloat16", 4, 7), ("bfloat16", 16, 64), ("cpu bfloat16", 8, 7)]


@pytest.mark.parametrize(("numerics", "page_tokens", "chunk"), CASES)
def test_prefill_and_decode_in_ragged_batches(numerics: str, page_tokens: int, chunk: int) -> None:
    model = model_of(numerics)
    lengths = (1, 5, 41, 12, 8)
    logits = []
    for memory in (dense(model), paged(model, page_tokens)):
        session = Session(model, memory=memory, replay="exact", chunk=chunk)
        sequences = [Sequence(slot, tokens(n, slot)) for slot, n in enumerate(lengths)]
        steps = [session.prefill(sequences)]
        for step in range(9):
            for sequence in sequences:
                sequence.append(7 + step)
            steps.append(session.decode(sequences))
        draft = session.draft(sequences, [9] * len(lengths))
        logits.append([*steps, draft.logits_RBV, draft.confidence_RB])
    for index, (one, other) in enumerate(zip(*logits, strict=True)):
        assert torch.equal(one, other), f"step {index}: {(one - other).abs().max()}"


@pytest.mark.parametrize("numerics", BATCH_FREE)
def test_any_cut_of_a_prompt_gives_the_bits_of_one_forward(numerics: str) -> None:
    """Prefill in chunks beside another request, then single tokens: logits of the full forward (CMP-05, SPC-05)."""
    model, ids = model_of(numerics), tokens(44, 17)
    full = Session(model, memory=dense(model), chunk=1000).score(ids)
    for chunk in (1, 3, 4, 5, 16):
        session = Session(model, memory=paged(model), replay="exact", chunk=chunk)
        sequences = [Sequence(0, ids[:37]), Sequence(1, tokens(21, 18))]
        rows = [session.prefill(sequences)[:1]]
        for token in ids[37:].tolist():
            for sequence in sequences:
                sequence.append(token)
            rows.append(session.decode(sequences)[:1])
        assert torch.equal(torch.cat(rows), full[36:]), chunk


Piece = tuple[int, Tensor, int, int, int]
"""Slot, all token ids of the request, first and last position plus one to run, position to publish from."""


def run(model: Transformer, memory: PagedMemory | DenseMemory, pieces: list[Piece], features: Tensor | None = None) -> Tensor:
    """Logits of all rows of one ragged pass through all layers; `features` [1,D] replaces the embedding of row 0."""
    segments, at, engram = [], 0, []
    for slot, ids, start, stop, publish in pieces:
        segments.append(Segment(slot=slot, start=at, length=stop - start, position=start, publish_from=publish))
        origin = max(0, start - model.config.engram_max_ngram_size + 1)
        rows = model.engram_ids(ids[origin:stop], torch.ones(stop - origin, dtype=torch.bool), start - origin)
        assert rows is not None
        engram.append(rows)
        at += stop - start
    ids_N = torch.cat([ids[start:stop] for _, ids, start, stop, _ in pieces])
    batch = Rows(
        token_ids_N=ids_N,
        positions_N=torch.cat([torch.arange(start, stop) for _, _, start, stop, _ in pieces]),
        text_N=torch.ones(len(ids_N), dtype=torch.bool),
        segments=tuple(segments),
        engram_LNX=torch.cat(engram, 1),
        features_FD=features,
        feature_rows_F=None if features is None else torch.tensor([0]),
    )
    with torch.inference_mode():
        flow = model(batch, memory)
        assert model.mtp is not None
        model.mtp.observe(flow.targets, batch, memory)
        return model.logits(flow)


def whole(slot: int, ids: Tensor, start: int, stop: int) -> Piece:
    return slot, ids, start, stop, start


def page_bytes(memory: PagedMemory, slot: int, tokens: int) -> Tensor:
    """The bytes of a slot's rows that stand for its first `tokens` tokens, page by page."""
    parts = []
    for plane in memory.layout.planes:
        pages = memory.bytes_PB[memory.rows.table[slot, : memory.rows.held[slot]].long()]
        rows = pages[:, plane.offset : plane.offset + plane.nbytes].unflatten(1, (plane.rows, plane.row_bytes)).flatten(0, 1)
        parts.append(rows[: tokens // plane.ratio].flatten())
    return torch.cat(parts)


HITS = [(40, 7), (24, 30), (8, 1), (12, 2), (2, 5)]
REPLAYS = [("cpu", *hit) for hit in HITS] + [("deterministic", *hit) for hit in HITS[1:4]]
REPLAYS += [("ref", 40, 7), ("bfloat16", 12, 2), ("cpu bfloat16", 24, 30)]


@pytest.mark.parametrize(("numerics", "hit", "suffix"), REPLAYS)
def test_replay_beside_other_requests_is_that_of_the_dense_memory(numerics: str, hit: int, suffix: int) -> None:
    """A hit whose windows are rebuilt (PFX-03, PFX-05): stored rows untouched, windows from the replay's start only."""
    model = model_of(numerics)
    shared, other = tokens(hit + suffix + 3, 5), tokens(60, 6)
    start, window = max(0, hit - model.plan.window), model.plan.window
    pages_memory, reference = paged(model), dense(model)
    for memory in (pages_memory, reference):
        run(model, memory, [whole(0, shared, 0, hit), whole(1, other, 0, 33)])
    warm = Slot()
    warm.main, warm.keys = reference.slots[0].fork().main, reference.slots[0].fork().keys
    reference.slots[2] = warm
    prefix = pages_memory.rows.table[0, : -(-hit // 8)].tolist()
    if hit % 8:
        pages_memory.copy_page(prefix[-1], SPARE[0])
        prefix[-1] = SPARE[0]
    pages_memory.open(2, [*prefix, *SPARE[1:]], hit)
    before = page_bytes(pages_memory, 2, hit).clone()
    logits = []
    for memory in (pages_memory, reference):
        logits.append(
            run(model, memory, [whole(1, other, 33, 34), (2, shared, start, hit + suffix, hit), whole(0, other, hit, hit + 1)])
        )
        logits.append(run(model, memory, [(2, shared, hit + suffix, hit + suffix + 3, 0), whole(1, other, 34, 35)]))
    assert torch.equal(logits[0], logits[2]) and torch.equal(logits[1], logits[3])
    assert torch.equal(page_bytes(pages_memory, 2, hit), before)
    for layer in range(len(model.plan.layers)):
        held = pages_memory.window(layer, 2, hit + suffix + 3)
        assert torch.equal(held, reference.slots[2].windows[layer][-len(held) :])
        assert len(held) == min(window, hit + suffix + 3 - start)


@pytest.mark.parametrize("numerics", BATCH_FREE)
def test_replay_in_pieces_gives_the_bits_of_replay_at_once(numerics: str) -> None:
    """A replay that a chunk limit cuts, also inside a group: only `publish_from` decides what is written."""
    model, ids = model_of(numerics), tokens(48, 9)
    results = []
    for cuts in ([24, 48], [24, 27, 31, 32, 35, 48], [24, 25, 26, 33, 48]):
        memory = paged(model)
        run(model, memory, [whole(0, ids, 0, 32)])
        memory.open(1, memory.rows.table[0, : memory.rows.held[0]].tolist(), 32)
        parts = [run(model, memory, [(1, ids, a, b, 32)]) for a, b in pairwise(cuts)]
        results.append((torch.cat(parts), page_bytes(memory, 1, 48)))
    for logits, stored in results[1:]:
        assert torch.equal(logits, results[0][0]) and torch.equal(stored, results[0][1])


def with_ratio(ratio: int) -> Transformer:
    """`tiny`, or the same with its ratio-2 sources at another ratio."""
    name = f"ratio {ratio}"
    if name not in _models:
        config = replace(preset("tiny"), compress_ratios=(0, 0, ratio, ratio, 1, 1, 1, 1, 0, 0, 0))
        _models[name] = random_model(config, NUMERICS["cpu"], 3)
    return _models[name]


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("width", [1, 2, 5, 6])
def test_rejected_drafts_leave_no_trace(ratio: int, width: int) -> None:
    """SPC-01: every accept length at 16 start positions; a slot each. What follows is what follows without the drafts."""
    model, ids, starts = with_ratio(ratio), tokens(64, 4), range(20, 36)
    drafted, clean = (paged(model, page_tokens=8, slots=width + 1) for _ in range(2))
    layers = len(model.plan.layers) + len(model.plan.drafts)
    for start in starts:
        wrong = [torch.cat([ids[: start + taken], 260 - ids[start + taken :]]) for taken in range(width + 1)]
        for memory in (drafted, clean):
            for slot in range(width + 1):
                pages = memory.rows.table[slot, : memory.rows.held[slot]].tolist()
                memory.open(slot, pages, 0)
            run(model, memory, [whole(slot, ids, 0, start) for slot in range(width + 1)])
        run(model, drafted, [whole(taken, wrong[taken], start, start + width) for taken in range(width + 1)])
        # The clean memory runs a pass of the same shape, so that a row's bits may be compared, without rejected rows' tokens.
        run(model, clean, [whole(taken, ids, start, start + width) for taken in range(width + 1)])
        logits = [run(model, m, [whole(n, ids, start + n, start + n + 5) for n in range(width + 1)]) for m in (drafted, clean)]
        assert torch.equal(logits[0], logits[1]), start
        for taken in range(width + 1):
            stop = start + taken + 5
            assert torch.equal(page_bytes(drafted, taken, stop), page_bytes(clean, taken, stop)), (start, taken)
            for layer in range(layers):
                assert torch.equal(drafted.window(layer, taken, stop), clean.window(layer, taken, stop)), (start, taken, layer)


@pytest.mark.parametrize(("numerics", "width"), [("deterministic", 1), ("cpu", 1), ("deterministic", 6), ("cpu", 6)])
def test_rejected_drafts_leave_no_trace_to_the_bit(numerics: str, width: int) -> None:
    """The same against the plain forward, drafts in a batch with another request (SPC-03)."""
    model, ids, other = model_of(numerics), tokens(48, 4), tokens(48, 8)
    clean = paged(model)
    full = run(model, clean, [whole(0, ids, 0, 44), whole(1, other, 0, 44)])
    for start in (19, 20, 23):
        for taken in range(0, width + 1, 2 if width > 1 else 1):
            memory = paged(model)
            run(model, memory, [whole(0, ids, 0, start), whole(1, other, 0, 30)])
            drafted = torch.cat([ids[: start + taken], 260 - ids[start + taken :]])
            logits = run(model, memory, [whole(1, other, 30, 31), whole(0, drafted, start, start + width)])
            assert torch.equal(logits[1 : 1 + taken], full[start : start + taken])
            logits = run(model, memory, [whole(0, ids, start + taken, 44), whole(1, other, 31, 33)])
            assert torch.equal(logits, torch.cat([full[start + taken : 44], full[75:77]])), (start, taken)
            assert torch.equal(page_bytes(memory, 0, 44), page_bytes(clean, 0, 44))


def test_a_slot_used_again_shows_nothing_of_its_last_request() -> None:
    """PFX-01, SPC-03: the next request of a slot, in pages full of NaN, gives the bits of a fresh memory."""
    model, ids = model_of("cpu"), tokens(50, 11)
    fresh, used = paged(model), paged(model)
    broken = torch.full((1, model.config.dim), torch.nan)
    run(model, used, [whole(3, tokens(60, 12), 0, 60)], broken)
    pages = used.rows.table[3, : used.rows.held[3]].tolist()
    used.close(3)
    used.open(3, pages, 0)
    for start, stop in ((0, 13), (13, 14), (14, 50)):
        assert torch.equal(run(model, used, [whole(3, ids, start, stop)]), run(model, fresh, [whole(3, ids, start, stop)]))


@pytest.mark.parametrize("numerics", ["ref", "cpu", "deterministic"])
def test_broken_rows_of_one_request_leave_the_others_unchanged(numerics: str) -> None:
    model = model_of(numerics)
    results = []
    for value in (0.5, torch.nan):
        memory = paged(model)
        run(model, memory, [whole(0, tokens(20, 1), 0, 20), whole(1, tokens(20, 2), 0, 20), whole(2, tokens(9, 3), 0, 9)])
        features = torch.full((1, model.config.dim), value)
        parts = [run(model, memory, [whole(0, tokens(25, 1), 20, 25), whole(1, tokens(21, 2), 20, 21)], features)[5:]]
        parts.append(run(model, memory, [whole(1, tokens(30, 2), 21, 30), whole(2, tokens(30, 3), 9, 30)]))
        results.append(torch.cat(parts))
        broken = run(model, memory, [whole(0, tokens(26, 1), 25, 26)])
        assert bool(broken.isnan().any()) == (value != 0.5)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("numerics", BATCH_FREE)
def test_a_copied_partial_page_goes_its_own_way(numerics: str) -> None:
    """Two requests that share 20 tokens, pages of 8: the third page is copied, the first two stay shared."""
    model = model_of(numerics)
    one, two = tokens(40, 21), torch.cat([tokens(40, 21)[:20], tokens(20, 22)])
    memory, alone = paged(model), paged(model)
    run(model, memory, [whole(0, one, 0, 21)])
    shared = memory.rows.table[0, :3].tolist()
    memory.copy_page(shared[2], SPARE[0])
    memory.open(7, [*shared[:2], *SPARE], 20)
    run(model, memory, [(7, two, 0, 40, 20), whole(0, one, 21, 40)])
    run(model, alone, [whole(0, one, 0, 40), whole(1, two, 0, 40)])
    assert torch.equal(page_bytes(memory, 0, 40), page_bytes(alone, 0, 40))
    assert torch.equal(page_bytes(memory, 7, 40), page_bytes(alone, 1, 40))


@pytest.mark.parametrize("source", [2, 4])
def test_both_readers_and_both_writers_agree_on_the_bytes(source: int) -> None:
    """IDX-01: rows written by native code read back through the generic reader, and the other way round."""
    native, generic = paged(model_of("cpu")), paged(model_of("deterministic"))
    assert native.native and not generic.native
    random = torch.Generator().manual_seed(source)
    ratio = native.plan.layers[source].ratio
    count, config = 40 // ratio, native.config
    ids = torch.zeros(40, dtype=torch.int64)
    segments = (Segment(slot=0, start=0, length=40, position=0),)
    rows = Rows(token_ids_N=ids, positions_N=torch.arange(40), text_N=ids == 0, segments=segments)
    values = [torch.randn(count, width, generator=random) for width in (config.head_dim, config.index_head_dim)]
    for memory in (native, generic):
        kv = torch.zeros(40, config.head_dim)
        groups = memory.group(source, rows, ratio, kv, kv if ratio > 1 else None)
        assert groups.positions_G.tolist() == list(range(0, 40, ratio))
        memory.append(source, rows, groups, *values)
    assert torch.equal(page_bytes(native, 0, 40), page_bytes(generic, 0, 40))
    for memory in (native, generic):
        assert torch.equal(memory.rows.keys(source, 0, count, torch.float32), fake_mxfp4(values[1]))
        assert torch.equal(memory.rows.main(source, 0, torch.arange(count), torch.float32), fake_main_fp4(values[0]))


def test_a_page_moved_through_bytes_reads_the_same() -> None:
    """What tiers do: bytes out of one page and into another of a second memory, then the request goes on there."""
    model, ids = model_of("cpu"), tokens(40, 31)
    first, second = paged(model), paged(model)
    run(model, first, [whole(0, ids, 0, 32)])
    target = second.rows.table[5, : second.rows.held[5]].tolist()
    for page, place in zip(first.rows.table[0, :4].tolist(), target, strict=False):
        second.page_view(place).copy_(torch.frombuffer(bytearray(first.page_view(page).numpy().tobytes()), dtype=torch.uint8))
    second.open(5, target, 32)
    first.open(1, first.rows.table[0, : first.rows.held[0]].tolist(), 32)
    logits = [run(model, memory, [(slot, ids, 24, 40, 32)]) for memory, slot in ((first, 1), (second, 5))]
    assert torch.equal(logits[0], logits[1])


def test_draft_windows_after_a_hit_hold_replayed_entries_only() -> None:
    """SPC-15: the first proposal after a replay of the whole window equals the cold one; a shorter window is not padded."""
    model, ids = model_of("deterministic"), tokens(70, 41)
    assert model.mtp is not None
    cold, warm = paged(model), paged(model)
    for memory in (cold, warm):
        run(model, memory, [whole(0, ids, 0, 64)])
    pages = warm.rows.table[0, : warm.rows.held[0]].tolist()
    run(model, cold, [whole(0, ids, 64, 70)])
    drafts = [model.mtp(torch.tensor([9]), torch.tensor([69]), [0], cold, model.embed, model.head)]
    draft_layers = [spec.index for spec in model.plan.drafts]
    for start in (0, 62, 66):
        if start != 66:
            warm.open(1, pages, 64)
            run(model, warm, [(1, ids, start, 70, 64)])
        else:
            warm.open(1, pages[:8] + pages[9:], 64)
            run(model, warm, [whole(1, ids, 64, 66)])
            run(model, warm, [whole(1, ids, 66, 70)])
        drafts.append(model.mtp(torch.tensor([9]), torch.tensor([69]), [1], warm, model.embed, model.head))
        held = {len(warm.window(layer, 1, 70)) for layer in draft_layers}
        assert held == {min(model.plan.window, 70 - min(start, 64))}
    assert torch.equal(drafts[0].logits_RBV, drafts[1].logits_RBV)


@pytest.mark.parametrize(("name", "expected"), [("v41-flash", 890), ("nano", None), ("tiny", None)])
def test_bytes_a_token_are_those_of_the_plan(name: str, expected: int | None, tmp_path: Path) -> None:
    """From the plan's rows, from the allocator, and from what a store has written of two pages."""
    config = preset(name)
    memory = PagedMemory(config, Numerics(dtype=torch.bfloat16), pages=2, slots=1, verify_rows=6)
    rows = [
        CacheRow(layers=1, ratio=spec.ratio, main_bytes=config.main_row_bytes, key_bytes=config.key_row_bytes)
        for spec in config.plan.kv_sources
    ]
    planned = sum(row.bytes_per_token for row in rows)
    tokens_held = 2 * memory.layout.page_tokens
    assert memory.bytes_PB.nbytes - 2 * memory.layout.padding_bytes == planned * tokens_held
    assert PageLayout.of(config).bytes_per_token == planned
    size = {"page_bytes": memory.layout.page_bytes, "page_tokens": memory.layout.page_tokens}
    store = PageStore.open(tmp_path / "store", model=bytes(16), **size)
    assert store.put([Page(bytes([n]) * 16, memory.page_view(n).numpy().data) for n in range(2)]) == 2
    assert export(store, tmp_path / "pages") == 2
    written = sum(file.stat().st_size for file in (tmp_path / "pages").glob("*.page"))
    assert written - 2 * memory.layout.padding_bytes == planned * tokens_held
    slots = store.stat().file_bytes - HEAD_BYTES
    assert written <= slots <= written * 17 / 16 + 2 * (HEADER_BYTES + 512), "what a record costs beside its page"
    store.close()
    if expected is not None:
        assert memory.bytes_PB.nbytes == expected * tokens_held


@pytest.mark.parametrize("name", ["nano", "tiny"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_slot_are_those_of_the_memory_plan(name: str, dtype: torch.dtype) -> None:
    memory = PagedMemory(preset(name), Numerics(impl="cpu", dtype=dtype), pages=1, slots=3, verify_rows=4)
    assert memory.slot_bytes == slot_bytes(preset(name), 4, dtype.itemsize)


def test_nothing_grows() -> None:
    """CMP-09 and the budget: state has the size it was made with, whatever passes through."""
    model = model_of("cpu")
    memory = paged(model)
    tensors = [memory.bytes_PB, memory.rings.values, memory.rows.table, *(t.kv for t in memory.tails.values())]
    before = [(t.data_ptr(), t.nbytes) for t in tensors]
    for tail, spec in zip(memory.tails.values(), model.plan.kv_sources, strict=False):
        assert tail.size == spec.ratio - 1 + VERIFY
    run(model, memory, [whole(slot, tokens(90, slot), 0, 90) for slot in range(4)])
    after = [memory.bytes_PB, memory.rings.values, memory.rows.table, *(t.kv for t in memory.tails.values())]
    assert [(t.data_ptr(), t.nbytes) for t in after] == before


BAD: list[tuple[str, Callable[[PagedMemory], object]]] = [
    ("ends inside a group", lambda m: m.open(0, [1, 2], 3)),
    ("slot 8 is outside", lambda m: m.open(8, [1], 0)),
    ("page 136 is outside", lambda m: m.open(0, [1, 136], 0)),
    ("hold 8 tokens, 16 are needed", lambda m: m.open(0, [1], 16)),
    ("exceed", lambda m: m.extend(0, [1] * 200)),
    ("slot 6 is not open", lambda m: (m.close(6), m.extend(6, [1]))),
    ("slot 6 is not open", lambda m: (m.close(6), m.exchange(6, 0, 1))),
    ("has 2 pages; there is no page 2", lambda m: (m.open(0, [1, 2], 0), m.exchange(0, 2, 3))),
    ("page 136 is outside", lambda m: (m.open(0, [1, 2], 0), m.exchange(0, 1, 136))),
    ("hold 128 tokens, 140 are needed", lambda m: run(model_of("cpu"), m, [whole(0, tokens(140), 0, 140)])),
]


@pytest.mark.parametrize(("message", "act"), BAD)
def test_misuse_is_named(message: str, act: Callable[[PagedMemory], object]) -> None:
    with pytest.raises(ValueError, match=message):
        act(paged(model_of("cpu")))


def test_impossible_sizes_are_named() -> None:
    config = preset("tiny")
    for name in ("pages", "slots", "verify_rows"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            PagedMemory(config, Numerics(), **{"pages": 1, "slots": 1, "verify_rows": 1, name: 0})
    with pytest.raises(ValueError, match="quantised bytes only"):
        PagedMemory(config, Numerics(quantise=False), pages=1, slots=1, verify_rows=1)
    with pytest.raises(ConfigError, match="page_tokens is 7"):
        PagedMemory(config, Numerics(), pages=1, slots=1, verify_rows=1, page_tokens=7)
