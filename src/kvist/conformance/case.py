"""A golden case on disk: `case.json`, its runs and limits, and the recorded tensors, checked before anything runs.

Must not know the model. A case is untrusted input: whatever is wrong with it becomes a `CaseError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvist.conformance.errors import CaseError

FORMAT = 1
KINDS = ("model", "quantisers", "pure-functions")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SEMANTICS = ("fixed", "released")
MAX_JSON_BYTES = 16 << 20
MAX_NAME = 100


@dataclass(frozen=True, kw_only=True)
class Run:
    """One sequence of a model case, alone in its batch. Lengths in tokens."""

    name: str
    prompt_len: int
    decode_steps: int
    images: int
    drafts: bool
    layerwise: bool

    @property
    def length(self) -> int:
        """All positions of the run: prompt and decode steps."""
        return self.prompt_len + self.decode_steps


@dataclass(frozen=True, kw_only=True)
class Case:
    """One loaded case. `tolerances` are the limits of `case.json` as written there; tensors keep their file names."""

    folder: Path
    name: str
    kind: str
    dtype: str
    semantics: str
    runs: tuple[Run, ...]
    tolerances: Mapping[str, Any]
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Tensor]
    expected: Mapping[str, Tensor]

    def on(self, device: torch.device | str) -> Case:
        """The same case with its inputs on a device; what is expected stays on the host."""
        return replace(self, inputs={name: tensor.to(device) for name, tensor in self.inputs.items()})

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of a model case's arithmetic."""
        return DTYPES[self.dtype]

    def limits(self, group: str) -> Mapping[str, Any]:
        """One group of limits (`all`, `strict`, `layerwise_rel_l2`, ...); empty if the case has none."""
        found = self.tolerances.get(group, {})
        if not isinstance(found, Mapping):
            raise CaseError(f"{self.folder / 'case.json'}: tolerances.{group} must be an object, got {type(found).__name__}")
        return found

    @property
    def exact(self) -> tuple[str, ...]:
        """Names (or patterns) that must be equal; a remark in brackets after a name is dropped."""
        names = self.tolerances.get("exact", [])
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise CaseError(f"{self.folder / 'case.json'}: tolerances.exact must be a list of names, got {names!r}")
        return tuple(name.split(" (")[0] for name in names)

    def given(self, run: Run, name: str) -> Tensor:
        """A required input of a run. Raises `CaseError` if the case lacks it."""
        return _require(self.inputs, f"{run.name}/{name}", self.folder / "inputs.safetensors")

    def recorded(self, run: Run, name: str) -> Tensor | None:
        """A recorded output of a run, or None where the case does not hold it."""
        return self.expected.get(f"{run.name}/{name}")

    def must(self, run: Run, name: str) -> Tensor:
        """A recorded output that the comparison cannot do without. Raises `CaseError` if the case lacks it."""
        return _require(self.expected, f"{run.name}/{name}", self.folder / "expected.safetensors")


def limit(value: Any, name: str) -> float:
    """A limit of `case.json` as a finite number. Raises `CaseError` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CaseError(f"the limit {name} must be a finite number, got {value!r}")
    return float(value)


def load_case(folder: str | Path) -> Case:
    """Read and check a case folder. Raises `CaseError` naming the file and the rule it breaks."""
    folder = Path(folder)
    file = folder / "case.json"
    meta = _read_json(file)
    version = meta.get("format")
    if version != FORMAT:
        raise CaseError(f"{file}: format {version!r} is unknown; this runner reads format {FORMAT}")
    kind = _choice(file, meta, "kind", KINDS)
    dtype = _choice(file, meta, "dtype", (*DTYPES, "mixed")) if "dtype" in meta or kind == "model" else "mixed"
    if kind == "model" and dtype not in DTYPES:
        raise CaseError(f"{file}: a model case runs in one of {', '.join(DTYPES)}, not {dtype!r}")
    semantics = _choice(file, {"semantics": "fixed"} | dict(meta), "semantics", SEMANTICS)
    tolerances = meta.get("tolerances")
    if not isinstance(tolerances, Mapping):
        raise CaseError(f"{file}: tolerances must be an object, got {tolerances!r}; without limits nothing can be judged")
    parameters = meta.get("parameters", {})
    if not isinstance(parameters, Mapping):
        raise CaseError(f"{file}: parameters must be an object, got {parameters!r}")
    files = meta.get("files", {})
    if not isinstance(files, Mapping):
        raise CaseError(f"{file}: files must be an object, got {files!r}")
    return Case(
        folder=folder,
        name=_label(file, "name", meta.get("name", folder.name)),
        kind=kind,
        dtype=dtype,
        semantics=semantics,
        runs=_runs(file, meta) if kind == "model" else (),
        tolerances=tolerances,
        parameters=parameters,
        inputs=_read_tensors(folder, files.get("inputs", "inputs.safetensors")),
        expected=_read_tensors(folder, files.get("expected", "expected.safetensors")),
    )


def _read_json(file: Path) -> Mapping[str, Any]:
    if not file.is_file():
        raise CaseError(f"no golden case in {file.parent}: {file.name} is missing")
    if file.stat().st_size > MAX_JSON_BYTES:
        raise CaseError(f"{file} has {file.stat().st_size} bytes; a case description has at most {MAX_JSON_BYTES}")
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise CaseError(f"{file} is not JSON: {error}") from error
    if not isinstance(meta, Mapping):
        raise CaseError(f"{file} must hold an object, got {type(meta).__name__}")
    return meta


def _read_tensors(folder: Path, name: Any) -> Mapping[str, Tensor]:
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".", ".."):
        raise CaseError(f"{folder / 'case.json'}: {name!r} must be the plain name of a file in the case's folder")
    file = folder / name
    if not file.is_file():
        raise CaseError(f"{file} is missing")
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CaseError(f"{file} is not a readable safetensors file: {error}") from error


def _label(file: Path, what: str, value: Any) -> str:
    """A name that is safe to print."""
    if not isinstance(value, str) or not value.isprintable() or not 0 < len(value) <= MAX_NAME:
        raise CaseError(f"{file}: {what} must be 1 to {MAX_NAME} printable characters, got {value!r:.80}")
    return value


def _choice(file: Path, meta: Mapping[str, Any], key: str, known: tuple[str, ...]) -> str:
    value = meta.get(key)
    if value not in known:
        raise CaseError(f"{file}: {key} {value!r} is unknown; known: {', '.join(known)}")
    return str(value)


def _runs(file: Path, meta: Mapping[str, Any]) -> tuple[Run, ...]:
    entries = meta.get("runs")
    if not isinstance(entries, list) or not entries:
        raise CaseError(f"{file}: a model case needs a non-empty list of runs, got {entries!r}")
    runs: list[Run] = []
    for at, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise CaseError(f"{file}: runs[{at}] must be an object with a name, got {entry!r}")
        where = f"{file}: run {_label(file, 'the name of a run', entry['name'])!r}"
        counts = {
            "prompt_len": entry.get("prompt_len"),
            "decode_steps": entry.get("decode_steps", 0),
            "images": entry.get("images", 0),
        }
        for key, value in counts.items():
            least = 1 if key == "prompt_len" else 0
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise CaseError(f"{where}: {key} must be an integer of at least {least}, got {value!r}")
        flags = {key: entry.get(key, False) for key in ("drafts", "layerwise")}
        if not all(isinstance(value, bool) for value in flags.values()):
            raise CaseError(f"{where}: drafts and layerwise must be true or false, got {flags}")
        if any(run.name == entry["name"] for run in runs):
            raise CaseError(f"{where} is listed twice")
        runs.append(Run(name=entry["name"], **counts, **flags))
    return tuple(runs)


def _require(tensors: Mapping[str, Tensor], name: str, file: Path) -> Tensor:
    if name not in tensors:
        raise CaseError(f"{file} lacks the tensor {name!r}")
    return tensors[name]
