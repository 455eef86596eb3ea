"""What has been said so far, and what the engine is asked next: a chat's messages, or one text that goes on (base models).

Owns the two kinds of conversation and their plain form for files. Must not know terminals, files or how replies come about.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvist.engine.request import Request
from kvist.engine.sampling.params import SamplingParams
from kvist.server.generation import Work
from kvist.server.served import Served
from kvist.server.wish import Caller, ChatWish, chat_work, wanted_tokens, with_images
from kvist.text import ContentImage, ContentText, Message, Reply, encode_chat
from kvist.text.messages import Content

MODES = ("auto", "chat", "text")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """How replies are to be: sampling, most new tokens, reasoning and its effort."""

    sampling: SamplingParams
    max_tokens: int
    thinking: bool = True
    effort: str | int | None = None


class Conversation(Protocol):
    """A conversation at one moment. Every step gives a new one, so that a step that fails changes nothing."""

    @property
    def kind(self) -> str:
        """`chat` or `text`."""
        ...

    def asked(self, text: str, pictures: Sequence[bytes], wishes: Wishes) -> tuple[Conversation, Work]:
        """With the user's turn, and the work of its reply. Raises ValueError and ApiError."""
        ...

    def answered(self, reply: Reply, tokens: Sequence[int]) -> Conversation:
        """With the reply, whole or as far as it came."""
        ...

    def again(self, wishes: Wishes) -> Work:
        """Work that reads all that was said and makes one token, which is not used: afterwards the cache holds it."""
        ...

    def begun(self) -> Conversation:
        """Without anything said."""
        ...

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        ...

    def restored(self, plain: dict[str, Any]) -> Conversation:
        """What `plain` gave. Raises ValueError for anything else."""
        ...


@dataclass(frozen=True)
class Continuation:
    """One text: what the user types is appended to it, and the model goes on from there. For base models."""

    served: Served
    ids: tuple[int, ...]
    kind: str = "text"

    def asked(self, text: str, pictures: Sequence[bytes], wishes: Wishes) -> tuple[Conversation, Work]:
        """See `Conversation`."""
        if pictures:
            raise ValueError("a continued text cannot hold pictures; chat with a model that sees (--mode chat)")
        longer = replace(self, ids=(*self.ids, *self.served.tokenizer.encode(text)))
        return longer, longer._work(wishes)

    def answered(self, reply: Reply, tokens: Sequence[int]) -> Conversation:
        """See `Conversation`."""
        return replace(self, ids=(*self.ids, *(token for token in tokens if token != self.served.eos_id)))

    def again(self, wishes: Wishes) -> Work:
        """See `Conversation`."""
        return self._work(replace(wishes, max_tokens=1))

    def begun(self) -> Conversation:
        """See `Conversation`."""
        return replace(self, ids=(self.served.bos_id,))

    def plain(self) -> dict[str, Any]:
        """See `Conversation`."""
        return {"kind": self.kind, "ids": self.ids}

    def restored(self, plain: dict[str, Any]) -> Conversation:
        """See `Conversation`."""
        ids, size = plain.get("ids"), min(self.served.vocab_size, len(self.served.tokenizer))
        if not isinstance(ids, list) or not ids:
            raise ValueError("it holds no token ids")
        if not all(isinstance(token, int) and not isinstance(token, bool) and 0 <= token < size for token in ids):
            raise ValueError(f"it holds something that is no token id below {size}")
        return replace(self, ids=tuple(ids))

    def _work(self, wishes: Wishes) -> Work:
        # Near the end of the context a reply is shorter rather than refused.
        room = max(1, self.served.context - len(self.ids))
        tokens = wanted_tokens(self.served, len(self.ids), min(wishes.max_tokens, room), wishes.max_tokens)
        return Work(request=Request(prompt=list(self.ids), max_tokens=tokens, sampling=wishes.sampling))


@dataclass(frozen=True)
class Turns:
    """A chat: the user's and the model's turns in the model's own format, behind a system message if there is one."""

    served: Served
    system: str = ""
    messages: tuple[Message, ...] = ()
    kind: str = "chat"

    def asked(self, text: str, pictures: Sequence[bytes], wishes: Wishes) -> tuple[Conversation, Work]:
        """See `Conversation`."""
        said = Message(role="user", content=_content(text, pictures))
        longer = replace(self, messages=(*(self.messages or self._opening()), said))
        wish = ChatWish(messages=longer.messages, thinking=wishes.thinking, effort=wishes.effort, sampling=wishes.sampling)
        return longer, chat_work(self.served, wish, Caller(), wishes.max_tokens)

    def answered(self, reply: Reply, tokens: Sequence[int]) -> Conversation:
        """See `Conversation`."""
        return replace(
            self, messages=(*self.messages, Message(role="assistant", content=reply.content, reasoning=reply.reasoning))
        )

    def again(self, wishes: Wishes) -> Work:
        """See `Conversation`."""
        vision = self.served.image_token_id if self.served.read_image is not None else None
        prompt = encode_chat(
            self.served.tokenizer,
            self.messages,
            thinking=wishes.thinking,
            effort=wishes.effort,
            add_generation_prompt=False,
            image_token_id=vision,
        )
        ids, images = with_images(self.served, prompt)
        wanted_tokens(self.served, len(ids), 1, 1)
        return Work(request=Request(prompt=ids, max_tokens=1, sampling=wishes.sampling, images=images))

    def begun(self) -> Conversation:
        """See `Conversation`."""
        return replace(self, messages=())

    def plain(self) -> dict[str, Any]:
        """See `Conversation`."""
        return {"kind": self.kind, "messages": [_plain(message) for message in self.messages]}

    def restored(self, plain: dict[str, Any]) -> Conversation:
        """See `Conversation`."""
        messages = plain.get("messages")
        if not isinstance(messages, list) or not messages:
            raise ValueError("it holds no messages")
        return replace(self, messages=tuple(_message(entry) for entry in messages))

    def _opening(self) -> tuple[Message, ...]:
        return (Message(role="system", content=self.system),) if self.system else ()


def open_conversation(served: Served, mode: str, system: str) -> Conversation:
    """A conversation with a model: `chat`, `text`, or `auto`, which is text for base models (`MODES`). Raises ValueError."""
    if mode == "text" or (mode == "auto" and served.base):
        if system:
            raise ValueError("a continued text has no system message; leave --system out or take --mode chat")
        return Continuation(served, (served.bos_id,))
    return Turns(served, system)


def _plain(message: Message) -> dict[str, Any]:
    parts = (ContentText(message.content),) if isinstance(message.content, str) else message.content
    pictures = [base64.b64encode(part.image).decode() for part in parts if isinstance(part, ContentImage)]
    text = "".join(part.text for part in parts if isinstance(part, ContentText))
    return {"role": message.role, "text": text, "reasoning": message.reasoning, "pictures": pictures}


def _message(entry: Any) -> Message:
    try:
        role, text, reasoning, encoded = entry["role"], entry["text"], entry["reasoning"], entry["pictures"]
        pictures = [base64.b64decode(picture, validate=True) for picture in encoded]
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError("one of its messages is damaged") from error
    if role not in ("system", "user", "assistant") or not isinstance(text, str) or not isinstance(reasoning, str):
        raise ValueError("one of its messages is damaged")
    return Message(role=role, content=_content(text, pictures), reasoning=reasoning)


def _content(text: str, pictures: Sequence[bytes]) -> Content:
    if not pictures:
        return text
    blocks: list[ContentText | ContentImage] = [ContentImage(picture) for picture in pictures]
    return (*blocks, ContentText(text))
