"""`/v1/messages` (Anthropic style) and its token count: the request's schema and its translation.

Owns this API's blocks. Must not know events (routes/messages.py) or HTTP. Signatures of thinking blocks are empty here and are
not checked.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from kvist.server.body import Body
from kvist.server.errors import ApiError
from kvist.server.pictures import Pictures, base64_bytes
from kvist.server.protocol.chat import thinking_of, tool_definition
from kvist.server.protocol.parts import (
    FlatFormat,
    Json,
    checked_max_tokens,
    output_format,
    sampling_params,
    stop_strings,
)
from kvist.server.wish import ChatWish, ToolChoice
from kvist.text import ContentImage, ContentText, Message, ToolCall

CacheControl = Json | None
"""Accepted and without effect: prefixes are cached anyway."""


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None
    cache_control: CacheControl = None


class ImageSource(Body):
    """Base64, a URL, or the id of an uploaded file."""

    type: Literal["base64", "url", "file"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    file_id: str | None = None


class ImageBlock(Body):
    """An image."""

    type: Literal["image"]
    source: ImageSource
    cache_control: CacheControl = None


class ThinkingBlock(Body):
    """Reasoning of an earlier turn."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(Body):
    """A call of an earlier turn."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Json
    caller: Json | None = None
    cache_control: CacheControl = None


ResultPart = Annotated[TextBlock | ImageBlock, Field(discriminator="type")]


class ToolResultBlock(Body):
    """A call's result."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[ResultPart] | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


Block = Annotated[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessageParam(Body):
    """A turn."""

    role: Literal["user", "assistant"]
    content: str | list[Block]


class ToolParam(Body):
    """A tool with its JSON schema."""

    name: str
    description: str | None = None
    input_schema: Json
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: CacheControl = None


class ToolChoiceParam(Body):
    """Whether and what to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingParam(Body):
    """Reasoning on or off; `budget_tokens` is accepted, the effort is what counts (`output_config.effort`)."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(Body):
    """Effort by name or number, and a JSON schema for the text."""

    effort: str | int | None = None
    format: FlatFormat | None = None


class CountRequest(Body):
    """What can be counted: all that enters the prompt."""

    model: str
    messages: list[MessageParam]
    system: str | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoiceParam | None = None
    thinking: ThinkingParam | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None


class MessagesRequest(CountRequest):
    """The request."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Json | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


def messages_wish(request: CountRequest, pictures: Pictures, *, thinking: bool, default_temperature: float) -> ChatWish:
    """What the request asks; a `CountRequest` asks for its prompt only. Raises ApiError, ValueError."""
    tools = request.tools or []
    config = request.output_config or OutputConfig()
    asked = None if request.thinking is None else request.thinking.type != "disabled"
    thinks, effort = thinking_of(config.effort, asked, thinking)
    full = request if isinstance(request, MessagesRequest) else None
    return ChatWish(
        messages=_messages(request, pictures),
        tools=tuple(tool_definition(tool.name, tool.description, tool.input_schema) for tool in tools),
        strict=frozenset(tool.name for tool in tools if tool.strict),
        choice=_choice(request.tool_choice),
        thinking=thinks,
        effort=effort,
        format=output_format(config.format),
        max_tokens=None if full is None else checked_max_tokens({"max_tokens": full.max_tokens}),
        stops=() if full is None else stop_strings(full.stop_sequences),
        sampling=sampling_params(
            default_temperature=default_temperature,
            temperature=None if full is None else full.temperature,
            top_p=None if full is None else full.top_p,
            top_k=None if full is None else full.top_k,
        ),
    )


def _choice(asked: ToolChoiceParam | None) -> ToolChoice:
    if asked is None:
        return ToolChoice()
    parallel = not asked.disable_parallel_tool_use
    if asked.type == "tool":
        if not asked.name:
            raise ApiError("invalid_value", "tool_choice of type tool needs a name", param="tool_choice.name")
        return ToolChoice(kind="named", name=asked.name, parallel=parallel)
    if asked.type == "any":
        return ToolChoice(kind="required", parallel=parallel)
    return ToolChoice(kind="none" if asked.type == "none" else "auto", parallel=parallel)


def _messages(request: CountRequest, pictures: Pictures) -> tuple[Message, ...]:
    messages: list[Message] = []
    system = request.system
    if system:
        text = system if isinstance(system, str) else "\n\n".join(block.text for block in system)
        messages.append(Message(role="system", content=text))
    for at, message in enumerate(request.messages):
        blocks = [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content
        messages += _assistant(blocks, at) if message.role == "assistant" else _user(blocks, pictures, at)
    return tuple(messages)


def _assistant(blocks: list[Any], at: int) -> list[Message]:
    reasoning, content, calls = [], [], []
    for number, block in enumerate(blocks):
        match block:
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case TextBlock():
                content.append(block.text)
            case ToolUseBlock():
                arguments = json.dumps(block.input, ensure_ascii=False)
                calls.append(ToolCall(name=block.name, arguments=arguments, id=block.id))
            case _:
                raise _misplaced(block, at, number, "assistant")
    return [Message(role="assistant", content="\n\n".join(content), reasoning="".join(reasoning), tool_calls=tuple(calls))]


def _user(blocks: list[Any], pictures: Pictures, at: int) -> list[Message]:
    """Results become tool messages, in their place among the user's blocks; the prompt joins them into one turn again."""
    messages: list[Message] = []
    pending: list[ContentText | ContentImage] = []
    for number, block in enumerate(blocks):
        match block:
            case TextBlock() | ImageBlock():
                pending.append(_block(block, pictures, at, number))
            case ToolResultBlock():
                if pending:
                    messages.append(Message(role="user", content=tuple(pending)))
                    pending = []
                parts = [] if block.content is None else block.content
                content = parts if isinstance(parts, str) else tuple(_block(part, pictures, at, number) for part in parts)
                messages.append(Message(role="tool", content=content, tool_call_id=block.tool_use_id))
            case _:
                raise _misplaced(block, at, number, "user")
    if pending or not messages:
        messages.append(Message(role="user", content=tuple(pending)))
    return messages


def _block(block: TextBlock | ImageBlock, pictures: Pictures, at: int, number: int) -> ContentText | ContentImage:
    if isinstance(block, TextBlock):
        return ContentText(block.text)
    where = f"messages.{at}.content.{number}.source"
    source = block.source
    if source.type == "url":
        return ContentImage(pictures.of_url(source.url or "", where))
    if source.type == "file":
        return ContentImage(pictures.of_file(source.file_id or "", where))
    return ContentImage(base64_bytes(source.data or "", where))


def _misplaced(block: Any, at: int, number: int, role: str) -> ApiError:
    where = f"messages.{at}.content.{number}"
    return ApiError("invalid_value", f"{where}: a block of type {block.type} has no place in a turn of {role}", param=where)
