"""What `kvist generate` and `kvist demo` do in a terminal: load, stream text, show a long prefill's progress, sum up.

Owns the words and tables a person sees. Must not hold any logic of generation.
"""

from __future__ import annotations

import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvist.checkpoint import build_model, fetch_counters, locate
from kvist.config import ModelConfig
from kvist.engine.generate import Finished, GenerateParams, TextDelta, stream
from kvist.engine.sampler import SamplingParams
from kvist.engine.session import Progress as PrefillProgress
from kvist.engine.session import Sequence, Session
from kvist.kernels.device import require_device
from kvist.kernels.native import threads
from kvist.model.numerics import Numerics
from kvist.page_layout import PageLayout
from kvist.text.tokenizer import Tokenizer

LONG_PROMPT_TOKENS = 2048
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BOOK = "persuasion.txt"
_SIZE = re.compile(r"(\d+(?:\.\d*)?)\s*(?:([KMGT])(i?))?B?", re.IGNORECASE)
DEMO_CONTEXT = 16_384


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a model: where decoder windows come from, number type, prefill chunk, operators.

    `expert_budget_bytes`: leave routed experts and Engram tables in the files and hold so many bytes of experts at most.
    """

    replay: str = "bounded"
    dtype: str = "float32"
    chunk: int = 512
    deterministic: bool = False
    impl: str = "cpu"
    ced: bool = True
    expert_budget_bytes: int | None = None


def load_session(name: str, options: RunOptions) -> tuple[Session, Tokenizer]:
    """A model by folder, shipped name or hub id, with its tokenizer. Raises named errors for what is missing."""
    if options.dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    folder = locate(name)
    dtype = DTYPES[options.dtype]
    numerics = Numerics(dtype=dtype, deterministic=options.deterministic, impl=options.impl)
    device = device_for(numerics)
    budget = options.expert_budget_bytes
    if budget is None:
        model = build_model(folder, numerics=numerics, device=device)
    else:
        model = build_model(folder, numerics=numerics, device=device, access="read", engram="read", expert_budget_bytes=budget)
    session = Session(model, replay=options.replay, chunk=options.chunk, ced=options.ced)
    return session, Tokenizer(folder)


def device_for(numerics: Numerics, name: str = "auto") -> torch.device:
    """The device of this name (`auto`: a card for impl `gpu`, else the CPU), if the numerics run there.

    Raises GpuUnavailable where it is not here, ValueError for what cannot run on it.
    """
    device = require_device(("cuda" if numerics.impl == "gpu" else "cpu") if name == "auto" else name)
    numerics.check_device(device)
    return device


def run_generate(name: str, prompt: str, params: GenerateParams, options: RunOptions, status: Console) -> None:
    """Stream a continuation of `prompt` to standard output; progress and figures go to `status`."""
    session, tokenizer = load_session(name, options)
    finished = stream_to(sys.stdout.write, session, tokenizer, text_ids(session, tokenizer, prompt), params, status)
    status.print(summary(finished), style="dim", highlight=False)
    if fetched := fetch_summary(session):
        status.print(fetched, style="dim", highlight=False, soft_wrap=True)


def text_ids(session: Session, tokenizer: Tokenizer, text: str) -> list[int]:
    """Plain text as a base model was trained to see it: the begin token, then the text's ids."""
    return [session.model.config.bos_token_id, *tokenizer.encode(text)]


def stream_to(
    write: Callable[[str], object],
    session: Session,
    tokenizer: Tokenizer,
    ids: list[int],
    params: GenerateParams,
    status: Console,
) -> Finished:
    """Run one request, writing text as it comes; a progress bar while a long prompt is read."""
    bar = Progress(
        TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn(), console=status
    )
    task = bar.add_task("reading", total=len(ids))

    def show(progress: PrefillProgress) -> None:
        bar.update(task, completed=progress.done)
        if progress.done >= progress.total:
            bar.stop()

    long = len(ids) >= LONG_PROMPT_TOKENS
    if long:
        bar.start()
    try:
        for event in stream(session, tokenizer, ids, params, progress=show if long else None):
            if isinstance(event, TextDelta):
                write(event.text)
                sys.stdout.flush()
            else:
                write("\n")
                return event
    finally:
        if bar.live.is_started:
            bar.stop()
    raise AssertionError("a stream ends with Finished")


def summary(finished: Finished) -> str:
    """One line: tokens, rates and why it ended."""
    new = len(finished.new_ids)
    why = f"stop string {finished.stop!r}" if finished.stop else finished.reason
    return (
        f"{finished.prompt_tokens} prompt tokens at {finished.prompt_tokens / max(finished.prefill_s, 1e-9):,.0f}/s, "
        f"{new} new at {max(new - 1, 0) / max(finished.decode_s, 1e-9):,.1f}/s; ended by {why}"
    )


def fetch_summary(session: Session) -> str:
    """One line about what was read from the files while running; empty for a resident model."""
    counters = fetch_counters(session.model)
    parts = []
    if (experts := counters.experts) is not None:
        parts.append(
            f"experts: {experts.hits:,} found, {experts.late:,} on their way, {experts.misses:,} not; "
            f"{experts.bytes_read / 1e9:,.3f} GB read, {experts.stall_s:,.2f} s waited, "
            f"at most {experts.peak_bytes / 1e9:,.3f} GB held"
        )
    if (engram := counters.engram) is not None:
        parts.append(
            f"Engram rows: {engram.distinct:,} asked for, {100 * engram.hit_rate:.0f}% found; "
            f"{engram.bytes_read / 1e6:,.2f} MB read, {engram.stall_s:,.2f} s waited"
        )
    return "\n".join(parts)


def parse_bytes(text: str) -> int:
    """A size such as 500MB, 8GB, 1.5GiB or plain bytes. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is no size; give bytes or a number above 0 with KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    power = "KMGT".find((match[2] or " ")[0].upper()) + 1
    return int(float(match[1]) * (1024 if match[3] else 1000) ** power)


def book_text() -> str:
    """The public-domain excerpt that ships with the package (Jane Austen, Persuasion, 1817)."""
    return resources.files("kvist.assets").joinpath(BOOK).read_text(encoding="utf-8")


def whole_words(ids: list[int], tokenizer: Tokenizer, count: int) -> list[int]:
    """`count` ids (all, if there are fewer): the begin token, then text from as early a place as lets it end with a word."""
    late = next((at for at in range(len(ids) - count) if tokenizer.decode([ids[count + at]])[:1].isspace()), 0)
    return [ids[0], *ids[1 + late : count + late]]


def run_demo(name: str, out: Console) -> None:
    """The main job: continue a book, read 16K tokens and continue them, then a table of rates and cache bytes."""
    began = time.perf_counter()
    out.print(f"[bold]kvist demo[/bold]: {name} on this CPU, {threads()} thread(s)")
    session, tokenizer = load_session(name, RunOptions())
    config = session.model.config
    book = book_text()
    opening = book[: book.index("\n", 900)]
    shown = opening[opening.index(" ", len(opening) - 600) :]
    out.print(f"\n[bold]1. A book goes on[/bold] (Persuasion, a work the model has not seen)\n[dim]...{shown}[/dim]")
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    params = GenerateParams(max_tokens=120, sampling=sampling)
    first = stream_to(sys.stdout.write, session, tokenizer, text_ids(session, tokenizer, opening), params, out)

    ids = whole_words(text_ids(session, tokenizer, book), tokenizer, min(DEMO_CONTEXT, config.max_seq_len - 200))
    out.print(f"\n[bold]2. A long document[/bold]: {len(ids):,} tokens of the book, then on from there")
    out.print(f"[dim]...{tokenizer.decode(ids[-120:])}[/dim]")
    second = stream_to(sys.stdout.write, session, tokenizer, ids, params, out)
    sample_ids = torch.tensor(ids[:2048])
    without_s, with_s = (prefill_seconds(Session(session.model, ced=ced), sample_ids) for ced in (False, True))
    out.print()
    out.print(rates_table(config, first, second, len(sample_ids), with_s, without_s))
    out.print(cache_table(config))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    out.print(f"peak memory {peak_mb:,.0f} MB; {time.perf_counter() - began:.1f} s in all", highlight=False)


def prefill_seconds(session: Session, ids_T: torch.Tensor) -> float:
    """Seconds that a prompt takes."""
    own = session.alone(len(ids_T))
    started = time.perf_counter()
    own.prefill([Sequence(0, ids_T)])
    return time.perf_counter() - started


def rates_table(config: ModelConfig, first: Finished, second: Finished, sampled: int, with_s: float, without_s: float) -> Table:
    """Tokens a second and layers run, with and without the causal encoder-decoder split."""
    layers, encoder = config.n_layers, config.plan.decoder_start
    table = Table(title="rates", title_justify="left")
    for column in ("what", "context", "tokens/s", "layers run a prompt token"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for run in (first, second):
        rate = run.prompt_tokens / run.prefill_s
        ced = f"{encoder} of {layers} (+ the last {config.window_size} through all)"
        table.add_row("prefill", f"{run.prompt_tokens:,}", f"{rate:,.0f}", ced)
        table.add_row("decode", f"{run.prompt_tokens:,}", f"{(len(run.new_ids) - 1) / run.decode_s:,.1f}", str(layers))
    table.add_row("prefill, split on", f"{sampled:,}", f"{sampled / with_s:,.0f}", f"{encoder} of {layers}")
    table.add_row("prefill, split off", f"{sampled:,}", f"{sampled / without_s:,.0f}", f"{layers} of {layers}")
    return table


def cache_table(config: ModelConfig) -> Table:
    """Cache bytes a token by kind, from the page layout; window bytes a sequence."""
    layout = PageLayout.of(config)
    table = Table(title="cache", title_justify="left")
    for column in ("kind", "bytes a token", "note"):
        table.add_column(column, justify="right" if column == "bytes a token" else "left")
    main = sum(config.main_row_bytes / spec.ratio for spec in config.plan.kv_sources)
    keys = sum(config.key_row_bytes / spec.ratio for spec in config.plan.kv_sources)
    table.add_row("main rows (FP4)", f"{main:,.1f}", f"{len(config.plan.kv_sources)} source layers for {config.n_layers} layers")
    table.add_row("index keys (MXFP4)", f"{keys:,.1f}", "")
    table.add_row("all that grows", f"{main + keys:,.1f}", f"a page of {layout.page_tokens} tokens: {layout.page_bytes:,} bytes")
    window = config.n_layers * config.window_size * config.window_row_bytes
    plain = 2 * 2 * config.n_layers * config.n_heads * config.head_dim
    table.add_row("window (FP8)", "0", f"{window:,} bytes a sequence, constant, rebuilt by replay")
    table.add_row("for comparison", f"{plain:,}", "bf16 keys and values of every head and layer")
    return table


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from an option, a file or standard input. Raises ValueError if there is none or two."""
    if prompt is not None and prompt_file is not None:
        raise ValueError("give --prompt or --prompt-file, not both")
    if prompt is not None:
        return prompt
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            where = f"{error.reason} at byte {error.start}"
            raise ValueError(f"{prompt_file} is not UTF-8 text ({where}); convert it first") from error
    if sys.stdin.isatty():
        raise ValueError("no prompt: give --prompt TEXT, --prompt-file FILE, or pipe text in")
    return sys.stdin.read()
