"""The command line: arguments in, calls to the packages that do the work, tables and exit status out.

Thin and lazy: every package of ours is imported inside the command that needs it, so that `kvist --help` is instant.
Must not compute anything about a model. Exit status: 0 good, 1 a check failed, 2 a user's mistake (one red line).
"""

from __future__ import annotations

import dataclasses
import os
import sys
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from kvist.cli_bench import bench
from kvist.cli_errors import is_users, message
from kvist.version import VERSION

if TYPE_CHECKING:
    from kvist.checkpoint import Inspection, VerifyReport
    from kvist.config import ModelConfig

TRACEBACK_VARIABLE = "KVIST_TRACEBACK"

app = typer.Typer(
    name="kvist",
    help="The complete DeepSeek-V4.1-Flash system: generate, inspect, prove and plan.",
    epilog=f"MODEL is a folder, a shipped name (nano) or a hub id. {TRACEBACK_VARIABLE}=1 shows tracebacks of errors.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
checkpoint_app = typer.Typer(help="Look into, check and convert checkpoints.", no_args_is_help=True)
app.add_typer(checkpoint_app, name="checkpoint")
cache_app = typer.Typer(help="Look into, prove, cut down and export a store of cache pages.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")
app.command()(bench)

Store = Annotated[Path, typer.Argument(metavar="DIR", help="the directory of a page store")]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="a folder, a shipped name (nano) or a hub id")]


class WeightFormat(StrEnum):
    """Storage of the matrices that the release keeps in FP8."""

    keep = "keep"
    fp8 = "fp8"
    bf16 = "bf16"


class ExpertFormat(StrEnum):
    """Storage of the routed experts, which the release keeps in FP4."""

    keep = "keep"
    fp4 = "fp4"
    fp8 = "fp8"
    bf16 = "bf16"


def main() -> NoReturn:
    """The entry point: run the command; what a user or a file caused becomes one red message and status 2."""
    _ready_streams()
    try:
        app()
    except BrokenPipeError:
        # the reader of a pipe left (`kvist plan nano | head`); stdout must not be flushed into it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE) or not is_users(error):
            raise
        _errors().print(message(error), style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    sys.exit(0)


def _ready_streams() -> None:
    """A closed descriptor becomes the null device; input is UTF-8, strictly; output replaces what its encoding lacks."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (open as long as the process)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _output() -> Console:
    # A pipe has no width of its own: rich would cut tables to 80 columns and drop what does not fit.
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=160)


def _errors() -> Console:
    return Console(stderr=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvist {VERSION}")
        raise typer.Exit


@app.callback()
def _global(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version and leave")
    ] = False,
) -> None:
    del version  # the callback has acted on it


@app.command()
def plan(
    model: Annotated[str, typer.Argument(metavar="PRESET|MODEL", help="v41-flash, v41-flash-slim, nano, tiny, or a model")],
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="write the figures there (needs kvist's extra plot)")] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="instead: where it lies on a machine, and the tokens/s its bytes allow")
    ] = False,
    disk_gbps: Annotated[float, typer.Option(help="--fit: 10^9 bytes/s that the disk reads")] = 2.0,
    ram_gb: Annotated[float, typer.Option(help="--fit: host memory, 10^9 bytes")] = 32.0,
    gpu_gb: Annotated[float, typer.Option(help="--fit: device memory; 0: none")] = 0.0,
    ram_gbps: Annotated[float, typer.Option(help="--fit: host memory's rate")] = 20.0,
    gpu_gbps: Annotated[float, typer.Option(help="--fit: device memory's rate")] = 1000.0,
    link_gbps: Annotated[float, typer.Option(help="--fit: host to device")] = 25.0,
    disk_kiops: Annotated[float, typer.Option(help="--fit: thousands of random reads/s")] = 100.0,
    reserve_gb: Annotated[float, typer.Option(help="--fit: host memory for the program and the system")] = 1.0,
    held: Annotated[str, typer.Option(help="--fit: dense weights as stored, bfloat16 or float32")] = "bfloat16",
    context: Annotated[int | None, typer.Option(help="--fit: tokens of context a stream; none: 4096, if it holds them")] = None,
    streams: Annotated[int, typer.Option(help="--fit: requests that decode together")] = 1,
) -> None:
    """What a configuration costs: layers, parameters, bytes by tensor class, cache bytes a token, operations a token."""
    from kvist.plan import print_report, report, write_figures

    if fit and plot is not None:
        raise ValueError("--plot draws the figures of the plan without --fit; leave one of them out")
    if fit:
        from kvist.plan import Machine, print_fit
        from kvist.plan import fit as place

        machine = Machine(
            disk_gbps=disk_gbps,
            ram_gb=ram_gb,
            gpu_gb=gpu_gb,
            ram_gbps=ram_gbps,
            gpu_gbps=gpu_gbps,
            link_gbps=link_gbps,
            disk_kiops=disk_kiops,
            reserve_gb=reserve_gb,
        )
        config = _configuration(model)
        tokens = min(4096, config.max_seq_len) if context is None else context
        print_fit(place(config, machine, held=held, context=tokens, streams=streams), _output())
        return
    result = report(_configuration(model))
    print_report(result, _output())
    if plot is not None:
        for file in write_figures(result, plot):
            print(file)


def _configuration(name: str) -> ModelConfig:
    """A preset by name, else the config.json of a model, so that planning needs no weights and no torch for presets."""
    from kvist.config_json import load_config
    from kvist.presets import PRESETS, preset

    if name in PRESETS:
        return preset(name)
    path = Path(name)
    if name and (path.suffix == ".json" or path.is_dir()):
        return load_config(path)
    from kvist.checkpoint import ModelNotFound, locate

    try:
        return load_config(locate(name))
    except ModelNotFound as error:
        raise ModelNotFound(f"{error}; presets: {', '.join(sorted(PRESETS))}") from error


@app.command()
def generate(
    model: Model,
    prompt: Annotated[str | None, typer.Option(help="the text to continue")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="a UTF-8 file to continue; neither: standard input")] = None,
    max_tokens: Annotated[int, typer.Option(help="most new tokens")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus; 1 is off")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    seed: Annotated[int, typer.Option(help="noise is keyed by (seed, position)")] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="stop string; may be repeated")] = None,
    replay: Annotated[str, typer.Option(help="decoder windows after prefill: bounded (as published) or exact")] = "bounded",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    chunk: Annotated[int, typer.Option(help="prompt tokens a pass")] = 512,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="bits independent of batch and chunk")] = False,
    impl: Annotated[str, typer.Option(help="operators: cpu (fused C), ref, or gpu (a Hopper card, bfloat16)")] = "cpu",
    expert_budget: Annotated[
        str | None, typer.Option(metavar="SIZE", help="leave experts and tables in the files; hold at most e.g. 8GB of experts")
    ] = None,
) -> None:
    """Continue a text, streaming; a progress bar while a long prompt is read."""
    from kvist.engine.generate import GenerateParams
    from kvist.engine.sampler import SamplingParams
    from kvist.engine.terminal import RunOptions, parse_bytes, read_prompt, run_generate

    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed)
    params = GenerateParams(max_tokens=max_tokens, sampling=sampling, stops=tuple(stop or ()))
    options = RunOptions(
        replay=replay,
        dtype=dtype,
        chunk=chunk,
        deterministic=deterministic,
        impl=impl,
        expert_budget_bytes=None if expert_budget is None else parse_bytes(expert_budget),
    )
    run_generate(model, read_prompt(prompt, prompt_file), params, options, _errors())


@app.command()
def chat(
    model: Model,
    mode: Annotated[str, typer.Option(help="chat, text (continue what is typed), or auto: text for base models")] = "auto",
    system: Annotated[str, typer.Option(help="system message of a chat")] = "",
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.8,
    top_p: Annotated[float, typer.Option(help="nucleus; 1 is off")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="none: another one each time")] = None,
    max_tokens: Annotated[int, typer.Option(help="most tokens of a reply")] = 512,
    effort: Annotated[str, typer.Option(help="reasoning of a chat: none, low, high, max or 1..100")] = "high",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="memory for cache, slots and workspace")] = "1GB",
    context: Annotated[int | None, typer.Option(help="longest conversation; none: what fits")] = None,
    replay: Annotated[str, typer.Option(help="bounded (as published), exact, or a number of positions")] = "bounded",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16")] = "float32",
    expert_budget: Annotated[str | None, typer.Option(metavar="SIZE", help="leave experts and tables in the files")] = None,
    cache_dir: Annotated[Path | None, typer.Option(help="pages and sessions; none: the user's cache directory")] = None,
    cache_budget: Annotated[str, typer.Option(metavar="SIZE", help="bytes on disk for pages; 0 keeps none")] = "4GB",
) -> None:
    """Talk to a model in the terminal; sessions are saved and resumed through the page store (kvist's extra chat edits lines)."""
    from kvist.chat.loop import ChatOptions, run_chat
    from kvist.engine.launch import LaunchOptions

    options = ChatOptions(
        mode=mode, system=system, temperature=temperature, top_p=top_p, seed=seed, max_tokens=max_tokens, effort=effort
    )
    places = LaunchOptions(memory=memory, context=context, replay=replay, dtype=dtype, expert_budget=expert_budget, max_running=1)
    run_chat(model, options, dataclasses.replace(places, cache_dir=cache_dir, cache_budget=cache_budget))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    epilog="Every setting of docs/server.md is a flag: kvist serve MODEL -- --help lists them.",
)
def serve(
    context: typer.Context,
    model: Model,
    config: Annotated[Path | None, typer.Option(help="TOML file of settings, behind flags and KVIST_SERVE_ variables")] = None,
) -> None:
    """Serve a model to OpenAI and Anthropic clients over HTTP (needs kvist's extra serve)."""
    try:
        from kvist.server.main import serve as run_server
    except ModuleNotFoundError as error:
        raise ValueError(f"the server needs {error.name}, which is missing; pip install '.[serve]' in the checkout") from error
    run_server(model, context.args, config)


@app.command()
def demo(model: Annotated[str, typer.Argument(metavar="MODEL", help="a model to show")] = "nano") -> None:
    """The main job on real text: continue a book, read 16K tokens and continue them, then the figures."""
    from kvist.engine.terminal import run_demo

    run_demo(model, _output())


@app.command()
def train(
    model: Annotated[str, typer.Argument(metavar="PRESET|CONFIG", help="a preset or the config.json of what to train")],
    data: Annotated[Path, typer.Option(help="token folder made by python -m kvist.train.corpus")],
    out: Annotated[Path, typer.Option(help="state, metrics and the checkpoint go here; an existing state is continued")],
    stages: Annotated[str, typer.Option(help="of train,draft,export,evaluate,baseline")] = "train,draft,export,evaluate",
    recipe: Annotated[str, typer.Option(help="JSON of recipe fields, e.g. '{\"steps\": 200}'")] = "{}",
    mixture: Annotated[str, typer.Option(help="JSON of mixture fields")] = "{}",
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json; none: the shipped model's of that name")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1")] = "auto",
    stop_after: Annotated[float | None, typer.Option(metavar="SECONDS", help="save and leave after this long")] = None,
    draft_steps: Annotated[int, typer.Option(help="steps of the draft stage")] = 400,
) -> None:
    """Train from scratch: backbone, draft, export to the released format, judgement on held-out works."""
    import json
    from dataclasses import replace

    from kvist.train.loop import Recipe
    from kvist.train.run import run
    from kvist.train.sampling import Mixture

    try:
        settings = replace(Recipe(), **json.loads(recipe)), replace(Mixture(), **json.loads(mixture))
    except (TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"--recipe and --mixture take JSON objects of known fields: {error}") from error
    result = run(
        model,
        data,
        out,
        recipe=settings[0],
        mixture=settings[1],
        stages=tuple(stages.split(",")),
        tokenizer=tokenizer,
        device=device,
        stop_after=stop_after,
        draft_steps=draft_steps,
    )
    print(json.dumps(result, indent=1))


@app.command()
def conformance(
    cases: Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help="golden cases; none: the shipped ones")] = None,
    impl: Annotated[str | None, typer.Option(help="operator implementation to test; none: the runner's default")] = None,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="run in the bit-reproducible mode")] = False,
    device: Annotated[str, typer.Option(help="where models run: cpu, cuda, cuda:1")] = "cpu",
) -> None:
    """Prove the numbers: run golden cases and print a table; status 1 if any quantity fails."""
    from kvist import conformance as runner

    options = {} if impl is None else {"impl": impl}
    status = runner.conformance(cases or (), deterministic=deterministic, device=device, console=_output(), **options)
    raise typer.Exit(status)


@checkpoint_app.command("inspect")
def inspect_checkpoint(
    model: Model,
    tensors: Annotated[str | None, typer.Option(metavar="PATTERN", help="list matching tensors, e.g. 'layers.3.*'")] = None,
) -> None:
    """Files, parameters and bytes by tensor class, from the headers alone; status 1 if they differ from config.json."""
    from kvist.checkpoint import inspect, locate

    inspection = inspect(locate(model), tensors)
    _show_inspection(inspection, _output())
    if inspection.findings:
        raise typer.Exit(1)


def _show_inspection(inspection: Inspection, console: Console) -> None:
    table = Table("file", "bytes")
    for file, nbytes in inspection.files:
        table.add_row(str(file), f"{nbytes:,}")
    console.print(table)
    table = Table("class", "tensors", "parameters", "bytes")
    for row in inspection.kinds:
        table.add_row(row.kind, f"{row.tensors:,}", f"{row.parameters:,}", f"{row.nbytes:,}")
    table.add_section()
    sums = [sum(getattr(row, name) for row in inspection.kinds) for name in ("tensors", "parameters", "nbytes")]
    table.add_row("all", *(f"{value:,}" for value in sums))
    console.print(table)
    if inspection.tensors:
        table = Table("tensor", "dtype", "shape", "file", "offset", "bytes")
        for entry in inspection.tensors:
            shape = str(list(entry.shape))
            table.add_row(
                entry.name, entry.dtype, shape.replace("[", r"\["), entry.file.name, f"{entry.offset:,}", f"{entry.nbytes:,}"
            )
        console.print(table)
    _show_findings(inspection.findings, console)


def _show_findings(findings: tuple[Any, ...], console: Console) -> None:
    for finding in findings:
        console.print(str(finding), style="red", markup=False, highlight=False, soft_wrap=True)


@checkpoint_app.command("verify")
def verify_checkpoint(model: Model) -> None:
    """Read all: container, names, shapes, values that are not finite, tokenizer, SHA-256 of every file; status 1 if bad."""
    from kvist.checkpoint import locate, verify

    with _errors().status("headers") as status:
        report = verify(locate(model), status.update)
    _show_verification(report, _output())
    if not report.good:
        raise typer.Exit(1)


def _show_verification(report: VerifyReport, console: Console) -> None:
    table = Table("sha256", "bytes", "file")
    for file in report.files:
        table.add_row(file.sha256, f"{file.nbytes:,}", file.file.name)
    console.print(table)
    for problem in filter(None, (report.container, report.tokenizer)):
        console.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    _show_findings(report.findings, console)
    for name in report.not_finite:
        console.print(f"not finite: {name}", style="red", markup=False, highlight=False)
    problems = len(report.findings) + len(report.not_finite) + bool(report.container) + bool(report.tokenizer)
    console.print(
        f"{report.folder}: {report.tensors:,} tensors, {report.payload_bytes:,} bytes, "
        + ("good" if report.good else f"{problems} problems"),
        style="green" if report.good else "red",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@checkpoint_app.command("convert")
def convert_checkpoint(
    model: Model,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="folder to write; must not hold a checkpoint yet")],
    weights: Annotated[WeightFormat, typer.Option(help="the FP8 matrices")] = WeightFormat.keep,
    experts: Annotated[ExpertFormat, typer.Option(help="the routed experts")] = ExpertFormat.keep,
    shard_mb: Annotated[float | None, typer.Option(help="largest shard in 10^6 bytes; none: the default of the format")] = None,
) -> None:
    """Write a checkpoint in other storage formats or shard sizes; BF16 from FP8 or FP4 is exact."""
    from kvist.checkpoint import convert

    options: dict[str, int] = {}
    if shard_mb is not None:
        if not 0.001 <= shard_mb <= 1e9:
            raise ValueError(f"--shard-mb is {shard_mb}; it must lie in 0.001 .. 1e9")
        options["shard_bytes"] = int(shard_mb * 1e6)
    _, files = convert(model, out, weights=weights.value, experts=experts.value, **options)
    for file in files:
        print(f"{file}  {file.stat().st_size:,} bytes")


@cache_app.command("stat")
def stat_cache(folder: Store) -> None:
    """Pages and bytes of a store; works beside the process that writes it."""
    from kvist.cache.store import PageStore

    store = PageStore.open(folder, read_only=True)
    stat, geometry = store.stat(), store.geometry
    table = Table("pages", "tokens a page", "bytes a page", "slot bytes", "page file", "index", "model root")
    numbers = (stat.pages, geometry.page_tokens, stat.page_bytes, stat.slot_bytes, stat.file_bytes, stat.index_bytes)
    table.add_row(*(f"{number:,}" for number in numbers), geometry.model.hex())
    _output().print(table)
    store.close()


@cache_app.command("verify")
def verify_cache(
    folder: Store,
    drop: Annotated[bool, typer.Option("--drop", help="drop bad pages and make a bad index again (no other writer)")] = False,
) -> None:
    """Read and prove every page; status 1 if any is bad."""
    from kvist.cache.maintenance import verify
    from kvist.cache.store import PageStore

    store = PageStore.open(folder, read_only=not drop)
    result = verify(store)
    store.close()
    if store.notice:
        _errors().print(store.notice, markup=False, highlight=False, soft_wrap=True)
    print(f"{folder}: {result.pages:,} good pages, {result.payload_bytes:,} bytes")
    problems = [f"{count} bad pages: {reason}" for reason, count in result.bad.items()]
    _show_findings((*problems, *([result.index] if result.index else [])), _output())
    if not result.good:
        print("dropped" if result.dropped else "left as it is; --drop mends it, the pages are then computed again")
        raise typer.Exit(1)


@cache_app.command("prune")
def prune_cache(
    folder: Store,
    keep_bytes: Annotated[int, typer.Option(metavar="BYTES", help="most bytes of page file and index afterwards")],
) -> None:
    """Keep the most recently used pages that fit and give the disk space of the others back."""
    from kvist.cache.maintenance import prune

    gone, left = prune(folder, keep_bytes)
    print(f"{folder}: {gone:,} pages removed, {left:,} kept")


@cache_app.command("export")
def export_cache(folder: Store, out: Annotated[Path, typer.Argument(metavar="OUT", help="new folder to write")]) -> None:
    """Write every good page as a plain file KEY.page and a line of pages.jsonl."""
    from kvist.cache.maintenance import export
    from kvist.cache.store import PageStore

    store = PageStore.open(folder, read_only=True)
    print(f"{export(store, out):,} pages in {out}")
    store.close()
