"""Writing checkpoints: quantise to the released names and dtypes, stream into shards, appear as a whole or not at all.

Owns shard planning, quantised encoding and the order of renames. Holds one parameter at a time, tables in pieces.
Must not know where values come from. Source: facts sections 7, 8 and 13.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from kvist.checkpoint.about import write_about
from kvist.checkpoint.formats import INDEX_NAME, CheckpointMismatch, shard_name
from kvist.checkpoint.tables import EngramTable
from kvist.config import ModelConfig
from kvist.config_json import save_config
from kvist.inventory import DTYPE_BYTES, Parameter, Storage, TensorSpec, parameters
from kvist.quant import quantise_fp4_weight, quantise_fp8_rows, quantise_fp8_weight

TABLE_PIECE_ROWS = 1 << 16
DEFAULT_SHARD_BYTES = 4 << 30

Planes = tuple[Tensor, ...]
"""The file tensors of a parameter (codes, or codes and scales), or the same rows of each."""
Encoder = Callable[[Parameter], Iterable[Planes]]
"""Yields a parameter's planes; a table in pieces of rows, everything else in one."""


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one file will hold: its parameters, and the start of each tensor's bytes after the header."""

    parameters: tuple[Parameter, ...]
    specs: tuple[TensorSpec, ...]
    header: bytes
    offsets: Mapping[str, int]


def save_checkpoint(
    config: ModelConfig,
    state: Mapping[str, Tensor | EngramTable],
    tokenizer: Path | None,
    out: str | Path,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    base: bool = False,
) -> list[Path]:
    """Quantise `state` (released names -> values, tables as float tensors or `EngramTable`) into the folder `out`.

    `base`: the folder says that the model was not tuned to chat. Values that the formats represent exactly are kept bit for
    bit. Returns the weight files. Raises `CheckpointMismatch` that lists missing, extra and misshapen tensors before anything
    is written, and ValueError if `out` holds a model.
    """
    require_state(config, state)

    def encoder(parameter: Parameter) -> Iterable[Planes]:
        return encode(parameter, state[parameter.name])

    return write_checkpoint(config, encoder, tokenizer, out, shard_bytes, base=base)


def write_checkpoint(
    config: ModelConfig, encoder: Encoder, tokenizer: Path | None, out: str | Path, shard_bytes: int, *, base: bool = False
) -> list[Path]:
    """Write all parameters of `config` as `encoder` gives them, with config.json, tokenizer.json and (`base`) kvist.json.

    Files get their names only when all are complete, config.json last: a folder without it is no model.
    """
    out = Path(out)
    _require_free(out)
    if tokenizer is not None and not tokenizer.is_file():
        raise ValueError(f"no tokenizer at {tokenizer}")
    shards = plan_shards(config, shard_bytes)
    names = [shard_name(i + 1, len(shards)) for i in range(len(shards))]
    partial = out / f".partial-{os.getpid()}"
    made = not out.exists()
    partial.mkdir(parents=True)
    try:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(partial / name, shard, encoder)
        if len(shards) > 1:
            (partial / INDEX_NAME).write_text(_index(names, shards), encoding="utf-8")
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        write_about(partial, base=base)
        save_config(config, partial / "config.json")
        for file in sorted(partial.iterdir(), key=lambda file: file.name == "config.json"):
            _sync(file)
            file.rename(out / file.name)
        _sync(out)
    except BaseException as error:
        shutil.rmtree(out if made else partial, ignore_errors=True)
        if isinstance(error, OSError) and error.filename is None:  # a write that found no room does not say where
            raise OSError(error.errno, error.strerror, str(out)) from error
        raise
    partial.rmdir()
    return [out / name for name in names]


def require_state(config: ModelConfig, state: Mapping[str, Tensor | EngramTable]) -> None:
    """Raise `CheckpointMismatch` unless `state` has exactly the parameters of `config` in their unpacked shapes."""
    expected = {parameter.name: parameter for parameter in parameters(config)}
    lines = []
    for name, parameter in expected.items():
        if name not in state:
            lines.append(f"missing tensor {name!r}: expected shape {list(parameter.shape)}")
        elif tuple(state[name].shape) != parameter.shape:
            found = list(state[name].shape)
            lines.append(f"misshapen tensor {name!r}: expected {list(parameter.shape)}, found {found}")
    lines += [f"extra tensor {name!r}: the configuration has no such tensor" for name in state if name not in expected]
    if lines:
        raise CheckpointMismatch("\n".join(lines[:20] + [f"... and {len(lines) - 20} more"] * (len(lines) > 20)))


def encode(parameter: Parameter, value: Tensor | EngramTable) -> Iterator[Planes]:
    """The released form of one parameter. Raises `CheckpointMismatch` for values that its format cannot hold."""
    if isinstance(value, EngramTable):
        for start in range(0, len(value.codes), TABLE_PIECE_ROWS):
            piece = slice(start, start + TABLE_PIECE_ROWS)
            yield value.codes[piece], value.scales[piece]
    elif parameter.storage is Storage.TABLE:
        for start in range(0, len(value), TABLE_PIECE_ROWS):
            yield quantise_fp8_rows(_finite(parameter, value[start : start + TABLE_PIECE_ROWS]))
    else:
        yield encode_plain(parameter, _finite(parameter, value))


def encode_plain(parameter: Parameter, value: Tensor) -> Planes:
    """The planes of a parameter that is no table."""
    match parameter.storage:
        case Storage.BF16:
            return (value.to(torch.bfloat16),)
        case Storage.F32:
            return (value.to(torch.float32),)
        case Storage.FP8:
            return quantise_fp8_weight(value)
        case Storage.FP4:
            return quantise_fp4_weight(value)
        case _:
            raise AssertionError(f"{parameter.name} is a table")


def _finite(parameter: Parameter, value: Tensor) -> Tensor:
    value = value.detach()
    if not bool(torch.isfinite(value).all()):
        raise CheckpointMismatch(f"tensor {parameter.name!r} holds NaN or infinity; it is not saved")
    return value


def plan_shards(config: ModelConfig, shard_bytes: int) -> list[Shard]:
    """Cut the parameters, in order, into files of at most `shard_bytes` payload; a parameter is never split."""
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes is {shard_bytes}; at least 1")
    groups: list[list[Parameter]] = []
    filled = 0
    for parameter in parameters(config):
        if not groups or filled + parameter.nbytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(parameter)
        filled += parameter.nbytes
    return [_plan_shard(group) for group in groups]


def _plan_shard(group: list[Parameter]) -> Shard:
    # Wide items first keeps every tensor aligned, as readers that map the file expect.
    specs = sorted((spec for p in group for spec in p.specs()), key=lambda spec: -DTYPE_BYTES[spec.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offsets: dict[str, int] = {}
    at = 0
    for spec in specs:
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [at, at + spec.nbytes]}
        offsets[spec.name] = at
        at += spec.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return Shard(parameters=tuple(group), specs=tuple(specs), header=raw, offsets=offsets)


def _write_shard(file: Path, shard: Shard, encoder: Encoder) -> None:
    start = 8 + len(shard.header)
    with file.open("wb") as handle:
        handle.write(len(shard.header).to_bytes(8, "little") + shard.header)
        for parameter in shard.parameters:
            specs = parameter.specs()
            written = [0] * len(specs)
            for planes in encoder(parameter):
                for i, (spec, plane) in enumerate(zip(specs, planes, strict=True)):
                    handle.seek(start + shard.offsets[spec.name] + written[i])
                    written[i] += _write_bytes(handle, plane)
            for spec, count in zip(specs, written, strict=True):
                assert count == spec.nbytes, f"{spec.name}: wrote {count} of {spec.nbytes} bytes"


def _write_bytes(handle: BinaryIO, plane: Tensor) -> int:
    data = plane.cpu().contiguous().reshape(-1).view(torch.uint8)
    handle.write(data.numpy().data)
    return data.numel()


def _index(names: list[str], shards: list[Shard]) -> str:
    weight_map = {spec.name: name for name, shard in zip(names, shards, strict=True) for spec in shard.specs}
    total = sum(spec.nbytes for shard in shards for spec in shard.specs)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=0) + "\n"


def _require_free(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; a checkpoint is written to a folder")
    held = sorted(file.name for pattern in ("config.json", "model*.safetensors*") for file in out.glob(pattern))
    if held:
        raise ValueError(f"{out} already holds a model ({', '.join(held[:3])}); choose another folder or remove it first")


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk, so that a rename never outlives the bytes it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
