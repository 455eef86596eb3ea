"""Arithmetic of a configuration: layers, parameters, bytes, cache, operations. Imports no torch and allocates nothing.

`kvist plan PRESET [--plot DIR]` is `print_report(report(config), console)` and `write_figures(report, DIR)`.
"""

from kvist.plan.figures import write_figures
from kvist.plan.render import print_report
from kvist.plan.report import PlanReport, report

__all__ = ["PlanReport", "print_report", "report", "write_figures"]
