"""CUDA C++ kernels of this package: compiled by NVRTC (it comes with torch's CUDA build), launched on torch's current stream.

A source is compiled once for the card's own architecture and kept in the user's cache folder. Must not know operators.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from kvist.kernels.device.require import GpuUnavailable
from kvist.kernels.native.build import SEAL_BYTES, cache_folder, seal, whole

_SHARED_BYTES_ATTRIBUTE = 8
_LARGE_CLUSTERS_ATTRIBUTE = 14
_OVERLAP_ATTRIBUTE = 6
_TOGETHER_ATTRIBUTE = 2
_CLUSTER_ATTRIBUTE = 4
PORTABLE_CLUSTER = 8
"""Blocks of a cluster on any card; Hopper takes 16 of a kernel that asks for it."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


class CudaError(RuntimeError):
    """A CUDA driver call failed; the message holds what it said."""


@functools.cache
def _compiler() -> ctypes.CDLL:
    """NVRTC of torch's CUDA version. Raises GpuUnavailable where none is found."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    beside = [path for folder in folders for path in glob.glob(f"{folder}/**/{name}", recursive=True)]
    for path in [*beside, name, f"/usr/local/cuda/lib64/{name}"]:
        try:
            # NVRTC opens its builtins by name, which finds them only where they are loaded already.
            for builtins in glob.glob(f"{Path(path).parent}/libnvrtc-builtins.so*") if "/" in path else []:
                ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise GpuUnavailable(
        f"impl 'gpu' compiles CUDA C++ with {name}, which was not found; pip install nvidia-cuda-nvrtc, or use 'ref'"
    )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _checked(code: int, what: str) -> None:
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise CudaError(f"{what}: {(text.value or b'').decode() or code}")


def compile_source(source: str, name: str, architecture: str) -> bytes:
    """A cubin of CUDA C++ for e.g. "sm_90a". Raises GpuUnavailable with the compiler's log."""
    nvrtc, program = _compiler(), ctypes.c_void_p()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None):
        raise GpuUnavailable(f"impl 'gpu': NVRTC does not take {name}; impl 'ref' runs without it")
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    if failed:
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        said = log.value.decode(errors="replace")[:2000]
        raise GpuUnavailable(
            f"impl 'gpu': {name} does not compile for {architecture}; impl 'ref' runs without it. It says:\n{said}"
        )
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    binary = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, binary)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def built(source: str, name: str, architecture: str) -> bytes:
    """`compile_source`, from the user's cache folder where it lies there already, as it was written."""
    key = "\0".join((source, architecture, torch.version.cuda or "", torch.__version__))
    file = f"{Path(name).stem}-{hashlib.sha256(key.encode()).hexdigest()[:24]}.cubin"
    path = cache_folder(file) / file
    if path.exists() and whole(path):
        return path.read_bytes()[:-SEAL_BYTES]
    binary = compile_source(source, name, architecture)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as written:
        written.write(binary)
    seal(Path(written.name))
    os.replace(written.name, path)
    return binary


class Kernel:
    """A function of a compiled source that takes one structure by value."""

    def __init__(self, function: ctypes.c_void_p, shared_bytes: int) -> None:
        self._function = function
        self._shared_bytes = shared_bytes
        if shared_bytes > 48 << 10:
            _checked(_driver().cuFuncSetAttribute(function, _SHARED_BYTES_ATTRIBUTE, shared_bytes), "shared memory of a kernel")

    def launch(
        self, argument: ctypes.Structure, blocks: int, threads: int, *, overlap: bool = False, together: bool = False,
        cluster: int = 1, shared_bytes: int | None = None,
    ) -> None:  # fmt: skip
        """Run on the current stream; `overlap`: start before the kernel before it has ended (it must wait by itself).

        `together`: all blocks run side by side, so that they may wait for each other. `cluster`: so many consecutive blocks do
        and see each other's shared memory. `shared_bytes`: less dynamic shared memory than the kernel was made for.
        """
        if cluster > PORTABLE_CLUSTER:
            _checked(_driver().cuFuncSetAttribute(self._function, _LARGE_CLUSTERS_ATTRIBUTE, 1), "large clusters of a kernel")
        chosen: list[tuple[int, tuple[int, ...]]] = []
        chosen += [(_OVERLAP_ATTRIBUTE, (1,))] * overlap
        chosen += [(_TOGETHER_ATTRIBUTE, (1,))] * together
        chosen += [(_CLUSTER_ATTRIBUTE, (cluster, 1, 1))] * (cluster > 1)
        attributes = (_Attribute * 3)()
        for attribute, (number, values) in zip(attributes, chosen, strict=False):
            attribute.id, attribute.value[: len(values)] = number, values
        config = _Config(
            grid=(blocks, 1, 1), block=(threads, 1, 1), shared_bytes=self._shared_bytes if shared_bytes is None else shared_bytes,
            stream=torch.cuda.current_stream().cuda_stream, attributes=attributes, attribute_count=len(chosen),
        )  # fmt: skip
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        _checked(_driver().cuLaunchKernelEx(ctypes.byref(config), self._function, arguments, None), "launch of a kernel")


@functools.cache
def kernels(
    paths: tuple[Path, ...],
    shared_bytes: tuple[tuple[str, int], ...],
    device: int,
    constants: tuple[tuple[str, int], ...] = (),
) -> dict[str, Kernel]:
    """The named kernels of source files put together, with their dynamic shared memory, built for the card `device`.

    `constants` stand before the sources.
    """
    major, minor = torch.cuda.get_device_capability(device)
    torch.cuda.current_stream(device)
    name = paths[-1].name
    given = "".join(f"static const int {constant} = {value};\n" for constant, value in constants)
    binary = built(given + "".join(path.read_text() for path in paths), name, f"sm_{major}{minor}a")
    module: Any = ctypes.c_void_p()
    _checked(_driver().cuModuleLoadData(ctypes.byref(module), binary), f"loading {name}")
    found = {}
    for kernel, size in shared_bytes:
        function = ctypes.c_void_p()
        _checked(_driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.encode()), f"{kernel} in {name}")
        found[kernel] = Kernel(function, size)
    return found
