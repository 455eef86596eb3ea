"""The golden-case runner: proves a model's numbers against recorded tensors of the official implementation.

Other packages import from here. Cases follow the goldens README; the kinds are model, quantisers and pure functions.
"""

from kvist.conformance.case import Case, Run, load_case
from kvist.conformance.check import Check
from kvist.conformance.errors import CaseError
from kvist.conformance.runner import SHIPPED, conformance, run_case, run_cases, shipped_cases, table

__all__ = [
    "SHIPPED",
    "Case",
    "CaseError",
    "Check",
    "Run",
    "conformance",
    "load_case",
    "run_case",
    "run_cases",
    "shipped_cases",
    "table",
]
