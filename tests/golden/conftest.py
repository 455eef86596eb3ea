"""Finds the golden cases: those shipped in `tests/golden/cases`, then those of a `../shared/goldens` beside the repository.

Owns which cases exist here. A test says which ones it wants with `@pytest.mark.golden_cases("a", "b")`; it is collected
once for each case that is present and takes the folder as `golden_case`. Must not know what is in a case.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).resolve().parents[2]
CASE_ROOTS = (Path(__file__).resolve().parent / "cases", _REPOSITORY.parent / "shared" / "goldens")


def case_dir(name: str) -> Path:
    """Folder of the golden case `name`. Raises FileNotFoundError naming the places searched."""
    for root in CASE_ROOTS:
        if (root / name / "case.json").is_file():
            return root / name
    raise FileNotFoundError(f"no golden case {name!r} in {' or '.join(str(root) for root in CASE_ROOTS)}")


def present_cases(names: Sequence[str]) -> list[str]:
    """Those of `names` that exist here, in the order given."""
    return [name for name in names if any((root / name / "case.json").is_file() for root in CASE_ROOTS)]


def _wanted(test: object) -> tuple[str, ...] | None:
    marks = getattr(test, "pytestmark", [])
    return next((mark.args for mark in marks if mark.name == "golden_cases"), None)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "golden_cases(*names): run once for each of these golden cases that is present")


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Leaves out tests none of whose cases is present: an absent optional case is neither a failure nor a skip."""
    wanted = _wanted(obj)
    if wanted is None or present_cases(wanted):
        return None
    return []


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    wanted = _wanted(metafunc.function)
    if wanted is not None:
        metafunc.parametrize("golden_case", present_cases(wanted), indirect=True)


@pytest.fixture
def golden_case(request: pytest.FixtureRequest) -> Path:
    """The folder of the case this test runs on."""
    return case_dir(request.param)


@pytest.fixture(name="case_dir", scope="session")
def case_dir_fixture() -> Callable[[str], Path]:
    """`case_dir` as a fixture, for tests that need one particular shipped case."""
    return case_dir
