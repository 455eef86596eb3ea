"""What a server serves: an engine behind a protocol, a tokenizer, and the few facts that routes need of a model.

Owns `EngineClient`, which `AsyncEngine` satisfies and tests replace by a script. Must not know HTTP or tensors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvist.engine.anatomy import Anatomy
from kvist.engine.replay import Replay
from kvist.engine.request import Event, FinishedEvent, ImageInput, Request
from kvist.text import Tokenizer

if TYPE_CHECKING:
    from kvist.engine.microscope import View


class RequestEvents(Protocol):
    """The events of a request that was accepted."""

    def __aiter__(self) -> AsyncIterator[Event]:
        """Each reply's tokens and its end."""
        ...

    async def close(self) -> list[FinishedEvent]:
        """End what still runs; the ends that had not come yet, with what each has cost."""
        ...


class EngineClient(Protocol):
    """Something that answers requests."""

    async def submit(self, request: Request) -> RequestEvents:
        """Accept a request, or raise what is wrong with it."""
        ...

    async def close(self) -> None:
        """End all requests as cancelled."""
        ...


class ReadImage(Protocol):
    """An image that can stand in a prompt: span length, 32 bytes that name its content, and its embeddings on demand."""

    @property
    def tokens(self) -> int:
        """Tokens of the span."""
        ...

    @property
    def content(self) -> bytes:
        """Digest."""
        ...

    @property
    def embed(self) -> Callable[[], Any]:
        """Embeddings [tokens, D]."""
        ...


class Looking(Protocol):
    """What can look at a position; see `engine.microscope.Microscope`."""

    @property
    def image_token_bytes(self) -> int:
        """Bytes that a picture takes while it can be looked at again, for each token of its span."""
        ...

    def look(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        *,
        images: Sequence[ImageInput] = (),
        replay: Replay | None = None,
        proceed: Callable[[], None] = lambda: None,
    ) -> View:
        """The position that gave the last token of `output`. `proceed` is called often; it raises to stop."""
        ...


class HeldPrefix(Protocol):
    """A prefix that is held."""

    @property
    def tokens(self) -> int:
        """Tokens of it that are in memory."""
        ...


class PinHolder(Protocol):
    """What keeps pages in memory (`engine.pins.EnginePins`)."""

    @property
    def folder(self) -> Path | None:
        """Where the list of pins is kept; None: it ends with the process."""
        ...

    @property
    def limit_pages(self) -> int:
        """Most pages that may be held."""
        ...

    @property
    def pages(self) -> int:
        """Pages that are held."""
        ...

    def pages_of(self, tokens: int) -> int:
        """Pages that a prefix of so many tokens may take."""
        ...

    async def hold(self, ids: Sequence[int], salt: bytes) -> HeldPrefix:
        """Hold what memory has of these tokens."""
        ...

    async def release(self, pin: Any) -> None:
        """Let go of what `hold` gave."""
        ...

    async def touch(self) -> None:
        """Say that the pinned pages are wanted."""
        ...


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that is served.

    `context`: most tokens of prompt and reply together. `base`: it was not tuned to chat. `read_image` None: a model without
    vision. `collectors`: objects for a Prometheus registry. `anatomy`, `microscope`: what figures of requests are made of, and
    who looks into them; None where there is no such engine. `stopped`: why the engine serves no more, None while it does.
    """

    name: str
    engine: EngineClient
    tokenizer: Tokenizer
    context: int
    vocab_size: int
    bos_id: int
    eos_id: int
    created: int
    fingerprint: str = ""
    base: bool = False
    image_token_id: int | None = None
    read_image: Callable[[bytes], ReadImage] | None = None
    pins: PinHolder | None = None
    collectors: tuple[Any, ...] = ()
    anatomy: Anatomy | None = None
    microscope: Looking | None = None
    stopped: Callable[[], str | None] = lambda: None
