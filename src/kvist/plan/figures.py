"""Figures of a `PlanReport` for `kvist plan --plot DIR`. Owns drawing only; matplotlib is imported when a figure is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvist.plan.render import exact, short
from kvist.plan.report import PlanReport

MODE_COLOURS = {"window": "#9aa0a6", "full": "#c0392b", "reindex": "#e67e22", "reuse": "#2e86c1", "draft": "#8e44ad"}


def write_figures(report: PlanReport, folder: str | Path) -> list[Path]:
    """Write layers.png, bytes.png, cache.png and flops.png into `folder` (made if need be). Returns the files.

    Raises ValueError if matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("figures need matplotlib: pip install '.[plot]' in the checkout") from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (("layers", _layers), ("bytes", _bytes), ("cache", _cache), ("flops", _flops)):
        figure = Figure(figsize=(9, 5), layout="constrained")
        FigureCanvasAgg(figure)
        draw(report, figure.subplots())
        file = folder / f"{name}.png"
        figure.savefig(file, dpi=130)
        written.append(file)
    return written


def _layers(report: PlanReport, axes: Any) -> None:
    """Parameters a layer, coloured by mode; labels are ratios."""
    for at, row in enumerate(report.layers):
        axes.bar(at, row.parameters, color=MODE_COLOURS[row.mode], edgecolor="black" if row.engram else "none")
        if row.ratio:
            axes.annotate(str(row.ratio), (at, row.parameters), ha="center", va="bottom", fontsize=7)
    axes.set_yscale("log")
    axes.set_xlabel("layer (numbers: compression ratio; outlined: Engram)")
    axes.set_ylabel("parameters")
    used = {row.mode for row in report.layers}
    for mode, colour in MODE_COLOURS.items():
        if mode in used:
            axes.bar(0, 0, color=colour, label=mode)
    axes.legend(loc="upper right", fontsize=8)


def _bytes(report: PlanReport, axes: Any) -> None:
    """Stored bytes by tensor class, largest on top."""
    rows = sorted(report.kinds, key=lambda row: row.nbytes)
    bars = axes.barh([row.kind for row in rows], [row.nbytes for row in rows], color="#2e86c1")
    axes.bar_label(bars, [short(row.nbytes) for row in rows], fontsize=7, padding=2)
    axes.set_xscale("log")
    axes.set_xlabel(f"bytes (all: {report.nbytes:,})")


def _cache(report: PlanReport, axes: Any) -> None:
    """The waterfall of global cache bytes a token."""
    values = [float(step.bytes_per_token) for step in report.waterfall]
    for at, value in enumerate(values):
        last = at in (0, len(values) - 1)
        before = 0.0 if last else values[at - 1]
        colour = "#34495e" if last else "#c0392b" if value > before else "#27ae60"
        axes.bar(at, abs(value - before), bottom=min(value, before), color=colour)
        axes.annotate(exact(report.waterfall[at].bytes_per_token), (at, max(value, before)), ha="center", va="bottom")
    labels = [step.change.replace(" instead", "\ninstead").replace(": ", ":\n") for step in report.waterfall]
    axes.set_xticks(range(len(values)), labels, fontsize=7)
    axes.set_ylabel("global cache, bytes a token")


def _flops(report: PlanReport, axes: Any) -> None:
    """Operations a token against context, with and without CED and HSI."""
    lines = {
        "decode": "decode",
        "full_decode": "decode without HSI",
        "prefill": "prefill",
        "prefill_without_ced": "prefill without CED",
        "full_prefill": "prefill without CED and HSI",
    }
    for field, label in lines.items():
        style = "-" if field in ("decode", "prefill") else "--"
        points = [getattr(row, field).total for row in report.flops]
        axes.plot([row.context for row in report.flops], points, style, marker="o", markersize=3, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("FLOPs a token")
    axes.legend(fontsize=8)
