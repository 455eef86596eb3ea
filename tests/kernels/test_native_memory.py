"""Every allocation of the native operators fails in turn: a MemoryError with its bytes, no crash, no ring half written."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.request import Request
from kvist.engine.session import Session
from kvist.kernels.experts import experts
from kvist.kernels.index_select import select
from kvist.kernels.linear import linear
from kvist.kernels.native import build, calls
from kvist.kernels.sparse_attention import sparse_attention
from tests.equivalence.conftest import toy
from tests.equivalence.engine_traces import Watched, judge
from tests.kernels.test_fp4_experts import Bank, batch

pytestmark = pytest.mark.skipif(build.library() is None, reason="no C compiler")

MESSAGE = re.compile(r"kvist_\w+ needs ([\d,]+) bytes of scratch memory that the system does not give; run fewer rows")
HOOK = """
#include <stdatomic.h>
#include <stdlib.h>
static atomic_llong left = -1, asked;
void *hungry_alloc(size_t alignment, size_t bytes)
{
    atomic_fetch_add(&asked, 1);
    if (atomic_load(&left) >= 0 && atomic_fetch_sub(&left, 1) == 0) return NULL;
    return aligned_alloc(alignment, bytes);
}
void starve_after(long long allocations) { atomic_store(&left, allocations), atomic_store(&asked, 0); }
long long asked_for(void) { return atomic_load(&asked); }
"""


class Hunger:
    """The library with an allocator of ours: `after(n)` lets the allocation behind the next `n` fail, once."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._starve, self._asked = library.starve_after, library.asked_for
        self._starve.argtypes, self._asked.restype = [ctypes.c_longlong], ctypes.c_longlong

    def after(self, allocations: int) -> None:
        self._starve(allocations)

    def never(self) -> None:
        self._starve(-1)

    def count(self, work: Callable[[], object]) -> int:
        """Allocations of a piece of work."""
        self.never()
        work()
        return int(self._asked())


@pytest.fixture(scope="module")
def hunger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hunger]:
    folder = tmp_path_factory.mktemp("native")
    compiler = build.find_compiler()
    assert compiler is not None
    (folder / "hook.c").write_text(HOOK)
    running = []
    for source in sorted(Path(build.__file__).parent.glob("*.c")):
        define = ["-Daligned_alloc=hungry_alloc"] if source.name == "pool.c" else []
        include = ["-include", "stdlib.h", *define]
        arguments = [compiler, *build.FLAGS, "-O1", *build.machine_flags(), *include]
        running.append(subprocess.Popen([*arguments, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]))
    assert all(process.wait() == 0 for process in running)
    objects = [str(path) for path in folder.glob("*.o")]
    target = folder / "hungry.so"
    subprocess.run([compiler, *build.FLAGS, "-shared", str(folder / "hook.c"), *objects, "-o", str(target), "-lm"], check=True)
    library = ctypes.CDLL(str(target))
    patch = pytest.MonkeyPatch()
    patch.setattr(calls, "library", lambda: library)
    patch.setattr(calls, "_threads", 2)
    calls.native_or_none.cache_clear()
    yield Hunger(library)
    patch.undo()
    calls.native_or_none.cache_clear()


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


WEIGHT = randn(48, 64)
BANK = Bank(64, 96, fp4=True)


def chosen(rows: int, impl: str) -> Tensor:
    found = select(
        randn(rows, 2, 32), randn(rows, 2), randn(70, 32), torch.arange(rows) * 3, k=5, block_size=4, publish_blocks=3, impl=impl
    )
    assert found.candidates_NB is not None
    return torch.cat([found.topk_NK, found.candidates_NB], 1)


def attended(rows: int, impl: str) -> Tensor:
    span = torch.stack([torch.arange(rows), torch.arange(rows) + 4], 1)
    topk = torch.randint(-1, 9, (rows, 6), generator=torch.Generator().manual_seed(1))
    return sparse_attention(randn(rows, 3, 32), randn(rows + 4, 32), span, randn(9, 32), topk, randn(3), window=4, impl=impl)


def mixed(rows: int, impl: str) -> Tensor:
    x, ids, weights = batch(rows, 64)
    return experts(x, ids, weights, BANK, limit=7.0, form="fp8", shared=None, impl=impl)


WORK: dict[str, Callable[[], Tensor]] = {
    **{f"linear, {rows} rows, {form}": (lambda rows=rows, form=form: linear(randn(rows, 64), WEIGHT, form=form, impl="cpu"))
       for rows in (1, 40, 200) for form in (None, "fp8")},
    **{f"experts, {rows} rows": (lambda rows=rows: mixed(rows, "cpu")) for rows in (2, 20, 90)},
    **{f"select, {rows} queries": (lambda rows=rows: chosen(rows, "cpu")) for rows in (2, 30)},
    **{f"attend, {rows} queries": (lambda rows=rows: attended(rows, "cpu")) for rows in (2, 30)},
}  # fmt: skip


@pytest.mark.parametrize("name", WORK)
def test_an_operator_says_what_it_lacks_and_works_again(hunger: Hunger, name: str) -> None:
    work = WORK[name]
    right = work()
    total = hunger.count(work)
    assert total > 0
    for allowed in range(total):
        hunger.after(allowed)
        with pytest.raises(MemoryError, match=MESSAGE) as caught:
            work()
        found = MESSAGE.match(str(caught.value))
        assert found is not None
        assert int(found[1].replace(",", "")) % 64 == 0
        hunger.never()
    assert torch.equal(work(), right)


def test_the_dense_session_fails_by_name_at_every_allocation(hunger: Hunger) -> None:
    model, ids = toy(1, True), torch.arange(4, 40)
    total = hunger.count(lambda: Session(model).score(ids))
    right = Session(model).score(ids)
    assert total > 50
    for allowed in range(0, total, max(1, total // 60)):
        hunger.after(allowed)
        with pytest.raises(MemoryError, match=MESSAGE):
            Session(model).score(ids)
    hunger.never()
    assert torch.equal(Session(model).score(ids), right)


PROMPTS = [[(7 * i + k) % 250 + 4 for i in range(21 + k)] for k in range(2)]


def ask(k: int) -> Request:
    return Request(prompt=PROMPTS[k], max_tokens=6, ignore_end=True)


@pytest.mark.parametrize("stride", [23, pytest.param(1, marks=pytest.mark.long)])
def test_the_engine_ends_the_step_s_requests_and_serves_on(hunger: Hunger, stride: int) -> None:
    """In prefill, in a verify step and among the draft blocks; whoever comes next has the bits of the full forward."""

    def engine() -> Watched:
        config = EngineConfig(pages=60, page_tokens=4, max_running=2, replay="exact", speculation=3, step_cost=16)
        return Watched(Engine(toy(1, True), config))

    watched = engine()
    watched.add(ask(0))
    total = hunger.count(watched.finish)
    assert total > 100
    watched, failed = engine(), 0
    for allowed in range(0, total, stride):
        number = watched.add(ask(0))
        hunger.after(allowed)
        watched.finish()
        hunger.never()
        end = watched.outcomes[number].end
        assert end is not None
        if end.reason == "error":
            assert isinstance(end.error, MemoryError)
            assert MESSAGE.match(str(end.error))
            failed += 1
        else:
            judge(toy(1, True), watched.outcomes[number])
    drafting = watched.engine.metrics.draft_failures
    assert failed > total // stride // 3
    assert drafting > 0
    assert watched.engine.pages.pool.owned == 0
    for k in range(2):
        number = watched.add(ask(k))
        watched.finish()
        judge(toy(1, True), watched.outcomes[number])
