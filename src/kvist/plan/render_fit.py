"""A `Fit` as tables and formulas. Owns wording; every number shown comes from fit.py, every formula names its assumptions."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from kvist.plan.fit import GB, Fit, sizes_of


def print_fit(fit: Fit, console: Console) -> None:
    """Where things lie, what a step reads, tokens a second, and the formulas behind them."""
    console.print(classes_table(fit))
    console.print()
    if fit.lacking:
        console.print(_lacking(fit), soft_wrap=True)
        return
    console.print(step_table(fit))
    console.print()
    for line in formulas(fit):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def classes_table(fit: Fit) -> Table:
    """Bytes by class: stored, read for one step, and where they are kept."""
    sizes, config = fit.sizes, fit.config
    table = _table("Classes", "class", "GB", "GB read a step", "where")
    wanted = config.n_layers * fit.distinct_experts * sizes.expert
    held = ", ".join(f"{100 * tier.share:.1f}% {tier.name}" for tier in fit.tiers) or "disk"
    tables = f"{100 * fit.tables_share:.1f}% RAM, rest disk" if fit.tiers else "disk"
    dense = f"dense weights ({'as stored' if fit.held == 'stored' else fit.held})"
    table.add_row(dense, _gb(sizes.dense), _gb(sizes.dense_read), fit.resident_in)
    table.add_row(f"cache of {fit.streams} x {fit.context:,} tokens", _gb(fit.cache_bytes), _gb(fit.cache_read), fit.resident_in)
    table.add_row(f"routed experts, {sizes.expert / 1e6:.2f} MB each", _gb(sizes.experts), _gb(wanted), held)
    if sizes.draft_experts:
        table.add_row("routed experts of drafts", _gb(sizes.draft_experts), "0", "with the experts")
    if sizes.tables:
        table.add_row("Engram tables", _gb(sizes.tables), f"{fit.streams * sizes.table_row / GB:.7f}", tables)
    other = ", ".join(f"{name} {_gb(sizes_of(config, name).dense)} GB" for name in ("stored", "bfloat16", "float32"))
    table.caption = f"Dense weights: {other}; impl cpu adds 2 bytes a value for packed copies of the matrices."
    return table


def step_table(fit: Fit) -> Table:
    """Seconds of one decode step by resource, and the rates."""
    table = _table(f"One decode step of {fit.streams} token(s)", "what", "GB", "GB/s", "ms")
    machine = fit.machine
    rate = machine.gpu_gbps if fit.resident_in == "GPU" else machine.ram_gbps
    table.add_row(
        f"dense and cache from {fit.resident_in}", _gb(fit.sizes.dense_read + fit.cache_read), f"{rate:g}", _ms(fit.resident_s)
    )
    for tier in fit.tiers:
        over = " over the link" if tier.name == "RAM" and machine.gpu_gb else ""
        table.add_row(f"experts from {tier.name}{over}", _gb(tier.read), f"{tier.gbps:g}", _ms(tier.seconds))
    if fit.sizes.tables:
        table.add_row("Engram rows from disk", "", f"{machine.disk_kiops:g}K reads/s", _ms(fit.table_s))
    table.add_section()
    table.add_row("tokens/s, nothing overlaps", "", "", f"{fit.low:,.3g}")
    table.add_row("tokens/s, all overlaps", "", "", f"{fit.high:,.3g}")
    table.add_row(f"prompt tokens/s in chunks of {fit.chunk}, nothing overlaps", "", "", f"{fit.prefill_low:,.3g}")
    table.caption = "Limits by bytes alone: compute is not counted."
    return table


def formulas(fit: Fit) -> list[str]:
    """The arithmetic with its numbers, and what it assumes."""
    c, sizes, machine = fit.config, fit.sizes, fit.machine
    everything = sizes.experts + sizes.draft_experts
    wanted = c.n_layers * fit.distinct_experts * sizes.expert
    lines = [
        f"experts a layer and step = E (1 - (1 - K/E)^streams) = {c.n_routed_experts} (1 - (1 - {c.n_activated_experts}/"
        f"{c.n_routed_experts})^{fit.streams}) = {fit.distinct_experts:.3g}",
        f"expert bytes a step = layers x experts x bytes = {c.n_layers} x {fit.distinct_experts:.3g} x {sizes.expert:,} "
        f"= {_gb(wanted)} GB",
        f"share found in a cache of C bytes = C / {_gb(everything)} GB if C >= {_gb(wanted)} GB, else 0 "
        "(uniform routing, least recently used; skewed routing finds more)",
        "seconds = dense and cache / rate + sum over tiers (share x expert bytes / rate) + table reads / reads a second",
    ]
    if sizes.tables:
        lines.append(
            f"table reads = streams x layers x columns x 2 (codes, scales) x share not in RAM = {fit.streams} x "
            f"{sizes.table_reads} x {1 - fit.tables_share:.3g} (uniform ids; prefetch from token ids hides them)"
        )
    chosen = c.plan.decoder_start
    lines.append(
        f"prefill: a chunk of {fit.chunk} reads the experts it chooses in {chosen} of {c.n_layers} layers (causal "
        "encoder-decoder split), and their share of the dense weights"
    )
    lines.append(f"RAM left after {machine.reserve_gb:g} GB for the program holds experts first, then tables")
    return lines


def _lacking(fit: Fit) -> str:
    resident = fit.sizes.dense + fit.cache_bytes
    smaller = "" if fit.held == "stored" else "; --held stored or bfloat16 takes less"
    return (
        f"[red]does not fit[/red]: dense weights and cache take {_gb(resident)} GB, and neither the GPU's "
        f"{fit.machine.gpu_gb:g} GB nor RAM's {fit.machine.ram_gb:g} GB less {fit.machine.reserve_gb:g} GB for the program hold "
        f"them; {_gb(fit.lacking)} GB more RAM would{smaller}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 or column == "where" else "right")
    return table


def _gb(nbytes: float) -> str:
    return f"{nbytes / GB:,.4g}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3g}"
