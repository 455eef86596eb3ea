"""Tables of docs/performance.md: the targets and where they stand, and what holds now, operator by operator.

Owns the targets, and which kept rows stand in which section. Knows nothing of how a row was measured, nor of markers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.rows import Row

SLIM = "; 128 of 384 experts, random weights, one card"
Newest = dict[tuple[str, str], Row]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A bound on the newest row of a case.

    `by` says what is bounded: "value" in the row's own unit (at most), "percent" of the row's floor (at least), or the name of
    a peer of the row, whose multiple the value may be at most. `asked` is the bound in words. With `work` the value is also
    shown as a rate: work over value, in `rate`.
    """

    what: str
    bench: str
    case: str
    bound: float
    asked: str
    by: str = "value"
    work: float | None = None
    rate: str = ""

    def reached(self, row: Row) -> tuple[bool, str]:
        """Whether the row keeps the bound, and its figure in words."""
        words = f"{_short(row.value)} {row.unit}"
        if self.work is not None:
            words += f" ({_short(self.work / row.value)} {self.rate})"
        if self.by == "value":
            return row.value <= self.bound, words
        if self.by == "percent":
            percent = row.percent_of_floor or 0.0
            return percent >= self.bound, words
        ratio = row.value / row.peers[self.by]
        return ratio <= self.bound, f"{words}, {ratio:.2f}x"


def _us(what: str, bench: str, cases: dict[str, float]) -> list[Target]:
    return [Target(what=f"{what}: {case}", bench=bench, case=case, bound=us, asked=f"{us:g} us") for case, us in cases.items()]


def _percent(what: str, bench: str, cases: Iterable[str], percent: float) -> list[Target]:
    return [
        Target(what=f"{what}: {case.removesuffix(SLIM)}", bench=bench, case=case, bound=percent, by="percent",
               asked=f"{percent:g}% of the floor")
        for case in cases
    ]  # fmt: skip


def _model(case: str, bound: float, asked: str, by: str = "value", work: float | None = None, rate: str = "") -> Target:
    return Target(
        what=f"model: {case}", bench="v41-flash-slim", case=case + SLIM, bound=bound, asked=asked, by=by, work=work, rate=rate
    )


TARGETS: tuple[Target, ...] = (
    *_us("attention", "gpu-attention", {"1 x 1 rows, warm": 7, "16 x 1 rows, warm": 11, "64 x 1 rows, warm": 26}),
    *_us("attention", "gpu-attention", {"1 x 6 rows, warm": 9, "16 x 6 rows, warm": 28, "64 x 6 rows, warm": 85}),
    Target(what="attention: prefill, 4096 queries", bench="gpu-attention", case="prefill, 4096 queries", bound=687.2,
           asked="500 TFLOP/s", work=343_597, rate="TFLOP/s"),
    *_us("selection", "gpu-select", {"scan, 1 x 1 rows of 131072 keys": 16, "scan, 1 x 1 rows of 1048576 keys": 45}),
    *_us("selection", "gpu-select", {"scan, 16 x 1 rows of 131072 keys": 70, "scan, 64 x 1 rows of 131072 keys": 220}),
    *_us("selection", "gpu-select", {"candidate pool, 64 rows": 45}),
    Target(what="selection: prefill, 4096 queries of 131072 keys", bench="gpu-select",
           case="prefill, 4096 queries of 131072 keys, FP8 sums", bound=6283, asked="700 TFLOP/s", work=4_398_046,
           rate="TFLOP/s"),
    *_us("experts", "gpu-experts", {"1 rows of 128 experts": 42, "6 rows of 128 experts": 200}),
    *_us("experts", "gpu-experts", {"16 rows of 128 experts": 420, "64 rows of 128 experts": 730}),
    Target(what="experts: 4096 rows of 128 experts", bench="gpu-experts", case="4096 rows of 128 experts", bound=3106.1,
           asked="560 TFLOP/s", work=1_739_443, rate="TFLOP/s"),
    *_percent("projections", "gpu-linear", ("wq_b 32768 x 1280, 1 rows", "wo_a, 8 groups 8192 x 4096, 1 rows"), 70),
    *_percent("projections", "gpu-linear", ("wo_b 5120 x 8192, 1 rows", "engram wkv 25600 x 6144, 1 rows"), 70),
    *_us("projections", "gpu-linear", {"wq_a + wkv 1792 x 5120, 1 rows": 5.16, "shared w1 + w3 4608 x 5120, 1 rows": 8.55}),
    *_us("projections", "gpu-linear", {"shared w2 5120 x 2304, 1 rows": 5.78}),
    *_us("streams", "gpu-streams", {f"hyper-connections, {rows} rows": us for rows, us in ((1, 5), (64, 8), (4096, 160))}),
    _model("decode, 1 x 8,192 tokens", 5.0, "200 tokens/s", work=1000, rate="tokens/s"),
    _model("decode, 1 x 131,072 tokens", 5.128, "195 tokens/s", work=1000, rate="tokens/s"),
    _model("decode, 1 x 1,048,576 tokens", 5.405, "185 tokens/s", work=1000, rate="tokens/s"),
    _model("decode, 16 x 131,072 tokens", 55, "55% of the floor", by="percent", work=16_000, rate="tokens/s"),
    _model("decode, 64 x 131,072 tokens", 55, "55% of the floor", by="percent", work=64_000, rate="tokens/s"),
    *(_model(f"speculation, {batch} x 131,072 tokens, 3.5 tokens a cycle simulated", 1.0, "never slower than plain", by="plain")
      for batch in (1, 4, 16, 64)),
    _model("prefill, 1 x 131,072 tokens", 6000, "6 s"),
    _model("prefill, 1 x 1,048,576 tokens", 65_000, "65 s"),
    *(_model(f"replay, 8 hits of 131,072 tokens + {new} new ones", 1.3, "1.3x of resuming", by="resumed with stored windows")
      for new in ("16", "512", "1,024")),
    _model("pages of 131,072 tokens from host memory", 80, "80% of the link", by="percent"),
    _model("pages of 131,072 tokens from disk", 80, "80% of the disk", by="percent"),
)  # fmt: skip
"""What issue 5 asks for. Rates are bounds on time: operations over 500, 560 and 700 TFLOP/s; small projections: floor + 3 us."""

SECTIONS: dict[str, tuple[str, str]] = {
    "attention": ("gpu-attention", r".*"),
    "selection": ("gpu-select", r"scan.*|candidate.*|prefill.*FP8 sums"),
    "projections": ("gpu-linear", r".* (1|2|8|64|4096) rows"),
    "one row": ("gpu-row", r".*"),
    "experts": ("gpu-experts", r".*"),
    "streams": ("gpu-streams", r".*"),
    "decode": ("v41-flash-slim", r"decode, [^;]*tokens( \(.*\))?"),
    "several rows": ("v41-flash-slim", r"(verify|speculation),.*"),
    "prefill": ("v41-flash-slim", r"(prefill|replay),.*"),
    "pages": ("v41-flash-slim", r"pages .*"),
    "replies": ("gpu-greedy", r".*"),
}
"""Section of the page: its benchmark, and which cases (without the proxy's words) it shows."""


def named_peers(row: Row) -> list[tuple[str, float]]:
    """Peers but for other cuts of the same kernel, which are named by a tuple of sizes that means nothing to a reader."""
    return [(name, value) for name, value in row.peers.items() if not name.startswith("(")]


def targets_table(newest: Newest) -> str:
    """A line a target: the bound, the newest row, whether it keeps the bound. A target without a row says so."""
    lines = ["| operator or workload | target | now | met | % of floor |", "|---|--:|--:|---|--:|"]
    for target in TARGETS:
        row = newest.get((target.bench, target.case))
        if row is None:
            lines.append(f"| {target.what} | {target.asked} | not measured | | |")
            continue
        met, words = target.reached(row)
        percent = "" if row.percent_of_floor is None else f"{row.percent_of_floor:.0f}"
        lines.append(f"| {target.what} | {target.asked} | {words} | {'yes' if met else '**no**'} | {percent} |")
    return "\n".join(lines)


def section_table(name: str, newest: Newest) -> str:
    """The newest rows of a section's cases, by name and sizes. Raises `ValueError` for a name that is no section."""
    if name not in SECTIONS:
        raise ValueError(f"docs/performance.md asks for the rows of {name!r}; known: {', '.join(SECTIONS)}")
    bench, pattern = SECTIONS[name]
    lines = ["| case | now | floor | % of floor | beside it | commit |", "|---|--:|--:|--:|---|---|"]
    rows = [(case.replace(SLIM, ""), row) for (at, case), row in newest.items() if at == bench]
    for short, row in sorted(rows, key=lambda pair: _by_size(pair[0])):
        if re.fullmatch(pattern, short):
            lines.append(f"| {short} | {_short(row.value)} {row.unit} | {_floor(row)} | {_peers(row)} | {row.commit[:7]} |")
    return "\n".join(lines)


def _by_size(case: str) -> tuple[str, list[int]]:
    """A case without its numbers, then its numbers: 16 rows stand behind 4 rows."""
    return re.sub(r"[\d,]*\d", "", case), [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", case)]


def _floor(row: Row) -> str:
    floor = "" if row.floor is None else _short(row.floor)
    return f"{floor} | {'' if row.percent_of_floor is None else f'{row.percent_of_floor:.0f}'}"


def _peers(row: Row) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in named_peers(row))


def _short(value: float) -> str:
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value < 100 else f"{value:.0f}"
