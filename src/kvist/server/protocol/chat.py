"""`/v1/chat/completions`: the request's schema and its translation.

Owns this API's field names. Must not know responses (routes/chat.py) or HTTP. Fields that cannot be honoured are declared as
null only, so that a client which sends them empty is served and one which means them is told.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from kvist.engine.sampling.params import MAX_LOGPROBS
from kvist.server.body import Body
from kvist.server.errors import ApiError
from kvist.server.pictures import Pictures
from kvist.server.protocol.parts import (
    Json,
    SampledBody,
    checked_max_tokens,
    output_format,
    sampling_params,
    stop_strings,
)
from kvist.server.wish import ChatWish, ToolChoice
from kvist.text import ContentImage, ContentText, Message, PromptError, ToolCall, ToolDefinition, resolve_effort

THINKING_OFF = "none"


class TextPart(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """A data URL, or an address where the server fetches; `detail` has no effect: the model has one way to see."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None


class ImagePart(Body):
    """An image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class UploadedFile(Body):
    """A picture sent to `/v1/files` before."""

    file_id: str
    filename: str | None = None
    file_data: None = None


class FilePart(Body):
    """An uploaded picture."""

    type: Literal["file"]
    file: UploadedFile


class RefusalPart(Body):
    """A refusal of an earlier turn; it is text to this model."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | ImagePart | FilePart | RefusalPart, Field(discriminator="type")]


class Function(Body):
    """A call's function."""

    name: str
    arguments: str = "{}"


class Call(Body):
    """A call that the assistant made; `index` comes from clients that send a stream's deltas back."""

    id: str = ""
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None


class ChatMessage(Body):
    """One message. Fields that responses carry come back from clients; those without meaning for a prompt are ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
    content: str | list[Part] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    function_call: None = None
    audio: None = None


class FunctionTool(Body):
    """A function with its JSON schema; `strict`: calls must follow it, by grammar."""

    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool of the only kind here."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(Body):
    """The function to call."""

    name: str


class NamedTool(Body):
    """This function must be called."""

    type: Literal["function"]
    function: NamedFunction


class Thinking(Body):
    """Reasoning on or off (ours, as DeepSeek's API spells it)."""

    type: Literal["enabled", "disabled"]


class ChatRequest(SampledBody):
    """The request. `user`, `metadata`, `safety_identifier`, `prompt_cache_key`, `service_tier`, `verbosity` have no effect."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | int | None = None
    thinking: Thinking | None = None
    store: bool | None = None
    metadata: Json | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    verbosity: Literal["medium"] | None = None
    modalities: list[Literal["text"]] | None = None
    audio: None = None
    prediction: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None


def chat_wish(request: ChatRequest, pictures: Pictures, *, thinking: bool, default_temperature: float) -> ChatWish:
    """What the request asks. Raises ApiError, ValueError."""
    if request.store:
        raise ApiError("not_stored", "store: this server keeps no completions; leave it out", param="store")
    tools = request.tools or []
    thinks, effort = thinking_of(
        request.reasoning_effort, None if request.thinking is None else request.thinking.type == "enabled", thinking
    )
    return ChatWish(
        messages=tuple(_message(message, pictures, at) for at, message in enumerate(request.messages)),
        tools=tuple(tool_definition(t.function.name, t.function.description, t.function.parameters) for t in tools),
        strict=frozenset(tool.function.name for tool in tools if tool.function.strict),
        choice=_choice(request),
        thinking=thinks,
        effort=effort,
        format=output_format(request.response_format),
        max_tokens=checked_max_tokens({"max_completion_tokens": request.max_completion_tokens, "max_tokens": request.max_tokens}),
        stops=stop_strings(request.stop),
        replay=request.replay,
        sampling=sampling_params(
            default_temperature=default_temperature,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=request.logit_bias,
            seed=request.seed,
            n=request.n,
            logprobs=_logprobs(request),
        ),
    )


def thinking_of(effort: str | int | None, asked: bool | None, default: bool) -> tuple[bool, int]:
    """Whether to reason, and how much (1..100). `none` as effort switches it off; an effort alone switches it on."""
    if effort == THINKING_OFF:
        if asked:
            raise ApiError(
                "conflicting_fields", "thinking is enabled, but the effort is none; send one of them", param="thinking"
            )
        return False, resolve_effort(None)
    try:
        number = resolve_effort(effort)
    except PromptError as error:
        raise ApiError("invalid_value", f"{error}, or none to switch reasoning off", param="reasoning_effort") from error
    return (effort is not None or default) if asked is None else asked, number


def tool_definition(name: str, description: str | None, parameters: Json | None) -> ToolDefinition:
    """A tool for the prompt; its name must fit a call's tag."""
    return ToolDefinition(name=name, description=description or "", parameters=parameters)


def _logprobs(request: ChatRequest) -> int | None:
    if not request.logprobs:
        if request.top_logprobs:
            raise ApiError("conflicting_fields", "top_logprobs needs logprobs: true", param="top_logprobs")
        return None
    return request.top_logprobs or 0


def _choice(request: ChatRequest) -> ToolChoice:
    parallel = request.parallel_tool_calls is not False
    asked = request.tool_choice
    if isinstance(asked, NamedTool):
        return ToolChoice(kind="named", name=asked.function.name, parallel=parallel)
    return ToolChoice(kind=asked or "auto", parallel=parallel)


def _message(message: ChatMessage, pictures: Pictures, at: int) -> Message:
    try:
        return Message(
            role=message.role,
            content=_content(message, pictures, at),
            reasoning=message.reasoning_content or message.reasoning or "",
            tool_calls=tuple(
                ToolCall(name=call.function.name, arguments=call.function.arguments, id=call.id)
                for call in message.tool_calls or ()
            ),
            tool_call_id=message.tool_call_id or "",
        )
    except PromptError as error:
        raise ApiError("invalid_prompt", f"message {at}: {error}", param=f"messages.{at}") from error


def _content(message: ChatMessage, pictures: Pictures, at: int) -> str | tuple[ContentText | ContentImage, ...]:
    if message.content is None or isinstance(message.content, str):
        if message.content is None and not message.tool_calls and message.role != "assistant":
            raise ApiError("invalid_value", f"message {at} has no content", param=f"messages.{at}.content")
        return message.content or ""
    blocks: list[ContentText | ContentImage] = []
    for number, part in enumerate(message.content):
        match part:
            case TextPart():
                blocks.append(ContentText(part.text))
            case RefusalPart():
                blocks.append(ContentText(part.refusal))
            case ImagePart():
                where = f"messages.{at}.content.{number}.image_url"
                blocks.append(ContentImage(pictures.of_url(part.image_url.url, where)))
            case FilePart():
                where = f"messages.{at}.content.{number}.file.file_id"
                blocks.append(ContentImage(pictures.of_file(part.file.file_id, where)))
    return tuple(blocks)
