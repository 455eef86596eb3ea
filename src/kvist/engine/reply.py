"""A reply as it grows: when it ends, its text, and what the sampler must know of it.

Owns stop tokens, stop strings, held-back text and the history for penalties of one request. Must not know batches or memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvist.engine.errors import NonFiniteLogits
from kvist.engine.request import Request
from kvist.engine.sampling.constraint import Constraint, Mask
from kvist.engine.sampling.history import Ahead, History
from kvist.engine.sampling.logprobs import TokenLogprobs, row_logprobs
from kvist.text.stops import StopMatcher
from kvist.text.tokenizer import StreamDecoder, Tokenizer


class Reply:
    """One request's output side. ValueError for stop strings without a tokenizer.

    `constraint`: the request's grammar, compiled; its state follows the tokens fed. `masks`: what it allows behind the drafts
    last given to `allowed` (None: everything).
    """

    def __init__(
        self,
        request: Request,
        prompt: npt.NDArray[np.int64],
        eos: int,
        tokenizer: Tokenizer | None,
        constraint: Constraint | None = None,
    ) -> None:
        sampling = request.sampling
        if request.stops and tokenizer is None:
            raise ValueError(f"stop strings {request.stops!r} need text; make the engine with the model's tokenizer")
        self.history = History(prompt) if sampling.needs_history else None
        self.ends = frozenset(request.stop_ids) | (frozenset() if request.ignore_end else frozenset((eos,)))
        self.limit = request.max_tokens
        self.decoder = None if tokenizer is None else StreamDecoder(tokenizer, skip_control=True)
        self.stops = StopMatcher(request.stops or ())
        self.count = 0
        self.reason: str | None = None
        self.stop: str | int | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.constraint = constraint
        self.masks: Mask | None = None

    def feed(self, token: int) -> str:
        """Take the next token; the text that became certain. Sets `reason` when the reply ends: a stop before the limit.

        Raises GrammarError if the grammar runs into a limit.
        """
        self.count += 1
        self.masks = None
        if self.constraint is not None:
            self.constraint.accept(token)
        if self.history is not None:
            self.history.append(token)
        text = ""
        if token in self.ends:
            self.reason, self.stop = "stop", token
        elif self.decoder is not None:
            text = self.stops.feed(self.decoder.feed([token]))
        if self.stops.matched is not None:
            self.reason, self.stop = "stop", self.stops.matched
        elif self.reason is None and self.count >= self.limit:
            self.reason = "length"
        return text

    def finish(self) -> str:
        """What was held back, up to a stop string that only the end decides."""
        if self.decoder is None:
            return ""
        rest = self.stops.feed(self.decoder.finish()) + self.stops.finish()
        if self.stops.matched is not None:
            self.reason, self.stop = "stop", self.stops.matched
        return rest

    def behind(self, drafts: Sequence[int]) -> History | Ahead | None:
        """The history that the row behind these drafts needs."""
        return None if self.history is None else self.history.ahead(drafts)

    def score(self, start: int, rows_NV: npt.NDArray[np.float32], prompt: npt.NDArray[np.int64], top: int) -> None:
        """Note the prompt tokens that follow positions start, start + 1, ... from the logits behind those. Raises
        NonFiniteLogits. Positions that were noted before (the request was preempted) are left alone."""
        for position, row_V in enumerate(rows_NV, start):
            if position + 1 >= len(prompt) or position + 1 != len(self.prompt_logprobs):
                continue
            if not np.isfinite(row_V).all():
                raise NonFiniteLogits(f"logits for position {position + 1} are not finite")
            self.prompt_logprobs.append(row_logprobs(row_V, int(prompt[position + 1]), top))

    def allowed(self, drafts: Sequence[int]) -> int:
        """How many of these drafts, in order, the grammar allows; the masks of their rows are made. Raises GrammarError."""
        if self.constraint is None:
            return len(drafts)
        self.masks = self.constraint.masks(drafts)
        return len(self.masks) - 1

    def mask(self, depth: int) -> Mask | None:
        """What the grammar allows behind the first `depth` of the drafts last given to `allowed`; None: everything."""
        return None if self.masks is None else self.masks[depth]
