"""Tables for people: the one printed after a run, and those generated from the kept rows between markers: a few rows in README,
all in docs/measurements.md, the card's by section in docs/performance.md.

Knows nothing of how a row was measured.
"""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.rows import ROOT, Row, load
from benchmarks.runner import Line
from benchmarks.targets import SLIM, named_peers, section_table, targets_table

README = ROOT / "README.md"
ALL = ROOT / "docs" / "measurements.md"
STATE = ROOT / "docs" / "performance.md"
SECTION = re.compile(r"(<!-- rows: ([a-z ]+) -->\n).*?(<!-- rows end -->)", re.DOTALL)
BEGIN = "<!-- benchmarks: begin (python -m benchmarks table) -->"
END = "<!-- benchmarks: end -->"
Pairs = tuple[tuple[str, str], ...]
HIGHLIGHTS = (
    ("nano-prefill", "16K, trained"),
    ("nano-decode-b1", "16K, trained"),
    ("nano-decode-b16", "16 streams, 4096, trained"),
    ("restore-cost", "prefix of 16,384 tokens from disk and its first token, nano, trained"),
    ("page-store", "lookup and page, 1,000,000 pages of 4 KiB"),
    ("prefix-lookup", "4K prompt, 10,000 prefixes, 100M tokens cached"),
    ("server-load", "new tokens, 200 clients, 64 places, 90 s"),
    ("cpu-operators", "FP4 experts 5120 x 2304 x 3, 1 row, 451 MB in turn"),
    ("gpu-attention", "64 x 1 rows, rotated"),
    ("gpu-select", "scan, 1 x 1 rows of 1048576 keys"),
    ("gpu-select", "prefill, 4096 queries of 131072 keys, FP8 sums"),
    ("gpu-linear", "wq_b 32768 x 1280, 1 rows"),
    ("v41-flash-slim", f"decode, 1 x 131,072 tokens{SLIM}"),
    ("v41-flash-slim", f"decode, 64 x 131,072 tokens{SLIM}"),
    ("v41-flash-slim", f"speculation, 1 x 131,072 tokens, 3.5 tokens a cycle simulated{SLIM}"),
    ("v41-flash-slim", f"prefill, 1 x 131,072 tokens{SLIM}"),
    ("v41-flash-slim", f"prefill, 1 x 1,048,576 tokens{SLIM}"),
    ("v41-flash-slim", f"pages of 131,072 tokens from host memory{SLIM}"),
)  # fmt: skip
"""Benchmark and case of README's rows."""


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


def markdown(rows: list[tuple[str, Row]], only: Pairs | None = None) -> str:
    """The newest row of every (device, bench, case) as a Markdown table, benchmark by benchmark, in the order of what is kept.

    With `only`, the rows of those pairs of benchmark and case alone, in that order.
    """
    newest: dict[tuple[str, str, str], Row] = {}
    for key, row in rows:
        if row.correct:
            newest[key, row.bench, row.case] = row
    if only is not None:
        order = {pair: at for at, pair in enumerate(only)}
        chosen = sorted((at for at in newest if at[1:] in order), key=lambda at: order[at[1], at[2]])
        newest = {at: newest[at] for at in chosen}
    else:
        benches = list(dict.fromkeys(at[:2] for at in newest))
        newest = {at: newest[at] for at in sorted(newest, key=lambda at: benches.index(at[:2]))}
    if not newest:
        return "No row is kept yet."
    lines = [
        "| benchmark | case | value | limit | % of limit | beside it | machine | commit | date |",
        "|---|---|--:|--:|--:|---|---|---|---|",
    ]
    for (key, bench, case), row in newest.items():
        peers = ", ".join(f"{name} {number(value)}" for name, value in named_peers(row))
        floor = "" if row.floor is None else number(row.floor)
        percent = "" if row.percent_of_floor is None else f"{row.percent_of_floor:.0f}"
        lines.append(
            f"| {bench} | {case} | {number(row.value)} {row.unit} | {floor} | {percent} | {peers} | {key} "
            f"| {row.commit} | {row.date[:10]} |"
        )
    return "\n".join(lines)


def update(path: Path, only: Pairs | None = None, *, check: bool = False, results: Path | None = None) -> bool:
    """Write `markdown`'s table between a page's markers; with `check` only compare. Returns whether the page was up to date."""
    text = path.read_text()
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{path.name} must hold the line {BEGIN} once, and after it {END}")
    head, rest = text.split(BEGIN)
    rows = list(load() if results is None else load(results))
    fresh = f"{head}{BEGIN}\n{markdown(rows, only)}\n{END}{rest.split(END)[1]}"
    if fresh != text and not check:
        path.write_text(fresh)
    return fresh == text


def update_sections(path: Path, *, check: bool = False, results: Path | None = None) -> bool:
    """Write the newest rows of one H200 between a page's `rows` markers, by `targets.SECTIONS`; with `check` only compare.

    Returns whether the page was up to date. Raises `ValueError` for a section that is unknown or a marker that is left open.
    """
    text = path.read_text()
    newest = {(row.bench, row.case): row for key, row in (load() if results is None else load(results)) if key == "h200"}
    fresh, sections = SECTION.subn(lambda found: f"{found[1]}{_section(found[2], newest)}\n{found[3]}", text)
    if sections == 0 or sections != text.count("<!-- rows: ") or sections != text.count("<!-- rows end -->"):
        raise ValueError(f"{path.name}: every <!-- rows: NAME --> needs its <!-- rows end -->, and there must be one at least")
    if fresh != text and not check:
        path.write_text(fresh)
    return fresh == text


def update_pages(*, check: bool = False) -> bool:
    """Write all three pages' tables, or with `check` compare them. Returns whether all were up to date."""
    return all([update(README, HIGHLIGHTS, check=check), update(ALL, check=check), update_sections(STATE, check=check)])


def _section(name: str, newest: dict[tuple[str, str], Row]) -> str:
    return targets_table(newest) if name == "targets" else section_table(name, newest)
