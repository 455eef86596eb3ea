"""Conversions between the released format and its neighbours: BF16 weights, FP8 experts, and back.

Owns which parameter is copied, re-encoded or requantised; a parameter whose storage stays is copied byte for byte. Engram
tables always keep their FP8 rows. Must not know shards (save.py) or containers (formats.py). Source: facts section 7.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kvist.checkpoint.about import is_base
from kvist.checkpoint.formats import CheckpointMismatch
from kvist.checkpoint.load import open_files
from kvist.checkpoint.save import DEFAULT_SHARD_BYTES, TABLE_PIECE_ROWS, Planes, encode, write_checkpoint
from kvist.checkpoint.tensors import TensorFiles
from kvist.config import ModelConfig, replace
from kvist.inventory import BLOCK, Parameter, Storage, parameters
from kvist.quant import decode_e2m1_pairs, encode_e4m3

WEIGHT_FORMATS = ("keep", "fp8", "bf16")
EXPERT_FORMATS = ("keep", "fp4", "fp8", "bf16")


def convert(
    model: str | Path,
    out: str | Path,
    *,
    weights: str = "keep",
    experts: str = "keep",
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> tuple[ModelConfig, list[Path]]:
    """Write `model` to the folder `out` in other formats. Returns the new configuration and the weight files.

    `weights`: the FP8 matrices; `experts`: routed experts. `bf16` is exact from FP8 and FP4; FP4 experts to `fp8` are
    exact; `fp8` or `fp4` from wider formats round. `keep`/`keep` only re-shards. Raises ValueError for unknown formats.
    """
    if weights not in WEIGHT_FORMATS:
        raise ValueError(f"weights is {weights!r}; known: {', '.join(WEIGHT_FORMATS)}")
    if experts not in EXPERT_FORMATS:
        raise ValueError(f"experts is {experts!r}; known: {', '.join(EXPERT_FORMATS)}")
    folder, config, files = open_files(model)
    target = replace(
        config,
        dtype=config.dtype if weights == "keep" else weights,
        expert_dtype=config.expert_dtype if experts == "keep" else experts,
    )
    held = {parameter.name: parameter for parameter in parameters(config)}

    def encoder(parameter: Parameter) -> Iterator[Planes]:
        return recode(files, held[parameter.name], parameter)

    tokenizer = folder / "tokenizer.json"
    known = tokenizer if tokenizer.is_file() else None
    return target, write_checkpoint(target, encoder, known, out, shard_bytes, base=is_base(folder))


def recode(files: TensorFiles, source: Parameter, target: Parameter) -> Iterator[Planes]:
    """Planes of `target` from the same parameter held as `source`."""
    if source.storage is Storage.TABLE:
        codes, scales = (files.mapped(spec.name).view(spec.shape) for spec in source.specs())
        for start in range(0, len(codes), TABLE_PIECE_ROWS):
            yield codes[start : start + TABLE_PIECE_ROWS], scales[start : start + TABLE_PIECE_ROWS]
    elif source.storage is target.storage:
        yield tuple(files.raw(spec.name) for spec in source.specs())
    elif source.storage is Storage.FP4 and target.storage is Storage.FP8:
        yield fp4_as_fp8(files.raw(source.name), files.raw(source.scale_name), source.name)
    else:
        yield from encode(target, files.dequantised(source, torch.float32))


def fp4_as_fp8(packed: Tensor, scales: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """FP4 rows [o, i/2] with scales [o, i/32] as FP8 32x32 blocks with the same values.

    A block's scale is its largest row scale / 2^6: 6 becomes 384, and a row whose scale is 2^14 times smaller still lands
    on E4M3's finest step. Raises `CheckpointMismatch` that names the tensor if rows of a block differ by more.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    exponents = scales.view(torch.uint8).to(torch.int32)
    padded = torch.nn.functional.pad(exponents, (0, 0, 0, -rows % BLOCK))
    block = (padded.unflatten(0, (-1, BLOCK)).amax(dim=1) - 6).clamp_min(0)
    shift = exponents - block.repeat_interleave(BLOCK, dim=0)[:rows]
    factor = torch.ldexp(torch.ones_like(shift, dtype=torch.float32), shift).repeat_interleave(BLOCK, dim=1)[:, :columns]
    exact = decode_e2m1_pairs(packed.view(torch.uint8)) * factor
    codes = encode_e4m3(exact).view(torch.float8_e4m3fn)
    if not torch.equal(codes.to(torch.float32), exact):
        raise CheckpointMismatch(
            f"tensor {name!r} has row scales within one 32x32 block that differ by more than 2^14; FP8 cannot hold both "
            "exactly. Keep FP4 experts, or convert to bf16"
        )
    return codes, block.to(torch.uint8).view(torch.float8_e8m0fnu)
