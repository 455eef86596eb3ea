"""Operator: window entries moved between rings and a pass's buffer, codes and scales together; a place of -1 gives zeros.

Copies bytes and nothing else. Must not know layers or requests. Shapes: K entries, C codes and G scales of an entry.
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.window_rows.ref import move_rows_ref

Entries = tuple[Tensor, Tensor]


def move_rows(held: Entries, from_K: Tensor, into: Entries, to_K: Tensor, *, impl: str = "ref") -> None:
    """Copy entries `from_K` of `held` (uint8 codes [M,C], scales [M,G]) to places `to_K` of `into`, in place; int64 places.

    An entry from -1 is zeros; two entries must not share a place. `impl`: `ref` or `gpu`. Raises ValueError for entries of other
    widths, or an impl that there is not; GpuUnavailable.
    """
    widths = [(codes.shape[1], scales.shape[1]) for codes, scales in (held, into)]
    if widths[0] != widths[1] or from_K.shape != to_K.shape:
        raise ValueError(
            f"entries of {widths[0]} bytes into {widths[1]}, {len(from_K)} into {len(to_K)} places; they must be equal"
        )
    if impl == "ref":
        move_rows_ref(held, from_K, into, to_K)
    elif impl == "gpu":
        from kvist.kernels.window_rows.gpu import move_rows_gpu

        move_rows_gpu(held, from_K, into, to_K)
    else:
        raise ValueError(f"window_rows has no impl {impl!r}; 'ref' or 'gpu'")
