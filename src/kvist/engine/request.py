"""A request: what is asked (`Request`), its life inside the engine (`Job`, a state machine) and what comes back (events).

Owns token buffers and states. Must not know pages' contents, kernels or text. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvist.cache.identity import CONTENT_BYTES, Chain
from kvist.engine.progress import Progress, Usage
from kvist.engine.replay import Replay, ReplaySpan
from kvist.engine.sampling.grammar_text import Grammar
from kvist.engine.sampling.params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from kvist.engine.sampling.logprobs import TokenLogprobs

MAX_STOPS = 256
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 256
MAX_MARKER_IDS = 64


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """An image in a prompt: position of its span's first token, span length, the digest (32 bytes) of its content.

    `embed()` gives the span's embeddings [tokens, D] when they are needed and not in the engine's feature cache.
    """

    start: int
    tokens: int
    content: bytes
    embed: Callable[[], Any]

    def __post_init__(self) -> None:
        if self.start < 0 or self.tokens < 1:
            raise ValueError(f"an image span of {self.tokens} tokens from position {self.start} is no span")
        if len(self.content) != CONTENT_BYTES:
            raise ValueError(f"an image's content digest has {len(self.content)} bytes; all {CONTENT_BYTES} are needed")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One wish. Token ids in, token ids out.

    `stop_ids` end a reply as the end token does (unless `ignore_end`); `stops` are texts that end it (the engine then needs a
    tokenizer; None: none). `grammar`: a `Grammar` that the reply must follow, or, with `grammar_after`, what comes behind the
    first time that these ids stand in a row in the reply (the end of reasoning): before it any text may come, and no end.
    `priority`: higher goes first and may preempt lower. `tenant` shares the machine fairly; `salt` keeps its cache apart.
    `deadline_s`: seconds from arrival. `replay` None: the engine's. `speculate` False: never draft. `prompt_logprobs`: score
    the prompt (all layers run on all its positions), with that many best tokens. `client`: anything, given back. `progress`:
    what the engine writes to as the request goes on. Raises ValueError for values outside their limits.
    """

    prompt: Sequence[int] | npt.NDArray[np.int64]
    max_tokens: int = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: tuple[int, ...] = ()
    stops: tuple[str, ...] | None = None
    grammar: Grammar | None = None
    grammar_after: tuple[int, ...] = ()
    ignore_end: bool = False
    images: tuple[ImageInput, ...] = ()
    replay: Replay | None = None
    priority: int = 0
    tenant: str = ""
    salt: bytes = b""
    deadline_s: float | None = None
    speculate: bool = True
    prompt_logprobs: int | None = None
    client: Any = None
    progress: Progress | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, int) or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be a whole number of at least 1, got {self.max_tokens!r}")
        for name, kind in (("priority", int), ("tenant", str), ("salt", bytes)):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {value!r}")
        if self.prompt_logprobs is not None and not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"prompt_logprobs must lie in 0..{MAX_LOGPROBS}, got {self.prompt_logprobs}; None switches it off")
        if self.deadline_s is not None and not (math.isfinite(self.deadline_s) and self.deadline_s > 0):
            raise ValueError(f"deadline_s must be a positive number of seconds, got {self.deadline_s}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids has {len(self.stop_ids)} entries, at most {MAX_STOP_IDS} are allowed; leave some out")
        if self.grammar_after and self.grammar is None:
            raise ValueError(f"grammar_after names ids {self.grammar_after[:8]}, but there is no grammar to begin behind them")
        if len(self.grammar_after) > MAX_MARKER_IDS:
            raise ValueError(f"grammar_after has {len(self.grammar_after)} ids, at most {MAX_MARKER_IDS} are allowed; shorten it")
        if self.stops is not None:
            _check_stops(self.stops)


def _check_stops(stops: Sequence[object]) -> None:
    if isinstance(stops, str):
        raise ValueError(f"stops must be a sequence of strings, got the string {stops!r}; put it into a tuple")
    if not 1 <= len(stops) <= MAX_STOPS:
        raise ValueError(
            f"stops has {len(stops)} entries, 1..{MAX_STOPS} are allowed; leave it out (None) for none, or send fewer"
        )
    for stop in stops:
        if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            shown = f"{len(stop)} characters" if isinstance(stop, str) else repr(stop)
            raise ValueError(
                f"a stop string must have 1..{MAX_STOP_CHARACTERS} characters, got {shown}; shorten it or leave it out"
            )


class State(Enum):
    """Where a job stands. WAITING also means preempted: it resumes from cached pages."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


_LEGAL = {
    State.WAITING: {State.PREFILL, State.FINISHED},
    State.PREFILL: {State.DECODE, State.WAITING, State.FINISHED},
    State.DECODE: {State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(frozen=True, kw_only=True)
class TokenEvent:
    """New tokens of a request in order, text that became certain (with a tokenizer), log-probabilities if asked for."""

    id: int
    tokens: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    client: Any = None


@dataclass(frozen=True, kw_only=True)
class FinishedEvent:
    """The end of a request: `stop`, `length`, `cancelled` or `error` (then `error` says what), and its usage."""

    id: int
    reason: str
    usage: Usage
    error: Exception | None = None
    stop: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    client: Any = None


Event = TokenEvent | FinishedEvent


class TokenBuffer:
    """Token ids and their text flags, growing in place: int64 [n] and bool [n]."""

    def __init__(self, ids: Sequence[int] | npt.NDArray[np.int64], room: int, images: tuple[ImageInput, ...]) -> None:
        self.length = len(ids)
        self._ids = np.empty(self.length + room, dtype=np.int64)
        self._ids[: self.length] = ids
        self._text = np.ones(self.length + room, dtype=np.bool_)
        for image in images:
            stop = image.start + image.tokens
            if stop > self.length:
                raise ValueError(f"image span {image.start}..{stop} lies outside the prompt of {self.length} tokens")
            self._text[image.start : stop] = False

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """All ids so far (a view)."""
        return self._ids[: self.length]

    @property
    def text(self) -> npt.NDArray[np.bool_]:
        """False inside image spans (a view)."""
        return self._text[: self.length]

    def append(self, token: int) -> None:
        """Add a token; the buffer was made with room for all of them."""
        self._ids[self.length] = token
        self.length += 1

    def window(self, start: int, stop: int, beyond: Sequence[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Ids and flags of positions start..stop-1, those past the end taken from `beyond` (drafts, always text)."""
        inside = min(stop, self.length)
        ids, text = self._ids[start:inside], self._text[start:inside]
        if stop <= self.length:
            return ids, text
        extra = np.asarray(beyond[max(0, start - self.length) : stop - self.length], dtype=np.int64)
        return np.concatenate([ids, extra]), np.concatenate([text, np.ones(len(extra), dtype=np.bool_)])


class Job:
    """A request inside the engine. The scheduler moves its state, slot and pages; the engine its tokens and drafts.

    `computed`: positions whose rows exist for this job (the next piece starts here). `known`: positions whose tokens are
    final and computed, all finite. `published`: leading pages that the prefix index has been offered. `offered`: numbers of
    pages that others can find because of this job; `adopted`: of pages that were exchanged for another's; `copied`: key of the
    page that the part of a page at the hit's end was copied from. `coming`: keys of pages that are read ahead, the last one
    first, as far as they have not been seen to arrive.
    """

    def __init__(self, number: int, request: Request, arrival: float) -> None:
        self.id, self.request, self.arrival = number, request, arrival
        room = request.max_tokens + 1
        self.tokens = TokenBuffer(request.prompt, room, request.images)
        self.prompt_length = self.tokens.length
        self.deadline = None if request.deadline_s is None else arrival + request.deadline_s
        self.state = State.WAITING
        self.slot: int | None = None
        self.pages: list[int] = []
        self.span: ReplaySpan | None = None
        self.computed = 0
        self.published = 0
        self.exact_rows = True
        self.replay_length = 0
        self.drafts: list[int] = []
        self.survival: list[float] = []
        self.draft_probs: list[Any] | None = None
        self.verify = 0
        self.usage = Usage(prompt_tokens=self.prompt_length)
        self.progress = request.progress or Progress()
        self.progress.usage, self.progress.queued_at = self.usage, arrival
        self.admitted = 0
        self.chain: Chain | None = None
        self.offered: set[int] = set()
        self.adopted: set[int] = set()
        self.copied: bytes | None = None
        self.coming: list[bytes] = []
        self.reply: Any = None

    def __len__(self) -> int:
        return self.tokens.length

    @property
    def new_tokens(self) -> int:
        """Tokens produced so far."""
        return self.tokens.length - self.prompt_length

    @property
    def priority(self) -> int:
        """The request's priority."""
        return self.request.priority

    def move(self, state: State) -> None:
        """Change state; only the transitions of the state machine exist."""
        assert state in _LEGAL[self.state], f"job {self.id}: {self.state.value} -> {state.value}"
        self.state = state
        self.progress.state = state.value

    def drop_drafts(self) -> None:
        """Forget what was proposed."""
        self.drafts, self.survival, self.draft_probs, self.verify = [], [], None, 0
