"""The ends of the streams: embedded tokens copied into all of them, and their means, which the draft blocks look at (facts 2, 9).

Implementations: `ref` (torch), `gpu` (Triton).
"""

from __future__ import annotations

from torch import Tensor

from kvist.kernels.device import require_gpu
from kvist.kernels.streams.ref import embed_streams_ref, mean_streams_ref

__all__ = ["embed_streams", "mean_streams"]


def embed_streams(token_N: Tensor, embed_VD: Tensor, streams: int, *, impl: str = "ref") -> Tensor:
    """Rows of the embedding for int64 ids, `streams` equal copies each: [N,S,D]. Raises ValueError for an unknown `impl`,
    GpuUnavailable where `gpu` cannot run."""
    if _on_gpu(impl):
        from kvist.kernels.streams.gpu import embed_streams_gpu

        return embed_streams_gpu(token_N, embed_VD, streams)
    return embed_streams_ref(token_N, embed_VD, streams)


def mean_streams(x_NSD: Tensor, *, impl: str = "ref") -> Tensor:
    """Mean over the streams [N,D], summed in float32, in the dtype of x. Raises as `embed_streams`."""
    if _on_gpu(impl):
        from kvist.kernels.streams.gpu import mean_streams_gpu

        return mean_streams_gpu(x_NSD, x_NSD.new_empty(len(x_NSD), x_NSD.shape[2]), 0)
    return mean_streams_ref(x_NSD)


def _on_gpu(impl: str) -> bool:
    if impl not in ("ref", "gpu"):
        raise ValueError(f"streams have no impl {impl!r}; known: ref, gpu")
    if impl == "gpu":
        require_gpu()
    return impl == "gpu"
