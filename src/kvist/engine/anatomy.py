"""The fixed facts of an engine that figures of a request are made of: layers of each half, bytes of each kind, where pages are.

Owns their names. Must not know requests, tensors or HTTP. `docs/server.md` says what is shown of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.engine.budget import slot_bytes

if TYPE_CHECKING:
    from kvist.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Layers below and from the decoder source on; bytes a token of main rows and index keys; bytes a request of windows, draft
    windows and unfinished groups, however long it is; bytes and tokens of a page. `whereabouts`: see `Pages.whereabouts`; `clock`
    is the engine's."""

    encoder_layers: int
    decoder_layers: int
    main_row_bytes: float
    index_key_bytes: float
    window_bytes: int
    draft_bytes: int
    group_bytes: int
    page_tokens: int
    page_bytes: int
    whereabouts: Callable[[Sequence[bytes], int], dict[str, int]]
    clock: Callable[[], float]

    @property
    def slot_bytes(self) -> int:
        """What a running request takes beside its pages."""
        return self.window_bytes + self.draft_bytes + self.group_bytes


def anatomy(engine: Engine) -> Anatomy:
    """The facts of an engine."""
    plan, config, layout = engine.model.plan, engine.model.config, engine.plan.layout
    ring = (plan.window + engine.plan.verify_rows) * config.head_dim * engine.model.numerics.dtype.itemsize
    window, draft = len(plan.layers) * ring, len(plan.drafts) * ring
    whole = slot_bytes(config, engine.plan.verify_rows, engine.model.numerics.dtype.itemsize)
    kinds = {
        kind: float(sum(plane.bytes_per_token for plane in layout.planes if plane.kind.startswith(kind)))
        for kind in ("main", "key")
    }
    return Anatomy(
        encoder_layers=plan.decoder_start,
        decoder_layers=len(plan.layers) - plan.decoder_start,
        main_row_bytes=kinds["main"],
        index_key_bytes=kinds["key"],
        window_bytes=window,
        draft_bytes=draft,
        group_bytes=whole - window - draft,
        page_tokens=layout.page_tokens,
        page_bytes=layout.page_bytes,
        whereabouts=engine.pages.whereabouts,
        clock=engine.clock,
    )
