"""Runs cases one after the other and prints the table; whatever a case does wrong becomes a failed line, never a traceback.

Owns the dispatch by kind, the shipped subset and the exit status. Must not know how a quantity is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvist.conformance.case import Case, load_case
from kvist.conformance.check import FAIL, NOTE, PASS, Check, judged
from kvist.conformance.errors import CaseError
from kvist.kernels.device import require_device
from kvist.model.numerics import Numerics

SHIPPED = ("text-fp32", "dspark", "vision-two-images", "quantisers", "pure-functions")
DEFAULT_IMPL = "wide"
# What a file can provoke: our named errors are ValueErrors; the rest is for tensors no check foresaw.
CASE_PROBLEMS = (ValueError, OSError, RuntimeError, LookupError, TypeError, ArithmeticError, AssertionError, MemoryError)
STYLES = {PASS: "green", FAIL: "bold red", NOTE: "dim"}


def shipped_cases() -> list[Path]:
    """Folders of the shipped subset, which stands in the repository's `tests/golden/cases`.

    Raises `CaseError` where it is missing: an installed package has no tests beside it.
    """
    root = Path(__file__).resolve().parents[3] / "tests" / "golden" / "cases"
    missing = [name for name in SHIPPED if not (root / name / "case.json").is_file()]
    if missing:
        raise CaseError(
            f"the shipped cases {', '.join(missing)} are not in {root}; they come with a checkout of the repository, not "
            "with an installed package. Name the folders of your cases: kvist conformance DIR..."
        )
    return [root / name for name in SHIPPED]


def run_case(
    folder: str | Path, *, impl: str = DEFAULT_IMPL, deterministic: bool = False, device: torch.device | str = "cpu"
) -> list[Check]:
    """All checks of one case. A malformed case gives one failed check whose detail says what is wrong with it."""
    name = Path(folder).resolve().name
    try:
        case = load_case(folder)
        name = case.name
        return [check.of(name) for check in _checks(case, impl, deterministic, device)]
    except CASE_PROBLEMS as error:
        kind = "" if isinstance(error, CaseError) else f"{type(error).__name__}: "
        return [judged("case", False, kind + str(error)).of(name)]


def run_cases(
    folders: Sequence[str | Path],
    *,
    impl: str = DEFAULT_IMPL,
    deterministic: bool = False,
    device: torch.device | str = "cpu",
    report: Callable[[list[Check], float], None] | None = None,
) -> list[Check]:
    """Run cases in order; `report` is called after each with its checks and its time in seconds."""
    checks: list[Check] = []
    for folder in folders:
        began = time.perf_counter()
        found = run_case(folder, impl=impl, deterministic=deterministic, device=device)
        if report is not None:
            report(found, time.perf_counter() - began)
        checks += found
    return checks


def conformance(
    folders: Sequence[str | Path] = (),
    *,
    impl: str = DEFAULT_IMPL,
    deterministic: bool = False,
    device: torch.device | str = "cpu",
    console: Console | None = None,
) -> int:
    """The command: run, print one table a case and the count as the last line; 0 if nothing failed, else 1."""
    console = console or Console()
    # Names that nothing knows are refused here, also where a case needs no model.
    Numerics(impl=impl)
    require_device(device)
    try:
        chosen = list(folders) or shipped_cases()
    except CaseError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        console.print("0 passed, 1 failed", highlight=False)
        return 1

    def show(checks: list[Check], seconds: float) -> None:
        console.print(table(checks, f"{checks[0].case} ({seconds:.1f} s)"))

    checks = run_cases(chosen, impl=impl, deterministic=deterministic, device=device, report=show)
    failed = sum(check.failed for check in checks)
    passed = sum(check.verdict == PASS for check in checks)
    console.print(f"{passed} passed, {failed} failed", highlight=False)
    return 1 if failed else 0


def table(checks: Sequence[Check], title: str) -> Table:
    """The checks of one or more cases as a table."""
    out = Table(title=Text(title), title_justify="left", expand=False)
    for header in ("case", "quantity"):
        out.add_column(header, overflow="fold")
    for header in ("max abs error", "cosine", "argmax", "top-k"):
        out.add_column(header, overflow="fold", justify="right")
    for header in ("verdict", "detail"):
        out.add_column(header, overflow="fold")
    for check in checks:
        shares = (_number(check.max_abs, "{:.3g}"), _number(check.cosine, "{:.7f}"), _share(check.argmax), _share(check.topk))
        # Names and details hold what a file said; as `Text` none of it is read as markup.
        out.add_row(
            Text(check.case), Text(check.quantity), *shares, Text(check.verdict, style=STYLES[check.verdict]), Text(check.detail)
        )
    return out


def _checks(case: Case, impl: str, deterministic: bool, device: torch.device | str) -> Iterator[Check]:
    # Imported here: the table and the case format do not need the model.
    if case.kind == "model":
        from kvist.conformance.model_case import model_checks

        yield from model_checks(case, impl=impl, deterministic=deterministic, device=device)
    elif case.kind == "quantisers":
        from kvist.conformance.quantiser_case import quantiser_checks

        yield from quantiser_checks(case.on(device))
    else:
        from kvist.conformance.function_case import function_checks

        yield from function_checks(case.on(device))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2%}"
