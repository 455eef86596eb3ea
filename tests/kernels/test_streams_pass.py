"""Hyper-connections of several rows in CUDA C++, run on a processor: the pass over streams, and what follows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvist.kernels.hyper_connections import Mix, enter, leave
from kvist.kernels.hyper_connections import hopper as module
from kvist.kernels.hyper_connections.row import COLLAPSE_SOURCE, STREAM_SOURCE
from kvist.kernels.quantise import quantise
from tests.kernels.cuda_on_cpu import build

EPS = 1e-6


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, sources = tmp_path_factory.mktemp("pass"), Path(str(module.__file__)).parent
    made = build((STREAM_SOURCE, sources / "pass.cu"), {name: form.threads for name, form in module.KERNELS.items()}, folder)
    after = (STREAM_SOURCE, COLLAPSE_SOURCE, sources / "finish.cu")
    made |= build(after, {"finish": 32 * module.FINISH_WARPS}, folder)
    return lambda device: made


def near(got: Tensor, want: Tensor, bound: float = 4e-3) -> None:
    assert got.shape == want.shape
    assert torch.isfinite(got).all()
    assert float((got.double() - want.double()).norm() / want.double().norm()) < bound


def random_mix(n: int) -> Mix:
    return Mix(torch.rand(n, 4), torch.rand(n, 4), torch.rand(n, 4, 4))


@pytest.mark.parametrize(
    ("n", "d", "processors", "form"),
    [
        (3, 128, 2, module.FEW), (16, 160, 1, module.FEW), (20, 160, 1, module.SOME), (70, 224, 2, module.SOME),
        (70, 64, 1, module.WIDE), (130, 256, 4, module.WIDE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("leaves", [True, False])
def test_streams_and_sums(
    n: int, d: int, processors: int, form: module.Form, leaves: bool, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warps of 8 and 16 rows, blocks of one and two columns, some without rows, one step and several."""
    monkeypatch.setattr(module, "multiprocessors", lambda _: processors)
    monkeypatch.setattr(module, "WIDE_ROWS", 70 if form is module.WIDE else 99)
    assert module.form_of(n, d) is form
    torch.manual_seed(n)
    x, y = torch.randn(n, 4, d).bfloat16(), torch.randn(n, d).bfloat16()
    mix, fn = random_mix(n), torch.randn(24, 4 * d)
    streams, h = torch.empty_like(x), torch.empty(n, d).bfloat16()
    parts, squares, splits = module.pass_hopper(y if leaves else None, x, mix, fn, streams, h, build=kernels)
    assert splits == module.parts_of(n, d, processors)
    now = leave(y, x, mix) if leaves else x
    if leaves:
        near(streams, now)
    one = (mix.pre_NS.unsqueeze(2) * now.float()).sum(1)
    near(h, one)
    near(squares.view(n, splits).sum(1), h.float().square().sum(1), 1e-5)
    sums = parts.view(n, splits, 32).sum(1)
    near(sums[:, 24], (streams if leaves else x).float().square().sum((1, 2)), 1e-5)
    near(sums[:, :24], (streams if leaves else x).double().flatten(1) @ fn.double().t(), 1e-5)


@pytest.mark.parametrize(("n", "d", "share"), [(3, 1344, 1), (13, 160, 4), (40, 64, 32), (2, 5120, 1)])
@pytest.mark.parametrize("quantised", [True, False])
def test_norm_and_coefficients(
    n: int, d: int, share: int, quantised: bool, kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block makes the coefficients of one row or of several; rows are normed one after the other by fewer blocks than rows."""
    monkeypatch.setattr(module, "ALONE_ROWS", n if share == 1 else 0)
    monkeypatch.setattr(module, "SHARE", share)
    monkeypatch.setattr(module, "FINISH_RESIDENT", 1)
    monkeypatch.setattr(module, "multiprocessors", lambda _: 2)
    torch.manual_seed(d)
    x, mix = torch.randn(n, 4, d).bfloat16(), random_mix(n)
    fn, base, scale, norm = torch.randn(24, 4 * d) * (4 * d) ** -0.5, torch.randn(24), torch.rand(3) + 0.5, torch.rand(d) + 0.5
    h, q = torch.empty(n, d).bfloat16(), torch.empty(n, d).bfloat16()
    parts, squares, splits = module.pass_hopper(None, x, mix, fn, x, h, build=kernels)
    module.finish_hopper(
        h, parts, squares, splits, base, scale, norm, q if quantised else None, after := Mix(*map(torch.empty_like, mix)),
        iterations=20, hc_eps=EPS, norm_eps=EPS, build=kernels,
    )  # fmt: skip
    want, coefficients = enter(x, mix.pre_NS, fn, base, scale, norm, iterations=20, hc_eps=EPS, norm_eps=EPS, impl="wide")
    near(h, want)
    if quantised:
        assert torch.equal(q, quantise(h, "fp8"))
    for mine, theirs in zip(after, coefficients, strict=True):
        near(mine, theirs, 1e-5)


def test_the_weight_is_cut_exactly() -> None:
    weight = torch.randn(24, 4 * 64)
    cut = module.cut_weight(weight)
    assert cut.shape == (2, 4, 9, 32, 8)
    step, stream, j, term, g, t, half, pair = 1, 3, 1, 2, 5, 2, 1, 1
    eight = 3 * j + term
    channels = cut[step, stream, eight // 2 * 2 + half, 4 * g + t].view(2, 2, 2)[pair, eight % 2]
    at = stream * 64 + step * 32 + t * 8 + half * 4 + pair * 2
    assert torch.equal(channels.float(), (weight[8 * j + g, at : at + 2].view(torch.int32) & -65536).view(torch.float32))
    assert float(cut.double().sum()) == pytest.approx(float(weight.double().sum()), abs=1e-12)


def test_parts_fill_the_card() -> None:
    assert module.parts_of(2, 5120, 132) == 160
    assert module.parts_of(64, 5120, 132) == 160
    assert module.parts_of(4096, 5120, 132) == 4
    assert module.parts_of(100_000, 5120, 132) == 2
    assert module.parts_of(100_000, 5120 + 32, 132) == 1


def test_shares_of_coefficients() -> None:
    assert [module.share_of(rows) for rows in (2, 256, 257, 100_000)] == [1, 1, 8, 8]


def test_forms() -> None:
    assert module.form_of(2, 5120) is module.form_of(16, 5120) is module.FEW
    assert module.form_of(17, 5120) is module.form_of(4096, 5120 + 32) is module.SOME
    assert module.form_of(512, 5120) is module.WIDE
