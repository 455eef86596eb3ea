"""What a compressor gets from the memory that holds its unfinished tokens. Knows no requests.

Shapes: G groups of R tokens, C channels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Compression groups that became complete in a call: channels of their R tokens and each group's first position.

    `counts` holds the number of groups of each request of the batch, in the batch's order.
    """

    kv_GRC: Tensor
    gate_GRC: Tensor | None
    positions_G: Tensor
    counts: tuple[int, ...]
