"""A chat request without any protocol's spelling, and how it becomes work for the engine.

Owns what tools, formats and reasoning mean for prompt and grammar. Every chat-like route translates into `ChatWish`. Must not
know HTTP or JSON bodies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvist.engine.replay import Replay
from kvist.engine.request import ImageInput, Request
from kvist.engine.sampling.grammar_text import Grammar
from kvist.engine.sampling.params import SamplingParams
from kvist.server.errors import ApiError
from kvist.server.generation import Work
from kvist.server.grammars import OutputFormat, calls_grammar, format_grammar, marker, needs_call_grammar
from kvist.server.served import ReadImage, Served
from kvist.server.token_text import turn_ids
from kvist.text import ContentText, EncodedPrompt, Message, PromptError, TokenizerError, ToolDefinition, encode_chat
from kvist.text.marks import DSML, END_THINK


@dataclass(frozen=True, kw_only=True)
class ToolChoice:
    """`auto`, `none`, `required`, or `named` with the function's name. `parallel` False: at most one call."""

    kind: Literal["auto", "none", "required", "named"] = "auto"
    name: str = ""
    parallel: bool = True


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks: the engine's tenant, the cache's salt, and how long the request may take."""

    tenant: str = ""
    salt: bytes = b""
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ChatWish:
    """A conversation and what the reply should be. `strict`: names of tools whose calls must follow their schema."""

    messages: tuple[Message, ...]
    tools: tuple[ToolDefinition, ...] = ()
    strict: frozenset[str] = frozenset()
    choice: ToolChoice = field(default_factory=ToolChoice)
    thinking: bool = True
    effort: str | int | None = None
    format: OutputFormat | None = None
    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: tuple[str, ...] = ()
    replay: Replay | None = None


def chat_work(served: Served, wish: ChatWish, caller: Caller, default_max_tokens: int) -> Work:
    """The work of a chat. May take long for long prompts: call it in a thread. Raises ApiError, ValueError."""
    tools = () if wish.choice.kind == "none" else wish.tools
    require_short(served, (text for message in wish.messages for text in _texts(message)))
    prompt = _encoded(served, wish, tools)
    ids, images = with_images(served, prompt)
    max_tokens = wanted_tokens(served, len(ids), wish.max_tokens, default_max_tokens)
    engine_stops = wish.stops if not prompt.in_reasoning and not tools else ()
    marks = {mark: served.tokenizer.special_id(mark) for mark in (DSML, END_THINK) if served.tokenizer.has_special(mark)}
    grammar = _grammar(wish, marks)
    request = Request(
        prompt=ids,
        max_tokens=max_tokens,
        sampling=wish.sampling,
        stop_ids=turn_ids(served.tokenizer),
        stops=engine_stops or None,
        grammar=grammar,
        grammar_after=marker(marks) if grammar is not None and prompt.in_reasoning else (),
        images=images,
        replay=wish.replay,
        tenant=caller.tenant,
        salt=caller.salt,
        deadline_s=caller.deadline_s,
    )
    return Work(request=request, parse=True, reasoning=prompt.in_reasoning, stops=wish.stops, calls=wish.choice.kind != "none")


def _texts(message: Message) -> Iterator[str]:
    if isinstance(message.content, str):
        yield message.content
        return
    yield from (block.text for block in message.content if isinstance(block, ContentText))


def require_short(served: Served, texts: Iterable[str]) -> None:
    """Raise ApiError for texts that exceed the context however they are encoded: megabytes of them would take half a minute."""
    least = sum(map(len, texts)) // served.tokenizer.longest
    if least > served.context:
        raise ApiError(
            "context_length_exceeded",
            f"the prompt has at least {least} tokens, beyond the context of {served.context} tokens; shorten it",
        )


def count_prompt(served: Served, wish: ChatWish) -> list[int]:
    """The ids that a chat's prompt would have, images unfolded."""
    tools = () if wish.choice.kind == "none" else wish.tools
    return with_images(served, _encoded(served, wish, tools))[0]


def _encoded(served: Served, wish: ChatWish, tools: Sequence[ToolDefinition]) -> EncodedPrompt:
    try:
        return encode_chat(
            served.tokenizer,
            wish.messages,
            thinking=wish.thinking,
            effort=wish.effort,
            tools=tools,
            image_token_id=served.image_token_id if served.read_image is not None else None,
        )
    except (PromptError, TokenizerError) as error:
        if served.read_image is None and "image token" in str(error):
            raise ApiError("image_unsupported", f"{served.name} has no vision: send text only", param="messages") from error
        raise ApiError("invalid_prompt", str(error), param="messages") from error


def with_images(served: Served, prompt: EncodedPrompt) -> tuple[list[int], tuple[ImageInput, ...]]:
    """Ids with every image's placeholder repeated over its span, and the spans."""
    if not prompt.images:
        return list(prompt.token_ids), ()
    assert served.read_image is not None
    assert served.image_token_id is not None
    ids: list[int] = []
    images: list[ImageInput] = []
    done = 0
    read: dict[bytes, ReadImage] = {}
    for number, slot in enumerate(prompt.images):
        # A file named a thousand times is decoded once, and a prompt that is too long already is not read on.
        if slot.image not in read:
            try:
                read[slot.image] = served.read_image(slot.image)
            except ValueError as error:
                raise ApiError("invalid_image", f"image {number}: {error}", param="messages") from error
        image = read[slot.image]
        if len(ids) + image.tokens > served.context:
            raise ApiError(
                "context_length_exceeded",
                f"image {number} ends beyond the context of {served.context} tokens; send fewer or smaller pictures",
                param="messages",
            )
        ids += prompt.token_ids[done : slot.position]
        images.append(ImageInput(start=len(ids), tokens=image.tokens, content=image.content, embed=image.embed))
        ids += [served.image_token_id] * image.tokens
        done = slot.position + 1
    return [*ids, *prompt.token_ids[done:]], tuple(images)


def wanted_tokens(served: Served, prompt_tokens: int, wanted: int | None, default: int) -> int:
    """How many tokens a reply may have: what was asked for, else the default or what the context still holds."""
    left = served.context - prompt_tokens
    if left < 1 or (wanted is not None and wanted > left):
        asked = "" if wanted is None else f" and {wanted} new ones"
        raise ApiError(
            "context_length_exceeded",
            f"{prompt_tokens} prompt tokens{asked} exceed the context of {served.context} tokens; "
            f"shorten the prompt{'' if left < 1 else f' or ask for at most {left} tokens'}",
            param="max_tokens" if left >= 1 else None,
        )
    return min(default, left) if wanted is None else wanted


def _grammar(wish: ChatWish, marks: Mapping[str, int]) -> Grammar | None:
    forced = wish.choice.kind in ("required", "named")
    if forced and not wish.tools:
        raise ApiError("invalid_value", "tool_choice asks for a call, but there are no tools; send tools", param="tool_choice")
    if wish.choice.kind == "named" and wish.choice.name not in {tool.name for tool in wish.tools}:
        raise ApiError("invalid_value", f"tool_choice names {wish.choice.name!r}, which is not in tools", param="tool_choice")
    if forced and wish.format is not None:
        raise ApiError("conflicting_fields", "a forced tool call and a response format exclude each other; leave one out")
    if forced or needs_call_grammar(wish.tools, wish.strict, wish.choice.kind, wish.choice.parallel):
        if wish.format is not None:
            raise ApiError(
                "conflicting_fields", "strict tools or single calls and a response format exclude each other; leave one out"
            )
        chosen = [tool for tool in wish.tools if wish.choice.kind != "named" or tool.name == wish.choice.name]
        return calls_grammar(chosen, marks, forced=forced, parallel=wish.choice.parallel)
    return None if wish.format is None else format_grammar(wish.format)
