"""Passes of many rows: which consecutive rows of which requests run together, and every index that they need, made on the host.

Pure arithmetic on a layer plan, packed into one array of integers, so that one copy brings a pass to the card. The replay
plan is `engine/replay.py`'s, groups are `cache/placement.py`'s. Must not know weights, kernels or devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvist.cache.placement import Placement
from kvist.engine.replay import ReplaySpan
from kvist.model.rows import Segment

Ints = NDArray[np.int64]
NONE = -1


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A request to be computed up to its last token: `ids` int64 of all its tokens, `span` from `replay_span`.

    `encoder_from`, `decoder_from`: the first position whose window entries the rings hold when its rows run in each half; those
    of `span` where windows are rebuilt, earlier ones where the rings have them already.
    """

    slot: int
    ids: Ints
    span: ReplaySpan
    encoder_from: int
    decoder_from: int

    @staticmethod
    def replayed(slot: int, ids: Ints, span: ReplaySpan) -> Prompt:
        """Windows are rebuilt from the start of the replay on (a cold prompt starts at 0)."""
        return Prompt(slot=slot, ids=ids, span=span, encoder_from=span.start, decoder_from=span.decode_from)

    @staticmethod
    def resumed(slot: int, ids: Ints, hit: int, window: int) -> Prompt:
        """Both halves' windows before `hit` lie in the rings: only the rows behind it run, the last `window` in the decoder."""
        total, held = len(ids), max(0, hit - window)
        deep = max(hit, total - window)
        span = ReplaySpan(start=hit, hit=hit, decode_from=deep, total=total, exact_rows=True, exact_windows=True)
        return Prompt(slot=slot, ids=ids, span=span, encoder_from=held, decoder_from=held if deep == hit else deep)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows start..stop-1 of a prompt in one pass."""

    prompt: Prompt
    start: int
    stop: int

    @property
    def deep(self) -> int:
        """The first of them that runs the decoder half too, `stop` if none does."""
        return min(max(self.start, self.prompt.span.decode_from), self.stop)


def cut(prompts: Sequence[Prompt], chunk: int) -> Iterator[list[Piece]]:
    """Passes of up to `chunk` rows, prompts one after the other; a pass holds a piece of a request at most."""
    pieces: list[Piece] = []
    room = chunk
    for prompt in prompts:
        at, total = prompt.span.start, prompt.span.total
        while at < total:
            stop = min(total, at + room)
            pieces.append(Piece(prompt=prompt, start=at, stop=stop))
            room -= stop - at
            at = stop
            if not room:
                yield pieces
                pieces, room = [], chunk
    if pieces:
        yield pieces


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a pass's indices depend on besides its rows.

    `ring`: cells of a window ring, `tails`: cells of a source's tail by ratio (0: none), `history`: cells of the n-gram history
    (0: no Engram), `back`: tokens that an n-gram looks back, `together`: queries that may be scored together.
    """

    window: int
    ring: int
    tails: dict[int, int]
    history: int
    back: int
    together: int


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass: `arrays` by name, `finished` prompts in the order of their logits, `reach` the longest context in it.

    `cells`: of each half's window buffer.
    """

    pieces: tuple[Piece, ...]
    arrays: dict[str, Ints]
    finished: tuple[Prompt, ...]
    reach: int
    cells: dict[str, int]

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of the encoder and of the decoder half."""
        return len(self.arrays["tokens"]), len(self.arrays["deep"])

    @property
    def shape(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes: passes of one shape differ in numbers alone."""
        return tuple((name, array.shape) for name, array in self.arrays.items())

    def packed(self) -> Ints:
        """All numbers one after the other."""
        return np.concatenate([array.reshape(-1) for array in self.arrays.values()])


def plan_pass(pieces: Sequence[Piece], sizes: Sizes) -> Pass:
    """The indices of a pass. Raises ValueError for two pieces of one request, or ids that do not reach a piece's end."""
    slots = [piece.prompt.slot for piece in pieces]
    if len(set(slots)) != len(slots):
        raise ValueError(f"slots {slots} repeat; a pass takes one piece a request")
    for piece in pieces:
        if len(piece.prompt.ids) < piece.stop:
            raise ValueError(f"slot {piece.prompt.slot}: {len(piece.prompt.ids)} ids for rows up to {piece.stop}")
    arrays = {"tokens": np.concatenate([piece.prompt.ids[piece.start : piece.stop] for piece in pieces])}
    arrays["offset"] = np.concatenate([np.arange(piece.stop - piece.start) for piece in pieces])
    if sizes.history:
        before = [(piece, max(0, piece.start - sizes.back), piece.start) for piece in pieces]
        newest = [(piece, max(piece.start, piece.stop - sizes.history), piece.stop) for piece in pieces]
        arrays |= _tokens("before", before, sizes.history) | _tokens("newest", newest, sizes.history)
    encoder = [(piece, piece.start, piece.prompt.encoder_from) for piece in pieces]
    decoder = [(piece, piece.deep, piece.prompt.decoder_from) for piece in pieces if piece.deep < piece.stop]
    arrays |= _half("encoder", encoder, sizes) | _half("decoder", decoder, sizes)
    first, starts = 0, {}
    for piece in pieces:
        starts[piece.prompt.slot] = first - piece.start
        first += piece.stop - piece.start
    deep = [np.arange(at, piece.stop) + starts[piece.prompt.slot] for piece, at, _ in decoder]
    arrays["deep"] = np.concatenate(deep) if deep else np.zeros(0, np.int64)
    arrays |= _groups(pieces, sizes)
    ends, finished, at = [], [], 0
    for piece, begin, _ in decoder:
        at += piece.stop - begin
        if piece.stop == piece.prompt.span.total:
            ends.append(at - 1)
            finished.append(piece.prompt)
    arrays["wanted"] = np.array(ends, dtype=np.int64)
    cells = {
        name: len(arrays[f"{name} position"]) + len(runs) * (sizes.window - 1)
        for name, runs in (("encoder", encoder), ("decoder", decoder))
    }
    reach = max(piece.stop for piece in pieces)
    return Pass(pieces=tuple(pieces), arrays=arrays, finished=tuple(finished), reach=reach, cells=cells)


def _tokens(name: str, spans: Sequence[tuple[Piece, int, int]], cells: int) -> dict[str, Ints]:
    """Tokens start..stop-1 of requests and their places in the n-gram history: slots, cells, ids."""
    slot = np.concatenate([np.full(stop - start, piece.prompt.slot) for piece, start, stop in spans])
    cell = np.concatenate([np.arange(start, stop) % cells for _, start, stop in spans])
    ids = np.concatenate([piece.prompt.ids[start:stop] for piece, start, stop in spans])
    return {f"{name} slot": slot.astype(np.int64), f"{name} cell": cell, f"{name} id": ids}


def _half(name: str, rows: Sequence[tuple[Piece, int, int]], sizes: Sizes) -> dict[str, Ints]:
    """Positions, places in the pass's window buffer and what moves between it and the rings.

    The buffer holds, one request after the other, `window - 1` entries before its rows (from ring cell -1 where a window does not
    reach back so far) and the rows' own.
    """
    kinds = ("position", "slot", "first", "stop", "carry_from", "carry_to", "keep_row", "keep_from", "keep_to")
    parts: dict[str, list[Ints]] = {kind: [np.zeros(0, np.int64)] for kind in kinds}
    together = [np.zeros((0, 2), np.int64)]
    at, offset, before = 0, 0, sizes.window - 1
    for piece, start, held_from in rows:
        slot, count = piece.prompt.slot, piece.stop - start
        position = np.arange(start, piece.stop)
        own = offset + before + np.arange(count)
        held = min(before, start - held_from)
        carried = np.arange(start - before, start)
        kept = position[max(0, count - sizes.window) :]
        lines = (
            position, np.full(count, slot), np.maximum(own + 1 - sizes.window, offset + before - held), own + 1,
            np.where(carried >= start - held, slot * sizes.ring + carried % sizes.ring, NONE), offset + np.arange(before),
            kept - start + at, kept - start + offset + before, slot * sizes.ring + kept % sizes.ring,
        )  # fmt: skip
        for kind, line in zip(kinds, lines, strict=True):
            parts[kind].append(line)
        firsts = np.arange(0, count, sizes.together)
        together.append(np.stack([at + firsts, np.minimum(sizes.together, count - firsts)], 1))
        at, offset = at + count, offset + before + count
    arrays = {f"{name} {kind}": np.concatenate(lines) for kind, lines in parts.items()}
    arrays[f"{name} together"] = np.concatenate(together)
    return arrays


def _groups(pieces: Sequence[Piece], sizes: Sizes) -> dict[str, Ints]:
    """By ratio: which rows make the groups that end here, which members came earlier, what is kept of unfinished ones."""
    segments, at = [], 0
    for piece in pieces:
        count = piece.stop - piece.start
        publish = min(piece.prompt.span.hit, piece.stop)
        slot = piece.prompt.slot
        segments.append(Segment(slot=slot, start=at, length=count, position=piece.start, publish_from=publish))
        at += count
    place = Placement(_Rows(tuple(segments)), torch.device("cpu"))
    arrays: dict[str, Ints] = {}
    for ratio, ring in sizes.tails.items():
        group = place.grouping(ratio, ring)
        named = {
            "members": group.batch_GR, "early": group.early_E, "early_cell": group.ring_E, "slot": group.slots_G,
            "position": group.positions_G, "keep": group.keep_K, "keep_cell": group.cell_K,
        }  # fmt: skip
        arrays |= {f"group {ratio} {name}": part.numpy() for name, part in named.items()}
    return arrays


@dataclass(frozen=True)
class _Rows:
    """What `Placement` reads of a batch."""

    segments: tuple[Segment, ...]

    @property
    def positions_N(self) -> torch.Tensor:
        """Positions of all rows."""
        return torch.cat([torch.arange(one.position, one.position + one.length) for one in self.segments])
