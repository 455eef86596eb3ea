"""A checkpoint folder becomes a configuration, dequantised tensors and Engram tables, or a whole model.

Owns the order of checks (config, container, inventory, then values) and the promise that no tensor is held twice.
Must not know requests or devices' kernels. Source: facts section 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from kvist.checkpoint.bounded import CacheCounters
from kvist.checkpoint.contents import require_match
from kvist.checkpoint.engram_store import DEFAULT_CACHE_BYTES, EngramCounters, EngramStore, StoredTable
from kvist.checkpoint.expert_bank import ExpertStore, FileBank, is_routed_expert
from kvist.checkpoint.formats import CheckpointMismatch, open_checkpoint
from kvist.checkpoint.locate import locate
from kvist.checkpoint.tables import EngramTable, TableAccess, open_tables
from kvist.checkpoint.tensors import Access, TensorFiles
from kvist.config import ModelConfig
from kvist.config_json import load_config
from kvist.inventory import Storage, parameters
from kvist.model.block import Block
from kvist.model.engram import EngramReader
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.text.token_map import token_map

DTYPES = (torch.float32, torch.bfloat16)
CHOOSING = ("indexer", "router", "draft router")
"""Classes of parameters that choose rows and experts: NaN in them changes a reply and leaves every logit finite."""
EngramAccess = Literal["mmap", "memory", "read"]


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """Values of a checkpoint: dequantised parameters under their released names, and Engram tables by layer index."""

    tensors: dict[str, Tensor]
    tables: dict[int, EngramTable]


def open_files(model: str | Path, access: Access = "mmap") -> tuple[Path, ModelConfig, TensorFiles]:
    """Locate a model and validate its configuration, container and inventory; reads headers only.

    Raises `ConfigError`, `CheckpointMismatch` or `ModelNotFound`.
    """
    folder = locate(model)
    config = load_config(folder)
    checkpoint = open_checkpoint(folder)
    require_match(checkpoint, config)
    return folder, config, TensorFiles(checkpoint, access)


def read_state(
    files: TensorFiles, config: ModelConfig, dtype: torch.dtype, *, experts: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """(released name, values) of every parameter but the Engram tables (and routed experts, if not wanted), one at a time.

    FP8 and FP4 weights are dequantised to `dtype` (exact in bfloat16), BF16 tensors converted to it, F32 ones kept. Raises
    `CheckpointMismatch` for NaN or infinity in a parameter of `CHOOSING`; elsewhere both reach the logits, which are checked.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}; weights load as torch.float32 or torch.bfloat16")
    for parameter in parameters(config):
        if parameter.storage is not Storage.TABLE and (experts or not is_routed_expert(parameter)):
            value = files.dequantised(parameter, dtype)
            if parameter.kind in CHOOSING and not bool(torch.isfinite(value).all()):
                raise CheckpointMismatch(
                    f"tensor {parameter.name!r} in {files.entry(parameter.name).file} holds NaN or infinity and would choose "
                    "rows or experts without a sign of it; `kvist checkpoint verify` lists all such tensors: fetch the file again"
                )
            yield parameter.name, value


def load_model(
    model: str | Path,
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    engram: TableAccess = "mmap",
    access: Access = "mmap",
) -> tuple[ModelConfig, ModelState]:
    """Everything a checkpoint holds, on `device`. `model` is a folder, a shipped name or a hub id."""
    _, config, files = open_files(model, access)
    tensors = {name: value.to(device) for name, value in read_state(files, config, dtype)}
    return config, ModelState(tensors=tensors, tables=open_tables(files, config, dtype, access=engram, device=device))


def build_model(
    model: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    numerics: Numerics | None = None,
    device: torch.device | str = "cpu",
    engram: EngramAccess = "mmap",
    access: Access = "mmap",
    classes: Tensor | None = None,
    expert_budget_bytes: int | None = None,
    device_expert_budget_bytes: int | None = None,
    engram_cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> Transformer:
    """A `Transformer` with its weights, Engram readers and token classes, ready to run (in eval mode).

    The modules are created without memory and take over each tensor as it is read. `numerics`, if given, decides the
    dtype too; `classes` replaces the token classes that the folder's tokenizer gives.
    With `expert_budget_bytes` routed experts stay in the files and are read as they are chosen, at most so many bytes of them
    held at a time, and at most `device_expert_budget_bytes` on a device that is not the host (`ExpertStore`); the results are
    the same bit for bit. `engram`: tables mapped (`mmap`; a file that shrinks while the model runs ends the process), in
    `memory`, or `read` row by row through a cache of `engram_cache_bytes` with prefetch, where a failing read is an error of
    the call (`EngramStore`).
    Raises `ConfigError`, `CheckpointMismatch`, `ModelNotFound`, or ValueError for a budget below one expert.
    """
    numerics = numerics or Numerics(dtype=dtype)
    folder, config, files = open_files(model, access)
    with torch.device("meta"):
        transformer = Transformer(config, numerics, own_experts=expert_budget_bytes is None)
    if expert_budget_bytes is not None:
        on_device = device_expert_budget_bytes
        store = ExpertStore(files, config, numerics, expert_budget_bytes, device=device, device_budget_bytes=on_device)
        transformer.attach_experts(store.banks)
    # A module may keep a parameter wider than the file has it (router, head): widening BF16 is exact.
    kept = {name: value.dtype for name, value in transformer.state_dict().items()}
    state = {
        name: value.to(device=device, dtype=kept.get(name, value.dtype))
        for name, value in read_state(files, config, numerics.dtype, experts=expert_budget_bytes is None)
    }
    transformer.load_state_dict(state, strict=True, assign=True)
    if config.engram_layer_ids:
        tables: Mapping[int, EngramReader]
        if engram == "read":
            tables = EngramStore(files, config, numerics.dtype, cache_bytes=engram_cache_bytes).tables
        else:
            tables = open_tables(files, config, numerics.dtype, access=engram, device=device)
        classes = token_classes(folder, config) if classes is None else classes
        transformer.attach_engram(classes.to(device), tables)
    return transformer.eval()


@dataclass(frozen=True, kw_only=True)
class FetchCounters:
    """What a model has read while running; None for a part that is resident or mapped."""

    experts: CacheCounters | None
    device_experts: CacheCounters | None
    engram: EngramCounters | None


def expert_store(model: Transformer) -> ExpertStore | None:
    """The store behind a built model's expert banks; None if its experts are resident."""
    for block in model.layers:
        assert isinstance(block, Block)
        if isinstance(block.ffn.bank, FileBank):
            return block.ffn.bank.store
    return None


def fetch_counters(model: Transformer) -> FetchCounters:
    """Counters of a built model's expert and Engram stores, for metrics."""
    store, engram = expert_store(model), None
    for block in model.layers:
        assert isinstance(block, Block)
        reader = block.engram.reader if block.engram is not None else None
        if isinstance(reader, StoredTable) and reader.store is not None:
            engram = reader.store.counters()
    return FetchCounters(
        experts=None if store is None else store.counters(),
        device_experts=None if store is None else store.device_counters(),
        engram=engram,
    )


def token_classes(folder: Path, config: ModelConfig) -> Tensor:
    """Engram's class of every token id, int64 [ids], from the folder's tokenizer.

    Raises `CheckpointMismatch` if the tokenizer gives another number of classes than the configuration says: the tables
    would then be read at other rows than they were trained with.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointMismatch(f"missing {file}: Engram's token classes are computed from the tokenizer")
    classes = torch.as_tensor(token_map(file), dtype=torch.int64)
    found = int(classes.max()) + 1 if len(classes) else 0
    if found != config.engram_compressed_vocab_size:
        raise CheckpointMismatch(
            f"{file} gives {found} token classes, config.json says engram_compressed_vocab_size "
            f"{config.engram_compressed_vocab_size}; they belong to different models"
        )
    return classes
