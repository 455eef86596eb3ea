"""The exact comparison: token classes, Engram rows and everything before the vision tower must be equal.

Must not know tolerances other than equality. Goldens README, 'Comparing' 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kvist.conformance.case import Case
from kvist.conformance.check import Check, judged, max_abs
from kvist.conformance.errors import CaseError
from kvist.conformance.prompt import SeenImage
from kvist.conformance.results import RunResult
from kvist.images import TEXT
from kvist.text.token_map import token_map


def equal(quantity: str, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> Check:
    """One line for tensors that must be equal in shape and value."""
    for name, got, want in pairs:
        if got.shape != want.shape:
            return judged(quantity, False, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}")
    differing = sum(int((got != want).sum()) for _, got, want in pairs)
    values = sum(want.numel() for _, _, want in pairs)
    largest = max((max_abs(got, want) for _, got, want in pairs), default=0.0)
    return judged(quantity, differing == 0, f"{differing} of {values} values differ", max_abs=largest)


def exact_checks(case: Case, results: Sequence[RunResult]) -> Iterator[Check]:
    """Equality of all that the case records of it, and a failure for a name in `tolerances.exact` that is not known."""
    names, seen = case.exact, set()
    tables = {
        "token_map": list(_token_classes(case)),
        "engram_rows": [pair for result in results for pair in _engram_rows(result)],
        "input_ids": [pair for result in results for pair in _expanded_prompt(result)],
        "token_types": [pair for result in results for pair in _token_types(result)],
        **{name: [p for result in results for p in _image_tensors(result, name)] for name in ("grid", "span_types")},
        **{name: [p for result in results for p in _image_tensors(result, name)] for name in ("resized", "patches")},
    }
    for quantity, pairs in tables.items():
        seen.add(quantity)
        if pairs:
            yield equal(f"exact {quantity}", pairs)
        elif quantity in names:
            yield judged(f"exact {quantity}", None, "the case records nothing of this kind")
    for name in names:
        if name not in seen:
            yield judged(f"exact {name}", False, "this runner knows no exact quantity of this name")


def _token_classes(case: Case) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Engram's compressed classes, computed from the case's tokenizer."""
    want = case.expected.get("token_map")
    if want is not None:
        file = case.folder / "tokenizer.json"
        if not file.is_file():
            raise CaseError(f"{file} is missing, but the case records token_map")
        yield "token_map", torch.as_tensor(token_map(file), dtype=torch.int64), want.long()


def _engram_rows(result: RunResult) -> Iterator[tuple[str, Tensor, Tensor]]:
    want, got = result.case.recorded(result.run, "engram_rows"), result.prompt.engram_LTX
    if want is not None:
        got_TLX = torch.empty(0) if got is None else got.permute(1, 0, 2)
        yield f"{result.run.name}/engram_rows", got_TLX, want.long()


def _expanded_prompt(result: RunResult) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The prompt with one image id an image, each replaced by as many as its span takes."""
    short = result.case.inputs.get(f"{result.run.name}/prompt_ids")
    if short is None or not result.prompt.images:
        return
    ids, images = [], list(result.prompt.images)
    for token in short.tolist():
        here = images.pop(0) if images and token == result.image_token_id else None
        ids += [token] * (1 if here is None else len(here.span))
    yield f"{result.run.name}/input_ids", torch.tensor(ids), result.prompt.ids_T[: result.run.prompt_len]


def _token_types(result: RunResult) -> Iterator[tuple[str, Tensor, Tensor]]:
    want = result.case.inputs.get(f"{result.run.name}/token_types")
    if want is None:
        return
    types = torch.full((result.run.prompt_len,), TEXT, dtype=torch.int64)
    for image in result.prompt.images:
        types[image.start : image.start + len(image.span)] = torch.from_numpy(image.processed.span_types).long()
    yield f"{result.run.name}/token_types", types, want.long()


def _image_tensors(result: RunResult, name: str) -> Iterator[tuple[str, Tensor, Tensor]]:
    for index, image in enumerate(result.prompt.images):
        want = result.case.recorded(result.run, f"{name}.{index}")
        if want is not None:
            got = image_tensor(image, name)
            yield f"{result.run.name}/{name}.{index}", got, want.float() if want.is_floating_point() else want.long()


def image_tensor(image: SeenImage, name: str) -> Tensor:
    """One preprocessing result by its recorded name, int64 or float32."""
    made = {
        "grid": lambda: torch.tensor(image.grid),
        "span_types": lambda: torch.from_numpy(image.processed.span_types).long(),
        "resized": lambda: torch.from_numpy(image.processed.resized).long(),
        "patches": lambda: torch.from_numpy(image.processed.patches).float(),
    }
    return made[name]()
