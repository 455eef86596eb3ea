"""A `pure-functions` case: the small functions of the model, each called directly with the recorded inputs.

Must not know whole models. Goldens README, 'pure-functions'.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kvist.config import ModelConfig, VisionConfig, replace
from kvist.conformance.case import Case
from kvist.conformance.check import Check, judged, row_cosine, row_max_abs
from kvist.conformance.errors import CaseError
from kvist.conformance.quantiser_case import pattern_limits, same_bits, unknown_tensors
from kvist.images import plan_image
from kvist.kernels.hyper_connections import sinkhorn_coefficients
from kvist.kernels.index_select.ref import candidate_blocks, pool_mask
from kvist.kernels.rotary import rotate
from kvist.kernels.sparse_attention import sparse_attention
from kvist.model.engram import hash_plan, hash_rows
from kvist.model.layers import inverse_frequencies, rotary_table
from kvist.presets import preset

MAX_ITERATIONS = 1000
Pairs = Iterator[tuple[str, Tensor]]


def function_checks(case: Case) -> Iterator[Check]:
    """Every recorded tensor of the case once; a name this runner does not know fails."""
    known: set[str] = set()
    for group in (_sinkhorn, _rope, _engram, _images, _candidates, _attention):
        try:
            results = list(group(case))
        except (RuntimeError, IndexError, TypeError, KeyError) as error:
            group_name = group.__name__.strip("_")
            raise CaseError(f"{case.folder}: inputs or parameters of {group_name} do not fit together: {error!r}") from error
        for name, got in results:
            if name in case.expected:
                known.add(name)
                yield _compare(case, name, got.cpu(), case.expected[name])
    yield from unknown_tensors(case, known)


def _compare(case: Case, name: str, got: Tensor, want: Tensor) -> Check:
    limits = pattern_limits(case, name)
    if not limits:
        return same_bits(f"exact {name}", got.to(want.dtype) if not want.is_floating_point() else got, want)
    if got.shape != want.shape:
        return judged(name, False, f"shape {list(got.shape)}, expected {list(want.shape)}")
    rows = (got.reshape(1, -1), want.reshape(1, -1))
    errors = {"max_abs": row_max_abs(*rows).item(), "max_rel": _max_rel(got, want)}
    ok = all(key in errors and errors[key] <= bound for key, bound in limits.items())
    text = ", ".join(f"{key} {errors.get(key, float('nan')):.2g}; limit {bound:g}" for key, bound in limits.items())
    return judged(name, ok, text, max_abs=errors["max_abs"], cosine=row_cosine(*rows).item())


def _max_rel(got: Tensor, want: Tensor) -> float:
    gap = (got.double() - want.double()).abs() / want.double().abs().clamp_min(1e-300)
    return torch.where(got == want, 0.0, gap).nan_to_num(nan=float("inf")).max().item() if want.numel() else 0.0


def _given(case: Case, name: str) -> Tensor:
    if name not in case.inputs:
        raise CaseError(f"{case.folder / 'inputs.safetensors'} lacks the tensor {name!r}")
    return case.inputs[name]


def _parameters(case: Case, group: str) -> Mapping[str, Any]:
    found = case.parameters.get(group)
    if not isinstance(found, Mapping):
        raise CaseError(f"{case.folder / 'case.json'}: parameters.{group} must be an object, got {found!r}")
    return found


def _sinkhorn(case: Case) -> Pairs:
    if "sinkhorn/mixes" not in case.inputs:
        return
    settings = _parameters(case, "sinkhorn")
    for iterations in settings["iterations"]:
        if not 1 <= iterations <= MAX_ITERATIONS:
            raise CaseError(f"{case.folder}: sinkhorn iterations must lie in 1..{MAX_ITERATIONS}, got {iterations}")
        mix = sinkhorn_coefficients(
            _given(case, "sinkhorn/mixes"),
            _given(case, "sinkhorn/scale"),
            _given(case, "sinkhorn/base"),
            streams=settings["hc_mult"],
            iterations=iterations,
            eps=settings["eps"],
        )
        for part, tensor in zip(("pre", "post", "comb"), mix, strict=True):
            yield f"sinkhorn.{iterations}/{part}", tensor


def _rope(case: Case) -> Pairs:
    for name, settings in (_parameters(case, "rope") if "rope" in case.parameters else {}).items():
        at = f"rope.{name}"
        yield f"{at}/inv_freq", inverse_frequencies(*_rotary_layer(settings))
        # The rest starts from the stored frequencies and tables: far positions amplify their last bit.
        freq_P = case.expected.get(f"{at}/inv_freq", inverse_frequencies(*_rotary_layer(settings)))
        positions_N = _given(case, f"{at}/positions")
        cos, sin = rotary_table(positions_N, freq_P.to(positions_N.device))
        yield f"{at}/cos", cos
        yield f"{at}/sin", sin
        x = _given(case, f"{at}/x")
        table = case.expected.get(f"{at}/cos", cos).to(x.device), case.expected.get(f"{at}/sin", sin).to(x.device)
        yield f"{at}/rotated", rotate(x, table)
        yield f"{at}/rotated_back", rotate(x, table, back=True)


def _rotary_layer(settings: Mapping[str, Any]) -> tuple[ModelConfig, Any]:
    """A configuration and one layer of it with the settings of a rotary table."""
    base, original = preset("tiny"), int(settings["original_max_position_embeddings"])
    width = -(-int(settings["dim"]) // 32) * 32
    config = replace(
        base,
        head_dim=max(base.head_dim, width),
        index_head_dim=max(base.index_head_dim, width),
        rope_head_dim=int(settings["dim"]),
        rope_theta=float(settings["theta"]),
        compress_rope_theta=float(settings["theta"]),
        original_seq_len=original,
        rope_factor=float(settings["factor"]),
        beta_fast=float(settings["beta_fast"]),
        beta_slow=float(settings["beta_slow"]),
    )
    return config, next(spec for spec in config.plan.layers if spec.yarn == (original > 0))


def _engram(case: Case) -> Pairs:
    if "engram/classes" not in case.inputs:
        return
    settings = _parameters(case, "engram")
    released = preset("v41-flash")
    config = replace(
        released,
        engram_layer_ids=tuple(settings["layer_ids"]),
        engram_compressed_vocab_size=int(settings["compressed_vocab_size"]),
    )
    plan = hash_plan(config)
    yield "engram/primes", torch.from_numpy(plan.primes).flatten(1)
    yield "engram/offsets", torch.from_numpy(plan.offsets).flatten(1)
    yield "engram/multipliers", torch.from_numpy(plan.multipliers)
    yield "engram/rows_in_table", torch.from_numpy(plan.primes).flatten(1).sum(1)
    text_N = _given(case, "engram/text_mask") != 0
    rows_LNX = hash_rows(config, _given(case, "engram/classes"), text_N, int(settings["pad_class"]), 0)
    yield "engram/rows", rows_LNX.permute(1, 0, 2)


def _images(case: Case) -> Pairs:
    if "image/sizes" not in case.inputs:
        return
    settings = _parameters(case, "image")
    sizes = ("patch_size", "downsample_ratio", "max_image_tokens", "min_pixels", "max_wh_ratio")
    config = VisionConfig(
        num_hidden_layers=1,
        hidden_size=4,
        num_attention_heads=1,
        intermediate_size=4,
        **{name: settings[name] for name in sizes if name in settings},
    )
    plans = [plan_image(width, height, config) for width, height in _given(case, "image/sizes").tolist()]
    names = {"patch_columns": "patch_cols", "token_columns": "token_cols"}
    yield "image/grid", torch.tensor([[getattr(plan, names.get(c, c)) for c in settings["columns"]] for plan in plans])


def _candidates(case: Case) -> Pairs:
    for name in case.expected:
        if name.startswith("candidates.") and name.endswith("/mask"):
            size = name.removeprefix("candidates.").removesuffix("/mask")
            if not all(part.isdigit() and int(part) for part in size.split("x")) or size.count("x") != 1:
                raise CaseError(f"{case.folder}: {name!r} must read candidates.<blocks>x<size>/mask")
            blocks, block_size = map(int, size.split("x"))
            scores_NM, visible_N = _given(case, "candidates/scores"), _given(case, "candidates/visible").long()
            pool_NB = candidate_blocks(scores_NM, visible_N, blocks=blocks, block_size=block_size)
            yield name, pool_mask(pool_NB, scores_NM.shape[1], block_size)


def _attention(case: Case) -> Pairs:
    if "attention/q" not in case.inputs:
        return
    q, rows = _given(case, "attention/q"), _given(case, "attention/rows")
    topk, sink = _given(case, "attention/indices").long(), _given(case, "attention/sink")
    none_N2 = torch.zeros(len(q), 2, dtype=torch.int64, device=q.device)
    for dt, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        window = rows.new_zeros(0, rows.shape[1]).to(dtype)
        yield f"attention/out.{dt}", sparse_attention(q.to(dtype), window, none_N2, rows.to(dtype), topk, sink, window=0)
