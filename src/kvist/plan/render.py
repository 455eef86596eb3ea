"""A `PlanReport` as rich tables. Owns wording and number formats; computes nothing but sums and ratios to show."""

from __future__ import annotations

from fractions import Fraction

from rich.console import Console
from rich.table import Table

from kvist.plan.report import PlanReport


def print_report(report: PlanReport, console: Console) -> None:
    """Print every table of a report."""
    for table in (
        layer_table(report),
        parameter_table(report),
        kind_table(report),
        cache_table(report),
        waterfall_table(report),
        flop_table(report),
    ):
        console.print(table)
        console.print()


def exact(value: Fraction) -> str:
    """A fraction of bytes with as many decimals as it needs, at most four."""
    return f"{float(value):,.4f}".rstrip("0").rstrip(".")


def short(count: float) -> str:
    """A count with a unit: 12.3K, 4.56M, 7.89G."""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.3g}"


def _table(title: str, *columns: str, left: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=True)
    return table


def layer_table(report: PlanReport) -> Table:
    """Role, sources and costs of every layer."""
    table = _table(
        "Layers", "layer", "mode", "ratio", "rows of", "index of", "pool", "theta", "experts", "parameters", "B/token", left=2
    )
    for row in report.layers:
        table.add_row(
            row.index + (" E" if row.engram else ""),
            row.mode,
            str(row.ratio) if row.ratio else "",
            _optional(row.kv_source),
            _optional(row.index_source),
            row.candidates,
            row.rope,
            row.experts,
            short(row.parameters),
            exact(row.cache_bytes) if row.cache_bytes else "",
        )
    table.caption = "E: Engram before the layer. B/token: global cache that the layer itself adds."
    return table


def _optional(layer: int | None) -> str:
    return "" if layer is None else str(layer)


def parameter_table(report: PlanReport) -> Table:
    """Parameters by part, and active ones."""
    table = _table("Parameters", "part", "number")
    counts = report.counts
    for name in ("backbone", "engram", "vision", "drafts"):
        if getattr(counts, name):
            table.add_row(name, f"{getattr(counts, name):,}")
    table.add_row("total", f"{counts.total:,}", end_section=True)
    table.add_row("active in prefill", f"{report.active_prefill:,}")
    table.add_row("active in decode", f"{report.active_decode:,}")
    return table


def kind_table(report: PlanReport) -> Table:
    """Stored bytes by tensor class."""
    table = _table("Tensor classes", "class", "tensors", "parameters", "bytes", "share")
    for row in report.kinds:
        share = f"{100 * row.nbytes / report.nbytes:.1f}%"
        table.add_row(row.kind, f"{row.tensors:,}", f"{row.parameters:,}", f"{row.nbytes:,}", share)
    table.add_section()
    table.add_row("all", f"{report.tensors:,}", f"{report.counts.total:,}", f"{report.nbytes:,}", "100%")
    return table


def cache_table(report: PlanReport) -> Table:
    """The page, plane by plane."""
    layout = report.layout
    title = f"Page of {layout.page_tokens} tokens: {layout.page_bytes:,} bytes, {layout.padding_bytes:,} of them padding"
    table = _table(title, "layer", "plane", "rows", "bytes a row", "offset", "bytes", "B/token", left=2)
    for plane in layout.planes:
        table.add_row(
            str(plane.layer),
            plane.kind,
            str(plane.rows),
            str(plane.row_bytes),
            f"{plane.offset:,}",
            f"{plane.nbytes:,}",
            exact(plane.bytes_per_token),
        )
    table.add_section()
    table.add_row("all", "", "", "", "", f"{layout.payload_bytes:,}", exact(report.cache_bytes_per_token))
    table.caption = (
        f"Window KV, constant a sequence: {report.window_bytes:,} bytes, and {report.draft_window_bytes:,} for drafts."
    )
    return table


def waterfall_table(report: PlanReport) -> Table:
    """Global cache bytes a token, step by step."""
    table = _table("Global cache, bytes a token", "layout", "rows", "B/token", "factor", left=2)
    before: Fraction | None = None
    for step in report.waterfall:
        factor = "" if before is None else f"x {float(step.bytes_per_token / before):.3f}"
        table.add_row(step.change, step.formula, exact(step.bytes_per_token), factor)
        before = step.bytes_per_token
    return table


def flop_table(report: PlanReport) -> Table:
    """Operations a token against context."""
    table = _table(
        "FLOPs a token (multiply-add = 2)",
        "context",
        "decode",
        "without HSI",
        "BF16 equivalent",
        "prefill",
        "without CED",
        "without both",
        "BF16 equivalent ",
    )
    for row in report.flops:
        table.add_row(
            f"{row.context:,}",
            short(row.decode.total),
            short(row.full_decode.total),
            short(row.decode.weighted),
            short(row.prefill.total),
            short(row.prefill_without_ced.total),
            short(row.full_prefill.total),
            short(row.prefill.weighted),
        )
    table.caption = "Prefill: mean over the prompt, logits of its last token. BF16 equivalent: FP8 counts 1/2, FP4 1/4."
    return table
