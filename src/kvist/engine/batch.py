"""From the pieces of a step to the model's `Rows`: ids, positions, Engram rows and image features in whole-batch operations.

Owns the arrays of one step. Must not know scheduling, sampling or where keys live.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvist.engine.request import ImageInput
from kvist.engine.scheduler import Piece
from kvist.model.rows import Rows, Segment
from kvist.model.transformer import Transformer


class FeatureCache:
    """Image embeddings by content, least recently used out first; `limit` bytes. What a replay inside a span needs."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, 0
        self.hits = self.misses = 0
        self._spans: OrderedDict[bytes, Tensor] = OrderedDict()

    def span(self, image: ImageInput) -> Tensor:
        """The embeddings [tokens, D] of an image's span, encoded again if they are not held. ValueError for a wrong length."""
        found = self._spans.get(image.content)
        if found is not None:
            self.hits += 1
            self._spans.move_to_end(image.content)
            return _checked(found, image)
        self.misses += 1
        made = _checked(image.embed(), image)
        self._spans[image.content] = made
        self.held += made.nbytes
        while self.held > self.limit and len(self._spans) > 1:
            self.held -= self._spans.popitem(last=False)[1].nbytes
        return made


def _checked(values: Tensor, image: ImageInput) -> Tensor:
    if len(values) != image.tokens:
        raise ValueError(f"an image gave {len(values)} embeddings for a span of {image.tokens} tokens; render the prompt again")
    return values


def _seen(piece: Piece) -> Iterator[tuple[ImageInput, int, int]]:
    """The images that have rows in the piece, and the first and the end of those positions."""
    for image in piece.job.request.images:
        low, high = max(image.start, piece.start), min(image.start + image.tokens, piece.stop)
        if low < high:
            yield image, low, high


class _Context(NamedTuple):
    """Token ids, text flags, and how many of them stand before the rows that are meant."""

    ids: npt.NDArray[np.int64]
    text: npt.NDArray[np.bool_]
    lead: int


class BatchBuilder:
    """Makes `Rows` of pieces. One a runner; holds no state of requests but the features fetched for the coming pass."""

    def __init__(self, model: Transformer, features: FeatureCache, device: torch.device) -> None:
        self.model, self.features, self.device = model, features, device
        self.reach = model.config.engram_max_ngram_size - 1 if model.config.engram_layer_ids else 0
        self._fetched: dict[tuple[int, int], Tensor] = {}

    def rows(self, pieces: Sequence[Piece]) -> Rows:
        """One ragged batch: the pieces' rows in order, a segment a piece."""
        ids, text, segments, at = [], [], [], 0
        contexts = [self._context(piece) for piece in pieces]
        for piece, (near_ids, near_text, lead) in zip(pieces, contexts, strict=True):
            job = piece.job
            assert job.slot is not None
            ids.append(near_ids[lead:])
            text.append(near_text[lead:])
            count = piece.stop - piece.start
            segments.append(Segment(slot=job.slot, start=at, length=count, position=piece.start, publish_from=piece.publish_from))
            at += count
        positions = np.concatenate([np.arange(piece.start, piece.stop) for piece in pieces])
        features_FD, feature_rows_F = self._features(pieces)
        return Rows(
            token_ids_N=torch.from_numpy(np.concatenate(ids)).to(self.device),
            positions_N=torch.from_numpy(positions).to(self.device),
            text_N=torch.from_numpy(np.concatenate(text)).to(self.device),
            segments=tuple(segments),
            engram_LNX=self._engram(contexts),
            features_FD=features_FD,
            feature_rows_F=feature_rows_F,
        )

    def _context(self, piece: Piece) -> _Context:
        """Ids and text flags of the piece's rows and of the n-gram's reach before them, and how many those are."""
        origin = max(0, piece.start - self.reach)
        ids, text = piece.job.tokens.window(origin, piece.stop, piece.job.drafts)
        return _Context(ids, text, piece.start - origin)

    def engram(self, pieces: Sequence[Piece]) -> Tensor | None:
        """Table rows [layers, N, columns] of the pieces' rows."""
        return self._engram([self._context(piece) for piece in pieces])

    def forget(self) -> None:
        """A new step begins: let go of the features of the last one."""
        self._fetched = {}

    def fetch(self, piece: Piece) -> None:
        """Have the features of the image rows in the piece, until `forget`; raises what encoding them raises.

        Those rows only: whole spans of many pieces might be more than memory was planned for.
        """
        for image, low, high in _seen(piece):
            self._fetched[piece.job.id, image.start] = self.features.span(image)[low - image.start : high - image.start].clone()

    def _engram(self, contexts: Sequence[_Context]) -> Tensor | None:
        """N-gram rows of all pieces in one hash: pieces stand in one line, kept apart by a barrier that reads as an image."""
        if not self.reach:
            return None
        ids, text, wanted, at = [], [], [], 0
        for near_ids, near_text, lead in contexts:
            ids += [near_ids[:1], near_ids]
            text += [_BARRIER, near_text]
            wanted.append(np.arange(at + 1 + lead, at + 1 + len(near_ids)))
            at += 1 + len(near_ids)
        line_T = torch.from_numpy(np.concatenate(ids)).to(self.device)
        hashed_LTX = self.model.engram_ids(line_T, torch.from_numpy(np.concatenate(text)).to(self.device))
        assert hashed_LTX is not None
        return hashed_LTX[:, torch.from_numpy(np.concatenate(wanted)).to(self.device)]

    def _features(self, pieces: Sequence[Piece]) -> tuple[Tensor | None, Tensor | None]:
        values, places, at = [], [], 0
        for piece in pieces:
            for image, low, high in _seen(piece):
                values.append(self._fetched[piece.job.id, image.start])
                places.append(torch.arange(at + low - piece.start, at + high - piece.start))
            at += piece.stop - piece.start
        if not values:
            return None, None
        return torch.cat(values).to(self.device), torch.cat(places).to(self.device)


_BARRIER = np.zeros(1, dtype=np.bool_)
