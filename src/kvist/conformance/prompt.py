"""The tokens of a run as the model takes them: ids, text mask, image features, and the batches of prefill and decode.

Owns the checks of a run's inputs and the preprocessing of its images. Must not know what was recorded for the outputs.
Shapes: T tokens of a run, P patches, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvist.conformance.case import Case, Run
from kvist.conformance.errors import CaseError
from kvist.images import ImageError, ProcessedImage, preprocess
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Transformer

INTEGERS = (torch.uint8, torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True)
class SeenImage:
    """One image of a run: what preprocessing, the tower and the aligner made of it, and where its span starts."""

    start: int
    processed: ProcessedImage
    tower: Tensor
    aligned: Tensor
    span: Tensor

    @property
    def grid(self) -> list[int]:
        """Resized width and height, patch rows and columns, token rows and columns."""
        plan = self.processed.plan
        return [plan.width, plan.height, plan.patch_rows, plan.patch_cols, plan.token_rows, plan.token_cols]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A run's tokens: `ids_T` int64, `text_T` bool (False inside an image span), images, n-gram rows [T, layers, columns].

    Kept on the host, images excepted; `rows` puts a batch on the model's `device`.
    """

    ids_T: Tensor
    text_T: Tensor
    images: tuple[SeenImage, ...]
    engram_LTX: Tensor | None
    device: torch.device

    def rows(self, start: int, stop: int) -> Rows:
        """The batch of positions start..stop-1 in slot 0. Image features go with the batch that starts at 0."""
        features = feature_rows = None
        if self.images and start == 0:
            features = torch.cat([image.span for image in self.images])
            places = [torch.arange(image.start, image.start + len(image.span)) for image in self.images]
            feature_rows = torch.cat(places).to(self.device)
        return Rows(
            token_ids_N=self.ids_T[start:stop].to(self.device),
            positions_N=torch.arange(start, stop, device=self.device),
            text_N=self.text_T[start:stop].to(self.device),
            segments=(Segment(slot=0, start=0, length=stop - start, position=start),),
            engram_LNX=None if self.engram_LTX is None else self.engram_LTX[:, start:stop].to(self.device),
            features_FD=features,
            feature_rows_F=feature_rows,
        )


def read_prompt(case: Case, run: Run, model: Transformer) -> Prompt:
    """A run's inputs, checked, with its images seen by the model. Raises `CaseError` for inputs that do not fit."""
    prompt_T = _ids(case, run, "input_ids", run.prompt_len, model)
    decode_T = _ids(case, run, "decode_ids", run.decode_steps, model) if run.decode_steps else prompt_T[:0]
    ids_T = torch.cat([prompt_T, decode_T])
    if run.length > model.config.max_seq_len:
        raise CaseError(f"{_where(case, run)}: {run.length} positions exceed the model's context of {model.config.max_seq_len}")
    images = tuple(_see(case, run, model, index) for index in range(run.images))
    text_T = torch.ones(len(ids_T), dtype=torch.bool)
    for image in images:
        text_T[image.start : image.start + len(image.span)] = False
    device = model.embed.weight.device
    engram_LTX = model.engram_ids(ids_T.to(device), text_T.to(device))
    return Prompt(
        ids_T=ids_T, text_T=text_T, images=images, engram_LTX=None if engram_LTX is None else engram_LTX.cpu(), device=device
    )


def integers(case: Case, run: Run, name: str, shape: tuple[int, ...]) -> Tensor:
    """A required integer input of exactly this shape, int64. Raises `CaseError`."""
    tensor = case.given(run, name)
    if tuple(tensor.shape) != shape or tensor.dtype not in INTEGERS:
        raise CaseError(
            f"{_where(case, run)}: input {name!r} must be integers of shape {list(shape)}, "
            f"got {tensor.dtype} {list(tensor.shape)}"
        )
    return tensor.long()


def _ids(case: Case, run: Run, name: str, length: int, model: Transformer) -> Tensor:
    ids = integers(case, run, name, (length,))
    try:
        return model.check_ids(ids)
    except ValueError as error:
        raise CaseError(f"{_where(case, run)}: input {name!r}: {error}") from error


def _see(case: Case, run: Run, model: Transformer, index: int) -> SeenImage:
    config, vision, aligner = model.config.vision, model.vision, model.aligner
    if config is None or vision is None or aligner is None:
        raise CaseError(f"{_where(case, run)} has {run.images} images, but config.json has no vision_config")
    try:
        processed = preprocess(case.given(run, f"image.{index}").numpy(), config)
    except ImageError as error:
        raise CaseError(f"{_where(case, run)}: image.{index}: {error}") from error
    plan = processed.plan
    start = int(integers(case, run, "image_starts", (run.images,))[index])
    if not 0 <= start <= run.prompt_len - plan.span_tokens:
        raise CaseError(
            f"{_where(case, run)}: image {index} starts at {start} and takes {plan.span_tokens} tokens; "
            f"the prompt has {run.prompt_len}"
        )
    device, dtype = model.embed.weight.device, model.numerics.dtype
    patches = torch.from_numpy(np.ascontiguousarray(processed.patches)).to(device, dtype)
    tower = vision(patches, plan.patch_rows, plan.patch_cols)
    aligned = aligner(tower, plan.patch_rows, plan.patch_cols)
    span = model.encode_image(patches, plan.patch_rows, plan.patch_cols)
    return SeenImage(start=start, processed=processed, tower=tower, aligned=aligned, span=span)


def _where(case: Case, run: Run) -> str:
    return f"{case.folder}: run {run.name!r}"
