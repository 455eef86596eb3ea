"""CUDA sources without a card: a missing compiler is named, a built source is kept and not built again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvist.kernels.device import GpuUnavailable, cuda_source


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    cuda_source._compiler.cache_clear()
    with pytest.raises(GpuUnavailable, match=r"libnvrtc\.so\.99.*use 'ref'"):
        cuda_source.compile_source("", "empty.cu", "sm_90a")


class Refusing:
    """NVRTC that takes a source, or not, and then finds a mistake in it."""

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes

    def nvrtcCreateProgram(self, *_: object) -> int:
        return 0 if self.takes else 3

    def nvrtcCompileProgram(self, *_: object) -> int:
        return 6

    def nvrtcGetProgramLogSize(self, _: object, size: Any) -> None:
        size._obj.value = 64

    def nvrtcGetProgramLog(self, _: object, log: Any) -> None:
        log.value = b"some.cu(3): error: no such instruction"


@pytest.mark.parametrize(
    ("takes", "says"),
    [
        (False, "NVRTC does not take some.cu; impl 'ref'"),
        (True, r"some.cu does not compile for sm_90a; impl 'ref' .*\n.*such"),
    ],
)
def test_a_source_that_does_not_build_is_named(monkeypatch: pytest.MonkeyPatch, takes: bool, says: str) -> None:
    monkeypatch.setattr(cuda_source, "_compiler", lambda: Refusing(takes=takes))
    with pytest.raises(GpuUnavailable, match=says):
        cuda_source.compile_source("text", "some.cu", "sm_90a")


def test_a_built_source_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its text and architecture: the same is read, another is built."""
    built: list[str] = []

    def compiled(source: str, name: str, architecture: str) -> bytes:
        built.append(f"{name} {architecture}")
        return source.encode()

    monkeypatch.setenv("KVIST_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setattr(cuda_source, "compile_source", compiled)
    for _ in range(2):
        assert cuda_source.built("text", "some.cu", "sm_90a") == b"text"
    assert built == ["some.cu sm_90a"]
    assert cuda_source.built("other", "some.cu", "sm_90a") == b"other"
    cuda_source.built("text", "some.cu", "sm_100a")
    assert len(built) == 3
    kept = list(tmp_path.glob("some-*.cubin"))
    assert len(kept) == 3
    # Files that a lost machine cut off, or that rotted, are built again.
    kept[0].write_bytes(kept[0].read_bytes()[:-1])
    kept[1].write_bytes(b"rot" + kept[1].read_bytes()[3:])
    kept[2].write_bytes(b"")
    for _ in range(2):
        assert cuda_source.built("text", "some.cu", "sm_90a") == b"text"
        assert cuda_source.built("other", "some.cu", "sm_90a") == b"other"
        assert cuda_source.built("text", "some.cu", "sm_100a") == b"text"
    assert len(built) == 6


def test_assembly_without_a_meaning_is_refused_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than left out, which once made products of one type do nothing without a word."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from cuda_on_cpu import translated

    assert translated('void f() { asm volatile("fence.proxy.async;"); }') == "void f() { (void)0; }"
    with pytest.raises(ValueError, match=r"no meaning for asm\(\"mul.rn.f32 .*name the function"):
        translated('void f(float& x) { asm("mul.rn.f32 %0, %0, %0;" : "+f"(x)); }')
