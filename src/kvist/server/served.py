"""What a server serves: an engine behind a protocol, a tokenizer, and the few facts that routes need of a model.

Owns `EngineClient`, which `AsyncEngine` satisfies and tests replace by a script. Must not know HTTP or tensors.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvist.engine.request import Event, Request
from kvist.text import Tokenizer


class EngineClient(Protocol):
    """Something that answers requests. Closing an iterator ends its request."""

    def generate(self, request: Request) -> AsyncIterator[Event]:
        """The events of a request; raises before the first one what is wrong with it."""
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


@dataclass(frozen=True, kw_only=True)
class Served:
    """A model that is served.

    `context`: most tokens of prompt and reply together. `base`: it was not tuned to chat. `read_image` None: a model without
    vision. `collectors`: objects for a Prometheus registry. `stopped`: why the engine serves no more, None while it does.
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
    collectors: tuple[Any, ...] = ()
    stopped: Callable[[], str | None] = lambda: None
