"""The container: safetensors headers, shards and the index, read with suspicion.

Owns what makes a file acceptable; every way of loading starts here, so all of them decide alike. Reads headers only and
allocates nothing that a header asks for. Must not know models, weights or torch. Source: the safetensors format; facts 13.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
MAX_HEADER_BYTES = 32 << 20
"""Three times what all 96,085 tensors of the release need: a header is parsed whole, so it must not be any size."""
MAX_NAME = 512
MAX_AXES = 16
MAX_INDEX_BYTES = 256 << 20
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")

_SHORT = reprlib.Repr()  # what a header says goes into messages, but not megabytes of it
_SHORT.maxlist, _SHORT.maxstring, _SHORT.maxother = MAX_AXES, 200, 200


class CheckpointMismatch(ValueError):
    """A checkpoint that does not hold what it should; each line of the message names a tensor or file and what was expected."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: `offset` and `nbytes` are absolute positions in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The validated tensors of a folder, by name, and its weight files in order."""

    folder: Path
    files: tuple[Path, ...]
    entries: Mapping[str, Entry]


def read_header(file: Path) -> dict[str, Entry]:
    """Entries of one safetensors file in file order.

    Raises `CheckpointMismatch` unless the header is well formed and the tensors fill the rest of the file exactly: no
    overlap, no gap, no trailing byte, nothing cut off.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            prefix = handle.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise CheckpointMismatch(
                    f"{file}: the header is said to have {length} bytes; the file has {size} bytes and a header at most "
                    f"{MAX_HEADER_BYTES}. It is truncated or no safetensors file"
                )
            raw = handle.read(length)
    except OSError as error:
        raise CheckpointMismatch(f"{file}: cannot be read: {error}") from error
    header = _parse_json(raw, file)
    header.pop("__metadata__", None)
    entries = [_entry(name, fields, file, 8 + length) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    _check_layout(entries, file, 8 + length, size)
    return {entry.name: entry for entry in entries}


def _parse_json(raw: bytes, file: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            repeated = sorted(key for key, times in Counter(key for key, _ in pairs).items() if times > 1)
            raise CheckpointMismatch(f"{file}: {', '.join(map(_SHORT.repr, repeated[:5]))} appears twice")
        return result

    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointMismatch:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of thousands of digits
        raise CheckpointMismatch(f"{file}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointMismatch(f"{file}: expected a JSON object, found {type(data).__name__}")
    return data


def _entry(name: str, fields: Any, file: Path, start: int) -> Entry:
    if len(name) > MAX_NAME:
        raise CheckpointMismatch(f"{file}: tensor {_SHORT.repr(name)} has a name of {len(name)} characters; at most {MAX_NAME}")
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointMismatch(f"{file}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise CheckpointMismatch(
            f"{file}: tensor {name!r} has unknown dtype {_SHORT.repr(dtype)}; known: {', '.join(ITEM_BYTES)}"
        )
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2 or len(shape) > MAX_AXES:
        raise CheckpointMismatch(
            f"{file}: tensor {name!r} has shape {_SHORT.repr(shape)} and data_offsets {_SHORT.repr(offsets)}; a shape has at "
            f"most {MAX_AXES} axes, and both hold whole numbers from 0 to 2^63 - 1"
        )
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise CheckpointMismatch(
            f"{file}: tensor {name!r} {dtype} {shape} needs {math.prod(shape) * ITEM_BYTES[dtype]} bytes, its offsets "
            f"{begin}..{end} hold {end - begin}"
        )
    return Entry(name, dtype, tuple(shape), file, start + begin, end - begin)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 63 for v in value)


def _check_layout(entries: list[Entry], file: Path, start: int, size: int) -> None:
    at, before = start, "the header"
    for entry in entries:
        if entry.offset != at:
            what = "overlaps" if entry.offset < at else "leaves a gap after"
            raise CheckpointMismatch(f"{file}: tensor {entry.name!r} {what} {before}")
        at, before = entry.offset + entry.nbytes, f"tensor {entry.name!r}"
        if at > size:
            raise CheckpointMismatch(
                f"{file}: truncated: tensor {entry.name!r} {entry.dtype} {list(entry.shape)} ends at byte {at}, the file "
                f"has {size}"
            )
    if at != size:
        raise CheckpointMismatch(f"{file}: {size - at} bytes follow {before}, the last one; expected {at} bytes in all")


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Find and validate the weight files of a folder: those of the index, else `model.safetensors`, else all shards.

    Raises `CheckpointMismatch` that lists every missing shard and every tensor that the index and the shards disagree on.
    """
    folder = Path(folder)
    index = folder / INDEX_NAME
    weight_map = _read_index(index) if index.is_file() else None
    files = sorted({folder / name for name in weight_map.values()}) if weight_map is not None else _scan(folder)
    absent = [file for file in files if not file.is_file()]
    if absent:
        raise CheckpointMismatch(_lines(_absent_shards(absent, weight_map)))
    entries: dict[str, Entry] = {}
    problems: list[str] = []
    for file in files:
        for name, entry in read_header(file).items():
            if name in entries:
                problems.append(f"tensor {name!r} is in {entries[name].file} and again in {file}")
            entries[name] = entry
    if weight_map is not None:
        problems += _compare_index(weight_map, entries, index)
    if problems:
        raise CheckpointMismatch(_lines(problems))
    return Checkpoint(folder=folder, files=tuple(files), entries=entries)


def _scan(folder: Path) -> list[Path]:
    """Weight files without an index. A shard's name tells how many there are, so that a lost one is noticed."""
    single = folder / "model.safetensors"
    shards = sorted(file for file in folder.glob("model-*.safetensors") if _SHARD.fullmatch(file.name))
    if single.is_file():
        if shards:
            raise CheckpointMismatch(f"{folder} holds {single.name} and shards ({shards[0].name}) but no {INDEX_NAME}")
        return [single]
    if not shards:
        raise CheckpointMismatch(f"{folder} holds neither {INDEX_NAME}, model.safetensors nor model-*-of-*.safetensors")
    totals = {int(match[2]) for file in shards if (match := _SHARD.fullmatch(file.name))}
    if len(totals) > 1:
        raise CheckpointMismatch(f"{folder} holds shards of several checkpoints ({sorted(totals)} files) and no {INDEX_NAME}")
    total = totals.pop()
    return [folder / shard_name(i, total) for i in range(1, total + 1)]


def shard_name(number: int, total: int) -> str:
    """File name of shard `number` (from 1) of `total`; a single one has no number."""
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def _read_index(index: Path) -> dict[str, str]:
    size = index.stat().st_size
    if size > MAX_INDEX_BYTES:
        raise CheckpointMismatch(f"{index} has {size} bytes; an index has at most {MAX_INDEX_BYTES}")
    weight_map = _parse_json(index.read_bytes(), index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointMismatch(f"{index}: weight_map must be a non-empty object")
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard.endswith(".safetensors") and Path(shard).name == shard
        if not plain or "\\" in shard or "\0" in shard:
            found = f"tensor {_SHORT.repr(name)} lies in {_SHORT.repr(shard)}"
            raise CheckpointMismatch(f"{index}: {found}; expected the plain name of a shard")
    return weight_map


def _absent_shards(absent: list[Path], weight_map: Mapping[str, str] | None) -> list[str]:
    lines = []
    for file in absent:
        names = [name for name, shard in (weight_map or {}).items() if shard == file.name]
        held = f", which the index says holds {len(names)} tensors, {names[0]!r} among them" if names else ""
        lines.append(f"missing shard {file}{held}")
    return lines


def _compare_index(weight_map: Mapping[str, str], entries: Mapping[str, Entry], index: Path) -> list[str]:
    lines = []
    for name, shard in weight_map.items():
        found = entries.get(name)
        if found is None or found.file.name != shard:
            place = f"it is in {found.file.name}" if found else "no shard holds it"
            lines.append(f"{index.name} names tensor {name!r} in {index.parent / shard}, but {place}")
    lines += [
        f"tensor {name!r} in {entry.file} is not in {index.name}" for name, entry in entries.items() if name not in weight_map
    ]
    return lines


def _lines(problems: Iterable[str], limit: int = 20) -> str:
    found = list(problems)
    more = [f"... and {len(found) - limit} more"] if len(found) > limit else []
    return "\n".join(found[:limit] + more)
