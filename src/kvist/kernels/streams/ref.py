"""Both ends of the streams in plain torch. Knows no layers. Shapes: N rows, S streams, D model width, V ids."""

from __future__ import annotations

from torch import Tensor


def embed_streams_ref(token_N: Tensor, embed_VD: Tensor, streams: int) -> Tensor:
    """See `embed_streams`."""
    return embed_VD[token_N].unsqueeze(1).repeat(1, streams, 1)


def mean_streams_ref(x_NSD: Tensor) -> Tensor:
    """See `mean_streams`."""
    return x_NSD.float().mean(1).to(x_NSD.dtype)
