"""What a checkpoint holds, from headers alone: bytes and tensors by class and dtype, files, and differences.

Owns `inspect`; never touches tensor bytes, so it is instant for any size. Must not know how a report is printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from kvist.checkpoint.contents import Finding, compare
from kvist.checkpoint.formats import Entry, open_checkpoint
from kvist.config import ModelConfig
from kvist.config_json import load_config
from kvist.inventory import ParameterCounts, count_parameters, tensor_specs


@dataclass(frozen=True, kw_only=True)
class KindSum:
    """Tensors, payload bytes and logical parameters of one tensor class."""

    kind: str
    tensors: int
    nbytes: int
    parameters: int


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Headers of a checkpoint, summed up. `tensors` are those that match the pattern asked for, in file order."""

    config: ModelConfig
    files: tuple[tuple[Path, int], ...]
    counts: ParameterCounts
    kinds: tuple[KindSum, ...]
    tensors: tuple[Entry, ...]
    findings: tuple[Finding, ...]


def inspect(folder: str | Path, pattern: str | None = None) -> Inspection:
    """Read the headers of a checkpoint. `pattern` (with * and ?) picks tensors to list, such as `layers.3.*`.

    Raises `ConfigError` or `CheckpointMismatch` if config or container are malformed; differences are returned.
    """
    folder = Path(folder)
    config = load_config(folder)
    checkpoint = open_checkpoint(folder)
    sums: dict[str, tuple[int, int, int]] = {}
    for spec in tensor_specs(config):
        if spec.name in checkpoint.entries:
            tensors, nbytes, count = sums.get(spec.kind, (0, 0, 0))
            nbytes += checkpoint.entries[spec.name].nbytes
            sums[spec.kind] = tensors + 1, nbytes, count + spec.parameters
    return Inspection(
        config=config,
        files=tuple((file, file.stat().st_size) for file in checkpoint.files),
        counts=count_parameters(config),
        kinds=tuple(KindSum(kind=k, tensors=t, nbytes=b, parameters=p) for k, (t, b, p) in sums.items()),
        tensors=tuple(e for e in checkpoint.entries.values() if pattern and fnmatchcase(e.name, pattern)),
        findings=tuple(compare(checkpoint, config)),
    )
