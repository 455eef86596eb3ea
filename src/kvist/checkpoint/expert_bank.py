"""Routed experts that stay in their files: read as routing asks for them, through one bounded cache for all layers.

Owns which bytes an expert is, in which form it is held, portions and look-ahead. Must not know routing or sums. An expert is
held as the file stores it (packed FP4: half a byte a value), re-ordered for the native operator where that runs, and otherwise
dequantised one at a time while it is used; so its values, and the bits of every result, are those of a resident model.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, overload

import torch
from torch import Tensor

from kvist.checkpoint.bounded import BoundedCache, CacheCounters
from kvist.checkpoint.formats import Entry
from kvist.checkpoint.reads import FileReads, ReadFailed, adjacent_runs, private_buffer
from kvist.checkpoint.tensors import TORCH_DTYPES, TensorFiles, dequantise
from kvist.config import ModelConfig
from kvist.inventory import Parameter, Storage, parameters
from kvist.kernels.experts import Triple
from kvist.kernels.native import Packed, native_or_none, pack, pack_fp4, packed_fp4_bytes
from kvist.model.numerics import Numerics

MAX_FAILURES = 64
Key = tuple[int, int]
"""(layer, expert); layers count draft blocks after the backbone."""
Planes = tuple[tuple[Tensor, Tensor | None], ...]
"""(codes, scales or None) of w1, w2, w3 as the file stores them."""


@dataclass(frozen=True)
class Held:
    """One expert in memory: stored planes, or its three packed weights for the native operator."""

    planes: Planes | None
    packed: tuple[Packed, Packed, Packed] | None
    buffer: Tensor | None = None
    """What both are views of, if it can be used for another expert afterwards."""


class ExpertStore:
    """All routed experts of an opened checkpoint behind a cache of `budget_bytes` of host memory.

    `numerics` decides the form in which experts are held and handed out, `device` where dequantised ones go;
    `device_budget_bytes` of stored ones are kept there too. Beside the budgets exist one expert a reading thread, and one
    expert's dequantised values where the native operator does not run. `look_ahead`: read what the next layer used last time
    while this one computes. `isolate` (an attribute, off): an expert that cannot be read makes NaN of the rows that chose it, and
    its error is kept for `take_failures`; off, the error is raised and the whole pass fails. Raises ValueError for a budget
    below the largest expert.
    """

    def __init__(
        self,
        files: TensorFiles,
        config: ModelConfig,
        numerics: Numerics,
        budget_bytes: int,
        *,
        device: torch.device | str = "cpu",
        device_budget_bytes: int | None = None,
        look_ahead: bool = True,
        reads: FileReads | None = None,
        readers: int = 2,
    ) -> None:
        self.files, self.numerics, self.device, self.look_ahead = files, numerics, torch.device(device), look_ahead
        self.reads = reads or FileReads()
        self._thread = threading.local()
        self._spare: deque[Tensor] = deque(maxlen=2 * readers + 2)
        self.isolate = False
        self.failures: deque[ReadFailed] = deque(maxlen=MAX_FAILURES)
        native = numerics.product_impl == "cpu" and numerics.dtype is torch.float32 and self.device.type == "cpu"
        self.native = native and native_or_none() is not None
        self.experts = _expert_parameters(config)
        largest = max((self.nbytes(key) for key in self.experts), default=0)
        front_bytes = budget_bytes if device_budget_bytes is None else device_budget_bytes
        for what, budget in (("expert", budget_bytes), ("device expert", front_bytes)):
            if budget < largest:
                raise ValueError(
                    f"an {what} budget of {budget:,} bytes holds no expert: the largest takes {largest:,} bytes; "
                    f"give at least that, better {2 * config.n_activated_experts} times as much"
                )
        self.portion_bytes = max(largest, front_bytes // 2)
        self.host: BoundedCache[Key, Held] = BoundedCache(
            self.load, self.nbytes, budget_bytes, name="experts", workers=readers, evicted=self.recycle
        )
        self.front = self.host
        if device_budget_bytes is not None:
            if self.native:
                raise ValueError("native operators read experts from host memory; a device budget needs another device or impl")
            self.front = BoundedCache(self.upload, self.nbytes, front_bytes, name="device-experts", workers=readers)
        layers = sorted({layer for layer, _ in self.experts})
        self.banks: Mapping[int, FileBank] = {layer: FileBank(self, layer) for layer in layers}
        for layer, following in pairwise(layers):
            self.banks[layer].following = self.banks[following]
        if layers:
            # After the last layer comes the next token's first one.
            self.banks[layers[-1]].following = self.banks[layers[0]]

    def counters(self) -> CacheCounters:
        """Hits, misses, bytes and seconds of host memory since the start."""
        return self.host.counters()

    def device_counters(self) -> CacheCounters | None:
        """The same of the device's cache, if there is one."""
        return None if self.front is self.host else self.front.counters()

    def close(self) -> None:
        """Stop the reading threads; the model must not run afterwards."""
        self.front.close()
        self.host.close()

    def nbytes(self, key: Key) -> int:
        """Bytes that one expert takes while held."""
        if self.native:
            return sum(_packed_bytes(parameter) for parameter in self.experts[key])
        return sum(parameter.nbytes for parameter in self.experts[key])

    def load(self, key: Key) -> Held:
        """Read one expert. Raises `ReadFailed` naming the file, the tensor and the expert."""
        three = self.experts[key]
        entries = [self.files.entry(spec.name) for parameter in three for spec in parameter.specs()]
        raw: dict[str, Tensor] = {}
        whole = self._staging(three) if self.native else self._buffer(self.nbytes(key))
        buffer = whole
        for run in adjacent_runs(entries):
            size = sum(entry.nbytes for entry in run)
            raw |= self._read(run, key, buffer[:size])
            buffer = buffer[size:]
        planes = tuple((raw[parameter.name], raw.get(parameter.scale_name)) for parameter in three)
        if not self.native:
            return Held(planes, None, whole)
        room = whole = self._buffer(self.nbytes(key))
        packed = []
        for parameter, (codes, scales) in zip(three, planes, strict=True):
            size = _packed_bytes(parameter)
            packed.append(_pack(parameter, codes, scales, room[:size]))
            room = room[size:]
        return Held(None, (packed[0], packed[1], packed[2]), whole)

    def upload(self, key: Key) -> Held:
        """The stored planes of one expert on the device, by way of host memory."""
        with self.host.hold([key]) as (held,):
            assert held.planes is not None
            return Held(
                tuple(
                    (_there(codes, self.device, copy=True), _there(scales, self.device, copy=True))
                    for codes, scales in held.planes
                ),
                None,
            )

    def poisoned(self, key: Key, error: BaseException) -> Held:
        """For `isolate`: an expert whose outputs are all NaN in place of one that could not be read; keeps the `ReadFailed`.

        A batch then goes on, and only the rows that chose the expert are lost. Raises any other error.
        """
        if not isinstance(error, ReadFailed):
            raise error
        self.failures.append(error)
        planes: list[tuple[Tensor, Tensor | None]] = []
        for parameter in self.experts[key]:
            code, *scale = parameter.specs()
            if not scale:
                planes.append((torch.full((1, 1), torch.nan).expand(code.shape), None))
                continue
            planes.append((torch.zeros(code.shape, dtype=torch.uint8), torch.full(scale[0].shape, 255, dtype=torch.uint8)))
        if not self.native:
            return Held(tuple((_there(c, self.device), _there(s, self.device)) for c, s in planes), None)
        first, second, third = (
            _pack(parameter, codes, scales, private_buffer(_packed_bytes(parameter)))
            for parameter, (codes, scales) in zip(self.experts[key], planes, strict=True)
        )
        return Held(None, (first, second, third))

    def take_failures(self) -> list[ReadFailed]:
        """The failures since the last call, oldest first; what `isolate` has turned into NaN rows."""
        taken = []
        while self.failures:
            taken.append(self.failures.popleft())
        return taken

    def recycle(self, held: Held) -> None:
        """Keep an evicted expert's memory for the next one: fresh memory costs more than reading from the page cache."""
        if held.buffer is not None:
            self._spare.append(held.buffer)

    def _buffer(self, size: int) -> Tensor:
        try:
            while len(spare := self._spare.pop()) != size:
                continue
        except IndexError:
            return private_buffer(size)
        return spare

    def _staging(self, three: tuple[Parameter, ...]) -> Tensor:
        """This thread's own buffer for the stored bytes of an expert, kept: they live only until they are packed."""
        size = sum(parameter.nbytes for parameter in three)
        held: Tensor | None = getattr(self._thread, "buffer", None)
        if held is None or len(held) < size:
            held = self._thread.buffer = private_buffer(size)
        return held[:size]

    def values(self, key: Key, held: Held) -> Triple:
        """What the operator multiplies with: packed weights, or values in the model's dtype on its device."""
        if held.packed is not None:
            return held.packed
        assert held.planes is not None
        first, second, third = (
            _dequantise(parameter, _there(codes, self.device), _there(scales, self.device), self.numerics.dtype)
            for parameter, (codes, scales) in zip(self.experts[key], held.planes, strict=True)
        )
        return first, second, third

    def _read(self, run: list[Entry], key: Key, buffer: Tensor) -> dict[str, Tensor]:
        """One read for tensors that lie side by side in the file; each is a view of the buffer."""
        what = f"tensor {run[0].name!r}" + (f" to {run[-1].name!r}" if len(run) > 1 else "")
        what += f" (expert {key[1]} of layer {key[0]})"
        self.reads.range_into(run[0].file, run[0].offset, buffer.numpy().data, what)
        views, at = {}, 0
        for entry in run:
            views[entry.name] = buffer[at : at + entry.nbytes].view(TORCH_DTYPES[entry.dtype]).view(entry.shape)
            at += entry.nbytes
        return views


class FileBank:
    """The experts of one layer; satisfies the operator's `ExpertBank`."""

    def __init__(self, store: ExpertStore, layer: int) -> None:
        self.store, self.layer = store, layer
        self.following: FileBank | None = None
        self.used: list[int] = []
        self.count = sum(1 for at, _ in store.experts if at == layer)

    def portions(self, ids: Sequence[int]) -> Sequence[AbstractContextManager[Sequence[tuple[int, Triple]]]]:
        """Runs of at most half the budget: while one is computed with, what comes after it is read.

        After the last come the next layer's likely experts: those it used last time, or all of them in the wake of a batch
        that wants most of this layer.
        """
        store = self.store
        cuts = [0]
        filled = 0
        for at, index in enumerate(ids):
            nbytes = store.nbytes((self.layer, index))
            if filled + nbytes > store.portion_bytes and filled:
                cuts.append(at)
                filled = 0
            filled += nbytes
        self.used = list(ids)
        keys = [(self.layer, index) for index in ids]
        parts = [keys[start:stop] for start, stop in zip(cuts, [*cuts[1:], len(keys)], strict=True)] if keys else []
        after = self._likely_next(ids) if store.look_ahead else []
        return [
            self._hold(part, keys[stop:] + after if store.look_ahead else [])
            for part, stop in zip(parts, [*cuts[1:], len(keys)], strict=False)
        ]

    @contextmanager
    def _hold(self, keys: list[Key], then: list[Key]) -> Iterator[Sequence[tuple[int, Triple]]]:
        store = self.store
        with store.front.hold(keys, then, store.poisoned if store.isolate else None) as held:
            yield _Values(self.store, keys, held)

    def _likely_next(self, ids: Sequence[int]) -> list[Key]:
        bank = self.following
        if bank is None:
            return []
        likely = range(bank.count) if 2 * len(ids) > self.count else bank.used
        return [(bank.layer, index) for index in likely]


class _Values(Sequence[tuple[int, Triple]]):
    """(index, weights) of held experts, made as each is asked for: dequantised ones are large and used one after another."""

    def __init__(self, store: ExpertStore, keys: Sequence[Key], held: Sequence[Held]) -> None:
        self.store, self.keys, self.held = store, keys, held

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, at: Any) -> Any:
        return self.keys[at][1], self.store.values(self.keys[at], self.held[at])


def _expert_parameters(config: ModelConfig) -> dict[Key, tuple[Parameter, Parameter, Parameter]]:
    found: dict[Key, list[Parameter]] = {}
    for parameter in parameters(config):
        if is_routed_expert(parameter):
            index = int(parameter.name.split(".experts.")[1].split(".")[0])
            found.setdefault((parameter.layer, index), []).append(parameter)
    return {key: (three[0], three[1], three[2]) for key, three in found.items()}


def is_routed_expert(parameter: Parameter) -> bool:
    """True for the weights that an `ExpertStore` hands out: a resident model without them is small."""
    return ".experts." in parameter.name


def _packed_bytes(parameter: Parameter) -> int:
    rows, columns = parameter.shape
    if parameter.storage is Storage.FP4:
        return packed_fp4_bytes(rows, columns)
    return -(-rows // 16) * 16 * -(-columns // 2) * 4


def _pack(parameter: Parameter, codes: Tensor, scales: Tensor | None, room: Tensor) -> Packed:
    if parameter.storage is Storage.FP4:
        assert scales is not None
        return pack_fp4(codes, scales, room)
    made = pack(_dequantise(parameter, codes, scales, torch.float32))
    data = room.view(torch.int32).view(made.data.shape)
    data.copy_(made.data)
    return made._replace(data=data, pointer=data.data_ptr())


@overload
def _there(plane: Tensor, device: torch.device, *, copy: bool = False) -> Tensor: ...
@overload
def _there(plane: None, device: torch.device, *, copy: bool = False) -> None: ...
def _there(plane: Tensor | None, device: torch.device, *, copy: bool = False) -> Tensor | None:
    return None if plane is None else plane.to(device, copy=copy)


def _dequantise(parameter: Parameter, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        return codes.to(dtype)
    return dequantise(codes, scales, parameter.storage, dtype)
