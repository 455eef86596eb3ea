"""Compiles the Triton kernels that a call would launch for Hopper, without a GPU: what would run is built, nothing runs.

Triton's compiler and ptxas need no device. `Built` says what ptxas reports. Knows no operator.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")
POINTERS = {
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


@dataclass(frozen=True, kw_only=True)
class Built:
    """One kernel as built for sm_90a: its name, registers a thread, bytes of local memory (stack or spills), shared bytes."""

    name: str
    registers: int
    local_bytes: int
    shared_bytes: int
    cubin: bytes

    def sass(self) -> str:
        """Disassembly, with Triton's own copy of the tool."""
        return self._tool("--dump-sass")

    def _tool(self, option: str) -> str:
        return _cuobjdump(self.cubin, option)


def _cuobjdump(cubin: bytes, option: str) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _build(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Built:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    bound = inspect.signature(kernel.fn).bind(*args, **kwargs)
    bound.apply_defaults()
    signature, constants, attributes = {}, {}, {}
    for place, (param, value) in enumerate(zip(kernel.params, bound.arguments.values(), strict=True)):
        if param.is_constexpr or value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 1):
            signature[param.name] = "constexpr"
            constants[(place,)] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
            attributes[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            signature[param.name] = "i32"
            if value % 16 == 0:
                attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    cubin = made.asm["cubin"]
    usage = _cuobjdump(cubin, "--dump-resource-usage")
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Built(
        name=made.metadata.name, registers=numbers["REG"], local_bytes=numbers["STACK"] + numbers["LOCAL"],
        shared_bytes=made.metadata.shared, cubin=cubin,
    )  # fmt: skip


@contextmanager
def building() -> Iterator[list[Built]]:
    """Inside, launching a kernel builds it instead; the list fills with what was built."""
    from triton.runtime.jit import JITFunction

    built: list[Built] = []
    run = JITFunction.run
    JITFunction.run = lambda self, *args, grid, warmup, **kwargs: built.append(_build(self, args, kwargs))
    try:
        yield built
    finally:
        JITFunction.run = run
