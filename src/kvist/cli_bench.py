"""`kvist bench`: workloads that are measured from a checkout. Arguments in, exit status out; the work lies in `benchmarks/`.

Part of the command line and under its rules: nothing of ours is imported before the command runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

WORKLOADS = ("v41-flash-slim",)


def bench(
    name: Annotated[str, typer.Argument(metavar="WORKLOAD", help="v41-flash-slim")],
    only: Annotated[
        str | None,
        typer.Option(help="decode, verify, speculation, prefill, replay, restore, or several with commas; none: decode"),
    ] = None,
    context: Annotated[int | None, typer.Option(help="tokens of context; none: 8K and 128K")] = None,
    batch: Annotated[int | None, typer.Option(help="requests that decode together; none: 1")] = None,
    every: Annotated[bool, typer.Option("--all", help="every part; contexts 8K to 1M, batches 1 to 64")] = False,
    budget_minutes: Annotated[float, typer.Option(help="start no further case after this; run again to go on")] = 8.5,
    engram_gb: Annotated[
        float | None, typer.Option(help="pinned host memory for Engram tables; none: a quarter of what is free")
    ] = None,
    chunk: Annotated[int | None, typer.Option(help="prompt tokens in a pass; none: 16384")] = None,
    experts: Annotated[int | None, typer.Option(help="experts a layer, of 384; none: 128")] = None,
    layers: Annotated[int | None, typer.Option(help="layers, half of them in the encoder; none: 40")] = None,
    again: Annotated[bool, typer.Option("--again", help="measure also what this commit has been measured with")] = False,
) -> None:
    """Measure decode, prefill and cache moves of released widths on one card; run in a checkout, which keeps the rows.

    It is a proxy: 128 of 384 experts (or more of them in fewer layers), random weights, one card.
    """
    if name not in WORKLOADS:
        raise ValueError(f"no workload named {name!r}; known: {', '.join(WORKLOADS)}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    if importlib.util.find_spec("benchmarks") is None:
        raise ValueError(f"there is no benchmarks/ in {here}; run kvist bench in the root of a checkout")
    slim, cases = importlib.import_module("benchmarks.slim"), importlib.import_module("benchmarks.cases")
    options = {"only": only, "context": context, "batch": batch, "every": every, "budget_minutes": budget_minutes}
    model = {"experts": experts, "layers": layers}
    wanted = slim.Wanted(**options, **model, engram_gb=engram_gb, again=again, chunk=chunk)
    # Long lines: they are kept in logs.
    console = Console(width=None if sys.stdout.isatty() else 400)
    try:
        slim.run(wanted, "kvist " + " ".join(sys.argv[1:]), console)
    except cases.WrongResult as error:
        console.print(f"[red]wrong result, nothing reported:[/red] {error}")
        raise typer.Exit(1) from error
