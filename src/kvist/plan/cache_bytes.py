"""Bytes of global cache a token: row by row from the page layout, and the way there from other layouts, step by step.

Owns the waterfalls and V4-Flash's layout as data. Knows the page layout only. Source: facts section 11; report 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvist.config import ModelConfig
from kvist.page_layout import PageLayout


@dataclass(frozen=True, kw_only=True)
class CacheRow:
    """`layers` layers that each keep a main entry and an index key (bytes) for every `ratio` tokens."""

    layers: int
    ratio: int
    main_bytes: int
    key_bytes: int

    @property
    def bytes_per_token(self) -> Fraction:
        """Exact bytes a token of all its layers."""
        return Fraction(self.layers * (self.main_bytes + self.key_bytes), self.ratio)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A layout on the way: what changed, its rows, and its bytes a token."""

    change: str
    rows: tuple[CacheRow, ...]

    @property
    def bytes_per_token(self) -> Fraction:
        """Exact bytes a token."""
        return sum((row.bytes_per_token for row in self.rows), Fraction(0))

    @property
    def formula(self) -> str:
        """The sum in writing, equal rows taken together: `3 x (288+68)/2 + (288+68)`."""
        together: dict[tuple[int, int, int], int] = {}
        for row in self.rows:
            key = row.main_bytes, row.key_bytes, row.ratio
            together[key] = together.get(key, 0) + row.layers
        return " + ".join(
            (f"{layers} x " if layers > 1 else "") + f"({main}+{key})" + (f"/{ratio}" if ratio > 1 else "")
            for (main, key, ratio), layers in together.items()
        )


# 448 FP8 channels, 64 BF16 rotary channels, 8 bytes of scales; the heavily compressed layers have no index keys.
V4_FLASH = (
    CacheRow(layers=21, ratio=4, main_bytes=584, key_bytes=68),
    CacheRow(layers=20, ratio=128, main_bytes=584, key_bytes=0),
)
V4_WIDTHS = (512, 128)


def source_rows(config: ModelConfig) -> tuple[CacheRow, ...]:
    """One `CacheRow` a source layer, from the planes of the page layout."""
    layout = PageLayout.of(config)
    rows = []
    for spec in config.plan.kv_sources:
        planes = [plane for plane in layout.planes if plane.layer == spec.index]
        main = sum(plane.row_bytes for plane in planes if plane.kind.startswith("main"))
        keys = sum(plane.row_bytes for plane in planes if plane.kind.startswith("key"))
        rows.append(CacheRow(layers=1, ratio=spec.ratio, main_bytes=main, key_bytes=keys))
    return tuple(rows)


def waterfall(config: ModelConfig) -> tuple[Step, ...]:
    """From V4-Flash's layout where the entry widths are the same, else from one cache a layer in BF16, to this model's.

    Empty for a model without global cache.
    """
    if not config.plan.kv_sources:
        return ()
    if (config.head_dim, config.index_head_dim) == V4_WIDTHS:
        return _from_v4_flash(config)
    return _from_own_caches(config)


def _from_v4_flash(config: ModelConfig) -> tuple[Step, ...]:
    indexed, _ = V4_FLASH
    final = source_rows(config)
    entry = indexed.main_bytes
    shared = CacheRow(layers=len(final), ratio=indexed.ratio, main_bytes=entry, key_bytes=indexed.key_bytes)
    denser = tuple(CacheRow(layers=1, ratio=row.ratio, main_bytes=entry, key_bytes=indexed.key_bytes) for row in final)
    return (
        Step(change="V4-Flash", rows=V4_FLASH),
        Step(change="without its 20 layers of ratio 128", rows=(indexed,)),
        Step(change=f"{len(final)} source layers instead of {indexed.layers}", rows=(shared,)),
        Step(change=f"ratios {', '.join(str(row.ratio) for row in final)} instead of {indexed.ratio}", rows=denser),
        Step(change=f"FP4 main entries: {final[0].main_bytes} bytes instead of {entry}", rows=final),
    )


def _from_own_caches(config: ModelConfig) -> tuple[Step, ...]:
    final = source_rows(config)
    global_layers = [spec for spec in config.plan.layers if spec.ratio]
    main, key = 2 * config.head_dim, 2 * config.index_head_dim
    own = tuple(CacheRow(layers=1, ratio=spec.ratio, main_bytes=main, key_bytes=key) for spec in global_layers)
    shared = tuple(CacheRow(layers=1, ratio=row.ratio, main_bytes=main, key_bytes=key) for row in final)
    small = tuple(CacheRow(layers=1, ratio=row.ratio, main_bytes=row.main_bytes, key_bytes=key) for row in final)
    return (
        Step(change=f"BF16 entries and keys in each of {len(own)} layers", rows=own),
        Step(change=f"{len(final)} source layers share them", rows=shared),
        Step(change=f"FP4 main entries: {final[0].main_bytes} bytes instead of {main}", rows=small),
        Step(change=f"MXFP4 index keys: {final[0].key_bytes} bytes instead of {key}", rows=final),
    )
