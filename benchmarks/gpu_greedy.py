"""`gpu-greedy`: how often nano's greedy replies on a card part from those alone and cold, by the company they are given in.

The check: alone and cold once more gives the same tokens, and no way parts more often, or by larger margins, than a card is
allowed. Knows nothing of how replies are asked for (`greedy_company.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.cases import Benchmark, CountedCase, Options, WrongResult
from benchmarks.greedy_company import MARGIN, RATE, Company, Compared
from benchmarks.nano_model import weights_label


def _restarted(company: Company) -> Compared:
    with tempfile.TemporaryDirectory() as folder:
        return company.restarted(Path(folder))


WAYS: dict[str, Callable[[Company], Compared]] = {
    "all at once": Company.batched,
    "speculated, 5 drafts": lambda company: company.drafted(5, together=False)[0],
    "speculated, 1 draft": lambda company: company.drafted(1, together=False)[0],
    "speculated, adaptive, all at once": lambda company: company.drafted("adaptive", together=True)[0],
    "behind a hit of the whole prompt": Company.hit,
    "pages from another process's disk": _restarted,
    "prompts in chunks of 61": Company.chunked,
    "preempted and resumed": Company.preempted,
}


def _cases(name: str, found: Compared) -> Iterator[CountedCase]:
    def check() -> None:
        if not found.allowed:
            raise WrongResult(f"{name}: {found}; at most {RATE} a token and margins below {MARGIN}")

    yield CountedCase(
        name=f"nano, {name}: other tokens", count=lambda: found.rate, check=check, unit="a token", better="lower",
    )  # fmt: skip
    yield CountedCase(name=f"nano, {name}: largest margin", count=lambda: found.worst, check=check, unit="logits", better="lower")


def _build(options: Options) -> Iterator[CountedCase]:
    from kvist.checkpoint import build_model, locate
    from kvist.kernels.device import require_gpu
    from kvist.model.numerics import Numerics

    require_gpu()
    if weights_label() != "trained":
        raise WrongResult("models/nano holds no trained weights")
    model = build_model(locate("nano"), numerics=Numerics(dtype=torch.bfloat16, impl="gpu"), device="cuda")
    company = Company(model, rounds=1 if options.quick else 2)
    again = company.again()
    print(f"alone and cold once more: {again}", flush=True)
    if again.margins:
        raise WrongResult(f"alone and cold once more: {again}; nothing but the machine has changed")
    for name, way in WAYS.items():
        found = way(company)
        print(f"{name}: {found}", flush=True)
        yield from _cases(name, found)


BENCHMARK = Benchmark(
    name="gpu-greedy",
    summary="nano on a card: how often greedy replies part from those alone, by company, drafts and hits",
    build=_build,
)
