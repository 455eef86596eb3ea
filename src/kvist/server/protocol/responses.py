"""`/v1/responses`: the request's schema and its translation. Stateless: nothing is stored, every turn sends its history.

Owns this API's items. Must not know responses' events (routes/responses.py) or HTTP. Bug case ENC-03: reasoning items go back
as reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from kvist.engine.sampling.params import MAX_LOGPROBS
from kvist.server.body import Body
from kvist.server.errors import ApiError
from kvist.server.pictures import Pictures
from kvist.server.protocol.chat import Thinking, thinking_of, tool_definition
from kvist.server.protocol.parts import (
    Bias,
    FlatFormat,
    Json,
    checked_max_tokens,
    output_format,
    sampling_params,
    stop_strings,
)
from kvist.server.wish import ChatWish, ToolChoice
from kvist.text import ContentImage, ContentText, Message, PromptError, ToolCall


class InputText(Body):
    """Text; answers of earlier turns come with annotations, which mean nothing here."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputImage(Body):
    """An image by URL or by the id of an uploaded file, one of the two."""

    type: Literal["input_image"]
    image_url: str | None = None
    detail: Literal["auto", "low", "high"] | None = None
    file_id: str | None = None


class Refusal(Body):
    """A refusal of an earlier turn; text to this model."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[InputText | InputImage | Refusal, Field(discriminator="type")]


class MessageItem(Body):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Body):
    """A call of an earlier turn."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None
    namespace: str | None = None


class CallOutputItem(Body):
    """A call's result."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: str | None = None


class ReasoningText(Body):
    """Reasoning as this server gives it out."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(Body):
    """Reasoning of an earlier turn. Only its text counts; summaries of other systems are not what the model thought."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[Any] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    status: str | None = None


Item = MessageItem | CallItem | CallOutputItem | ReasoningItem


class ResponseTool(Body):
    """A function tool, flat."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class NamedTool(Body):
    """This function must be called."""

    type: Literal["function"]
    name: str


class Reasoning(Body):
    """Effort by name or number; `summary` other than none is not made."""

    effort: str | int | None = None
    summary: None = None
    generate_summary: None = None


class TextConfig(Body):
    """The content's format."""

    format: FlatFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponseRequest(Body):
    """The request. `store` must be false or left out: it is false here."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    logit_bias: Bias | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: TextConfig | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    thinking: Thinking | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    user: str | None = None
    metadata: Json | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    max_tool_calls: None = None
    prompt: None = None


def response_wish(request: ResponseRequest, pictures: Pictures, *, thinking: bool, default_temperature: float) -> ChatWish:
    """What the request asks. Raises ApiError, ValueError."""
    _refuse_stored(request)
    tools = request.tools or []
    effort = None if request.reasoning is None else request.reasoning.effort
    asked = None if request.thinking is None else request.thinking.type == "enabled"
    thinks, number = thinking_of(effort, asked, thinking)
    return ChatWish(
        messages=_messages(request, pictures),
        tools=tuple(tool_definition(tool.name, tool.description, tool.parameters) for tool in tools),
        strict=frozenset(tool.name for tool in tools if tool.strict),
        choice=_choice(request),
        thinking=thinks,
        effort=number,
        format=output_format(None if request.text is None else request.text.format),
        max_tokens=checked_max_tokens({"max_output_tokens": request.max_output_tokens}),
        stops=stop_strings(request.stop),
        sampling=sampling_params(
            default_temperature=default_temperature,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            logit_bias=request.logit_bias,
            seed=request.seed,
            logprobs=_logprobs(request),
        ),
    )


def _refuse_stored(request: ResponseRequest) -> None:
    for name in ("store", "previous_response_id", "conversation", "background"):
        if getattr(request, name):
            raise ApiError(
                "not_stored",
                f"{name}: this server keeps no responses; send the whole history in `input` and leave {name} out",
                param=name,
            )


def _logprobs(request: ResponseRequest) -> int | None:
    if "message.output_text.logprobs" in (request.include or ()):
        return request.top_logprobs or 0
    return request.top_logprobs or None


def _choice(request: ResponseRequest) -> ToolChoice:
    parallel = request.parallel_tool_calls is not False
    if isinstance(request.tool_choice, NamedTool):
        return ToolChoice(kind="named", name=request.tool_choice.name, parallel=parallel)
    return ToolChoice(kind=request.tool_choice or "auto", parallel=parallel)


@dataclass
class _Turn:
    """An assistant's turn that is being put together from its items."""

    reasoning: list[str] = field(default_factory=list)
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> Message:
        return Message(
            role="assistant", content="\n\n".join(self.content), reasoning="".join(self.reasoning), tool_calls=tuple(self.calls)
        )


def _messages(request: ResponseRequest, pictures: Pictures) -> tuple[Message, ...]:
    messages = [Message(role="system", content=request.instructions)] if request.instructions else []
    if isinstance(request.input, str):
        return (*messages, Message(role="user", content=request.input))
    turn: _Turn | None = None
    for at, item in enumerate(request.input):
        if isinstance(item, ReasoningItem | CallItem) or (isinstance(item, MessageItem) and item.role == "assistant"):
            turn = turn or _Turn()
            _extend(turn, item, pictures, at)
            continue
        if turn is not None:
            messages.append(_made(turn.message, len(messages)))
            turn = None
        if isinstance(item, CallOutputItem):
            messages.append(Message(role="tool", content=_content(item.output, pictures, at), tool_call_id=item.call_id))
        elif isinstance(item, MessageItem):
            messages.append(Message(role=item.role, content=_content(item.content, pictures, at)))
    if turn is not None:
        messages.append(_made(turn.message, len(messages)))
    return tuple(messages)


def _made(make: Any, at: int) -> Message:
    try:
        message: Message = make()
    except PromptError as error:
        raise ApiError("invalid_prompt", f"message {at}: {error}", param="input") from error
    return message


def _extend(turn: _Turn, item: ReasoningItem | CallItem | MessageItem, pictures: Pictures, at: int) -> None:
    match item:
        case ReasoningItem():
            turn.reasoning += [part.text for part in item.content or ()]
        case CallItem():
            turn.calls.append(ToolCall(name=item.name, arguments=item.arguments, id=item.call_id, namespace=item.namespace))
        case MessageItem():
            content = _content(item.content, pictures, at)
            texts = [content] if isinstance(content, str) else [part.text for part in content if isinstance(part, ContentText)]
            turn.content += texts


def _content(content: str | list[Part], pictures: Pictures, at: int) -> str | tuple[ContentText | ContentImage, ...]:
    if isinstance(content, str):
        return content
    blocks: list[ContentText | ContentImage] = []
    for number, part in enumerate(content):
        match part:
            case InputText():
                blocks.append(ContentText(part.text))
            case Refusal():
                blocks.append(ContentText(part.refusal))
            case InputImage():
                blocks.append(ContentImage(_picture(part, pictures, f"input.{at}.content.{number}")))
    return tuple(blocks)


def _picture(part: InputImage, pictures: Pictures, where: str) -> bytes:
    if (part.image_url is None) == (part.file_id is None):
        raise ApiError("invalid_value", f"{where}: send image_url or file_id, one of the two", param=where)
    if part.file_id is not None:
        return pictures.of_file(part.file_id, f"{where}.file_id")
    assert part.image_url is not None
    return pictures.of_url(part.image_url, f"{where}.image_url")
