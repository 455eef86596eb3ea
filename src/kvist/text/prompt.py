"""Chat encoding: a conversation to the token ids of a prompt, with the places of its images.

Owns the order of turns, headers and marks, and the line between control tokens (written by us) and plain text (written by
anybody else, never read as a control token). Must not know clients' JSON, images or the model. Source: facts section 12.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvist.text.marks import (
    ASSISTANT,
    BOS,
    DSML,
    END_THINK,
    END_TOOL_RESULT,
    EOS,
    IMAGE,
    LATEST_REMINDER,
    SYSTEM,
    TASKS,
    THINK,
    TOOL_RESULT,
    USER,
)
from kvist.text.messages import (
    Content,
    ContentImage,
    ContentText,
    Message,
    PromptError,
    ToolDefinition,
    resolve_effort,
)
from kvist.text.tokenizer import Tokenizer
from kvist.text.tool_text import TOOL_INSTRUCTIONS, Markup, calls_text, tools_text

EFFORT_LINE = "Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

_MARKUP_MARKS = re.compile(f"({re.escape(DSML)}|{re.escape(THINK)}|{re.escape(END_THINK)})")
_CLIENT_ROLES = ("system", "developer", "user", "latest_reminder")


@dataclass(frozen=True)
class ImageSlot:
    """One image of a prompt: `position` of its single placeholder in `token_ids`, and the `image` of its content block."""

    position: int
    image: Any


@dataclass(frozen=True, kw_only=True)
class EncodedPrompt:
    """A prompt ready for the model.

    `text` shows it with the marks spelled out, for people: it must not be encoded again, as plain text in it may spell marks.
    `in_reasoning` says that the reply continues reasoning (`ReplyParser(reasoning=...)`).
    """

    token_ids: tuple[int, ...]
    images: tuple[ImageSlot, ...]
    text: str
    in_reasoning: bool


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    thinking: bool = True,
    effort: str | int | None = None,
    tools: Sequence[ToolDefinition] = (),
    add_generation_prompt: bool = True,
    image_token_id: int | None = None,
    tool_instructions: str = TOOL_INSTRUCTIONS,
) -> EncodedPrompt:
    """Encodes a conversation. `thinking` asks for reasoning, with `effort` 1..100 or by name (`resolve_effort`).

    `tools` are added to a leading system or developer message, or to an empty system message put in front. With
    `add_generation_prompt` the prompt ends with the assistant's header and `<think>` or `</think>` (or with a task token),
    without it with the last message. `image_token_id` is the configuration's; needed where there are images.

    Past reasoning is dropped before the last user turn unless a message defines tools; without `thinking` all of it is.
    Raises `PromptError` for a conversation that has no encoding, `TokenizerError` for a special token the file lacks.
    """
    number = resolve_effort(effort)
    if not messages:
        raise PromptError("there are no messages; a chat prompt needs at least one")
    _refuse_placeholders(messages, tokenizer, image_token_id)
    turns = _turns(_with_tools(messages, tools))
    writer = _Writer(tokenizer, image_token_id)
    layout = _Layout(
        turns,
        thinking=thinking,
        keep_all=any(message.tools for message in messages) or bool(tools),
        generate=add_generation_prompt,
        tool_instructions=tool_instructions,
    )
    writer.control(BOS)
    if thinking or turns[0].role == "system":
        writer.control(SYSTEM)
    if thinking:
        writer.plain(EFFORT_LINE.format(effort=number))
    for index in range(len(turns)):
        layout.write(writer, index)
    in_reasoning = layout.write_end(writer)
    return writer.result(in_reasoning)


def _refuse_placeholders(messages: Sequence[Message], tokenizer: Tokenizer, image_token_id: int | None) -> None:
    """Text that spells the image placeholder would look like an image to a reader of the prompt's text; see PAR-11.

    Tool results and the model's own turns are not refused, as their author cannot answer an error: there it stays plain text.
    """
    spellings = {IMAGE}
    if image_token_id is not None and 0 <= image_token_id < len(tokenizer):
        spellings.add(tokenizer.decode([image_token_id]))
    for at, message in enumerate(messages):
        for block in _blocks(message.content) if message.role in _CLIENT_ROLES else ():
            found = next((s for s in spellings if s in block.text), None) if isinstance(block, ContentText) else None
            if found:
                raise PromptError(
                    f"message {at} ({message.role}) holds the image placeholder {found!r} as text; "
                    "send an image as a content block of its own, or take the placeholder out"
                )


def _with_tools(messages: Sequence[Message], tools: Sequence[ToolDefinition]) -> list[Message]:
    first = messages[0]
    if not tools:
        return list(messages)
    if first.role in ("system", "developer"):
        return [replace(first, tools=(*first.tools, *tools)), *messages[1:]]
    return [Message(role="system", tools=tuple(tools)), *messages]


def _blocks(content: Content) -> tuple[ContentText | ContentImage, ...]:
    return (ContentText(content),) if isinstance(content, str) else content


@dataclass(frozen=True)
class _ToolResult:
    call_id: str
    blocks: tuple[ContentText | ContentImage, ...]


@dataclass
class _Turn:
    """Messages that share one turn: consecutive user and tool messages, else one message."""

    role: str
    message: Message
    parts: list[ContentText | ContentImage | _ToolResult] = field(default_factory=list)
    task: str | None = None


def _turns(messages: Sequence[Message]) -> list[_Turn]:
    turns: list[_Turn] = []
    order: dict[str, int] = {}
    for message in messages:
        role = "user" if message.role == "tool" else message.role
        # A task token follows its message at once, so nothing can be merged behind it.
        if not (turns and role == "user" == turns[-1].role and turns[-1].task is None):
            if turns:
                _sort_results(turns[-1], order)
            turns.append(_Turn(role, message))
        turn = turns[-1]
        blocks = _blocks(message.content)
        turn.parts.extend([_ToolResult(message.tool_call_id, blocks)] if message.role == "tool" else blocks)
        turn.task = message.task
        if message.tool_calls:
            order = {call.id: at for at, call in enumerate(message.tool_calls) if call.id}
    if turns:
        _sort_results(turns[-1], order)
    return turns


def _sort_results(turn: _Turn, order: dict[str, int]) -> None:
    """Puts tool results into the order of their calls, in the places that results have; unknown ids come last.

    To be called when a turn is whole: after each of its messages it would cost the square of their number.
    """
    places = [at for at, part in enumerate(turn.parts) if isinstance(part, _ToolResult)]
    results = [part for part in turn.parts if isinstance(part, _ToolResult)]
    results.sort(key=lambda result: order.get(result.call_id, len(order)))
    for place, result in zip(places, results, strict=True):
        turn.parts[place] = result


class _Layout:
    """Where headers, thinking marks and task tokens stand between the turns."""

    def __init__(self, turns: list[_Turn], *, thinking: bool, keep_all: bool, generate: bool, tool_instructions: str) -> None:
        self._turns = turns
        self._thinking = thinking
        self._keep_all = keep_all
        self._generate = generate
        self._tool_instructions = tool_instructions
        self._last_user = max((at for at in range(len(turns)) if self._asks(at)), default=-1)
        self._answering = False  # a header or a task token has been written and waits for an assistant's turn
        self._in_reasoning = False

    def _asks(self, index: int) -> bool:
        """Whether a turn counts as the user's: also developer messages and system messages that come later."""
        role = self._turns[index].role
        return role in ("user", "developer") or (role == "system" and index > 0)

    def _reasons(self, index: int) -> bool:
        """Whether the assistant's turn at `index` shows its reasoning."""
        return self._thinking and (self._keep_all or index > self._last_user)

    def write(self, writer: _Writer, index: int) -> None:
        turn = self._turns[index]
        if turn.role == "assistant":
            self._write_assistant(writer, index)
        elif turn.role == "latest_reminder":
            writer.control(LATEST_REMINDER)
            writer.parts(turn.parts)
        else:
            self._answering = self._in_reasoning = False
            if turn.role == "system" and index:
                writer.control(SYSTEM)
            if turn.role != "system":
                writer.control(USER)
            writer.parts(turn.parts)
            if turn.message.tools:
                writer.plain("\n\n")
                writer.pieces(tools_text(turn.message.tools, self._tool_instructions))
        if self._is_answered(index):
            self._write_transition(writer, index)

    def _is_answered(self, index: int) -> bool:
        if index + 1 == len(self._turns):
            return self._generate
        # A reminder stands inside the answer, behind the header, as the release's encoder has it.
        return self._turns[index + 1].role in ("assistant", "latest_reminder")

    def _write_transition(self, writer: _Writer, index: int) -> None:
        task = self._turns[index].task
        if task == "action" or (task is None and self._asks(index)):
            self._write_header(writer, index + 1, thinking=self._thinking if task else self._reasons(index + 1))
        if task is not None:
            writer.control(TASKS[task])
            self._answering, self._in_reasoning = True, False

    def _write_header(self, writer: _Writer, index: int, *, thinking: bool) -> None:
        writer.control(ASSISTANT)
        writer.control(THINK if thinking else END_THINK)
        self._answering, self._in_reasoning = True, thinking

    def _write_assistant(self, writer: _Writer, index: int) -> None:
        turn = self._turns[index]
        if not self._answering:
            self._write_header(writer, index, thinking=self._reasons(index))
        if self._in_reasoning:
            writer.plain(turn.message.reasoning)
            writer.control(END_THINK)
        writer.parts(turn.parts)
        if turn.message.tool_calls:
            writer.pieces(calls_text(turn.message.tool_calls))
        writer.control(EOS)
        self._answering = self._in_reasoning = False

    def write_end(self, writer: _Writer) -> bool:
        """Opens the reply if nothing has; returns whether it continues reasoning."""
        if self._generate and not self._answering:
            self._write_header(writer, len(self._turns), thinking=self._reasons(len(self._turns)))
        return self._in_reasoning


class _Writer:
    """Collects ids; neighbouring plain text is encoded in one piece, as a tokenizer that saw the whole prompt would."""

    def __init__(self, tokenizer: Tokenizer, image_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._image_token_id = image_token_id
        self._ids: list[int] = []
        self._images: list[ImageSlot] = []
        self._pending: list[str] = []
        self._shown: list[str] = []

    def plain(self, text: str) -> None:
        """Text that is never a control token, whatever it spells."""
        self._pending.append(text)
        self._shown.append(text)

    def control(self, mark: str) -> None:
        self._flush()
        self._ids.append(self._tokenizer.special_id(mark))
        self._shown.append(mark)

    def _image(self, image: Any) -> None:
        if self._image_token_id is None:
            raise PromptError("the conversation has an image, but this model has no image token; use a model with a vision tower")
        self._tokenizer.token_bytes(self._image_token_id)  # raises for an id outside the vocabulary
        self._flush()
        self._images.append(ImageSlot(len(self._ids), image))
        self._ids.append(self._image_token_id)
        self._shown.append(IMAGE)

    def pieces(self, pieces: Iterator[str]) -> None:
        for piece in pieces:
            if not isinstance(piece, Markup):
                self.plain(piece)
                continue
            for at, part in enumerate(_MARKUP_MARKS.split(piece)):
                if at % 2:
                    self.control(part)
                else:
                    self.plain(part)

    def parts(self, parts: Sequence[ContentText | ContentImage | _ToolResult]) -> None:
        """Content blocks, a blank line between them; a tool result in its (plain text) tags."""
        for at, part in enumerate(parts):
            if at:
                self.plain("\n\n")
            match part:
                case ContentText(text):
                    self.plain(text)
                case ContentImage(image):
                    self._image(image)
                case _ToolResult(_, blocks):
                    self.plain(TOOL_RESULT)
                    self.parts(blocks)
                    self.plain(END_TOOL_RESULT)

    def _flush(self) -> None:
        text, self._pending = "".join(self._pending), []
        if text:
            self._ids.extend(self._tokenizer.encode(text))

    def result(self, in_reasoning: bool) -> EncodedPrompt:
        self._flush()
        return EncodedPrompt(
            token_ids=tuple(self._ids),
            images=tuple(self._images),
            text="".join(self._shown),
            in_reasoning=in_reasoning,
        )
