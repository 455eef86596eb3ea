"""Replay arithmetic: which positions each half of the model runs on for a prompt of T tokens with H of them in the cache.

Derived from `LayerPlan` alone; pure integers. Must not know pages, requests or tensors. Report 2.2; design section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.config import LayerPlan

Replay = str | int
"""`"bounded"` (the window, as published), `"exact"`, or a number of positions from the window up."""


@dataclass(frozen=True, kw_only=True)
class ReplaySpan:
    """The plan of one prefill: rows `start..total-1` in the encoder half, `decode_from..total-1` in the decoder half too.

    Rows below `hit` are replay: their global rows exist and stay as they are. `exact_rows`: global rows from `hit` on get
    the bits of a cold run. `exact_windows`: so do all windows, and with them every later logit.
    """

    start: int
    hit: int
    decode_from: int
    total: int
    exact_rows: bool
    exact_windows: bool

    @property
    def replayed(self) -> int:
        """Positions that are run again although their global rows are cached."""
        return max(0, min(self.hit, self.total) - self.start)


def check_replay(plan: LayerPlan, replay: Replay) -> None:
    """ValueError unless `replay` is a known word or a number of positions that covers the window."""
    if isinstance(replay, str):
        if replay not in ("bounded", "exact"):
            raise ValueError(f"replay must be 'bounded', 'exact' or a number of positions, got {replay!r}")
    elif isinstance(replay, bool) or not isinstance(replay, int):
        raise ValueError(f"replay must be 'bounded', 'exact' or a whole number of positions, got {replay!r}")
    elif replay < plan.window:
        raise ValueError(f"replay of {replay} positions is below the window of {plan.window}; give at least that, or 'exact'")


def decoder_tail(plan: LayerPlan, replay: Replay) -> int:
    """Last positions of a prompt that the decoder half runs on.

    Bounded: `replay` of them. Exact: (window - 1) a decoder layer, and one more because a draft ring holds `window`
    entries of the last layers' inputs where a query's own window reaches window - 1 back.
    """
    exact = max(plan.window, plan.exact_decoder_replay + 1)
    if replay == "exact":
        return exact
    return plan.window if replay == "bounded" else min(int(replay), exact)


def replay_span(plan: LayerPlan, total: int, hit: int, replay: Replay, *, all_layers: bool = False) -> ReplaySpan:
    """What to run for `total` tokens of which the first `hit` (a multiple of the alignment) have global rows.

    Decoder: the last D = `decoder_tail` positions, so encoder outputs are wanted from E = min(hit, total - D) on. Bounded
    replay of n starts the encoder at min(hit - n, total - D), and windows reach back to there only. Exact replay starts
    (window - 1) x encoder layers before E: then no window entry that an output from E on depends on is missing. A start at
    0 is exact whatever the mode. `all_layers`: the decoder runs on every row (scores of a prompt).
    """
    assert 0 <= hit <= total and hit % plan.alignment == 0, (hit, total, plan.alignment)
    reach = plan.exact_encoder_replay
    decode_from = 0 if all_layers else max(0, total - decoder_tail(plan, replay))
    if hit == 0:
        start = 0
    elif replay == "exact":
        start = max(0, min(hit, decode_from) - reach)
    else:
        length = plan.window if replay == "bounded" else int(replay)
        start = max(0, min(hit - min(length, reach), decode_from))
    needed = min(hit, decode_from) - reach
    deep = decode_from == 0 or total - decode_from > plan.exact_decoder_replay
    return ReplaySpan(
        start=start,
        hit=hit,
        decode_from=decode_from,
        total=total,
        exact_rows=start == 0 or start <= hit - reach,
        exact_windows=(start == 0 or start <= needed) and deep,
    )
