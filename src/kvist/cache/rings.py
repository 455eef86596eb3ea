"""Per-request state that is addressed by position and never grows: window entries a layer, unfinished tokens a source.

A cell is position modulo ring size, so a rejected draft needs no rollback: its positions are computed again and overwrite.
Owns which positions a ring still holds. Must not know pages, models or batches. Design section 5.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORIGIN, LOW, STOP = 0, 1, 2
EMPTY = -1


class WindowRings:
    """The last entries of every layer and slot, `values` [layers, slots, window + verify_rows, width].

    `state` int64 [layers, slots, 3] on the CPU: the first position since the slot was opened (-1: none), the first one not
    overwritten since, the one after the newest.
    """

    def __init__(
        self, layers: int, slots: int, window: int, verify_rows: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.window, self.size = window, window + verify_rows
        self.values = torch.zeros(layers, slots, self.size, width, dtype=dtype, device=device)
        self.state = torch.full((layers, slots, 3), EMPTY, dtype=torch.int64)

    @property
    def nbytes(self) -> int:
        """Bytes of all rings' entries."""
        return self.values.nbytes

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Views of one layer's values and state."""
        return self.values[layer], self.state[layer]

    def clear(self, slot: int) -> None:
        """Forget a slot's entries in all layers."""
        self.state[:, slot] = EMPTY

    def first(self, layer: int, slot: int, position: int) -> int:
        """The first of the up to `window` positions before `position` that the ring holds (`position`: none).

        A pass that starts behind the newest entry plus one, or not after the oldest, starts a new run of entries: its
        window sees nothing older. AssertionError if entries that a causal query would see were overwritten.
        """
        origin, low, stop = self.state[layer, slot].tolist()
        if origin == EMPTY or position > stop or position <= origin:
            return position
        if max(origin, position - self.window + 1) < low:
            raise AssertionError(
                f"layer {layer}, slot {slot}, position {position}: the ring of {self.size} holds [{low}, {stop}) only; "
                f"a pass took back more than verify_rows = {self.size - self.window} rows"
            )
        return max(low, position - self.window)

    def read(self, layer: int, slot: int, first: int, stop: int) -> Tensor:
        """Entries of positions [first, stop), [stop - first, width]."""
        cells = torch.arange(first, stop, device=self.values.device) % self.size
        return self.values[layer, slot].index_select(0, cells)

    def write(self, layer: int, slot: int, position: int, entries_TC: Tensor) -> None:
        """Keep entries of positions from `position` on; of more than the ring holds, the last ones."""
        count = len(entries_TC)
        if not count:
            return
        kept, stop = min(count, self.size), position + count
        cells = torch.arange(stop - kept, stop, device=self.values.device) % self.size
        self.values[layer, slot].index_copy_(0, cells, entries_TC[count - kept :])
        origin, low, newest = self.state[layer, slot].tolist()
        if origin == EMPTY or position > newest or position <= origin:
            origin = low = position
        low = max(low, stop - self.size)
        self.state[layer, slot] = torch.tensor([origin, low, stop])


class TailRings:
    """Raw channels and gates of the last tokens of every slot, for one source with ratio > 1.

    `kv` and `gate` [slots, ratio - 1 + verify_rows, width] float32: enough for the group that a rejected draft had finished.
    """

    def __init__(self, slots: int, ratio: int, verify_rows: int, width: int, device: torch.device) -> None:
        self.size = ratio - 1 + verify_rows
        self.kv = torch.zeros(slots, self.size, width, device=device)
        self.gate = torch.zeros(slots, self.size, width, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of both rings."""
        return self.kv.nbytes + self.gate.nbytes
