"""`python -m benchmarks NAME | list | table | thin`: the command line of the measurements.

Owns arguments, exit status (1: a result was wrong and neither it nor what follows is reported; 2: a user's mistake) and that rows
are kept as they come. Knows no benchmark.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from benchmarks import registry, tables
from benchmarks.cases import Options, WrongResult
from benchmarks.rows import RESULTS, Machine, Row, append, thin
from benchmarks.runner import measure


def main(argv: list[str] | None = None) -> int:
    """Run one command; the last line on stdout of a benchmark is one JSON object that holds its rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Check, measure, keep and tabulate.")
    parser.add_argument("name", help="a benchmark, or 'list', 'table' (write three pages' tables), 'thin' (drop superseded rows)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds a variant; the median is reported")
    parser.add_argument("--quick", action="store_true", help="reduced sizes; its rows are never kept")
    parser.add_argument("--no-keep", action="store_true", help="do not append the rows to benchmarks/results")
    parser.add_argument("--check", action="store_true", help="with 'table': only say whether they are up to date")
    arguments = parser.parse_args(argv)
    console = Console(stderr=True)
    try:
        if arguments.name == "list":
            return _list(console)
        if arguments.name == "table":
            current = tables.update_pages(check=arguments.check)
            return 1 if arguments.check and not current else 0
        if arguments.name == "thin":
            for path in sorted(RESULTS.glob("*.jsonl")):
                console.print(f"{path.name}: {thin(path)} superseded rows dropped")
            return 0
        return _run(arguments, console)
    except WrongResult as error:
        console.print(f"[red]wrong result, nothing reported:[/red] {error}")
        return 1
    except (ValueError, OSError) as error:
        console.print(str(error), style="red", markup=False)
        return 2


def _list(console: Console) -> int:
    for name in registry.MODULES:
        console.print(f"{name}: {registry.find(name).summary}")
    return 0


def _run(arguments: argparse.Namespace, console: Console) -> int:
    benchmark = registry.find(arguments.name)
    options = Options(rounds=arguments.rounds, quick=arguments.quick)
    command = f"python -m benchmarks {arguments.name} --rounds {arguments.rounds}" + " --quick" * arguments.quick
    machine = Machine.here()
    kept: list[Path] = []
    refused: list[OSError] = []

    def keep(row: Row) -> None:
        try:
            kept.append(append([row], machine.key))
        except OSError as error:  # said at the end: the table and the line have the row all the same
            refused.append(error)

    given = () if arguments.no_keep or arguments.quick else (keep,)
    lines, rows = measure(benchmark, options, machine, command, *given)
    tables.show(lines, console)
    print(json.dumps({"bench": benchmark.name, "rows": [json.loads(row.to_json()) for row in rows]}), flush=True)
    if kept:
        console.print(f"{len(kept)} rows appended to {kept[0].relative_to(kept[0].parents[2])}")
    if refused:
        raise refused[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
