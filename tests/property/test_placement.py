"""Where a pass's groups come from: by Python numbers and by arrays the same, and as a plain statement says."""

from __future__ import annotations

import random

import pytest
import torch

from kvist.cache.placement import Placement, Span, grouped_few, grouped_many
from kvist.model.rows import Rows, Segment


def some_spans(seed: int) -> list[Span]:
    """Requests with gaps between their slots, empty segments, replayed rows, positions at and off a group's begin."""
    dice, spans, start = random.Random(seed), list[Span](), 0
    for slot in sorted(dice.sample(range(20), dice.randrange(7))):
        length, position = dice.choice((0, 1, 1, 2, 5, 19)), dice.randrange(40)
        publish = min(position + dice.choice((0, 0, 0, 1, 7)), position + length)
        spans.append(Span(slot=slot, start=start, length=length, position=position, publish_from=publish))
        start += length
    return spans


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(40))
def test_both_ways_place_alike(seed: int, ratio: int) -> None:
    spans, ring = some_spans(seed), 0 if ratio == 1 else ratio - 1 + 6
    table = [(span.slot, span.start, span.length, span.position, span.publish_from) for span in spans]
    arrays = grouped_many(torch.tensor(table, dtype=torch.int64).view(-1, 5).numpy(), ratio, ring)
    assert [part.tolist() for part in arrays] == [list(part) for part in grouped_few(spans, ratio, ring)]


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(40))
def test_every_member_is_where_it_is_said_to_be(seed: int, ratio: int) -> None:
    spans, ring = some_spans(seed), 0 if ratio == 1 else ratio - 1 + 6
    segments = tuple(
        Segment(slot=s.slot, start=s.start, length=s.length, position=s.position, publish_from=s.publish_from) for s in spans
    )
    positions_N = torch.tensor([s.position + n for s in spans for n in range(s.length)], dtype=torch.int64)
    rows = Rows(token_ids_N=positions_N, positions_N=positions_N, text_N=positions_N >= 0, segments=segments)
    made = Placement(rows, torch.device("cpu")).grouping(ratio, ring)
    cells = dict(zip(made.early_E.tolist(), made.ring_E.tolist(), strict=True))
    group = 0
    for span, count in zip(spans, made.counts, strict=True):
        first = span.publish_from // ratio * ratio
        assert count == len([p for p in range(first, span.stop, ratio) if p + ratio <= span.stop])
        for position in range(first, first + count * ratio, ratio):
            assert (int(made.slots_G[group]), int(made.positions_G[group])) == (span.slot, position)
            for member in range(ratio):
                at = position + member
                if at < span.position:
                    assert cells.pop(group * ratio + member) == span.slot * ring + at % ring
                else:
                    assert int(made.batch_GR[group, member]) == span.start + at - span.position
            group += 1
    assert not cells
    assert group == len(made.positions_G)
    kept = [
        (s.start + p - s.position, s.slot * ring + p % ring) for s in spans for p in range(max(s.position, s.stop - ring), s.stop)
    ]
    assert list(zip(made.keep_K.tolist(), made.cell_K.tolist(), strict=True)) == kept
