"""Arithmetic of a configuration: layers, parameters, bytes, cache, operations. Imports no torch and allocates nothing.

`kvist plan PRESET [--plot DIR]` is `print_report(report(config), console)` and `write_figures(report, DIR)`;
`kvist plan PRESET --fit ...` is `print_fit(fit(config, machine), console)`.
"""

from kvist.plan.figures import write_figures
from kvist.plan.fit import Fit, Machine, fit
from kvist.plan.render import print_report
from kvist.plan.render_fit import print_fit
from kvist.plan.report import PlanReport, report

__all__ = ["Fit", "Machine", "PlanReport", "fit", "print_fit", "print_report", "report", "write_figures"]
