"""Joint attention on the GPU: choice of kernel and tiles, launches. Released widths on Hopper run `attend.cu` (`hopper.py`),
everything else one Triton kernel (`attend_triton.py`).

`sparse_attention_gpu` takes values as `sparse_attention` does; `attend_packed` reads FP8 window rings and FP4 rows in pages and
may rotate queries and outputs on the way. Must not know requests or layers. Shapes as in `ref.py`; D slots, P rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kvist.kernels.device import interpreted
from kvist.kernels.device.pages import DevicePages, multiprocessors, require_on_gpu
from kvist.kernels.sparse_attention.attend_triton import LOG2_E, attend, combine
from kvist.kernels.sparse_attention.hopper import attend_hopper, fits

MOST_CHANNELS = 512
HEADS_A_PROGRAM = 64
WARPS = 4
"""Of a program. Eight read outside of memory on an H200 (Triton 3.6), which no interpreter shows."""
FLOAT32_HEADS_A_PROGRAM = 16
"""float32 products run in registers, without matrix units."""


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a Triton launch is cut: shares of the keys, parts of the output channels, keys a tile, entries a window tile.

    `overlap`: the joining kernel is launched while the last programs still write (programmatic dependent launch).
    """

    splits: int
    parts: int = 2
    keys: int = 32
    entries: int = 32
    overlap: bool = False


@dataclass(frozen=True, kw_only=True)
class WindowRows:
    """Window entries of D slots: position p of slot d lies in cell p % ring.

    Values: `values` [D,ring,C] in the dtype of the queries, `scales` None. FP8: `values` uint8 [D,ring,C] codes and `scales`
    uint8 [D,ring,C/32] (E8M0); both may be views of 528-byte rows. The last dimension must be contiguous.
    """

    values: Tensor
    scales: Tensor | None = None

    @staticmethod
    def of_rows(rows_DRB: Tensor, channels: int) -> WindowRows:
        """Views of rows that hold codes, then scales: uint8 [D,ring,channels + channels/32]."""
        return WindowRows(values=rows_DRB[..., :channels], scales=rows_DRB[..., channels:])


def choose_tiling(queries: int, k: int, window: int, programs: int) -> Tiling:
    """Two programs of four warps a multiprocessor, each with half of the channels, as many shares as fill the card once.

    What compiles without many spills (docs/performance.md); to be replaced by measured choices. A share gets 32 rows or more.
    """
    most = max(1, programs // max(1, queries))
    splits = 1
    while splits * 2 <= min(most, 16, max(1, max(k, window) // 32)):
        splits *= 2
    return Tiling(splits=splits, parts=2, keys=32, entries=16 if window <= 16 * splits else 32)


def _check(q_NHC: Tensor, sink_H: Tensor) -> None:
    if q_NHC.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"queries are {q_NHC.dtype}; the GPU kernel takes bfloat16 or float32")
    _, heads, channels = q_NHC.shape
    if channels % 2 or channels > MOST_CHANNELS:
        raise ValueError(f"{channels} channels; the GPU kernel takes an even number up to {MOST_CHANNELS}")
    if sink_H.shape != (heads,):
        raise ValueError(f"{tuple(sink_H.shape)} sinks for {heads} heads")


def _pairs(x: Tensor) -> Tensor:
    """bfloat16 [...,C] as int32 [...,C/2]; float32 as it is. The last dimension must be contiguous, rows of even length."""
    return x.view(torch.int32) if x.dtype is torch.bfloat16 else x


def _even_rows(x: Tensor) -> Tensor:
    """`x` such that its rows can be read in pairs of channels."""
    aligned = x.stride(-1) == 1 and all(s % 2 == 0 for s in x.stride()[:-1]) and x.data_ptr() % 4 == 0
    return x if aligned else x.contiguous()


def sparse_attention_gpu(
    q_NHC: Tensor,
    window_TC: Tensor,
    span_N2: Tensor,
    rows_MC: Tensor | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    window: int,
) -> Tensor:
    """See `sparse_attention`; values of one request. Raises GpuUnavailable, or ValueError for unsupported sizes."""
    require_on_gpu("sparse_attention", q_NHC, window_TC, rows_MC, topk_NK, sink_H)
    _check(q_NHC, sink_H)
    topk = topk_NK if rows_MC is not None and topk_NK is not None and rows_MC.shape[0] else None
    rows = None if topk is None or rows_MC is None else rows_MC.to(q_NHC.dtype).contiguous()
    slots = torch.zeros(q_NHC.shape[0], dtype=torch.int32, device=q_NHC.device)
    values = window_TC.to(q_NHC.dtype)
    held = values if len(values) else values.new_zeros(1, q_NHC.shape[2])
    ring = WindowRows(values=_even_rows(held).unsqueeze(0))
    return _launch(q_NHC, ring, span_N2, slots, rows, topk, sink_H, window, None, None)


def attend_packed(
    q_NHC: Tensor,
    ring: WindowRows,
    span_N2: Tensor,
    slot_N: Tensor,
    pages: DevicePages | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    *,
    window: int,
    rope: tuple[Tensor, Tensor] | None = None,
    tiling: Tiling | None = None,
    planar: bool = False,
) -> Tensor:
    """Attention of bfloat16 queries of any requests over rings and pages.

    `span_N2` positions [start, stop) of each query's window, at most `window` long, held by the ring of slot `slot_N`;
    `topk_NK` row ids within the slot's pages, ascending, -1 last; `rope` float32 tables (cos, sin) [N,P]: the last 2P channels
    of queries are rotated and those of outputs rotated back. `planar`: queries (rotated already) and outputs keep a head's
    even channels before its odd ones, as projections with permuted weights give and take them for nothing. Returns [N,H,C].
    Raises GpuUnavailable, or ValueError.
    """
    require_on_gpu("sparse_attention", q_NHC, ring.values, span_N2, slot_N, topk_NK, sink_H)
    _check(q_NHC, sink_H)
    channels = q_NHC.shape[2]
    if q_NHC.dtype is not torch.bfloat16:
        raise ValueError(f"packed rows are read by bfloat16 queries, got {q_NHC.dtype}; convert the queries")
    if channels % 32:
        raise ValueError(f"{channels} channels; packed rows need a multiple of 32")
    if ring.scales is not None and any(stride % 2 for stride in ring.values.stride()[:2]):
        raise ValueError(
            f"ring rows lie {ring.values.stride(1)} bytes apart; codes are read in pairs, pad rows to an even number"
        )
    if rope is not None and 2 * rope[0].shape[1] > channels:
        raise ValueError(f"{rope[0].shape[1]} rotated pairs in {channels} channels")
    if planar and rope is not None:
        raise ValueError("planar queries are rotated by their producer; pass rope or planar, not both")
    scales = ring.scales
    keys = window + (0 if topk_NK is None else topk_NK.shape[1])
    if tiling is None and not planar and scales is not None and fits(q_NHC, ring.values, pages, keys):
        return attend_hopper(q_NHC, ring.values, scales, span_N2, slot_N, pages, topk_NK, sink_H, window=window, rope=rope)
    return _launch(q_NHC, ring, span_N2, slot_N, pages, topk_NK, sink_H, window, rope, tiling, planar=planar)


def _launch(
    q_NHC: Tensor,
    ring: WindowRows,
    span_N2: Tensor,
    slot_N: Tensor,
    rows: Tensor | DevicePages | None,
    topk_NK: Tensor | None,
    sink_H: Tensor,
    window: int,
    rope: tuple[Tensor, Tensor] | None,
    tiling: Tiling | None,
    *,
    planar: bool = False,
) -> Tensor:
    n, heads, channels = q_NHC.shape
    q = q_NHC.contiguous() if planar else _pairs(_even_rows(q_NHC).contiguous())
    out = torch.empty_like(q)
    if not n:
        return out.view(q_NHC.dtype)
    k = 0 if rows is None or topk_NK is None else topk_NK.shape[1]
    cut = tiling or choose_tiling(n, k, window, multiprocessors(q.device))
    pairs = channels // 2
    wide = q_NHC.dtype is torch.float32
    sizes = _sizes(heads, pairs, k, window, cut, wide=wide)
    packed_ring = ring.scales is not None
    values = ring.values.view(torch.int16) if packed_ring else _pairs(ring.values)
    scales = ring.scales if ring.scales is not None else values
    floats = (n, cut.splits, heads) if cut.splits > 1 else (0,)
    peaks, totals = (torch.empty(floats, device=q.device) for _ in range(2))
    shares = torch.empty((*floats, channels), device=q.device)
    cos, sin = (t.contiguous() for t in rope) if rope is not None else (sink_H, sink_H)
    turned = 0 if rope is None else cos.shape[1]
    pages = rows if isinstance(rows, DevicePages) else None
    source = pages.bytes_PB if pages is not None else q if rows is None or isinstance(rows, DevicePages) else _pairs(rows)
    of_pages = (0, 0, 0, 0)
    if pages is not None:
        of_pages = (pages.table_ST.shape[1], pages.page_bytes, pages.main_codes, pages.main_scales)
    table = pages.table_ST if pages is not None else slot_N
    topk = topk_NK.contiguous() if topk_NK is not None and k else slot_N
    # Strides count what the kernel's pointers count: pairs of values, or two codes.
    unit = 1 if not (wide and not packed_ring) else 2
    strides = (values.stride(1) // unit, scales.stride(1), values.stride(0), scales.stride(0))
    grid = (n, cut.splits, sizes["PARTS"] * -(-heads // sizes["HT"]))
    planes = (
        q if planar else torch.empty((n, heads, channels), dtype=torch.float32 if interpreted() else q_NHC.dtype, device=q.device)
    )
    attend[grid](
        q, planes, out, sink_H.float(), cos, sin, values, scales, span_N2.contiguous(), slot_N, source, table, topk, shares,
        peaks, totals, heads, k, values.shape[1], *strides, *of_pages, channels**-0.5 * LOG2_E.value, PAIRS=pairs, TURNED=turned,
        SPLITS=cut.splits, PLANAR=planar, ROWS=1 if pages is None else pages.rows, PACKED_WINDOW=packed_ring,
        PACKED_ROWS=pages is not None, WIDE=wide, PLAIN=interpreted(), OVERLAP=cut.overlap,
        num_warps=WARPS, num_stages=1, **sizes,
    )  # fmt: skip
    if cut.splits > 1:
        few = 1 if n * heads <= 4096 else 4
        combine[(n, -(-heads // few))](
            shares, peaks, totals, out, sink_H.float(), cos, sin, heads, PAIRS=pairs, TURNED=turned, SPLITS=cut.splits, HT=few,
            BT=triton.next_power_of_2(pairs), PLANAR=planar, WIDE=wide, OVERLAP=cut.overlap,
            num_warps=4, **({"launch_pdl": True} if cut.overlap else {}),
        )  # fmt: skip
    return out.view(q_NHC.dtype) if not wide else out


def _sizes(heads: int, pairs: int, k: int, window: int, cut: Tiling, *, wide: bool) -> dict[str, int]:
    """Compile-time sizes of a launch."""
    width = max(16, triton.next_power_of_2(pairs))
    parts = cut.parts if width == pairs and pairs // cut.parts >= 16 else 1
    assert parts in (1, 2), "the kernel is written for one or two parts"
    window_share, row_share = -(-window // cut.splits), -(-k // cut.splits)
    return {
        "HT": min(FLOAT32_HEADS_A_PROGRAM if wide else HEADS_A_PROGRAM, max(16, triton.next_power_of_2(heads))),
        "BT": width // parts,
        "PARTS": parts,
        "WT": cut.entries,
        "W_TILES": -(-window_share // cut.entries),
        "KT": cut.keys,
        "K_TILES": -(-row_share // cut.keys),
    }
