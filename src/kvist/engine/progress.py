"""How far a request is, in plain numbers: the engine's thread writes them as it goes, anybody may read them at any time.

Owns what can be told of a request while it runs. Must not know pages' contents, tensors or HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Usage:
    """Tokens of one request: prompt, found in the cache (by tier), run again, produced, drafted, drafts accepted."""

    prompt_tokens: int = 0
    cached: dict[str, int] = field(default_factory=dict)
    replayed_tokens: int = 0
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens whose global rows came from any tier."""
        return sum(self.cached.values())


@dataclass(kw_only=True)
class Progress:
    """One request's way through the engine. Every field is written whole, so that a reader sees a moment or the next one.

    Times are the engine clock's seconds, None until they come: queued, first given a slot, first token, newest token, end.
    `encoder_rows` and `decoder_rows` ran in prefill (replay and, after a preemption, repetition included); `pages` are held
    now; `digests` (it grows) and `replay_length` name the pages of the request's tokens in every tier.
    """

    state: str = "waiting"
    reason: str | None = None
    usage: Usage = field(default_factory=Usage)
    queued_at: float | None = None
    started_at: float | None = None
    first_at: float | None = None
    newest_at: float | None = None
    ended_at: float | None = None
    encoder_rows: int = 0
    decoder_rows: int = 0
    pages: int = 0
    digests: list[bytes] = field(default_factory=list)
    replay_length: int = 0

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens whose global rows this request has made itself."""
        return max(0, self.encoder_rows - self.usage.replayed_tokens)

    def started(self, now: float) -> None:
        """The request has got a slot."""
        self.started_at = now if self.started_at is None else self.started_at

    def prefilled(self, encoder_rows: int, decoder_rows: int, pages: int) -> None:
        """A piece of the prompt has run."""
        self.encoder_rows += encoder_rows
        self.decoder_rows += decoder_rows
        self.pages = pages

    def produced(self, now: float, pages: int) -> None:
        """Tokens have come."""
        self.first_at = now if self.first_at is None else self.first_at
        self.newest_at, self.pages = now, pages

    def ended(self, reason: str, now: float) -> None:
        """The request is over."""
        self.reason, self.ended_at, self.pages = reason, now, 0
