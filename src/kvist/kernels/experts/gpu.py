"""Experts on a GPU: rows grouped by expert, gate and up with activation, weight and FP8 quantiser, down with the sum.

Two launches behind a plan of tiles (an expert and up to T of its rows): gate+up writes the quantised hidden rows, down writes
each choice's output and the last program of a row to arrive adds the row's choices in their order, so sums never depend on
timing. Weights are panels (`device/panels.py`), products exact in bfloat16. On Hopper one row, a few and very many have launches
of their own (`row.py`, `few.py`, `grouped.py`). Must not know layers.

Shapes: N rows, S choices a row, D model width, F expert width, T rows a tile, E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvist.kernels.device import PanelWeight, interpreted, require_bfloat16, require_gpu
from kvist.kernels.device.arrivals import arrivals, parts_for, refuse_capture
from kvist.kernels.device.gpu import begin, fake_fp8_groups, few, let_next, panel_product, rounded, sigmoid
from kvist.kernels.device.pages import multiprocessors
from kvist.kernels.device.row import blocks_of, on_hopper
from kvist.kernels.experts.few import few_experts
from kvist.kernels.experts.few import takes as takes_few
from kvist.kernels.experts.gpu_bank import GpuBank as GpuBank
from kvist.kernels.experts.grouped import fits, run_grouped
from kvist.kernels.experts.row import given_experts_row, takes
from kvist.kernels.linear.gpu import EXPANDED_ROWS, expanded

PLAIN = interpreted()
SMALL_PLAN = 512
"""Choices up to which one program makes the plan."""
DECODE_ROWS = 64
"""Rows up to which tiles are narrow (reading weights is what costs); above, tiles are wide (multiplying is)."""


class Shape(NamedTuple):
    """How a launch is cut: rows a tile, panels a program, warps, pipeline stages; inputs in parts if programs are fewer."""

    tile: int
    panels: int
    warps: int
    stages: int
    programs: int = 0


DECODE = Shape(8, 2, 4, 4, 1024)
GROUPED = Shape(32, 2, 4, 4)
PREFILL = Shape(256, 2, 8, 3)
SHAPES = (
    (5.25, DECODE._replace(programs=0)), (13.5, GROUPED._replace(tile=16)), (28, GROUPED), (64, GROUPED._replace(tile=64)),
    (float("inf"), PREFILL),
)  # fmt: skip
"""Cuts by the choices an expert up to which they are fastest. Tiles of 8, 16, 32 and 64, us for 128 experts on an H200: 746, 816,
915, - at 4.5; 811, 819, 931, - at 6; 1,329, 893, 937, - at 12; -, 1,282, 941, - at 18; -, -, 1,548, 1,290 at 36."""
LAID_ROWS = 9
"""Choices an expert above which `grouped.cu` is faster. In us for tiles of 16 or 32: 878 for 870 at 7, 891 for 939 at 12, 895 for
1,010 at 18, 911 for 995 at 24, 1,079 for 1,837 at 48."""


class Plan(NamedTuple):
    """Tiles on the device, int32: `head` [1] their number; each one's expert (any integer type, -1 for none), first place in
    `order` and rows; `order` holds choices (row * S + slot) by expert; `need` [N] counts a row's listed choices.
    """

    head: Tensor
    expert: Tensor
    first: Tensor
    rows: Tensor
    order: Tensor
    need: Tensor

    @property
    def most_tiles(self) -> int:
        """Tiles that a launch must provide for."""
        return len(self.expert)


@triton.jit
def _make_plan(ids, head, expert, first, rows, order, need, N, E, S: tl.constexpr, P: tl.constexpr, EP: tl.constexpr,
               T: tl.constexpr, TILES_EACH: tl.constexpr, NP: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    begin(PLAIN)
    let_next(PLAIN)
    place = tl.arange(0, P)
    inside = place < N * S
    chosen = tl.load(ids + place, mask=inside, other=-1).to(tl.int32)
    inside = inside & (chosen >= 0)
    ranked = tl.sort(tl.where(inside, chosen, E) * P + place)
    tl.store(order + place, ranked % P, mask=ranked < E * P)
    count = tl.histogram(tl.where(inside, chosen, 0), EP, mask=inside)
    tiles = (count + (T - 1)) // T
    tile = tl.cumsum(tiles, 0) - tiles
    start = tl.cumsum(count, 0) - count
    which = tl.arange(0, EP)
    for j in range(TILES_EACH):
        some = j < tiles
        tl.store(expert + tile + j, which, mask=some)
        tl.store(first + tile + j, start + j * T, mask=some)
        tl.store(rows + tile + j, tl.minimum(count - j * T, T), mask=some)
    tl.store(head, tl.sum(tiles, 0))
    row, total = tl.arange(0, NP), tl.zeros([NP], tl.int32)
    for slot in range(S):
        total += (tl.load(ids + row * S + slot, mask=row < N, other=-1) >= 0).to(tl.int32)
    tl.store(need + row, total, mask=row < N)


@triton.jit
def _gate_up(x, codes, scales, weights, hidden, sums, arrived, head, expert, first, rows, order, limit, S: tl.constexpr,
             K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PANELS: tl.constexpr, PARTS: tl.constexpr, FP4: tl.constexpr,
             QUANTISE: tl.constexpr, FEW_PROGRAMS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    tile = tl.program_id(1)
    begin(PLAIN)
    if FEW_PROGRAMS:
        let_next(PLAIN)
    if tile >= tl.load(head):
        return
    N: tl.constexpr = 64 * PANELS
    F: tl.constexpr = R // 2
    CHUNKS: tl.constexpr = (K + 127) // 128 if FP4 else (K + 63) // 64
    SCALES: tl.constexpr = 64 if FP4 else 1
    t = tl.arange(0, T)
    which = tl.load(expert + tile).to(tl.int64)
    listed = t < tl.load(rows + tile)
    choice = tl.load(order + tl.load(first + tile) + t, mask=listed, other=0)
    # Plans of one row list its ids as they are: a choice of none arrives, and computes nothing.
    alive = listed & (which >= 0)
    panel = (tl.maximum(which, 0) * (R // 64) + tl.program_id(0) * PANELS) * CHUNKS
    STEPS: tl.constexpr = CHUNKS // PARTS
    acc = panel_product(
        tl.zeros([N, T], tl.float32), codes + panel * 2048, scales + panel * SCALES, x, (choice // S).to(tl.int64) * K, alive,
        tl.program_id(2) * STEPS, STEPS, K, N, FP4, True, PLAIN,
    )  # fmt: skip
    if PARTS > 1:
        o = tl.program_id(0) * N + tl.arange(0, N)
        place = sums + (choice * PARTS).to(tl.int64)[None, :] * R + o[:, None]
        inside = alive[None, :] & (o < R)[:, None]
        tl.store(place + tl.program_id(2) * R, acc, mask=inside)
        # A release that covers the whole program's stores, then an acquire before others' stores are read.
        tl.debug_barrier()
        counter = arrived + tile * tl.num_programs(0) + tl.program_id(0)
        before = tl.atomic_add(counter, 1, sem="acq_rel")
        tl.debug_barrier()
        if before != PARTS - 1:
            return
        tl.store(counter, 0)
        acc = tl.zeros([N, T], tl.float32)
        for part in tl.static_range(PARTS):
            acc += tl.load(place + part * R, mask=inside, other=0.0, cache_modifier=".cg")
    gate, up = tl.split(tl.permute(tl.reshape(rounded(acc, PLAIN), (N // 2, 2, T)), (0, 2, 1)))
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = gate * sigmoid(gate) * up * tl.load(weights + choice, mask=alive, other=0.0)[None, :]
    value = rounded(value, PLAIN)
    if QUANTISE:
        value = tl.reshape(fake_fp8_groups(tl.reshape(value, (PANELS, 32, T)), 1), (N // 2, T))
    f = tl.program_id(0) * (N // 2) + tl.arange(0, N // 2)
    tl.store(hidden + choice.to(tl.int64)[None, :] * F + f[:, None], value.to(hidden.dtype.element_ty),
             mask=alive[None, :] & (f < F)[:, None])  # fmt: skip


@triton.jit
def _activate(both, hidden, limit, F: tl.constexpr, W: tl.constexpr, QUANTISE: tl.constexpr, PLAIN: tl.constexpr):
    """W hidden values of a row from its gates and ups in turn."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * W
    pair = tl.load(both + row * (2 * F) + 2 * at + tl.arange(0, 2 * W), mask=2 * at + tl.arange(0, 2 * W) < 2 * F, other=0.0)
    gate, up = tl.split(tl.reshape(pair.to(tl.float32), (W, 2)))
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = rounded(gate * sigmoid(gate) * up, PLAIN)
    if QUANTISE:
        value = tl.reshape(fake_fp8_groups(tl.reshape(value, (W // 32, 32)), 1), (W,))
    f = at + tl.arange(0, W)
    tl.store(hidden + row * F + f, value.to(hidden.dtype.element_ty), mask=f < F)


@triton.jit
def _down(hidden, codes, scales, ids, each, out, arrived, head, expert, first, rows, order, need, N_ROWS, S: tl.constexpr,
          K: tl.constexpr, R: tl.constexpr, T: tl.constexpr, PANELS: tl.constexpr, PARTS: tl.constexpr, FP4: tl.constexpr,
          ADD: tl.constexpr, MOST: tl.constexpr, FEW_PROGRAMS: tl.constexpr, PLAIN: tl.constexpr):  # fmt: skip
    tile = tl.program_id(1)
    N: tl.constexpr = 64 * PANELS
    CHUNKS: tl.constexpr = (K + 127) // 128 if FP4 else (K + 63) // 64
    SCALES: tl.constexpr = 64 if FP4 else 1
    d = tl.program_id(0) * N + tl.arange(0, N)
    STEPS: tl.constexpr = CHUNKS // PARTS
    begin(PLAIN)
    if FEW_PROGRAMS:
        let_next(PLAIN)
    tiles = tl.load(head)
    if tile >= tiles:
        if ADD and tile == tiles:  # rows that chose nothing are zero
            row = tl.arange(0, T)
            for start in range(0, MOST, T):
                empty = (start + row < N_ROWS) & (tl.load(need + start + row, mask=start + row < N_ROWS, other=1) == 0)
                tl.store(out + (start + row).to(tl.int64)[None, :] * R + d[:, None], tl.zeros([N, T], tl.float32),
                         mask=empty[None, :] & (d < R)[:, None])  # fmt: skip
        return
    t = tl.arange(0, T)
    which = tl.load(expert + tile).to(tl.int64)
    listed = t < tl.load(rows + tile)
    choice = tl.load(order + tl.load(first + tile) + t, mask=listed, other=0)
    # Plans of one row list its ids as they are: a choice of none arrives, and computes nothing.
    alive = listed & (which >= 0)
    panel = (tl.maximum(which, 0) * (R // 64) + tl.program_id(0) * PANELS) * CHUNKS
    acc = panel_product(
        tl.zeros([N, T], tl.float32), codes + panel * 2048, scales + panel * SCALES, hidden, choice.to(tl.int64) * K, alive,
        tl.program_id(2) * STEPS, STEPS, K, N, FP4, False, PLAIN,
    )  # fmt: skip
    # Whole sums are rounded as the release does; parts of sums are float32 until they are whole.
    value = rounded(acc, PLAIN) if PARTS == 1 else acc
    place = (choice * PARTS + tl.program_id(2)).to(tl.int64)[None, :] * R + d[:, None]
    tl.store(each + place, value.to(each.dtype.element_ty), mask=alive[None, :] & (d < R)[:, None])
    if ADD:
        row = choice // S
        # A release that covers the whole program's stores, then an acquire before others' stores are read.
        tl.debug_barrier()
        counter = arrived + row * tl.num_programs(0) + tl.program_id(0)
        before = tl.atomic_add(counter, 1, mask=listed, sem="acq_rel")
        last = listed & (before == tl.load(need + row, mask=listed, other=0) * PARTS - 1)
        tl.debug_barrier()
        if tl.max(last.to(tl.int32), 0) == 1:
            total = tl.zeros([N, T], tl.float32)
            for slot in tl.static_range(S):
                there = last & (tl.load(ids + row * S + slot, mask=last, other=-1) >= 0)
                source = each + ((row * S + slot) * PARTS).to(tl.int64)[None, :] * R + d[:, None]
                inside = there[None, :] & (d < R)[:, None]
                value = tl.load(source, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
                for part in tl.static_range(1, PARTS):
                    value += tl.load(source + part * R, mask=inside, other=0.0, cache_modifier=".cg")
                total += rounded(value, PLAIN)
            tl.store(out + row.to(tl.int64)[None, :] * R + d[:, None], total, mask=last[None, :] & (d < R)[:, None])
            tl.store(counter, tl.zeros([T], tl.int32), mask=last)


@triton.jit
def _add(each, ids, plus, out, S: tl.constexpr, R: tl.constexpr, W: tl.constexpr, PLUS: tl.constexpr, PLAIN: tl.constexpr):
    """Sum of a row's choices, for wide tiles: what `_down` does with ADD; and of another row with PLUS, rounded then."""
    begin(PLAIN)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * W + tl.arange(0, W)
    total = tl.zeros([W], tl.float32)
    for slot in tl.static_range(S):
        there = tl.load(ids + row * S + slot) >= 0
        total += tl.load(each + (row * S + slot) * R + d, mask=there & (d < R), other=0.0).to(tl.float32)
    if PLUS:
        total = rounded(total + tl.load(plus + row * R + d, mask=d < R, other=0.0).to(tl.float32), PLAIN)
    tl.store(out + row * R + d, total.to(out.dtype.element_ty), mask=d < R)


_constant_plans: dict[tuple[int, int, int, torch.device], Plan] = {}


def _listed(choices: int, need: int, tile: int, device: torch.device) -> Plan:
    """Choices 0, 1, ... in tiles of expert 0, `need` to a row. Made once a size and kept, so that graphs keep theirs."""
    key = (choices, need, tile, device)
    if key not in _constant_plans:
        refuse_capture(device)
        first = torch.arange(0, choices, tile, dtype=torch.int32, device=device)
        order = torch.arange(choices, dtype=torch.int32, device=device)
        head = torch.full((1,), len(first), dtype=torch.int32, device=device)
        needs = torch.full((choices // need,), need, dtype=torch.int32, device=device)
        _constant_plans[key] = Plan(head, torch.zeros_like(first), first, (choices - first).clamp(max=tile), order, needs)
    return _constant_plans[key]


def plan_rows(ids_NS: Tensor, experts: int, tile: int) -> Plan:
    """Group choices by expert. Never waits for the device, so it can be captured in a graph."""
    n, s = ids_NS.shape
    if n == 1:
        return _listed(s, s, 1, ids_NS.device)._replace(expert=ids_NS.flatten())
    most = min(n * s, experts + n * s // tile)
    sizes = (1, most, most, most, n * s, n)
    head, expert, first, rows, order, need = torch.empty(sum(sizes), dtype=torch.int32, device=ids_NS.device).split(sizes)
    plan = Plan(head, expert, first, rows, order, need)
    if n * s <= SMALL_PLAN:
        _make_plan[(1,)](
            ids_NS, *plan, n, experts, S=s, P=triton.next_power_of_2(max(16, n * s)),
            EP=triton.next_power_of_2(experts), T=tile, TILES_EACH=triton.next_power_of_2(-(-n // tile)),
            NP=triton.next_power_of_2(n), PLAIN=PLAIN,
            num_warps=4,
        )  # fmt: skip
        return plan
    flat = torch.where(ids_NS < 0, experts, ids_NS).flatten()
    order.copy_(flat.argsort(stable=True))
    count = torch.zeros(experts + 1, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))[:-1]
    tiles, start = (count + tile - 1) // tile, count.cumsum(0) - count
    stop = tiles.cumsum(0)
    at = torch.arange(most, device=flat.device)
    which = torch.searchsorted(stop, at, right=True).clamp_max_(experts - 1)
    place = at - (stop - tiles)[which]
    head.copy_(stop[-1:])
    expert.copy_(which)
    first.copy_(start[which] + place * tile)
    rows.copy_((count[which] - place * tile).clamp(0, tile))
    need.copy_((ids_NS >= 0).sum(1))
    return plan


def gate_up_gpu(x_ND: Tensor, weights_NS: Tensor, plan: Plan, weight: PanelWeight, limit: float, form: str | None,
                shape: Shape) -> Tensor:  # fmt: skip
    """Quantised hidden rows of every choice, bfloat16 [N*S, F]; rows of choices that are not in the plan are not written."""
    n, s = weights_NS.shape
    hidden = torch.empty(n * s, weight.outputs // 2, dtype=x_ND.dtype, device=x_ND.device)
    blocks = triton.cdiv(weight.outputs, 64 * shape.panels)
    parts = _parts(blocks * plan.most_tiles, shape, weight)
    sums, arrived = hidden, plan.head
    if parts > 1:
        sums = torch.empty(n * s, parts, weight.outputs, dtype=torch.float32, device=x_ND.device)
        arrived = arrivals(weight.codes, blocks * plan.most_tiles)
    _gate_up[(blocks, plan.most_tiles, parts)](
        x_ND, weight.codes, weight.scales, weights_NS, hidden, sums, arrived, *plan[:5], limit, S=s, K=weight.inputs,
        R=weight.outputs, T=shape.tile, PANELS=shape.panels, PARTS=parts, FP4=weight.form == "fp4", QUANTISE=form is not None,
        FEW_PROGRAMS=few(blocks * plan.most_tiles * parts, x_ND.device), PLAIN=PLAIN, num_warps=shape.warps,
        num_stages=shape.stages,
    )  # fmt: skip
    return hidden


def sum_choices(each: Tensor, ids_NS: Tensor, plus_ND: Tensor | None = None) -> Tensor:
    """Each choice's output -> each row's sum, float32; choices of none are not read. With `plus_ND`: added, rounded."""
    (n, s), width = ids_NS.shape, each.shape[-1]
    out = torch.empty(n, width, dtype=torch.float32 if plus_ND is None else torch.bfloat16, device=each.device)
    _add[(n, triton.cdiv(width, 1024))](
        each, ids_NS, out if plus_ND is None else plus_ND, out, S=s, R=width, W=1024, PLUS=plus_ND is not None, PLAIN=PLAIN,
        num_warps=4,
    )  # fmt: skip
    return out


def down_gpu(hidden: Tensor, ids_NS: Tensor, plan: Plan, weight: PanelWeight, shape: Shape) -> Tensor:
    """Sum of each row's choices, float32 [N,D]; zero for a row without any."""
    n, s = ids_NS.shape
    panels = triton.cdiv(weight.outputs, 64 * shape.panels)
    parts = _parts(panels * plan.most_tiles, shape, weight)
    each = torch.empty(
        n * s, parts, weight.outputs, dtype=hidden.dtype if parts == 1 else torch.float32, device=hidden.device
    )  # fmt: skip
    out = torch.empty(n, weight.outputs, dtype=torch.float32, device=hidden.device)
    add = n <= DECODE_ROWS
    _down[(panels, plan.most_tiles + 1, parts)](
        hidden, weight.codes, weight.scales, ids_NS, each, out, arrivals(weight.codes, n * panels), *plan, n, S=s,
        K=weight.inputs, R=weight.outputs, T=shape.tile, PANELS=shape.panels, PARTS=parts, FP4=weight.form == "fp4", ADD=add,
        MOST=DECODE_ROWS, FEW_PROGRAMS=few(panels * plan.most_tiles * parts, hidden.device), PLAIN=PLAIN,
        num_warps=shape.warps, num_stages=shape.stages,
    )  # fmt: skip
    return out if add else sum_choices(each, ids_NS)


def shape_for(rows: int, choices: int, weight: PanelWeight) -> Shape:
    """The cut for rows with so many choices in all. Wide programs need whole double panels."""
    shape = DECODE if rows <= DECODE_ROWS else next(cut for most, cut in SHAPES if choices <= most * weight.experts)
    if weight.outputs % (64 * shape.panels) == 0:
        return shape
    return shape._replace(panels=1, warps=4)


def _parts(programs: int, shape: Shape, weight: PanelWeight) -> int:
    """Parts of the inputs, only where programs do not fill the card: 216 in four parts took 54 us in place of 50."""
    device = weight.codes.device
    if programs > multiprocessors(device):
        return 1
    return parts_for(programs, weight.codes.shape[2], shape.programs, device)


def groups_pay(choices: int, bank: GpuBank) -> bool:
    """Whether experts have rows enough for `grouped.cu`, and it takes the bank."""
    return choices > LAID_ROWS * bank.gate_up.experts and fits(bank)


def _one_launch(x_ND: Tensor, ids_NS: Tensor, bank: GpuBank, form: str | None, shared: GpuBank | None = None) -> bool:
    """Whether rows are few, but more than one, and the launch for such takes them."""
    n, s = ids_NS.shape
    return n > 1 and form == "fp8" and on_hopper(x_ND) and takes_few(bank, n, s, shared)


def run_bank(x_ND: Tensor, ids_NS: Tensor, weights_NS: Tensor, bank: GpuBank, limit: float, form: str | None) -> Tensor:
    """All choices of all rows through one bank, float32 [N,D]."""
    n, choices = len(x_ND), ids_NS.numel()
    if _one_launch(x_ND, ids_NS, bank, form):
        return few_experts(x_ND, ids_NS, weights_NS, bank, limit=limit)
    if n == 1 and form == "fp8" and on_hopper(x_ND) and takes(bank, choices, blocks_of(x_ND.device)):
        return given_experts_row(x_ND, ids_NS, weights_NS, bank, limit=limit)
    if groups_pay(choices, bank) and form == "fp8":
        return sum_choices(run_grouped(x_ND, ids_NS, weights_NS, bank, limit), ids_NS)
    shapes = (shape_for(n, choices, bank.gate_up), shape_for(n, choices, bank.down))
    plan = plan_rows(ids_NS, bank.gate_up.experts, shapes[0].tile)
    hidden = gate_up_gpu(x_ND, weights_NS, plan, bank.gate_up, limit, form, shapes[0])
    return down_gpu(hidden, ids_NS, plan, bank.down, shapes[1])


def run_expanded(x_ND: Tensor, bank: GpuBank, limit: float, form: str | None) -> Tensor:
    """Every row through the one FP8 expert of a bank, whose values are expanded for cuBLAS first: bfloat16 [N,D]."""
    n, f = len(x_ND), bank.down.inputs
    both = torch.nn.functional.linear(x_ND, expanded(bank.gate_up))
    hidden = torch.empty(n, f, dtype=x_ND.dtype, device=x_ND.device)
    width = 256
    _activate[(n, triton.cdiv(f, width))](both, hidden, limit, F=f, W=width, QUANTISE=form is not None, PLAIN=PLAIN, num_warps=2)
    return torch.nn.functional.linear(hidden, expanded(bank.down))


_shared_choices: dict[tuple[int, torch.device], tuple[Tensor, Tensor]] = {}


def _all_to_one(rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and weights of rows that all choose expert 0. Made once a size and kept, as `_listed` is."""
    if (rows, device) not in _shared_choices:
        refuse_capture(device)
        ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        _shared_choices[rows, device] = (ids, torch.ones(rows, 1, device=device))
    return _shared_choices[rows, device]


def run_shared(x_ND: Tensor, bank: GpuBank, limit: float, form: str | None) -> Tensor:
    """Every row through the one expert of a bank, [N,D] float32, or bfloat16 where rows are many."""
    n, device = len(x_ND), x_ND.device
    if n >= EXPANDED_ROWS and bank.gate_up.form == bank.down.form == "fp8":
        return run_expanded(x_ND, bank, limit, form)
    shapes = (shape_for(n, n, bank.gate_up), shape_for(n, n, bank.down))
    ids, ones = _all_to_one(n, device)
    if n <= DECODE_ROWS:
        plan = _listed(n, 1, shapes[0].tile, device)
    else:
        plan = plan_rows(ids, 1, shapes[0].tile)
    hidden = gate_up_gpu(x_ND, ones, plan, bank.gate_up, limit, form, shapes[0])
    return down_gpu(hidden, ids, plan, bank.down, shapes[1])


def run_both(
    x_ND: Tensor, ids_NS: Tensor, weights_NS: Tensor, bank: GpuBank, shared: GpuBank, limit: float, form: str | None
) -> Tensor:
    """All choices of all rows and the shared expert, summed in float32 and rounded once: bfloat16 [N,D]."""
    if _one_launch(x_ND, ids_NS, bank, form, shared):
        return few_experts(x_ND, ids_NS, weights_NS, bank, shared, limit=limit)
    shared_ND = run_shared(x_ND, shared, limit, form)
    if groups_pay(ids_NS.numel(), bank) and form == "fp8":
        return sum_choices(run_grouped(x_ND, ids_NS, weights_NS, bank, limit), ids_NS, shared_ND)
    return torch.add(run_bank(x_ND, ids_NS, weights_NS, bank, limit, form), shared_ND, out=torch.empty_like(x_ND))


def experts_gpu(
    x_ND: Tensor,
    ids_NK: Tensor,
    weights_NK: Tensor,
    bank: object,
    *,
    limit: float,
    form: str | None,
    shared: object,
) -> Tensor:
    """See `experts`. `bank` and `shared` must be `GpuBank`s (shared: one expert); ids of a row distinct and ascending."""
    require_gpu()
    require_bfloat16("experts", x_ND)
    if form not in (None, "fp8"):
        raise ValueError(f"impl 'gpu' quantises hidden activations to fp8 or not at all, got {form!r}; use impl 'ref'")
    if not isinstance(bank, GpuBank) or not (shared is None or isinstance(shared, GpuBank)):
        kinds = f"{type(bank).__name__} and {type(shared).__name__}"
        raise ValueError(f"impl 'gpu' reads experts from a GpuBank, and the shared one too; got {kinds}; use impl 'ref'")
    n, d = x_ND.shape
    if bank.gate_up.inputs != d:
        raise ValueError(f"rows of {d} channels for experts of {bank.gate_up.inputs}")
    if not n:
        return torch.zeros(0, d, dtype=torch.float32, device=x_ND.device)
    x_ND = x_ND.contiguous()
    out = run_bank(x_ND, ids_NK.contiguous(), weights_NK.contiguous(), bank, limit, form)
    if shared is None:
        return out
    return out + run_shared(x_ND, shared, limit, form)
