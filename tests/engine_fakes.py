"""An engine whose forward pass is a script: tokens follow from the tokens before them, pages carry the ids that they stand for.

For tests of bookkeeping at speed. Owns the script and the marks in pages; whoever opens a hit finds out whether every page holds
the tokens that it was taken for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvist.engine.budget import EngineConfig
from kvist.engine.engine import Engine
from kvist.engine.request import Job
from kvist.engine.runner import StepResult
from kvist.engine.scheduler import Opened, Piece
from kvist.model.initialise import random_model
from kvist.model.numerics import Numerics
from kvist.model.transformer import Transformer
from kvist.presets import preset

VOCABULARY = 256
MODEL = random_model(preset("tiny"), Numerics(), 0)

Script = Callable[[Sequence[int]], int]


def hashed(tokens: Sequence[int]) -> int:
    """The next token as a function of the last eight and of how many there are; never below 4 (no end token)."""
    value = len(tokens)
    for token in tokens[-8:]:
        value = (value * 1000003 + token) & 0xFFFFFFFF
    return 4 + value % (VOCABULARY - 4)


class Scripted:
    """An engine with a scripted runner. `script` may be changed per prompt through `scripts` (keyed by the prompt's ids).

    `model`: whose sizes and vocabulary it has; it never runs.
    """

    def __init__(self, config: EngineConfig, script: Script = hashed, *, model: Transformer = MODEL, **parts: object) -> None:
        self.engine = Engine(model, config, **parts)  # type: ignore[arg-type]
        self.script, self.scripts = script, {}  # type: ignore[var-annotated]
        self.poison: set[int] = set()
        self.rows = 0
        self.engine.runner.run = self.run  # type: ignore[method-assign]
        self.engine.runner.check = lambda pieces: {}  # type: ignore[method-assign]
        self._open = self.engine._open
        self.engine._open = self.open  # type: ignore[method-assign]

    def open(self, change: Opened) -> None:
        """Every position of a hit carries its token's mark."""
        self._open(change)
        job = change.job
        if job.slot == change.slot:
            assert self.marks(job)[: change.tokens].tolist() == marks_of(job.tokens.ids[: change.tokens]), "a wrong page was hit"

    def marks(self, job: Job) -> np.ndarray:
        """The marks of all positions that the job's pages hold."""
        size = self.engine.pages.page_tokens
        return self.engine.memory.bytes_PB[job.pages, :size].numpy().reshape(-1)

    def run(self, pieces: Sequence[Piece]) -> StepResult:
        """Mark new positions and say what the script says."""
        size, rows, finite = self.engine.pages.page_tokens, [], []
        slots = [piece.job.slot for piece in pieces]
        assert len(set(slots)) == len(slots)
        assert None not in slots
        for piece in pieces:
            job = piece.job
            self.rows += piece.stop - piece.start
            tokens = job.tokens.ids.tolist() + job.drafts
            for position in range(max(piece.start, piece.publish_from), piece.stop):
                page = job.pages[position // size]
                assert self.engine.pages.pool.references(page) == 1, "a shared page is written"
                self.engine.memory.bytes_PB[page, position % size] = mark(tokens[position])
            script = self.scripts.get(tuple(tokens[: job.prompt_length]), self.script)
            for position in range(piece.wanted, piece.stop):
                logits = torch.zeros(self.engine.model.config.vocab_size)
                logits[script(tokens[: position + 1])] = 20.0
                if job.id in self.poison:
                    logits[7] = float("nan")
                rows.append(logits)
            finite.append(True)
        counts = [piece.stop - piece.wanted for piece in pieces]
        return StepResult(torch.stack(rows) if rows else torch.zeros(0, 1), counts, finite)


def mark(token: int) -> int:
    """A page byte that stands for a token and is not what an empty page holds."""
    return 1 + token % 255


def marks_of(tokens: np.ndarray) -> list[int]:
    """Marks of many tokens."""
    return [mark(int(token)) for token in tokens]


def follow(prompt: Sequence[int], count: int, script: Script = hashed) -> list[int]:
    """What the script says after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(script(tokens))
    return tokens[len(prompt) :]
