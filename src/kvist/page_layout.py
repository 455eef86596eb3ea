"""The page: where every byte of a page's global cache lies, computed from the layer plan.

Owns planes, their order and alignment; the pool, the store and `kvist plan` all read this one description. Knows nothing
of torch, devices or page contents. Source: design section 4; facts sections 4, 5 and 11.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kvist.config import ConfigError, ModelConfig

PLANE_ALIGNMENT = 128
"""Bytes: every plane starts at a multiple of it (a cache line pair; planes of the release need no padding)."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One kind of bytes of one source layer inside a page: `rows` rows of `row_bytes`, from byte `offset` of the page."""

    layer: int
    kind: str
    row_bytes: int
    rows: int
    ratio: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return self.rows * self.row_bytes

    @property
    def bytes_per_token(self) -> Fraction:
        """Exact bytes a token: a row serves `ratio` tokens."""
        return Fraction(self.row_bytes, self.ratio)


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """All planes of a page in layer order: main codes, main scales, key codes, key scales of each source layer."""

    page_tokens: int
    planes: tuple[Plane, ...]
    page_bytes: int

    @staticmethod
    def of(config: ModelConfig, page_tokens: int | None = None) -> PageLayout:
        """The layout for pages of `page_tokens` (default: the plan's). ConfigError unless it is a multiple of the ratios."""
        plan = config.plan
        tokens = plan.page_tokens if page_tokens is None else page_tokens
        if tokens < 1 or tokens % plan.alignment:
            raise ConfigError(f"page_tokens is {tokens}; it must be a positive multiple of {plan.alignment}")
        widths = {
            "main codes": config.head_dim // 2,
            "main scales": config.head_dim // 16,
            "key codes": config.index_head_dim // 2,
            "key scales": config.index_head_dim // 32,
        }
        planes, at = [], 0
        for spec in plan.kv_sources:
            for kind, width in widths.items():
                rows = tokens // spec.ratio
                planes.append(Plane(layer=spec.index, kind=kind, row_bytes=width, rows=rows, ratio=spec.ratio, offset=at))
                at += -(-rows * width // PLANE_ALIGNMENT) * PLANE_ALIGNMENT
        return PageLayout(page_tokens=tokens, planes=tuple(planes), page_bytes=at)

    @property
    def payload_bytes(self) -> int:
        """Bytes of a page that carry rows."""
        return sum(plane.nbytes for plane in self.planes)

    @property
    def padding_bytes(self) -> int:
        """Bytes of a page lost to alignment."""
        return self.page_bytes - self.payload_bytes

    @property
    def bytes_per_token(self) -> Fraction:
        """Exact payload bytes a token (890 for the release)."""
        return sum((plane.bytes_per_token for plane in self.planes), Fraction(0))
