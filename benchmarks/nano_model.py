"""What both nano benchmarks run on: the model in two implementations, prompts, the gate, and the machine's measured limits.

Uses `models/nano` when it holds weights, else random weights of the same shapes; the case's name says which.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.cases import WrongResult
from benchmarks.rows import ROOT
from kvist.checkpoint import build_model
from kvist.engine.session import Sequence, Session
from kvist.kernels.native import native_or_none, one_torch_thread
from kvist.kernels.native.calls import NATIVE_FUNCTIONS
from kvist.model.dspark import DraftBlocks
from kvist.model.initialise import random_model
from kvist.model.memory import DenseMemory
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset

EXACT = 1e-4
ROUNDING = 1e-3
TIPPED = 0.6


def weights_label() -> str:
    """`trained` or `random weights`."""
    return "trained" if any((ROOT / "models" / "nano").glob("*.safetensors")) else "random weights"


@cache
def nano(impl: str, quantise: bool = True) -> Transformer:
    """The model in float32 with the operators `impl`; `quantise=False` only for judging."""
    numerics = Numerics(impl=impl, quantise=quantise)
    if weights_label() == "trained":
        return build_model(ROOT / "models" / "nano", numerics=numerics)
    return random_model(preset("nano"), numerics, seed=1)


def prompt(length: int) -> Tensor:
    """Seeded token ids without special tokens."""
    return torch.randint(64, preset("nano").vocab_size, (length,), generator=torch.Generator().manual_seed(7))


def relative_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """|actual - expected| / |expected| of each row of logits [N,V]."""
    return (actual - expected).norm(dim=1) / expected.norm(dim=1)


def require_equal(actual: Tensor, expected: Tensor, where: str) -> None:
    """Without quantisers nothing is a staircase: every row of logits [N,V] must agree to float32 sums. `WrongResult`."""
    worst = float(relative_errors(actual, expected).max())
    if not worst < EXACT:
        raise WrongResult(f"{where}, quantisers off: relative error of logits {worst:.3g}, below {EXACT} is required")


def require_close(actual: Tensor, expected: Tensor, where: str) -> None:
    """With quantisers a last bit may tip a rounding, which moves a row of logits [N,V] (some 30,000 roundings a token make
    that common). Rows without such an event must agree, and no row may move far. Raises `WrongResult`."""
    error_N = relative_errors(actual, expected)
    untouched = float((error_N < ROUNDING).float().mean())
    if len(error_N) >= 8 and untouched < 0.25:
        raise WrongResult(f"{where}: only {untouched:.0%} of the rows agree within {ROUNDING}, at least 25% are expected")
    if not float(error_N.max()) < TIPPED:
        raise WrongResult(f"{where}: relative error of logits {float(error_N.max()):.3g}, below {TIPPED} is required")


def gate() -> None:
    """Score 96 tokens position by position without quantisers."""
    ids = prompt(96)
    ours, theirs = (Session(nano(impl, False)).score(ids) for impl in ("cpu", "ref"))
    require_equal(ours, theirs, "score of 96 tokens")


class _TorchCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_calls(run: Callable[[], object]) -> tuple[int, int]:
    """(native calls, torch operators) of one run; views count as operators."""
    native = native_or_none()
    with _counted(native) as counts, _TorchCalls() as torch_calls:
        run()
    return sum(counts.values()), torch_calls.count


@contextmanager
def _counted(native: Any) -> Iterator[dict[str, int]]:
    counts: dict[str, int] = {}
    if native is None:
        yield counts
        return
    originals = {name: getattr(native, name) for name in NATIVE_FUNCTIONS}

    def counting(name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return originals[name](*arguments)

        return call

    try:
        for name in originals:
            setattr(native, name, counting(name))
        yield counts
    finally:
        for name, function in originals.items():
            setattr(native, name, function)


@cache
def read_bandwidth() -> float:
    """Bytes a second that a sum over 256 MB reads, the best of five."""
    block = torch.ones(1 << 26)
    best = min(_seconds(lambda: block.sum()) for _ in range(5))
    return block.numel() * 4 / best


@cache
def product_rate() -> float:
    """Operations a second of a 2048-square bfloat16 product, the best of ten: the fastest product of this machine."""
    a = torch.ones(2048, 2048, dtype=torch.bfloat16)
    return float(2 * 2048**3 / min(_seconds(lambda: a @ a) for _ in range(10)))


def decode_bytes(model: Transformer, context: int) -> float:
    """Bytes one decode step must read: active backbone weights in bfloat16 and the index keys of selecting layers."""
    config = model.config
    share = config.n_activated_experts / config.n_routed_experts
    weights = 0.0
    for name, parameter in model.named_parameters():
        if not name.startswith(("mtp.", "embed.", "vision.", "aligner.")):
            weights += 2.0 * parameter.numel() * (share if ".experts." in name else 1.0)
    pool = config.candidate_topk_blocks * config.candidate_block_size
    keys = 0.0
    for spec in config.plan.layers:
        if spec.selects:
            source = config.plan.layers[spec.index if spec.kv_source is None else spec.kv_source]
            rows = context // source.ratio
            keys += 4.0 * config.index_head_dim * (min(rows, pool) if spec.candidate_source is not None else rows)
    return weights + keys


def observe_cost(model: Transformer) -> float:
    """Bytes of the draft blocks' weights that observing a token reads."""
    mtp = model.mtp
    if not isinstance(mtp, DraftBlocks):
        return 0.0
    names = ("main_proj", "attn.wkv.")
    return sum(2.0 * p.numel() for name, p in mtp.named_parameters() if any(part in name for part in names))


def on_one_thread(run: Callable[[], object]) -> object:
    """Run the reference on one torch thread: on a busy machine barriers of two stall (measured: a tenth of the speed)."""
    with one_torch_thread():
        return run()


def decode_tokens(session: Session, sequence: Sequence, tokens: int) -> Tensor:
    """Logits [tokens,V] of as many one-token steps, each on a token that is given."""
    logits = []
    for step in range(tokens):
        sequence.append(100 + step)
        logits.append(session.decode([sequence]))
    return torch.cat(logits)


def prefilled(impl: str, length: int) -> tuple[Session, Sequence]:
    """A session that has read `length` tokens."""
    session = Session(nano(impl))
    sequence = Sequence(0, prompt(length))
    session.prefill([sequence])
    return session, sequence


def twin(session: Session, sequence: Sequence, impl: str) -> tuple[Session, Sequence]:
    """The same request in another implementation, its memory copied: both decode from equal bits."""
    model, held = nano(impl), session.memory
    assert isinstance(held, DenseMemory), "pages are not copied from a session"
    memory = DenseMemory(model.config, model.numerics)
    memory.slots[0] = held.slot(0).fork()
    other = Session(model, memory=memory)
    copy = Sequence(0, sequence.ids_T.clone())
    copy.computed = sequence.computed
    return other, copy


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
