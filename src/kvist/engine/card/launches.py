"""How many kernels a decode step launches: counted from captured CUDA graphs, for the whole step and for a layer of each role.

Needs a card. Must not know timing.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from collections.abc import Callable

import torch

from kvist.config import LayerSpec
from kvist.engine.card.device_model import Buffers, DeviceModel
from kvist.engine.card.layers import Chosen
from kvist.kernels.hyper_connections import Mix


def _nodes(graph: torch.cuda.CUDAGraph) -> int:
    driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t()
    code = driver.cuGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(count))
    if code:
        raise RuntimeError(f"cuGraphGetNodes failed with code {code}")
    return count.value


def _count(work: Callable[[], object]) -> int:
    """Launches (kernels, copies) of `work`, which has run once before with the same shapes; nothing is run."""
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        work()
    return _nodes(graph)


def role_of(spec: LayerSpec) -> str:
    """A layer's role in words."""
    ratio = f", ratio {spec.ratio}" if spec.ratio else ""
    return f"{spec.mode.value}{ratio}" + (" with Engram" if spec.engram is not None else "")


def count_launches(model: DeviceModel, held: Buffers, tokens: int) -> dict[str, int]:
    """Launches of a whole step and of one layer of each role, for what `held` holds. The step must have run before.

    Each layer counted runs once and writes what it writes in a step, of made-up inputs: for states that are measured and left.
    """
    reach = model.reach_of(tokens)
    counts = {"step": _count(lambda: model.step(held, reach, advance=True))}
    # On one stream: a layer alone has no fork that it could join.
    alone = copy.copy(model)
    alone.side = None
    with torch.inference_mode():
        at, found = alone.places(held.card_rows, reach), alone.remember(held.card_rows)
        x_NSD = model.streams(held.tokens_M)
        mix = Mix(held.first_MS, held.first_MS, held.first_MS.unsqueeze(2).repeat(1, 1, model.config.hc_mult))
        y_ND = x_NSD[:, 0].contiguous()
        topk = torch.full((held.size, model.config.index_topk), -1, dtype=torch.int32, device=held.device)
        pool = torch.full((held.size, model.config.candidate_topk_blocks), -1, dtype=torch.int32, device=held.device)
        for layer in model.weights.layers:
            chosen = Chosen(source=layer.spec.kv_source, topk_NK=topk, pool_NB=pool)
            role = role_of(layer.spec)
            if role not in counts:
                run = functools.partial(alone.step_layer, layer, at, found, x_NSD, mix, y_ND, chosen, None)
                # A layer alone may take launches that the step had no use for: built here, before they are captured.
                run()
                counts[role] = _count(run)
    return counts
