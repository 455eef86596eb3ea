"""Tables for people: the one printed after a run, and README's, generated from the kept rows between two markers.

Knows nothing of how a row was measured.
"""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rows import ROOT, Row, load
from benchmarks.runner import Line

README = ROOT / "README.md"
BEGIN = "<!-- benchmarks: begin (python -m benchmarks table) -->"
END = "<!-- benchmarks: end -->"


def show(lines: list[Line], console: Console) -> None:
    """Print one line a case and variant, with rates and percent of the limit where they are known."""
    table = Table(header_style="bold")
    for name in ("case", "variant", "value", "unit", "spread", "GB/s", "GFLOP/s", "% of limit"):
        table.add_column(name, justify="left" if name in ("case", "variant", "unit") else "right")
    for line in lines:
        table.add_row(
            line.case,
            line.variant,
            number(line.value),
            line.unit,
            "" if line.spread is None else f"{line.spread:.0%}",
            "" if line.gigabytes_per_s is None else f"{line.gigabytes_per_s:.1f}",
            "" if line.gigaflops_per_s is None else f"{line.gigaflops_per_s:.1f}",
            "" if line.percent is None else f"{line.percent:.0f}",
        )
    console.print(table)


def number(value: float) -> str:
    """A value with three or four significant digits and thousands separators."""
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"


def markdown(rows: list[tuple[str, Row]]) -> str:
    """The newest row of every (device, bench, case) as a Markdown table, in the order in which they first appeared."""
    newest: dict[tuple[str, str, str], Row] = {}
    for key, row in rows:
        if row.correct:
            newest[key, row.bench, row.case] = row
    if not newest:
        return "No row is kept yet."
    lines = [
        "| benchmark | case | value | limit | % of limit | beside it | machine | commit | date |",
        "|---|---|--:|--:|--:|---|---|---|---|",
    ]
    for (key, bench, case), row in newest.items():
        peers = ", ".join(f"{name} {number(value)}" for name, value in row.peers.items())
        floor = "" if row.floor is None else number(row.floor)
        percent = "" if row.percent_of_floor is None else f"{row.percent_of_floor:.0f}"
        lines.append(
            f"| {bench} | {case} | {number(row.value)} {row.unit} | {floor} | {percent} | {peers} | {key} "
            f"| {row.commit} | {row.date[:10]} |"
        )
    return "\n".join(lines)


def update_readme(path: Path = README, *, check: bool = False, results: Path | None = None) -> bool:
    """Write the table between README's markers; with `check` only compare. Returns whether the file was up to date."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path.name} must hold the line {BEGIN} once, and after it {END}")
    head, rest = text.split(BEGIN)
    rows = list(load() if results is None else load(results))
    fresh = f"{head}{BEGIN}\n{markdown(rows)}\n{END}{rest.split(END)[1]}"
    if fresh != text and not check:
        path.write_text(fresh)
    return fresh == text
