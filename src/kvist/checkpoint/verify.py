"""A full check of a checkpoint: container, inventory, every value, the tokenizer, and a SHA-256 of every file.

Owns `verify`; reads each file once from end to end. Must not know models beyond their inventory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvist.checkpoint.contents import Finding, compare
from kvist.checkpoint.formats import Checkpoint, CheckpointMismatch, open_checkpoint
from kvist.checkpoint.load import token_classes
from kvist.checkpoint.tensors import TensorFiles
from kvist.config import ModelConfig
from kvist.config_json import load_config
from kvist.inventory import TensorSpec, tensor_specs
from kvist.text.tokenizer import Tokenizer, TokenizerError

PIECE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """Size and SHA-256 of one file."""

    file: Path
    nbytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """What `verify` found. `container` holds a malformed container's message: nothing else was compared then.

    `tokenizer` is what is wrong with the folder's tokenizer.json, if it has one.
    """

    folder: Path
    tensors: int
    payload_bytes: int
    container: str
    tokenizer: str
    findings: tuple[Finding, ...]
    not_finite: tuple[str, ...]
    files: tuple[FileSum, ...]

    @property
    def good(self) -> bool:
        """True if nothing is wrong."""
        return not (self.container or self.tokenizer or self.findings or self.not_finite)


def verify(folder: str | Path, progress: Callable[[str], None] = lambda _: None) -> VerifyReport:
    """Check everything about a checkpoint; problems are reported, not raised. `progress` is told each file and tensor class.

    Raises `ConfigError` if config.json cannot be read: without it there is nothing to compare with.
    """
    folder = Path(folder)
    config = load_config(folder)
    container, findings, bad = "", [], []
    checkpoint = None
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointMismatch as error:
        container = str(error)
    if checkpoint is not None:
        findings = compare(checkpoint, config)
        progress("values")
        wrong = {finding.name for finding in findings}
        bad = _not_finite(checkpoint, [spec for spec in tensor_specs(config) if spec.name not in wrong])
    sums = []
    for file in sorted(file for file in folder.iterdir() if file.is_file()):
        progress(file.name)
        sums.append(file_sum(file))
    entries = checkpoint.entries if checkpoint else {}
    return VerifyReport(
        folder=folder,
        tensors=len(entries),
        payload_bytes=sum(entry.nbytes for entry in entries.values()),
        container=container,
        tokenizer=_tokenizer_problem(folder, config),
        findings=tuple(findings),
        not_finite=tuple(bad),
        files=tuple(sums),
    )


def _tokenizer_problem(folder: Path, config: ModelConfig) -> str:
    if not (folder / "tokenizer.json").is_file():
        return ""
    try:
        Tokenizer(folder)
        if config.engram_layer_ids:
            token_classes(folder, config)
    except (CheckpointMismatch, TokenizerError) as error:
        return str(error)
    return ""


def file_sum(file: Path) -> FileSum:
    """Size and SHA-256 of a file, read in pieces."""
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return FileSum(file=file, nbytes=file.stat().st_size, sha256=digest)


def _not_finite(checkpoint: Checkpoint, specs: list[TensorSpec]) -> list[str]:
    """Names of tensors that hold NaN or infinity (in E4M3 the codes 0x7F and 0xFF, in E8M0 the byte 255)."""
    files = TensorFiles(checkpoint, "mmap")
    return [spec.name for spec in specs if spec.dtype != "I8" and _has_bad(files.mapped(spec.name), spec.dtype)]


def _has_bad(data: Tensor, dtype: str) -> bool:
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        if dtype == "F8_E4M3":
            bad = bool(((piece & 0x7F) == 0x7F).any())
        elif dtype == "F8_E8M0":
            bad = bool((piece == 255).any())
        else:
            values = piece.clone().view(torch.bfloat16 if dtype == "BF16" else torch.float32)
            bad = not bool(torch.isfinite(values).all())
        if bad:
            return True
    return False
