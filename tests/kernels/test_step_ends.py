"""What stands between large operators of a step on a card: streams, groups from rows and tails, n-gram classes, thin products;
each beside torch."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from kvist.kernels.device import GpuUnavailable
from kvist.kernels.group_pool import group_pool
from kvist.kernels.streams import embed_streams, mean_streams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CAN_RUN = importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or INTERPRETED)
needs_kernels = pytest.mark.skipif(not CAN_RUN, reason="needs Triton and a GPU, or Triton with TRITON_INTERPRET=1")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@needs_kernels
@pytest.mark.parametrize(("n", "width"), [(1, 64), (3, 1536), (0, 64)])
def test_streams(n: int, width: int) -> None:
    embed, token = normal(7, width).bfloat16(), torch.tensor([6, 0, 6][:n], dtype=torch.int64, device=DEVICE)
    got = embed_streams(token, embed, 4, impl="gpu")
    assert torch.equal(got, embed_streams(token, embed, 4))
    x = normal(n, 4, width, seed=1).bfloat16()
    assert torch.equal(mean_streams(x, impl="gpu"), mean_streams(x))


@needs_kernels
def test_means_that_are_kept() -> None:
    from kvist.kernels.streams.gpu import mean_streams_gpu

    x, ring = normal(3, 4, 64).bfloat16(), torch.zeros(2, 5, 128, dtype=torch.bfloat16, device=DEVICE)
    out = torch.zeros(3, 128, dtype=torch.bfloat16, device=DEVICE)
    slots, positions = torch.tensor([0, 1, 1], device=DEVICE), torch.tensor([7, 4, 10], device=DEVICE)
    mean_streams_gpu(x, out, 64, (ring, slots, positions))
    want = mean_streams(x)
    assert torch.equal(out[:, 64:], want)
    assert torch.equal(ring[slots, positions % 5, 64:], want)
    assert int((ring != 0).any(2).sum()) == 3 and not out[:, :64].any() and not ring[..., :64].any()


def test_streams_elsewhere() -> None:
    assert mean_streams(torch.tensor([[[1.0], [2.0], [3.0], [6.0]]])).tolist() == [[3.0]]
    with pytest.raises(ValueError, match="known: ref, gpu"):
        mean_streams(torch.ones(1, 4, 8), impl="fast")
    if not CAN_RUN:
        with pytest.raises(GpuUnavailable):
            embed_streams(torch.zeros(1, dtype=torch.int64), torch.ones(2, 8), 4, impl="gpu")


@needs_kernels
@pytest.mark.parametrize("ratio", [2, 3])
def test_groups_from_rows_and_tails(ratio: int) -> None:
    """Runs that begin inside a group, and one whose last rows were taken back, against all tokens pooled at once."""
    from kvist.kernels.group_pool.gpu import pool_rows_gpu

    width, tokens, cells = 48, 12, 9
    raw = normal(2, tokens, 2 * width)
    norm = 1.0 + 0.1 * normal(width, seed=2)
    tail = torch.full((2, cells, 2, width), float("nan"), device=DEVICE)
    # Slot 1 first computes wrong drafts behind position 1, which are taken back.
    passes = [[(0, 0, 1), (1, 0, 5)], [(0, 1, 4), (1, 2, 6)], [(0, 5, 7), (1, 8, 4)]]
    seen: dict[tuple[int, int], torch.Tensor] = {}
    for number, runs in enumerate(passes):
        slot, position, offset = ([], [], [])
        for s, first, count in runs:
            slot += [s] * count
            position += [first + i for i in range(count)]
            offset += [*range(count)]
        new = raw[slot, position].clone()
        if number == 0:
            new[3:] += 1.0
        slot_N, position_N, offset_N = (torch.tensor(part, device=DEVICE) for part in (slot, position, offset))
        out = pool_rows_gpu(new, tail, slot_N, position_N, offset_N, ratio, (norm, 1e-6))
        seen |= {(s, p): row for s, p, row in zip(slot, position, out, strict=True)}
    for (s, p), row in seen.items():
        if (p + 1) % ratio:
            continue
        group = raw[s, p + 1 - ratio : p + 1].unflatten(1, (2, width))
        latent = group_pool(group[None, :, 0], group[None, :, 1])[0].bfloat16().float()
        want = latent * torch.rsqrt(latent.square().mean() + 1e-6) * norm
        torch.testing.assert_close(row.float(), want, rtol=2e-2, atol=2e-2, msg=f"slot {s}, position {p}")


@needs_kernels
@pytest.mark.parametrize(("n", "inputs", "outputs"), [(1, 64, 2), (3, 64, 70), (16, 128, 40), (2, 512, 128), (1, 1280, 1056)])
@pytest.mark.parametrize("wide", [False, True])
def test_thin_products(n: int, inputs: int, outputs: int, wide: bool) -> None:
    from kvist.kernels.linear.thin_triton import thin_fits, thin_gpu

    x, weight = normal(n, inputs).bfloat16(), normal(outputs, inputs, seed=1).bfloat16()
    assert thin_fits(x, weight)
    want = x.double() @ weight.double().t()
    for _ in range(2):  # the second call finds the counters as the first left them
        got = thin_gpu(x, weight, wide=wide)
        assert got.dtype is (torch.float32 if wide else torch.bfloat16)
        bound = 1e-6 if wide else 2.0**-8
        assert float((got.double() - want).abs().max() / want.abs().max()) < bound


@needs_kernels
def test_what_is_not_thin() -> None:
    from kvist.kernels.linear.thin_triton import thin_fits

    weight = normal(8, 512).bfloat16()
    assert not thin_fits(normal(17, 512).bfloat16(), weight)
    assert not thin_fits(normal(1, 96).bfloat16(), normal(8, 96).bfloat16())


@needs_kernels
def test_n_grams_of_runs_and_history() -> None:
    """Rows of two runs hash as one sequence does: tokens of the pass, of earlier ones, an image between them, none before 0."""
    from kvist.kernels.engram.gpu import HashTables, StoredRows, gather_rows, keep_classes

    heads, width, size, cells = 2, 32, 50, 8
    classes = torch.arange(20, device=DEVICE) % 11
    multipliers = torch.tensor([3, 5, 7, 11], device=DEVICE)
    primes, offsets = (torch.tensor(part, device=DEVICE) for part in ([7, 11, 13, 17, 19, 23], [0, 7, 18, 20, 22, 25]))
    source = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 120, (size, width), generator=source, dtype=torch.uint8).to(DEVICE)
    stored = StoredRows(codes, torch.full((size, 1), 127, dtype=torch.uint8, device=DEVICE))
    hashes = HashTables(multipliers, primes, offsets, 9)
    ids = torch.tensor([4, 19, 3, 8, 15, 2, 7, 1], device=DEVICE)
    text = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool, device=DEVICE)
    history = torch.full((2, cells), 12345, dtype=torch.int64, device=DEVICE)

    def gathered(first: int, stop: int) -> torch.Tensor:
        at = torch.arange(first, stop, device=DEVICE)
        slot = torch.ones_like(at)
        rows = gather_rows(ids[at], at, at - first, text[at], classes, history, slot, hashes, stored, heads)
        keep_classes(ids[at], at, text[at], classes, history, slot)
        return rows

    whole = gathered(0, 8)
    history.fill_(12345)
    assert torch.equal(torch.cat([gathered(0, 3), gathered(3, 4), gathered(4, 8)]), whole)
    # Behind the image at position 3 nothing before it counts: position 4 hashes the pad class three times.
    pad, own = 9, int(classes[15])
    mixed = [own * 3 ^ pad * 5, own * 3 ^ pad * 5 ^ pad * 7, own * 3 ^ pad * 5 ^ pad * 7 ^ pad * 11]
    rows = [int((mixed[column // heads] % primes[column] + offsets[column]) % size) for column in range(6)]
    values = codes[rows].view(torch.float8_e4m3fn).float().flatten()
    torch.testing.assert_close(whole[4].float(), values, rtol=0, atol=0)
