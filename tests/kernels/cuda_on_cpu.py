"""Builds the package's CUDA sources for the processor, so that their arithmetic, layouts and barriers run without a GPU.

Inline assembly is replaced by what it means (`cuda_on_cpu.h`); everything else is compiled as it stands. Knows the names of the
small functions that hold assembly, not what kernels compute.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).parent
MEANING = {
    "shared_address": "return (u32)((u8*)p - shared_memory);",
    "barrier_init": "arrivals_init(at, count);",
    "arrive": "arrivals_arrive(at);",
    "wait": "arrivals_wait(at, parity);",
    "passed": "return arrivals_passed(at, parity);",
    "tell_wide": "*p = x;",
    "seen_wide": "take_turns(); return *p;",
    "group_barrier": "block->gates[name].pass(threads);",
    "cluster_arrive": "cluster_enter();",
    "cluster_announce": "cluster_enter();",
    "cluster_wait": "cluster_leave();",
    "address_in": "return at + ((block + 1) << 20);",
    "send_run": "memcpy(in_cluster(at), from, bytes), arrivals_sent(barrier, bytes);",
    "expect_sent": "arrivals_expect(at, bytes);",
    "products_wait": "__syncwarp();",
    "power2": "return exp2f(x);",
    "bfloat_pair": "return two_bfloats(low, high);",
    "times": "return two_bfloats(of_bfloat(a & 0xFFFF) * of_bfloat(b & 0xFFFF), of_bfloat(a >> 16) * of_bfloat(b >> 16));",
    "fp4_factor": "float f = of_e4m3(e4m3) * ldexpf(1, 117); return two_bfloats(f, f);",
    "fp4_factors": "float a = of_e4m3(scales & 255) * ldexpf(1, 117), b = of_e4m3(scales >> 8) * ldexpf(1, 117); "
    "return {two_bfloats(a, a), two_bfloats(b, b)};",
    "factor_pair": "return two_bfloats(of_e4m3(scales & 255) * ldexpf(1, 117), of_e4m3(scales >> 8 & 255) * ldexpf(1, 117));",
    "copy_word": "*to = *(const u32*)from;",
    "copy_unit": "real ? memcpy(to, from, 16) : memset(to, 0, 16);",
    "copy_once": "memcpy(shared_memory + to + AT, (const u8*)from + AT, 16);",
    "fetch_unit": "memcpy(to, from, 16);",
    "fetch_word": "memcpy(to, from, 4);",
    "count_if": "if (order) bins[order >> BIN_SHIFT]++;",
    "word_of_others": "take_turns(); return *p;",
    "count_at": "if (bin >= 0) bins[bin]++;",
    "glimpse": "take_turns(); return *p;",
    "look_up": "return __byte_perm(low, high, selector);",
    "pair_of_others": "take_turns(); return *p;",
    "arrive_at_group": "block->gates[name].enter(threads);",
    "expect": "arrivals_arrive(at);",
    "bulk_copy": "memcpy(to, from, bytes);",
    "seen": "take_turns(); return *p;",
    "publish": "*(u32*)p += by, progress++;",
    "seen_here": "take_turns(); return *p;",
    "tell_here": "*p = x, progress++;",
    "reciprocal": "return 1.f / x;",
    "warp_max": "for (int by = 16; by; by >>= 1) x = max(x, __shfl_xor_sync(~0u, x, by)); return x;",
    "warp_min": "for (int by = 16; by; by >>= 1) x = min(x, __shfl_xor_sync(~0u, x, by)); return x;",
    "product_16": "multiply_16<of_bfloat>(d, a0, a1, a2, a3, b0, b1);",
    "nearest_fp8": "auto near = [](float x) { u32 c; return copysignf(e4m3_value(min(fabsf(x), 448.f), c), x); }; "
    "return {near(first), near(second)};",
    "product_32": "multiply(d, 32, a, 0, b, keep, false);",
    "product_128": "multiply(d, 128, a, 0, b, keep, false);",
    "add_product": "multiply(d, N, a, 0, b, 1, false);",
    "bulk_store": "memcpy(to, from, bytes);",
    "store_columns": "store_turned(at, a, b, c, d);",
    "product_scores": "multiply(d, 64, nullptr, a, b, keep, false);",
    "values_192": "multiply(d, 192, nullptr, a, b, 1, true);",
    "own_values_192": "multiply(d, 192, p, 0, b, 1, true);",
    "own_values_64": "multiply(d, 64, p, 0, b, 1, true);",
    "own_values_32": "multiply(d, 32, p, 0, b, 1, true);",
    "values_128": "multiply(d, 128, nullptr, a, b, 1, true);",
    "values_64": "multiply(d, 64, nullptr, a, b, 1, true);",
    "values_32": "multiply(d, 32, nullptr, a, b, 1, true);",
    "place_in_cluster": "return blockIdx.x % blocks_of_cluster;",
    "number_of_cluster": "return blockIdx.x / blocks_of_cluster;",
    "add_scores": "multiply(d, 2 * SUMS, a, 0, b, 1, false);",
    "add_values": "multiply(d, 2 * SUMS, nullptr, a, b, 1, false, true);",
    "store_rows": "store_straight(at, a);",
    "write_pair_to": "*(float2*)in_cluster(at) = {x, y};",
    "tell": "*p = x;",
    "nearest_halves": "auto near = [](float x) { u32 c; return copysignf(e4m3_value(min(fabsf(x), 448.f), c), x); }; "
    "return two_halves(near(first), near(second));",
    "lower_codes": "return two_halves(of_e4m3(w & 255), of_e4m3(w >> 8 & 255));",
    "upper_codes": "return two_halves(of_e4m3(w >> 16 & 255), of_e4m3(w >> 24));",
    "half_pair": "return two_halves(low, high);",
    "halves_begin": "d[0] = d[1] = d[2] = d[3] = 0.f; multiply_16<of_half>(d, a0, a1, a2, a3, b0, b1);",
    "halves_add": "multiply_16<of_half>(d, a0, a1, a2, a3, b0, b1);",
    "copy_scales": "*to = *from;",
    "count_up": "return (*p)++;",
    "larger_halves": "return max(a >> 16, b >> 16) << 16 | max(a & 0xFFFF, b & 0xFFFF);",
    "product_32_fp8": "multiply_fp8(d, 32, a, b, keep);",
    "product_fp8": "multiply_fp8(d, 128, a, b, keep);",
}
"""Bodies of the functions that hold assembly."""
LEFT_OUT = (
    '""', '"wgmma.fence.', '"wgmma.commit_group.', '"wgmma.wait_group.', '"fence.', '"cp.async.commit_group', '"cp.async.wait_',
    '"cp.async.bulk.commit_group', '"cp.async.bulk.wait_group', '"prefetch.', '"griddepcontrol.', '"setmaxnreg.',
    '"{\\n.reg .b64 b;\\nmov.b64 b, {%" #RIGHT',
)  # fmt: skip
"""How assembly begins that changes no value here: order, hints, registers; and the products that only `add_product` calls."""


def _closing(text: str, start: int, pair: str) -> int:
    """Where the bracket opened before `start` closes; quoted text does not count."""
    depth, quoted, at = 1, False, start
    while depth:
        if text[at] == '"' and text[at - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += {pair[0]: 1, pair[1]: -1}.get(text[at], 0)
        at += 1
    return at


def translated(source: str) -> str:
    """The source with known functions' bodies replaced and assembly without values left out. Raises ValueError on any other."""
    for name, body in MEANING.items():
        found = re.search(rf"__device__ __forceinline__ [\w ]+\b{name}\(", source)
        if found:
            start = source.index("{", _closing(source, found.end(), "()")) + 1
            source = source[:start] + body + source[_closing(source, start, "{}") - 1 :]
    while found := re.search(r"\basm\s*(volatile)?\s*\(", source):
        end = _closing(source, found.end(), "()")
        if not source.startswith(LEFT_OUT, found.end()):
            raise ValueError(f"no meaning for {source[found.start() : end]}; name the function that holds it in MEANING")
        source = source[: found.start()] + "(void)0" + source[end:]
    source = source.replace("extern __shared__ u8 raw[];", "u8* raw = shared_memory;")
    source = source.replace("extern __shared__ uint2 held[];", "uint2* held = (uint2*)(shared_memory + 65536);")
    source = source.replace("__shared__ __align__(1024) u8 queries[8192];", "u8* queries = shared_memory;")
    return source.replace("__shared__", "static")


def build(paths: tuple[Path, ...], threads: dict[str, int], folder: Path) -> dict[str, OnCpu]:
    """The named kernels (name -> threads a block) of sources put together. Raises CalledProcessError if they do not compile."""
    text = "".join(path.read_text() for path in paths)

    def taken_by(name: str) -> str:
        return re.findall(rf"\b{name}\(const __grid_constant__ (\w+)", text)[0]

    entries = [
        f'extern "C" int run_{name}({taken_by(name)}* c, int from, int blocks, int together) '
        f"{{ return run_blocks(from, blocks, {count}, together, [=] {{ {name}(*c); }}); }}\n"
        for name, count in threads.items()
    ]
    whole, library = folder / f"{paths[-1].stem}.cpp", folder / f"{paths[-1].stem}_on_cpu.so"
    whole.write_text('#include "cuda_on_cpu.h"\n' + translated(text) + "\n" + "".join(entries))
    options = ["-std=c++17", "-O1", "-w", "-fno-strict-aliasing", "-shared", "-fPIC", "-I", str(FOLDER)]
    subprocess.run(["c++", *options, "-o", str(library), str(whole)], check=True)
    loaded = ctypes.CDLL(str(library))
    return {name: OnCpu(getattr(loaded, f"run_{name}")) for name in threads}


class OnCpu:
    """A kernel with the interface of `cuda_source.Kernel`."""

    def __init__(self, run: Callable[..., int]) -> None:
        self._run = run

    def launch(
        self, argument: ctypes.Structure, blocks: int, threads: int, *, overlap: bool = False, together: bool = False,
        cluster: int = 1, shared_bytes: int | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        """Run all clusters one after the other, from block `first` on. Raises RuntimeError where threads wait for ever."""
        if self._run(ctypes.byref(argument), first, blocks, blocks if together else cluster):
            raise RuntimeError("a block hangs: its threads wait for each other")


class Together:
    """A kernel whose blocks wait for each other: all of them run side by side."""

    def __init__(self, kernel: OnCpu) -> None:
        self._kernel = kernel

    def launch(
        self, argument: ctypes.Structure, blocks: int, threads: int, *, overlap: bool, shared_bytes: int | None = None
    ) -> None:
        self._kernel.launch(argument, blocks, threads, overlap=overlap, shared_bytes=shared_bytes, together=True)
