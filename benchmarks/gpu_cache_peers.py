"""FlashMLA and DeepGEMM beside our cache operators in the same run: their own row formats, none a dependency.

Rows are their 584 B and 132 B ones with content of the same scale: the work is comparable, the numbers inside are not, so only
times are taken. An absent or refusing peer is printed with its reason. Knows nothing of what is measured beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_timing import graphed

Peers = dict[str, Callable[[], object]]
FLASH_ROW, FLASH_DATA = 584, 576
DEEP_ROW = 132
DEEP_PAGE = 64


def _first(*names: str) -> Any | None:
    for name in names:
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    print(f"no peer: none of {', '.join(names)} is installed")
    return None


def _try(name: str, make: Callable[[], Peers]) -> Peers:
    """The peer's variants, or none with the reason: a peer that fails must not stop our own measurement."""
    try:
        return make()
    except (RuntimeError, TypeError, ValueError, AssertionError, AttributeError, ImportError) as error:
        print(f"no peer {name}: {type(error).__name__}: {str(error)[:200]}")
        return {}


def _flash_pages(blocks: int, page: int) -> torch.Tensor:
    """uint8 [blocks,page,1,584]: in a page all data (448 FP8, 64 bfloat16), then 8 scale bytes a row."""
    pool = torch.empty(blocks, page * FLASH_ROW, dtype=torch.uint8, device="cuda").random_(0x28, 0x40)
    pool[:, page * FLASH_DATA :] = 127
    return pool.view(blocks, page, 1, FLASH_ROW)


def flash_mla_decode(requests: int, rows: int, heads: int, k: int, calls: int) -> Peers:
    """FlashMLA's decode with a window of 128 and k further rows of 584 bytes."""
    module = _first("flash_mla", "tokenspeed_flashmla", "tokenspeed_flash_mla")
    if module is None:
        return {}

    def make() -> Peers:
        window, extra = _flash_pages(max(1, requests), 256), _flash_pages(requests * 256, 64)
        q = torch.randn(requests, rows, heads, 512, device="cuda", dtype=torch.bfloat16)
        near = (torch.arange(requests, device="cuda").view(-1, 1, 1) * 256 + torch.arange(128, device="cuda")).int()
        near = near.expand(requests, rows, 128).contiguous()
        far = torch.randint(0, 16384, (requests, rows, k), device="cuda", dtype=torch.int32)
        far = far.sort(-1).values + (torch.arange(requests, device="cuda") * 16384).int().view(-1, 1, 1)
        sink = torch.zeros(heads, device="cuda")
        meta = module.get_mla_metadata()[0]

        def run(_: int) -> object:
            return module.flash_mla_with_kvcache(
                q, window, None, None, 512, meta, indices=near, is_fp8_kvcache=True, attn_sink=sink, extra_k_cache=extra,
                extra_indices_in_kvcache=far.contiguous(),
            )  # fmt: skip

        run(0)
        return {"FlashMLA, 584 B rows": graphed(run, [0], calls)}

    return _try("FlashMLA", make)


def deep_gemm_decode(requests: int, rows: int, heads: int, context: int, k: int, calls: int) -> Peers:
    """DeepGEMM's paged FP8 scores, then torch.topk: scores of the context in memory, no tie rule."""
    module = _first("deep_gemm", "tokenspeed_deepgemm")
    if module is None or rows > 2:
        return {}

    def make() -> Peers:
        blocks = -(-context // DEEP_PAGE)
        pool = torch.empty(requests * blocks, DEEP_PAGE * DEEP_ROW, dtype=torch.uint8, device="cuda").random_(0x28, 0x40)
        pool[:, DEEP_PAGE * 128 :].view(torch.float32).fill_(1.0)
        cache = pool.view(requests * blocks, DEEP_PAGE, 1, DEEP_ROW)
        table = torch.randperm(requests * blocks, device="cuda").int().view(requests, blocks)
        q = torch.randn(requests, rows, heads, 128, device="cuda").to(torch.float8_e4m3fn)
        weights = torch.randn(requests * rows, heads, device="cuda")
        # A length for each query row: the wheel that loads there wants two dimensions.
        lengths = torch.full((requests, rows), context, dtype=torch.int32, device="cuda")
        count = torch.cuda.get_device_properties(0).multi_processor_count
        meta = module.get_paged_mqa_logits_metadata(lengths, DEEP_PAGE, count)

        def scores(_: int) -> torch.Tensor:
            return module.fp8_paged_mqa_logits(q, cache, weights, lengths, table, meta, context, clean_logits=False)

        def both(_: int) -> object:
            return scores(0).topk(k, 1, sorted=False)

        return {
            "DeepGEMM FP8, scores only": graphed(scores, [0], calls),
            "DeepGEMM FP8 + torch.topk": graphed(both, [0], calls),
        }

    return _try("DeepGEMM", make)
