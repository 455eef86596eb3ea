"""Helpers for checking numbers and speed on a user's own machine: comparison, difficult inputs, timing.

Shipped with the package; tests and benchmarks use them too. Must not know models or pages.
"""

from kvist.testing.compare import bit_equal, cosine, first_difference, max_abs, rel_l2
from kvist.testing.generators import generator, poisoned, quantiser_rows
from kvist.testing.timing import median_time_us

__all__ = [
    "bit_equal",
    "cosine",
    "first_difference",
    "generator",
    "max_abs",
    "median_time_us",
    "poisoned",
    "quantiser_rows",
    "rel_l2",
]
