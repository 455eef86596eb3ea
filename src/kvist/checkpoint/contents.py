"""What a checkpoint should hold against what it holds: findings, one a tensor, and the error that lists them.

Compares an opened `Checkpoint` with the inventory of its configuration by headers alone. Must not know tensor values.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvist.checkpoint.formats import Checkpoint, CheckpointMismatch
from kvist.config import ModelConfig
from kvist.inventory import tensor_specs


@dataclass(frozen=True, slots=True)
class Finding:
    """One difference: `problem` is missing, extra, misshapen, or wrong dtype; `expected` and `found` say dtype and shape."""

    problem: str
    name: str
    expected: str
    found: str
    file: str

    def __str__(self) -> str:
        if self.problem == "missing":
            return f"missing tensor {self.name!r}: expected {self.expected} in {self.file}"
        if self.problem == "extra":
            return f"extra tensor {self.name!r}: {self.found} in {self.file}; the configuration has no such tensor"
        return f"{self.problem} tensor {self.name!r}: expected {self.expected}, found {self.found} in {self.file}"


def compare(checkpoint: Checkpoint, config: ModelConfig) -> list[Finding]:
    """All differences between the files and the inventory of `config`, in inventory order, extras last."""
    findings = []
    searched = checkpoint.files[0].name if len(checkpoint.files) == 1 else f"one of {len(checkpoint.files)} shards"
    rest = dict(checkpoint.entries)
    for spec in tensor_specs(config):
        entry = rest.pop(spec.name, None)
        expected = f"{spec.dtype} {list(spec.shape)}"
        if entry is None:
            findings.append(Finding("missing", spec.name, expected, "", f"{checkpoint.folder} ({searched})"))
        elif entry.shape != spec.shape or entry.dtype != spec.dtype:
            problem = "misshapen" if entry.shape != spec.shape else "wrong dtype"
            found = f"{entry.dtype} {list(entry.shape)}"
            findings.append(Finding(problem, spec.name, expected, found, str(entry.file)))
    findings += [
        Finding("extra", name, "", f"{entry.dtype} {list(entry.shape)}", str(entry.file)) for name, entry in rest.items()
    ]
    return findings


def require_match(checkpoint: Checkpoint, config: ModelConfig, limit: int = 20) -> None:
    """Raise `CheckpointMismatch` with the first `limit` findings, if there are any."""
    findings = compare(checkpoint, config)
    if findings:
        lines = [str(finding) for finding in findings[:limit]]
        if len(findings) > limit:
            lines.append(f"... and {len(findings) - limit} more; `kvist checkpoint verify` lists all")
        raise CheckpointMismatch("\n".join([f"{checkpoint.folder} does not match its config.json:", *lines]))
