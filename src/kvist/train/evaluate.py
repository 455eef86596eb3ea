"""Judging a trained model on held-out works: bits per byte, loss by position, needle retrieval, indexer recall.

Owns the measures; the passes are those of training, so that what is compiled serves again. Must not know optimisers.
All windows overlap by half and every token is counted once, with at least half a window before it (but in the first one).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvist.config import ModelConfig
from kvist.inventory import Storage
from kvist.train import pieces
from kvist.train.network import Mode, Network
from kvist.train.sampling import Corpus, Recall
from kvist.train.shapes import Batch, Geometry
from kvist.train.weights import Weights, working_weights


@dataclass(kw_only=True)
class Judge:
    """A model and how it is run: `packed` passes every quantiser of the released format, else plain `dtype` weights."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    storage: Mapping[str, Storage]
    classes_V: Tensor | None
    device: torch.device
    dtype: torch.dtype
    tokens: int

    def ready(self, packed: bool) -> Weights:
        """Working weights, detached; they require gradients as in training, so that the same graphs serve."""
        used = working_weights(self.weights, self.storage, self.dtype, quantise=packed)
        return {name: w.detach().requires_grad_(self.weights[name].requires_grad) for name, w in used.items()}

    def geometry(self, length: int) -> Geometry:
        """Batches of the same number of tokens at every length."""
        return Geometry(config=self.config, batch=max(1, self.tokens // length), length=length, device=self.device)

    def network(self, weights: Weights, geometry: Geometry, packed: bool, queries_n: Tensor | None = None) -> Network:
        """A pass with selection on."""
        return Network(self.config, weights, geometry, Mode(select=True, quantise=packed, dtype=self.dtype), queries_n)


def documents(corpus: Corpus, tier: str, limit: int) -> tuple[np.ndarray, int]:
    """(ids of evenly spread whole documents, at most about `limit` tokens; their UTF-8 bytes)."""
    offsets, sizes = corpus.offsets[tier], corpus.sizes[tier]
    total = int(offsets[-1])
    keep = np.ones(len(sizes), dtype=bool)
    if total > limit:
        order = np.random.default_rng(0).permutation(len(sizes))
        lengths = np.diff(offsets)[order]
        keep[:] = False
        keep[order[np.cumsum(lengths) <= limit]] = True
        keep[np.argmin(np.diff(offsets))] |= not keep.any()
    parts = [np.array(corpus.ids[tier][offsets[i] : offsets[i + 1]]) for i in np.flatnonzero(keep)]
    return np.concatenate(parts), int(sizes[keep].sum())


def windows(ids: np.ndarray, geometry: Geometry, pad: int) -> Iterator[Batch]:
    """Half-overlapping windows over a token stream; `counted` marks each target once."""
    length, half = geometry.length, geometry.length // 2
    starts = list(range(0, max(1, len(ids) - 1 - half), half))
    starts += [-1] * (-len(starts) % geometry.batch)
    for group in range(0, len(starts), geometry.batch):
        rows = np.full((geometry.batch, length + 1), pad, dtype=np.int64)
        counted = np.zeros((geometry.batch, length), dtype=bool)
        for row, start in enumerate(starts[group : group + geometry.batch]):
            if start < 0:
                continue
            piece = ids[start : start + length + 1]
            rows[row, : len(piece)] = piece
            counted[row, (0 if start == 0 else half) : len(piece) - 1] = True
        both = torch.from_numpy(rows)
        yield Batch(
            tokens=both[:, :-1].contiguous(),
            targets=both[:, 1:].contiguous(),
            counted=torch.from_numpy(counted),
            tier=torch.zeros(geometry.batch, dtype=torch.int64),
        )


def bits_per_byte(judge: Judge, ids: np.ndarray, utf8_bytes: int, length: int, *, packed: bool) -> float:
    """Loss in bits over all targets of the stream, divided by the text's bytes."""
    weights, geometry = judge.ready(packed), judge.geometry(length)
    total = torch.zeros((), dtype=torch.float64, device=judge.device)
    for batch in windows(ids, geometry, judge.config.engram_pad_id):
        here = batch.to(judge.device)
        out = judge.network(weights, geometry, packed).run(here, judge.classes_V)
        assert out.losses_N is not None
        total += (out.losses_N.detach() * here.counted.flatten()).double().sum()
    return float(total) / math.log(2) / utf8_bytes


def loss_by_position(judge: Judge, ids: np.ndarray, length: int, rows: int) -> dict[str, float]:
    """Nats a token in ranges of positions that double, over plain slices of one stream."""
    weights, geometry = judge.ready(True), judge.geometry(length)
    total = torch.zeros(length, dtype=torch.float64, device=judge.device)
    count = 0
    starts = np.linspace(0, len(ids) - length - 2, rows).astype(np.int64)
    for group in range(0, rows - rows % geometry.batch, geometry.batch):
        both = torch.from_numpy(
            np.stack([np.array(ids[s : s + length + 1], dtype=np.int64) for s in starts[group : group + geometry.batch]])
        ).to(judge.device)
        out = judge.network(weights, geometry, True).run(_plain(both), judge.classes_V)
        assert out.losses_N is not None
        total += out.losses_N.detach().double().view(geometry.batch, length).sum(0)
        count += geometry.batch
    edges = [0, *(2**i for i in range(7, 20) if 2**i < length), length]
    means = (total / max(1, count)).cpu()
    return {f"{a}-{b}": round(float(means[a:b].mean()), 4) for a, b in pairwise(edges)}


def _plain(both_BT: Tensor) -> Batch:
    tokens, targets = both_BT[:, :-1].contiguous(), both_BT[:, 1:].contiguous()
    counted = torch.ones_like(tokens, dtype=torch.bool)
    return Batch(
        tokens=tokens, targets=targets, counted=counted, tier=torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    )


def needles(
    judge: Judge, ids: np.ndarray, recall: Recall, lengths: Mapping[int, int], trials: int, seed: int = 5
) -> dict[str, dict[str, float]]:
    """For each context length: share of values reproduced whole, and of single digits, with the statement anywhere before.

    `lengths`: context length -> length of the rows that hold it (what follows the question is not seen).
    """
    rng, results = np.random.default_rng(seed), dict[str, dict[str, float]]()
    weights = judge.ready(True)
    for length, held in lengths.items():
        geometry = judge.geometry(held)
        whole, digits, count = 0.0, 0.0, 0
        while count < trials:
            rows, places = [], []
            for _ in range(geometry.batch):
                row, place = _needle_row(ids, recall, length, held, rng)
                rows.append(row)
                places.append(place)
            both = torch.from_numpy(np.stack(rows).astype(np.int64)).to(judge.device)
            hits = _reproduced(judge, weights, geometry, both, torch.tensor(places, device=judge.device))
            whole += float(hits.all(1).float().sum())
            digits += float(hits.float().mean(1).sum())
            count += geometry.batch
        results[str(length)] = {"whole": round(whole / count, 4), "digits": round(digits / count, 4), "trials": count}
    return results


def _needle_row(ids: np.ndarray, recall: Recall, length: int, held: int, rng: np.random.Generator) -> tuple[np.ndarray, int]:
    fact, before = recall.statement(rng)
    start = int(rng.integers(len(ids) - held - 1))
    row = np.array(ids[start : start + held + 1])
    asked = length - len(fact)
    stated = int(rng.integers(1, asked - len(fact)))
    row[stated : stated + len(fact)] = fact
    row[asked : asked + len(fact)] = fact
    return row, asked + before


def _reproduced(judge: Judge, weights: Weights, geometry: Geometry, both_BT: Tensor, places_B: Tensor) -> Tensor:
    """Which of the five value tokens are the most probable ones, bool [B,5] (earlier ones given)."""
    batch = _plain(both_BT)
    out = judge.network(weights, geometry, True).run(batch, judge.classes_V, losses=False)
    at = torch.arange(geometry.batch, device=places_B.device) * geometry.length + places_B - 1
    at = (at.unsqueeze(1) + torch.arange(5, device=at.device)).flatten()
    h = (out.pre_NS[at].unsqueeze(2) * out.x_NSD[at].float()).sum(1).to(judge.dtype)
    logits = pieces.norm(h, weights["norm.weight"], judge.config.norm_eps).float() @ weights["head.weight"].T
    return (logits.argmax(1) == batch.targets.flatten()[at]).unflatten(0, (-1, 5)).detach()


def indexer_recall(judge: Judge, ids: np.ndarray, length: int, rows: int) -> dict[str, dict[str, float]]:
    """Share of the attention mass on visible rows that each source's selection holds, and what random rows would hold."""
    geometry, weights = judge.geometry(length), judge.ready(True)
    queries = torch.arange(length // 4, length, 3 * length // 4 // min(256, length // 16), device=judge.device)[
        : min(256, length // 16)
    ]
    sums: dict[int, list[float]] = {}
    starts = np.linspace(0, len(ids) - length - 2, rows).astype(np.int64)
    for group in range(0, rows - rows % geometry.batch, geometry.batch):
        both = np.stack([np.array(ids[s : s + length + 1], dtype=np.int64) for s in starts[group : group + geometry.batch]])
        out = judge.network(weights, geometry, True, queries).run(
            _plain(torch.from_numpy(both).to(judge.device)), judge.classes_V
        )
        for source, values in out.recalls.items():
            sums.setdefault(source, []).append(float(values.mean()))
    result = {}
    for source, shares in sums.items():
        visible = (queries + 1) // judge.config.plan.layers[source].ratio
        random = float((judge.config.index_topk / visible).clamp_max(1.0).mean())
        result[f"layer {source}"] = {"selected": round(sum(shares) / len(shares), 4), "random": round(random, 4)}
    return result


def judge_all(
    judge: Judge, corpus: Corpus, recall: Recall, file: Path, *, length: int, long_length: int, limit: int
) -> dict[str, Any]:
    """Every measure, as plain data; `file` is written after each, so that a cut run keeps what it has."""

    def keep() -> None:
        file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    result: dict[str, Any] = {"bits_per_byte": {}}
    for tier in ("prose", "docs", "code"):
        ids, size = documents(corpus, tier, limit)
        result["bits_per_byte"][tier] = {
            "packed": round(bits_per_byte(judge, ids, size, length, packed=True), 4),
            "unpacked": round(bits_per_byte(judge, ids, size, length, packed=False), 4),
            "tokens": len(ids),
            "utf8_bytes": size,
        }
        print(tier, result["bits_per_byte"][tier], flush=True)
        keep()
    prose = np.array(corpus.ids["prose"])
    lengths = {n: length if n <= length else long_length for n in (length >> 3, length >> 2, length >> 1, length) if n >= 64}
    lengths |= dict.fromkeys((long_length >> 1, long_length), long_length)
    result["needles"] = needles(judge, prose, recall, lengths, 48)
    print(result["needles"], flush=True)
    keep()
    result["indexer_recall"] = {
        str(n): indexer_recall(judge, prose, n, max(16, judge.tokens // n)) for n in (length, long_length)
    }
    print(result["indexer_recall"], flush=True)
    keep()
    result["loss_by_position"] = {
        tier: loss_by_position(judge, np.array(corpus.ids[tier]), long_length, max(24, judge.tokens // long_length))
        for tier in ("prose", "docs", "code")
    }
    print(result["loss_by_position"], flush=True)
    keep()
    return result
