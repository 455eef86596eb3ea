"""Native attention, index selection and experts against the reference; the build, and life without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvist.kernels.experts import ResidentBank, experts
from kvist.kernels.index_select import select
from kvist.kernels.linear import linear
from kvist.kernels.native import build, calls
from kvist.kernels.quantise import quantise
from kvist.kernels.sparse_attention import sparse_attention
from kvist.testing import bit_equal, generator, rel_l2


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=generator(seed))


def integers(*shape: int, seed: int, high: int = 3) -> torch.Tensor:
    """Small integers as floats: every sum is exact in any order, so that ties are real and choices must agree."""
    return torch.randint(-high, high + 1, shape, generator=generator(seed)).float()


def spans(queries: int, window: int, held: int) -> torch.Tensor:
    stop = torch.arange(held + 1, held + 1 + queries)
    return torch.stack([(stop - window).clamp_min(0), stop], 1)


def picks(queries: int, k: int, rows: int, seed: int) -> torch.Tensor:
    """Ascending ids, -1 last, a different number of them in every query."""
    out = torch.full((queries, k), -1, dtype=torch.int64)
    random = generator(seed)
    for n in range(queries):
        count = min(n % (k + 1), rows)
        out[n, :count] = torch.randperm(rows, generator=random)[:count].sort().values
    return out


@pytest.mark.parametrize("heads,width", [(1, 32), (4, 32), (8, 64), (9, 48), (12, 128), (3, 20)])
@pytest.mark.parametrize("queries,held", [(1, 0), (1, 70), (5, 3), (130, 20)])
def test_attention(heads, width, queries, held):
    q, window = normal(queries, heads, width), normal(held + queries, width, seed=1)
    rows, sink = normal(40, width, seed=2), normal(heads, seed=3)
    topk = picks(queries, 9, 40, seed=4)
    for at in ((rows, topk), (None, None)):
        actual = sparse_attention(q, window, spans(queries, 64, held), *at, sink, window=64, impl="cpu")
        expected = sparse_attention(q, window, spans(queries, 64, held), *at, sink, window=64, impl="wide")
        assert rel_l2(actual, expected) < 2e-6


def test_attention_reads_only_its_own_keys():
    q, window, rows, sink = normal(6, 4, 32), normal(30, 32, seed=1), normal(20, 32, seed=2), normal(4, seed=3)
    topk, span = torch.tensor([[1, 4, -1]]).expand(6, 3), spans(6, 8, 12)
    clean = sparse_attention(q, window, span, rows, topk, sink, window=8, impl="cpu")
    window[: int(span[:, 0].min())] = window[int(span[:, 1].max()) :] = float("nan")
    rows[torch.tensor([0, 2, 3, *range(5, 20)])] = float("nan")
    assert bit_equal(sparse_attention(q, window, span, rows, topk, sink, window=8, impl="cpu"), clean)


def test_attention_without_keys_or_queries_and_with_views():
    sink = torch.zeros(2)
    nothing = torch.zeros(3, 2, dtype=torch.int64)
    out = sparse_attention(normal(3, 2, 32), normal(0, 32), nothing, None, None, sink, window=4, impl="cpu")
    assert bit_equal(out, torch.zeros(3, 2, 32))
    none = sparse_attention(normal(0, 2, 32), normal(5, 32), spans(0, 4, 4), None, None, sink, window=4, impl="cpu")
    assert none.shape == (0, 2, 32)
    q, window = normal(3, 32, 2).transpose(1, 2), normal(32, 7, seed=1).T
    actual = sparse_attention(q, window, spans(3, 4, 4), None, None, sink, window=4, impl="cpu")
    assert rel_l2(actual, sparse_attention(q, window, spans(3, 4, 4), None, None, sink, window=4, impl="wide")) < 2e-6


def test_attention_survives_huge_scores_and_sinks():
    q, window = normal(4, 2, 32) * 1e4, normal(8, 32, seed=1) * 1e2
    for sink in (torch.full((2,), 1e5), torch.full((2,), -1e5)):
        actual = sparse_attention(q, window, spans(4, 4, 4), None, None, sink, window=4, impl="cpu")
        expected = sparse_attention(q, window, spans(4, 4, 4), None, None, sink, window=4, impl="wide")
        assert actual.isfinite().all()
        assert torch.allclose(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("queries", [1, 3, 4, 11])
@pytest.mark.parametrize("rows", [0, 1, 7, 16, 130, 900])
@pytest.mark.parametrize("heads,width", [(1, 32), (4, 64), (5, 40)])
def test_selection_with_exact_sums_is_identical(queries, rows, heads, width):
    """Integer inputs give many equal scores: the lower id must win in every one of them."""
    q, weight, keys = (integers(*s, seed=i) for i, s in enumerate([(queries, heads, width), (queries, heads), (rows, width)]))
    visible = torch.randint(0, rows + 1, (queries,), generator=generator(3))
    options = {"k": 16, "block_size": 8}
    for publish in (0, 5):
        actual = select(q, weight, keys, visible, **options, publish_blocks=publish, impl="cpu")
        expected = select(q, weight, keys, visible, **options, publish_blocks=publish)
        assert torch.equal(actual.topk_NK, expected.topk_NK)
        if publish:
            assert torch.equal(actual.candidates_NB, expected.candidates_NB)
            pooled = {"pool_NB": expected.candidates_NB, **options}
            actual, again = (select(q, weight, keys, visible, **pooled, impl=impl) for impl in ("cpu", "ref"))
            assert torch.equal(actual.topk_NK, again.topk_NK)


def test_selection_of_real_numbers_agrees_where_margins_allow():
    q, weight, keys = normal(8, 4, 64), normal(8, 4, seed=1).abs(), normal(700, 64, seed=2)
    visible = torch.full((8,), 700)
    scores = (torch.einsum("nji,mi->njm", q.double(), keys.double()).relu() * weight.double().unsqueeze(2)).sum(1)
    ranked = scores.sort(1, descending=True).values
    assert (ranked[:, 31] - ranked[:, 32]).min() > 1e-4, "the seed must leave a margin"
    expected = scores.topk(32, dim=1).indices.sort(1).values
    for queries in (slice(0, 1), slice(0, 8)):  # both ways of scoring
        got = select(q[queries], weight[queries], keys, visible[queries], k=32, block_size=8, impl="cpu")
        assert torch.equal(got.topk_NK, expected[queries])


def test_selection_ignores_poisoned_rows_that_are_not_visible():
    q, weight, keys = integers(6, 2, 32, seed=0), integers(6, 2, seed=1), integers(50, 32, seed=2)
    visible = torch.tensor([0, 3, 17, 20, 20, 20])
    clean = select(q, weight, keys, visible, k=8, block_size=4, publish_blocks=3, impl="cpu")
    keys[20:] = float("nan")
    again = select(q, weight, keys, visible, k=8, block_size=4, publish_blocks=3, impl="cpu")
    assert torch.equal(clean.topk_NK, again.topk_NK)
    assert torch.equal(clean.candidates_NB, again.candidates_NB)


@pytest.mark.parametrize(("heads", "width"), [(4, 64), (3, 32), (2, 40), (5, 128)])
def test_a_choice_does_not_depend_on_the_queries_beside_it(heads, width):
    """Rounding scores included: keys so alike that a last bit decides which are chosen."""
    q, weight, keys = normal(12, heads, width, seed=1), normal(12, heads, seed=2), normal(1, width, seed=3).repeat(70, 1)
    keys += normal(70, width, seed=4) * 2.0**-21
    visible = torch.arange(59, 71)
    whole = select(q, weight, keys, visible, k=8, block_size=4, publish_blocks=3, impl="cpu")
    for n in range(12):
        row = slice(n, n + 1)
        alone = select(q[row], weight[row], keys, visible[row], k=8, block_size=4, publish_blocks=3, impl="cpu")
        assert torch.equal(alone.topk_NK, whole.topk_NK[row])
        assert torch.equal(alone.candidates_NB, whole.candidates_NB[row])


class Bank(ResidentBank):
    """Experts with weights FP4 and FP8 formats can hold, or (`odd`) ones that only float32 holds."""

    def __init__(self, width: int, hidden: int, odd: bool) -> None:
        self.sizes, self.odd, self.made = (width, hidden), odd, {}

    def expert(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if index not in self.made:
            d, f = self.sizes
            parts = [normal(*shape, seed=9 * index + i) / 8 for i, shape in enumerate([(f, d), (d, f), (f, d)])]
            self.made[index] = tuple(p if self.odd and i == 1 else p.bfloat16().float() for i, p in enumerate(parts))
        return self.made[index]


@pytest.mark.parametrize("rows", [0, 1, 6, 16, 32, 33, 90])
@pytest.mark.parametrize("form", [None, "fp8"])
@pytest.mark.parametrize("odd", [False, True])
def test_experts(rows, form, odd):
    bank, x = Bank(64, 96, odd), normal(rows, 64)
    x = x if form is None else quantise(x, form)
    ids = torch.zeros(rows, 3, dtype=torch.int64)
    for n in range(rows):
        ids[n] = torch.randperm(7, generator=generator(n))[:3].sort().values
    ids[1::4, 2] = -1
    weights = normal(rows, 3, seed=1).abs()
    for shared in (None, bank.expert(99)):
        options = {"limit": 1.5, "form": form, "shared": shared}
        actual = experts(x, ids, weights, bank, **options, impl="cpu")
        expected = experts(x, ids, weights, bank, **options, impl="wide")
        # An FP8 rounding of a hidden value may fall on the other side; without a quantiser nothing can.
        assert rel_l2(actual, expected) < (2e-6 if form is None else 2e-3)
        if rows > 3:
            assert bit_equal(experts(x[2:4], ids[2:4], weights[2:4], bank, **options, impl="cpu"), actual[2:4])


def test_a_program_without_compiler_runs_the_reference_and_says_so_once():
    code = (
        "import logging; logging.basicConfig(format='%(message)s')\n"
        "import torch\n"
        "from kvist.kernels.linear import linear\n"
        "from kvist.kernels.rms_norm import rms_norm\n"
        "x, w = torch.randn(3, 32), torch.randn(8, 32)\n"
        "assert torch.equal(linear(x, w, impl='cpu'), linear(x, w))\n"
        "assert torch.equal(rms_norm(x, w[0], 1e-6, impl='cpu'), rms_norm(x, w[0], 1e-6))\n"
    )
    environment = {"PATH": "/nonexistent", "PYTHONPATH": ":".join(sys.path), "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("no C compiler") == 1


def test_plain_architecture_builds_and_bad_sources_are_named(tmp_path, monkeypatch):
    compiler = build.find_compiler()
    assert compiler is not None, "this test needs the C compiler that the README asks for"
    monkeypatch.setattr(build, "machine_flags", lambda: ("-march=no-such-machine",))
    build.build(compiler, tmp_path / "plain.so")
    assert (tmp_path / "plain.so").stat().st_size > 10_000
    (tmp_path / "bad.c").write_text("int broken(")
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    with pytest.raises(build.NativeBuildError, match=r"(?s)cannot build the native operators.*bad\.c"):
        build.build(compiler, tmp_path / "bad.so")


def test_a_compiler_that_fails_without_words_is_named(tmp_path):
    with pytest.raises(build.NativeBuildError, match=r"(?s)false cannot build the native operators.*without a word"):
        build.build("false", tmp_path / "none.so")


def test_the_library_name_depends_on_sources_and_flags(monkeypatch):
    compiler = build.find_compiler()
    before = build.digest(compiler)
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    assert build.digest(compiler) != before


@pytest.mark.parametrize("damage", [b"", b"\0" * 5000, "cut", "flipped"])
def test_a_damaged_library_is_built_again(tmp_path, monkeypatch, caplog, damage):
    """Also one that a lost machine cut off behind its head, whose loading would end the process."""
    monkeypatch.setenv("KVIST_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", ("-O0", *build.FLAGS[1:]))  # quick, and not the library in use
    path = tmp_path / f"kvist-{build.digest(build.find_compiler())}.so"
    if isinstance(damage, str):
        build.build(build.find_compiler(), path)
        sound = path.read_bytes()
        assert build.whole(path)
        damage = sound[:1000] if damage == "cut" else sound[:5000] + bytes([sound[5000] ^ 1]) + sound[5001:]
    path.write_bytes(damage)
    assert build.library.__wrapped__() is not None
    assert "built again" in caplog.text
    assert build.whole(path)


@pytest.mark.parametrize(("said", "meant"), [("1", 1), (" 3 ", 3), ("100000", 64), ("99999999999999999999", 64)])
def test_a_number_of_threads_from_the_environment(monkeypatch, said, meant):
    monkeypatch.setenv("KVIST_THREADS", said)
    assert calls.wanted_threads() == meant


@pytest.mark.parametrize("said", ["abc", "-3", "1.5"])
def test_what_is_no_number_of_threads_is_named(monkeypatch, said):
    monkeypatch.setenv("KVIST_THREADS", said)
    with pytest.raises(ValueError, match=f"KVIST_THREADS is '{said}'"):
        calls.wanted_threads()
    for none in ("", "0"):
        monkeypatch.setenv("KVIST_THREADS", none)
        assert calls.wanted_threads() >= 1


@pytest.mark.parametrize("place", ["/proc/no-such-folder", "/sys"])
def test_a_cache_that_takes_no_file_is_replaced_for_this_process_only(place):
    """A home that cannot be written, and a folder that is there and cannot be written."""
    code = "from kvist.kernels.native import build; print(build.cache_folder('a.so'))"
    environment = {**os.environ, "KVIST_NATIVE_CACHE": place}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    folder = Path(done.stdout.strip())
    assert folder.name.startswith("kvist-native-")
    assert not folder.exists(), "it went with the process"
    assert f"cannot use {place}" in done.stderr


def test_a_compiler_that_is_none_is_named(monkeypatch, caplog):
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert build.library.__wrapped__() is None
    assert "no C compiler (no-such-compiler -O2) on PATH" in caplog.text


def test_rows_that_do_not_divide_into_groups_are_refused() -> None:
    """Native quantisers take whole groups of 32: a hidden width of 40 or a row of 48 must not be read past its end."""
    ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)

    class Odd(ResidentBank):
        def expert(self, index: int):
            return torch.randn(40, 32), torch.randn(32, 40), torch.randn(40, 32)

    with pytest.raises(ValueError, match="rows of 40 values"):
        experts(torch.randn(2, 32), ids, weights, Odd(), limit=7.0, form="fp8", impl="cpu")
    with pytest.raises(ValueError, match="rows of 48 values"):
        linear(torch.randn(2, 48), torch.randn(16, 48), form="fp8", impl="cpu")
