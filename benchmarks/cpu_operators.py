"""Operators on the CPU against limits measured in the same run: FP4 experts, decode beyond the caches, index scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.cases import Benchmark, Case, Options, TimedCase, WrongResult
from benchmarks.cpu_limits import dot_rate, memory, read_bytes, sum_bytes
from benchmarks.cpu_wide_model import active_bytes, is_whole, wide_model
from benchmarks.nano_model import decode_tokens
from kvist.engine.session import Sequence, Session
from kvist.kernels.experts import PackedBank, experts
from kvist.kernels.index_select import select
from kvist.kernels.index_select.pages import select_pages
from kvist.kernels.native import Packed, native_or_none, one_torch_thread, pack, pack_fp4, packed_fp4_bytes
from kvist.kernels.native.pages import PageSource
from kvist.kernels.quantise import quantise
from kvist.model.transformer import Transformer
from kvist.quant import dequantise_fp4_weight, unpack_mxfp4

WIDTH, HIDDEN, EXPERTS = 5120, 2304, 24
HEADS, KEY_WIDTH, KEYS, PAGE_ROWS, BEST = 32, 128, 1 << 17, 128, 512
TOKENS = 16
OPTIONS = {"limit": 10.0, "form": "fp8", "impl": "cpu"}


def _codes(outputs: int, inputs: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (outputs, inputs // 2), generator=random, dtype=torch.uint8)
    return codes, torch.randint(116, 121, (outputs, inputs // 32), generator=random, dtype=torch.uint8)


def _bank(count: int, random: torch.Generator) -> PackedBank:
    def triple() -> tuple[Packed, Packed, Packed]:
        first, second, third = ((HIDDEN, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        return tuple(pack_fp4(*_codes(*shape, random)) for shape in (first, second, third))  # type: ignore[return-value]

    return PackedBank([triple() for _ in range(count)])


def _require_values(random: torch.Generator) -> None:
    """One expert from codes gives the bits of its values multiplied. Raises `WrongResult`."""
    codes = [_codes(*shape, random) for shape in ((HIDDEN, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    banks = [
        PackedBank([tuple(pack_fp4(*part) for part in codes)]),  # type: ignore[list-item]
        PackedBank([tuple(pack(dequantise_fp4_weight(*part, torch.float32)) for part in codes)]),  # type: ignore[list-item]
    ]
    for rows in (1, 3, 8):
        x = quantise(torch.randn(rows, WIDTH, generator=random), "fp8")
        chosen, weights = torch.zeros(rows, 1, dtype=torch.int64), torch.ones(rows, 1)
        one, other = (experts(x, chosen, weights, bank, **OPTIONS) for bank in banks)  # type: ignore[arg-type]
        if not torch.equal(one, other) or not float(one.abs().max()) > 0:
            raise WrongResult(f"{rows} rows of an FP4 expert differ from its values by {float((one - other).abs().max())}")


def _expert_cases(options: Options, block: Tensor) -> Iterator[Case]:
    random = torch.Generator().manual_seed(1)
    _require_values(random)
    count = EXPERTS // 4 if options.quick else EXPERTS
    bank = _bank(count, random)
    moved = 3.0 * packed_fp4_bytes(HIDDEN, WIDTH) * count
    for rows in (1, 4):
        x = quantise(torch.randn(rows, WIDTH, generator=random), "fp8")
        chosen, share = torch.arange(count).expand(rows, -1).contiguous(), torch.full((rows, count), 1.0 / count)

        def through(x: Tensor = x, chosen: Tensor = chosen, share: Tensor = share) -> None:
            experts(x, chosen, share, bank, **OPTIONS)  # type: ignore[arg-type]

        yield TimedCase(
            name=f"FP4 experts {WIDTH} x {HIDDEN} x 3, {rows} row{'s' * (rows > 1)}, {moved / 1e6:.0f} MB in turn",
            variants={
                "native": through,
                "memory read only": lambda: read_bytes(block, moved),
                "torch.sum, 1 thread": lambda: sum_bytes(block, moved),
            },
            subject="native",
            check=lambda: None,
            work=moved / 1e9,
            unit="GB/s",
            floor_variant="memory read only",
            moved_bytes=moved,
        )


def _session(model: Transformer, ids: Tensor, room: int, *, whole: bool) -> tuple[Session, Sequence]:
    """A request that has read its prompt, on pages; `whole` False: operators are called one by one."""
    session, sequence = Session(model).alone(len(ids) + room), Sequence(0, ids)
    if not whole:
        session.memory.places = lambda rows, *, block=False: None  # type: ignore[method-assign]
    session.prefill([sequence])
    return session, sequence


def _model_case(options: Options, block: Tensor) -> Iterator[Case]:
    model = wide_model()
    ids = torch.randint(64, model.config.vocab_size, (512,), generator=torch.Generator().manual_seed(7))
    room = TOKENS * (options.rounds + 4)
    one, other = (_session(model, ids, room, whole=whole) for whole in (True, False))

    def check() -> None:
        ours, theirs = decode_tokens(*one, 4), decode_tokens(*other, 4)
        if not is_whole(model) or not torch.equal(ours, theirs) or not bool(ours.isfinite().all()):
            raise WrongResult(f"whole layers differ from their operators by {float((ours - theirs).abs().max())}")

    moved = active_bytes(model)
    yield TimedCase(
        name=f"decode, {moved / 1e6:.0f} MB of weights a token, 512 tokens before",
        variants={
            "whole layers": lambda: decode_tokens(*one, TOKENS),
            "operators one by one": lambda: decode_tokens(*other, TOKENS),
            "memory read only": lambda: read_bytes(block, moved * TOKENS),
            "torch.sum, 1 thread": lambda: sum_bytes(block, moved * TOKENS),
        },
        subject="whole layers",
        check=check,
        work=TOKENS,
        unit="tokens/s",
        floor_variant="memory read only",
        moved_bytes=moved * TOKENS,
    )


def _keys(count: int, random: torch.Generator) -> tuple[PageSource, Tensor]:
    """Packed keys in scattered pages behind a table (main rows of 64 channels beside them), and their values [count,I]."""
    pages, sizes = count // PAGE_ROWS, [PAGE_ROWS * n for n in (32, 4, KEY_WIDTH // 2, KEY_WIDTH // 32)]
    offsets = [sum(sizes[:part]) for part in range(4)]
    data = torch.randint(0, 256, (pages, sum(sizes)), generator=random, dtype=torch.uint8)
    data[:, offsets[3] :] = torch.randint(122, 126, (pages, sizes[3]), generator=random, dtype=torch.uint8)
    table = torch.randperm(pages, generator=random).int().view(1, -1)
    source = PageSource.of(
        data, table, ratio=1, rows=PAGE_ROWS, main_width=64, key_width=KEY_WIDTH, offsets=(offsets[0], *offsets[1:])
    )
    ordered = data[table[0].long()]
    codes = ordered[:, offsets[2] : offsets[3]].reshape(count, -1)
    return source, unpack_mxfp4(codes, ordered[:, offsets[3] :].reshape(count, -1), torch.float32)


def _score_cases(options: Options) -> Iterator[Case]:
    random = torch.Generator().manual_seed(2)
    count = 1 << 13 if options.quick else KEYS
    source, keys_MI = _keys(count, random)
    for queries in (1, 4, 16):
        q = quantise(torch.randn(queries, HEADS, KEY_WIDTH, generator=random), "mxfp4")
        weight = torch.randn(queries, HEADS, generator=random)
        segments = torch.tensor([[0, 0, queries, count - queries, 0]])

        def run(segments: Tensor = segments, q: Tensor = q, weight: Tensor = weight) -> Tensor:
            return select_pages(source, segments, q, weight, k=BEST, block_size=8).topk_NK

        def check(q: Tensor = q, weight: Tensor = weight, queries: int = queries, found: Tensor = run()) -> None:
            visible = torch.arange(count - queries + 1, count + 1)
            expected = select(q, weight, keys_MI, visible, k=BEST, block_size=8, impl="cpu").topk_NK
            if not torch.equal(found, expected):
                raise WrongResult(f"{queries} queries choose other rows from packed keys than from their values")

        operations = 2.0 * queries * HEADS * KEY_WIDTH * count
        rate = dot_rate()
        yield TimedCase(
            name=f"scores and best {BEST}, {queries} x {HEADS} x {KEY_WIDTH}, {count // 1024}K packed keys",
            variants={"native": run},
            subject="native",
            check=check,
            floor=operations / rate * 1e6 if rate else None,
            moved_bytes=68.0 * count,
            flops=operations,
        )


def _build(options: Options) -> Iterator[Case]:
    if native_or_none() is None:
        raise ValueError("there is no C compiler, hence no native operator to measure; install gcc or clang, or set CC")
    with one_torch_thread():  # torch's idle workers spin for a while, on the cores that native threads need
        block = memory()
        yield from _expert_cases(options, block)
        yield from _model_case(options, block)
        yield from _score_cases(options)


BENCHMARK = Benchmark(
    name="cpu-operators",
    summary="CPU: FP4 experts and decode beyond the caches against the memory's read rate, index scores against integer dots",
    build=_build,
)
