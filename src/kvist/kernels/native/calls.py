"""What every native call needs: argument types, contiguous float32 inputs, outputs, the number of threads.

Must not know what the operators mean.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvist.kernels.native.build import library

LOG = logging.getLogger("kvist.kernels")
FORMATS = {"fp8": 0, "mxfp4": 1, "main_fp4": 2}

MOST_THREADS = 64


def wanted_threads() -> int:
    """What `KVIST_THREADS` says; without it or with 0 as many threads as this process has processors. Raises ValueError."""
    wanted = os.environ.get("KVIST_THREADS", "").strip() or "0"
    if not wanted.isdecimal():
        raise ValueError(f"KVIST_THREADS is {wanted!r}; give a number of threads, or 0 for one a processor")
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(int(wanted) or there, MOST_THREADS)


_threads = wanted_threads()
_CODES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "i": ctypes.c_int, "f": ctypes.c_float}
_SIGNATURES = {
    "kvist_quantise": "ppnnii",
    "kvist_ask_large_pages": "pn",
    "kvist_pack": "pnnip",
    "kvist_pack_fp4": "ppnnp",
    "kvist_read_rows": "innpnpp",
    "kvist_linear": "pnnnpinpiii",
    "kvist_rms_norm": "pppnnfi",
    "kvist_group_pool": "pppnnn",
    "kvist_rotate": "ppppnnnnii",
    "kvist_enter": "pppippppppp" + "nnniffi",
    "kvist_leave": "pppppnnni",
    "kvist_route": "pnpinnpppnfifppi",
    "kvist_experts": "ppppppp" + "nnnnnfiii",
    "kvist_attend": "ppppppp" + "nnnnnii",
    "kvist_select": "ppppppp" + "nnnnnnnni",
    "kvist_pages_write": "pppppni",
    "kvist_pages_attend": "pppnpppnppnii",
    "kvist_pages_select": "ppnppppp" + "nnnnni",
    "kvist_rings_write": "ppnp",
    "kvist_layers": "ppnpppp",
    "kvist_windows": "pppn",
    "kvist_ngram_rows": "ppnnpnnn" + "pppnnnp",
    "kvist_table_rows": "ppnnpnp",
    "kvist_read_memory": "pni",
    "kvist_integer_dots": "ni",
    "kvist_uniform": "nnnnp",
    "kvist_uniform_at": "pppnnp",
}
_RESULTS = {
    "kvist_pack": ctypes.c_int,
    "kvist_pack_fp4": ctypes.c_int,
    "kvist_read_rows": ctypes.c_int64,
    "kvist_ngram_rows": ctypes.c_int64,
    "kvist_table_rows": ctypes.c_int64,
    "kvist_read_memory": ctypes.c_int64,
    "kvist_integer_dots": ctypes.c_int64,
}
_CLAIMING = (
    "kvist_linear",
    "kvist_enter",
    "kvist_route",
    "kvist_experts",
    "kvist_attend",
    "kvist_select",
    "kvist_pages_attend",
    "kvist_pages_select",
    "kvist_layers",
    "kvist_windows",
)
"""Functions that need scratch memory: they return an int64, below zero minus the bytes that could not be had."""
NATIVE_FUNCTIONS = tuple(_SIGNATURES)


@cache
def native_or_none() -> ctypes.CDLL | None:
    """The library with its argument types set, or None where there is no compiler (the caller then runs the reference).

    Its functions raise MemoryError, with the bytes, where scratch memory cannot be had; their outputs then hold anything.
    """
    native = library()
    if native is not None:
        for name, codes in _SIGNATURES.items():
            function = getattr(native, name)
            function.argtypes = [_CODES[code] for code in codes]
            function.restype = ctypes.c_int64 if name in _CLAIMING else _RESULTS.get(name)
            if name in _CLAIMING:
                function.errcheck = _require_memory
    return native


def _require_memory(result: int, function: Any, _: object) -> int:
    if result < 0:
        raise MemoryError(
            f"{function.__name__} needs {-result:,} bytes of scratch memory that the system does not give; "
            "run fewer rows at once (step_cost, chunk), or give the process more memory"
        )
    return result


def f32(x: Tensor) -> Tensor:
    """The same values as contiguous float32 on the CPU; no copy if they are that already."""
    if x.dtype is torch.float32 and x.is_contiguous():
        return x
    return x.to(torch.float32).contiguous()


def i64(x: Tensor) -> Tensor:
    """The same integers as contiguous int64."""
    return x if x.dtype is torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()


def empty(*shape: int) -> Tensor:
    """Uninitialised float32 that the callee fills completely."""
    return torch.empty(shape, dtype=torch.float32)


class _Own(threading.local):
    """What a thread has been allowed, None where that is what the process is."""

    most: int | None = None


_own = _Own()


def threads() -> int:
    """As many threads as this process has processors; `KVIST_THREADS` and `at_most_threads` say otherwise."""
    most = _own.most
    return _threads if most is None or most > _threads else most


@contextmanager
def at_most_threads(count: int) -> Iterator[None]:
    """Native calls of this Python thread use at most `count` threads inside, so that other callers find theirs free."""
    assert count >= 1, count
    before, _own.most = _own.most, min(count, threads())
    try:
        yield
    finally:
        _own.most = before


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch's own operators on one thread inside: their idle workers spin and would take the cores from native ones."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def format_code(name: str) -> int:
    """The library's number of a quantiser. Raises ValueError for an unknown one."""
    if name not in FORMATS:
        raise ValueError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def refuse_gradients(*tensors: Tensor) -> None:
    """Native operators have no backward pass: raise ValueError rather than cut a graph without a word."""
    if not torch.is_grad_enabled():
        return
    if any(tensor.requires_grad for tensor in tensors):
        raise ValueError("impl 'cpu' has no gradients; train with impl 'ref' or wrap inference in torch.no_grad()")


@cache
def reference_runs(operator: str, kind: str) -> None:
    """Say once that an operator of impl `cpu` has no native code for this kind of input and runs the reference."""
    LOG.warning("impl 'cpu' of %s runs the reference operator for %s; native code takes float32", operator, kind)
