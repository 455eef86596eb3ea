"""Kept results: one JSON object a line in `benchmarks/results/<device>.jsonl`, appended, never edited, thinned by one rule.

Owns the row's fields and their validation, and what describes the machine and the commit. Knows nothing of timing.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import platform
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cases import Better, percent_of_floor
from kvist.version import VERSION

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


class BadRow(ValueError):
    """A kept line that is not a row; the message names file, line and field."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured value. `floor` is the limit in `unit`; `peers` are values of other variants or systems in `unit`."""

    bench: str
    case: str
    value: float
    unit: str
    better: Better
    floor: float | None
    percent_of_floor: float | None
    peers: dict[str, float]
    correct: bool
    commit: str
    command: str
    device: str
    versions: dict[str, str]
    date: str

    def to_json(self) -> str:
        """The row as one line. Raises `BadRow` for a value that JSON cannot hold."""
        numbers = {"value": self.value, "floor": self.floor, **self.peers}
        for name, number in numbers.items():
            if number is not None and not math.isfinite(number):
                raise BadRow(f"{self.bench}/{self.case}: {name} is {number}, rows hold finite numbers")
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a row was measured; `key` names the results file (`cpu2`, `h200`)."""

    key: str
    device: str
    versions: dict[str, str]
    commit: str

    @classmethod
    def here(cls) -> Machine:
        """Describe this machine, its packages and the checkout; a tree with local changes is marked `-dirty`. A copy of a tree
        that lacks its history is told its commit by the variable `KVIST_COMMIT`; raises ValueError if that is none."""
        import torch

        versions = {"python": platform.python_version(), "torch": torch.__version__, "kvist": VERSION}
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            versions["cuda"] = str(torch.version.cuda)
            words = [word.lower() for word in name.split() if any(c.isdigit() for c in word)]
            return cls(key=words[0] if words else "gpu", device=name, versions=versions, commit=_commit())
        cores = len(os.sched_getaffinity(0))
        return cls(key=f"cpu{cores}", device=f"{_cpu_name()}, {cores} cores", versions=versions, commit=_commit())


def make_row(
    machine: Machine,
    bench: str,
    case: str,
    value: float,
    unit: str,
    better: Better,
    *,
    floor: float | None,
    peers: dict[str, float],
    command: str,
) -> Row:
    """A row of a case whose check has just passed, dated now (UTC)."""
    return Row(
        bench=bench, case=case, value=_short(value), unit=unit, better=better,
        floor=None if floor is None else _short(floor),
        percent_of_floor=_maybe_short(percent_of_floor(value, floor, better)),
        peers={name: _short(number) for name, number in peers.items()}, correct=True,
        commit=machine.commit, command=command, device=machine.device, versions=machine.versions,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )  # fmt: skip


def append(rows: list[Row], key: str, folder: Path = RESULTS) -> Path:
    """Add rows to the device's file with one write, so that parallel runs do not interleave. Returns the file."""
    path = folder / f"{key}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write("".join(row.to_json() + "\n" for row in rows))
    return path


def load(folder: Path = RESULTS) -> Iterator[tuple[str, Row]]:
    """All kept rows as (device key, row), oldest first in each file. Raises `BadRow` on a line that is not one."""
    for path in sorted(folder.glob("*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            yield path.stem, parse(line, f"{path.name}:{number}")


def thin(path: Path) -> int:
    """Leave each case of a file its best and its newest row: what was reached, what holds now.

    The lines that stay keep their bytes and order; the others remain in the repository's history, where a case began too.
    Returns how many went. Raises `BadRow` on a line that is not a row.
    """
    lines = path.read_text().splitlines(keepends=True)
    cases: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for at, line in enumerate(lines):
        row = parse(line, f"{path.name}:{at + 1}")
        cases.setdefault((row.bench, row.case), []).append((at, row))
    stay: set[int] = set()
    for kept in cases.values():
        best = min if kept[-1][1].better == "lower" else max
        stay |= {kept[-1][0], best(kept, key=lambda pair: pair[1].value)[0]}
    path.write_text("".join(line for at, line in enumerate(lines) if at in stay))
    return len(lines) - len(stay)


def parse(line: str, where: str) -> Row:
    """Read one kept line. Raises `BadRow` that names `where` and the field."""
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise BadRow(f"{where}: not JSON: {error}") from error
    names = {field.name for field in dataclasses.fields(Row)}
    if not isinstance(record, dict) or set(record) != names:
        seen = set(record) if isinstance(record, dict) else set()
        raise BadRow(f"{where}: missing fields {sorted(names - seen)}, unknown fields {sorted(seen - names)}")
    if record["better"] not in ("lower", "higher") or not isinstance(record["value"], int | float):
        raise BadRow(f"{where}: better is {record['better']!r}, value is {record['value']!r}")
    return Row(**record)


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _maybe_short(value: float | None) -> float | None:
    return None if value is None else _short(value)


def _commit() -> str:
    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return result.stdout.strip() if result.returncode == 0 else ""

    if told := os.environ.get("KVIST_COMMIT"):
        if re.fullmatch(r"[0-9a-f]{12}(-dirty)?", told) is None:
            raise ValueError(
                f"KVIST_COMMIT is {told!r}; it names the commit of a copied tree by 12 hexadecimal digits, -dirty if changed"
            )
        return told
    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    # kept rows themselves, and their tables, must not make the tree dirty
    kept = (":!benchmarks/results", ":!README.md", ":!docs/measurements.md", ":!docs/performance.md")
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *kept)
    return f"{head}-dirty" if changed else head


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
