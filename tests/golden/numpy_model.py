"""The text model once more, in NumPy and float64, written from the facts page alone: the whole sequence at once, no cache.

Owns a second opinion on every formula between token ids and logits. Uses no operator of the package; takes its weights as
arrays under their released names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

Array = np.ndarray
E4M3, E2M1 = (3, -6, 448.0), (1, 0, 6.0)  # mantissa bits, least exponent, largest value


def rounded(x: Array, form: tuple[int, int, float]) -> Array:
    bits, least, largest = form
    size = np.minimum(np.abs(x), largest)
    _, exponent = np.frexp(size)
    step = np.exp2(np.maximum(exponent - 1, least) - bits)
    return np.copysign(np.rint(size / step) * step, x)


def power_of_two_scale(amax: Array, largest: float) -> Array:
    ratio = amax.astype(np.float32) * (np.float32(1) / np.float32(largest))
    mantissa, exponent = np.frexp(ratio)
    return np.exp2(np.where(mantissa == 0.5, exponent - 1, exponent).astype(np.float64))


def in_groups(x: Array, size: int, scale_of: Callable[[Array], Array], form: tuple[int, int, float]) -> Array:
    groups = x.astype(np.float32).astype(np.float64).reshape(*x.shape[:-1], -1, size)
    scale = scale_of(np.abs(groups).max(-1, keepdims=True))
    return (rounded(groups / scale, form) * scale).reshape(x.shape)


def fp8(x: Array) -> Array:
    return in_groups(x, 32, lambda amax: power_of_two_scale(np.maximum(amax, 1e-4), 448), E4M3)


def mxfp4(x: Array) -> Array:
    return in_groups(x, 32, lambda amax: power_of_two_scale(np.maximum(amax, 6 * 2.0**-126), 6), E2M1)


def main_fp4(x: Array) -> Array:
    return in_groups(x, 16, lambda amax: rounded(np.float32(np.maximum(amax, 6 * 2.0**-9)) / np.float32(6), E4M3), E2M1)


def rms(x: Array, weight: Array | float = 1.0, eps: float = 1e-20) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def primes_from(start: int) -> Callable[[], int]:
    at = start - 1

    def following() -> int:
        nonlocal at
        at += 1
        while at < 2 or any(at % d == 0 for d in range(2, int(at**0.5) + 1)):
            at += 1
        return at

    return following


class NumpyModel:
    """`weights` by released name, `tables` [rows, width] by layer, `classes` of the token ids; `quantise` as in `Numerics`."""

    def __init__(self, config, weights: Mapping[str, Array], tables: Mapping[int, Array], classes: Array, quantise: bool):
        self.c, self.tables, self.classes = config, tables, classes
        self.weights = {name: value.astype(np.float64) for name, value in weights.items()}
        self.fp8, self.mxfp4, self.main_fp4 = (fp8, mxfp4, main_fp4) if quantise else 3 * (lambda x: x,)
        self.selected: dict[int, Array] = {}
        self.candidates: dict[int, list[Array]] = {}
        self.newest_rank = 0

    def w(self, layer: int, name: str) -> Array:
        return self.weights[f"layers.{layer}.{name}"]

    def product(self, layer: int, name: str, x: Array) -> Array:
        return self.fp8(x) @ self.w(layer, name).T

    def ratio(self, layer: int) -> int:
        return self.c.compress_ratios[layer]

    def forward(self, ids: Array, text: Array, features: Mapping[int, Array] | None = None, tail: int | None = None) -> Array:
        """Logits of the last `tail` positions (none: all). With a tail, the window layers below the first source run on all
        positions, all others on the tail and as many more as their windows reach."""
        streams = self.weights["embed.weight"][ids]
        for position, row in (features or {}).items():
            streams[position] = row
        streams = np.repeat(streams[:, None], self.c.hc_mult, 1)
        pre = np.zeros(streams.shape[:2])
        pre[:, 0] = 1
        rows = self.table_rows(ids, text)
        sources = [layer for layer in range(self.c.n_layers) if layer in self.c.kv_source_layers]
        self.main, self.keys, self.topk, self.pool, at, text_here = {}, {}, None, None, 0, text
        for layer in range(self.c.n_layers):
            if layer in self.c.engram_layer_ids:
                streams = self.engram(layer, streams, rows[layer], text)
            source = max((s for s in sources if s <= layer), default=None)
            drop = 0
            if tail is not None and source is not None and layer == source:
                reach = tail + (self.c.n_layers - layer) * self.c.window_size
                drop = max(0, len(streams) - reach)
            streams, pre, at, text_here = self.block(layer, source, streams, pre, at, drop, text_here)
        y = rms((pre[..., None] * streams).sum(1), self.weights["norm.weight"], self.c.norm_eps)
        return (y @ self.weights["head.weight"].T)[-(tail or 0) :]

    def block(self, layer, source, streams, pre, at, drop, text):
        """One block on positions from `at` on; a source publishes all of them and goes on without the first `drop`."""
        pre_a, post, comb = self.coefficients(layer, "attn", streams[drop:])
        h = rms((pre[..., None] * streams).sum(1), self.w(layer, "attn_norm.weight"), self.c.norm_eps)
        if layer in self.c.kv_source_layers:
            self.publish(layer, h)
        y = self.attention(layer, source, h[drop:], at + drop)
        streams = self.expand(y, streams[drop:], post, comb)
        pre_f, post, comb = self.coefficients(layer, "ffn", streams)
        h = rms((pre_a[..., None] * streams).sum(1), self.w(layer, "ffn_norm.weight"), self.c.norm_eps)
        return self.expand(self.moe(layer, h, text[drop:]), streams, post, comb), pre_f, at + drop, text[drop:]

    def coefficients(self, layer: int, half: str, streams: Array) -> tuple[Array, Array, Array]:
        n, eps = self.c.hc_mult, self.c.hc_eps
        v = streams.reshape(len(streams), -1)
        mix = (v @ self.w(layer, f"hc_{half}_fn").T) / np.sqrt((v * v).mean(1, keepdims=True) + self.c.norm_eps)
        scale, base = self.w(layer, f"hc_{half}_scale"), self.w(layer, f"hc_{half}_base")
        pre = sigmoid(mix[:, :n] * scale[0] + base[:n]) + eps
        post = 2 * sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = softmax((mix[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n), 2) + eps
        for turn in range(self.c.hc_sinkhorn_iters):
            if turn:
                comb = comb / (comb.sum(2, keepdims=True) + eps)
            comb = comb / (comb.sum(1, keepdims=True) + eps)
        return pre, post, comb

    def expand(self, y: Array, streams: Array, post: Array, comb: Array) -> Array:
        return post[:, :, None] * y[:, None] + np.einsum("tij,tid->tjd", comb, streams)

    def rotate(self, layer: int, x: Array, positions: Array, back: bool = False) -> Array:
        """Last rope_head_dim channels of [T, ..., C], adjacent pairs as complex numbers."""
        c, width = self.c, self.c.rope_head_dim
        yarn = self.ratio(layer) > 0
        theta = c.compress_rope_theta if yarn else c.rope_theta
        freq = (1 / np.float32(theta) ** (np.arange(0, width, 2, dtype=np.float32) / np.float32(width))).astype(np.float32)
        if yarn:
            dims = [
                width * np.log(c.original_seq_len / (r * 2 * np.pi)) / (2 * np.log(theta)) for r in (c.beta_fast, c.beta_slow)
            ]
            low, high = max(np.floor(dims[0]), 0), min(np.ceil(dims[1]), width - 1)
            ramp = np.clip((np.arange(width // 2) - low) / ((high - low) or 0.001), 0, 1).astype(np.float32)
            freq = freq / np.float32(c.rope_factor) * ramp + freq * (1 - ramp)
        angle = (positions.astype(np.float32)[:, None] * freq).astype(np.float64)
        turn = np.exp((-1j if back else 1j) * angle).reshape(len(x), *[1] * (x.ndim - 2), -1)
        turned = (x[..., -width::2] + 1j * x[..., 1 - width :: 2]) * turn
        return np.concatenate([x[..., :-width], np.stack([turned.real, turned.imag], -1).reshape(*x.shape[:-1], width)], -1)

    def publish(self, layer: int, h: Array) -> None:
        ratio, eps = self.ratio(layer), self.c.norm_eps
        kv = h @ self.w(layer, "attn.compressor.wkv.weight").T
        whole = len(h) // ratio
        latent = kv[: whole * ratio].reshape(whole, ratio, -1)
        if ratio > 1:
            gate = (h @ self.w(layer, "attn.compressor.wgate.weight").T)[: whole * ratio].reshape(latent.shape)
            latent = (latent * softmax(gate, 1)).sum(1)
        latent = rms(latent.reshape(whole, -1), self.w(layer, "attn.compressor.norm.weight"), eps)
        first = np.arange(whole) * ratio
        key = rms(latent @ self.w(layer, "attn.indexer.wk.weight").T, self.w(layer, "attn.indexer.k_norm.weight"), eps)
        self.main[layer] = self.main_fp4(self.rotate(layer, latent, first))
        self.keys[layer] = self.mxfp4(self.rotate(layer, key, first))

    def attention(self, layer: int, source: int | None, h: Array, at: int) -> Array:
        c = self.c
        positions = np.arange(at, at + len(h))
        rank = rms(self.product(layer, "attn.wq_a.weight", h), self.w(layer, "attn.q_norm.weight"), c.norm_eps)
        q = self.product(layer, "attn.wq_b.weight", rank).reshape(len(h), c.n_heads, c.head_dim)
        q = self.rotate(layer, q, positions)
        kv = rms(self.product(layer, "attn.wkv.weight", h), self.w(layer, "attn.kv_norm.weight"), c.norm_eps)
        window = self.fp8(self.rotate(layer, kv, positions))
        if layer in c.index_source_layers:
            self.score(layer, source, h, rank, positions)
        sink, out = self.w(layer, "attn.attn_sink"), np.zeros_like(q)
        for t in range(len(h)):
            keys = window[max(0, t - c.window_size + 1) : t + 1]
            if self.ratio(layer):
                chosen = self.topk[t - len(h)]
                keys = np.concatenate([keys, self.main[source][chosen[chosen >= 0]]])
            scores = q[t] @ keys.T * c.head_dim**-0.5
            top = scores.max(1, keepdims=True)
            e = np.exp(scores - top)
            out[t] = e @ keys / (e.sum(1, keepdims=True) + np.exp(sink[:, None] - top))
        out = self.rotate(layer, out, positions, back=True).reshape(len(h), c.o_groups, -1)
        wo_a = self.w(layer, "attn.wo_a.weight").reshape(c.o_groups, c.o_lora_rank, -1)
        return self.product(layer, "attn.wo_b.weight", np.einsum("tgc,grc->tgr", out, wo_a).reshape(len(h), -1))

    def score(self, layer: int, source: int, h: Array, rank: Array, positions: Array) -> None:
        """Selected rows of every query, ascending, -1 behind them; the candidate source keeps blocks for later layers."""
        c = self.c
        q = self.product(layer, "attn.indexer.wq_b.weight", rank).reshape(len(h), c.index_n_heads, c.index_head_dim)
        q = self.mxfp4(self.rotate(layer, q, positions))
        weight = h @ self.w(layer, "attn.indexer.weights_proj.weight").T * c.index_head_dim**-0.5 * c.index_n_heads**-0.5
        keys, size = self.keys[source], c.candidate_block_size
        makes = layer in c.candidate_source_layers
        later = any(s < layer and s >= source for s in c.candidate_source_layers)
        self.topk = np.full((len(h), c.index_topk), -1)
        pools = []
        for t, position in enumerate(positions):
            visible = (position + 1) // self.ratio(layer)
            scores = weight[t] @ np.maximum(q[t] @ keys[:visible].T, 0)
            if makes:
                blocks = -(-visible // size)
                best = np.array([scores[b * size : (b + 1) * size].max() for b in range(blocks)])
                if blocks:
                    self.newest_rank = int((best > best[-1]).sum())
                    best[-1] = np.inf  # the block of the newest visible row
                pools.append(np.sort(np.argsort(-best, kind="stable")[: c.candidate_topk_blocks]))
            rows = np.arange(visible)
            if later:
                rows = rows[np.isin(rows // size, self.pool[t - len(h)])]
            best_rows = rows[np.argsort(-scores[rows], kind="stable")[: c.index_topk]]
            self.topk[t, : len(best_rows)] = np.sort(best_rows)
        if makes:
            self.pool = self.candidates[layer] = pools
        self.selected[layer] = self.topk

    def moe(self, layer: int, x: Array, text: Array) -> Array:
        c, x8 = self.c, self.fp8(x)
        score = np.sqrt(np.log1p(np.exp(x @ self.w(layer, "ffn.gate.weight").T / c.gate_temp)))
        biased = score + np.where(text[:, None], self.w(layer, "ffn.gate.bias"), self.w(layer, "ffn.gate.bias_vl"))
        out = self.expert(layer, "ffn.shared_experts", x8, 1.0)
        for t in range(len(x)):
            chosen = np.argsort(-biased[t], kind="stable")[: c.n_activated_experts]
            weights = score[t, chosen] / (score[t, chosen].sum() + 1e-20) * c.route_scale
            for e, weight in zip(chosen, weights, strict=True):
                out[t] += self.expert(layer, f"ffn.experts.{e}", x8[t : t + 1], weight)[0]
        return out

    def expert(self, layer: int, name: str, x8: Array, weight: float) -> Array:
        g, u = (x8 @ self.w(layer, f"{name}.{w}.weight").T for w in ("w1", "w3"))
        g, u = np.minimum(g, self.c.swiglu_limit), np.clip(u, -self.c.swiglu_limit, self.c.swiglu_limit)
        return self.product(layer, f"{name}.w2.weight", g * sigmoid(g) * u * weight)

    def table_rows(self, ids: Array, text: Array) -> dict[int, Array]:
        """Engram's table rows [T, columns] by layer."""
        c, following, found = self.c, primes_from(self.c.engram_vocab_size), {}
        bound = max(1, (2**63 - 1) // c.engram_compressed_vocab_size // 2)
        pad = int(self.classes[c.engram_pad_id])
        for layer in c.engram_layer_ids:
            draw = np.random.default_rng(10007 * layer).integers(0, bound, size=c.engram_max_ngram_size, dtype=np.int64)
            multipliers = [int(m) * 2 + 1 for m in draw]
            primes = [[following() for _ in range(c.engram_n_heads)] for _ in range(2, c.engram_max_ngram_size + 1)]
            found[layer] = np.zeros((len(ids), c.engram_n_heads * len(primes)), np.int64)
            for t in range(len(ids)):
                mixed, blocked, column, offset = 0, False, 0, 0
                for back in range(c.engram_max_ngram_size):
                    blocked = blocked or t < back or not text[t - back]
                    mixed ^= (pad if blocked else int(self.classes[ids[t - back]])) * multipliers[back]
                    for prime in primes[back - 1] if back else []:
                        found[layer][t, column] = mixed % prime + offset
                        column, offset = column + 1, offset + prime
        return found

    def engram(self, layer: int, streams: Array, rows: Array, text: Array) -> Array:
        n, width = self.c.hc_mult, self.c.dim
        found = self.tables[layer][rows].reshape(len(rows), -1)
        kv = self.product(layer, "engram.wkv.weight", found).reshape(len(rows), n + 1, width)
        both = self.w(layer, "engram.q_weight") * self.w(layer, "engram.k_weight")
        dot = (rms(streams, 1.0, self.c.norm_eps) * both * rms(kv[:, :n], 1.0, self.c.norm_eps)).sum(2) * width**-0.5
        gate = sigmoid(np.copysign(np.sqrt(np.maximum(np.abs(dot), 1e-6)), dot)) * text[:, None]
        return streams + gate[..., None] * kv[:, n:]
