"""The official Anthropic client against real routes over a scripted engine: whole and streamed messages, blocks, errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import anthropic
import pytest

from kvist.engine.request import Request
from kvist.server.errors import ApiError
from tests.integration.test_server_openai import CALLS
from tests.server_fakes import TOKENIZER, Live, Pause, says, serving

TOOL = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]},
}


def script(request: Request) -> list[str]:
    prompt = TOKENIZER.decode(request.prompt)
    return [f"I must call</think>On it.{CALLS}"] if "use tools" in prompt else ["let me see</think>Hi STOP there"]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving(script) as server:
        yield server


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_whole(live: Live) -> None:
    message = live.anthropic().messages.create(model="nano", max_tokens=100, messages=ask("hello"), system="be kind")
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking == "let me see"
    assert message.content[1].text == "Hi STOP there"
    assert message.stop_reason == "end_turn"
    assert message.usage.input_tokens == len(live.engine.requests[-1].prompt)
    stopped = live.anthropic().messages.create(
        model="nano",
        max_tokens=100,
        messages=ask("hello"),
        stop_sequences=["STOP"],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[1].text) == ("stop_sequence", "STOP", "Hi ")
    cut = live.anthropic().messages.create(model="nano", max_tokens=2, messages=ask("hello"))
    assert cut.stop_reason == "max_tokens"


def test_stream_with_tools(live: Live) -> None:
    """The client's accumulator arrives at the whole answer's blocks."""
    with live.anthropic().messages.stream(model="nano", max_tokens=500, messages=ask("use tools"), tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [block.input for block in final.content[2:]] == [{"city": "Århus"}, {"zone": "CET"}]
    assert final.stop_reason == "tool_use"
    whole = live.anthropic().messages.create(model="nano", max_tokens=500, messages=ask("use tools"), tools=[TOOL])
    assert [block.type for block in whole.content] == [block.type for block in final.content]
    assert whole.content[3].input == {"zone": "CET"}


def test_the_order_of_events(live: Live) -> None:
    """Each block begins, grows and ends before the next one begins; then the message's end: read from the wire, name by name."""
    body = {"model": "nano", "max_tokens": 500, "messages": ask("use tools"), "tools": [TOOL], "stream": True}
    with live.http() as http, http.stream("POST", "/v1/messages", json=body) as answer:
        lines = [line for line in answer.iter_lines() if line and not line.startswith(":")]
    names, events = lines[::2], [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert names == [f"event: {event['type']}" for event in events]
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None
    blocks = [list(group) for _, group in itertools.groupby(events[1:-2], key=lambda event: event["index"])]
    assert [block[0]["index"] for block in blocks] == [0, 1, 2, 3]
    deltas = {"thinking": {"thinking_delta", "signature_delta"}, "text": {"text_delta"}, "tool_use": {"input_json_delta"}}
    for block, kind in zip(blocks, ("thinking", "text", "tool_use", "tool_use"), strict=True):
        types = [event["type"] for event in block]
        assert types == ["content_block_start", *["content_block_delta"] * (len(types) - 2), "content_block_stop"]
        assert block[0]["content_block"]["type"] == kind
        assert {event["delta"]["type"] for event in block[1:-1]} == deltas[kind]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] > 0


def test_history_of_tools(live: Live) -> None:
    """Thinking, use and result of an earlier turn stand in the prompt as reasoning, call and result."""
    messages = [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "HIDDEN", "signature": ""},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "sunny"}, {"type": "text", "text": "so?"}],
        },
    ]
    client = live.anthropic()
    client.messages.create(model="nano", max_tokens=5, messages=messages, tools=[TOOL])
    prompt = TOKENIZER.decode(live.engine.requests[-1].prompt)
    assert "<think>HIDDEN</think>" in prompt
    assert "<tool_result>sunny</tool_result>\n\nso?" in prompt
    counted = client.messages.count_tokens(model="nano", messages=messages, tools=[TOOL])
    assert counted.input_tokens == len(live.engine.requests[-1].prompt)


def test_a_reply_goes_back_with_every_field_of_its_client(live: Live) -> None:
    """The client's blocks have fields that this server never sent, all of them null."""
    client = live.anthropic()
    reply = client.messages.create(model="nano", max_tokens=500, messages=ask("use tools"), tools=[TOOL])
    blocks = [block.model_dump() for block in reply.content]
    assert None in [value for block in blocks for value in block.values()]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": "ok", "no_such_field": None}
        for block in blocks
        if block["type"] == "tool_use"
    ]
    turns = [{"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    messages = [*ask("use tools"), *turns]
    assert client.messages.create(model="nano", max_tokens=500, messages=messages, tools=[TOOL]).stop_reason == "tool_use"
    results[0]["no_such_field"] = 0
    with pytest.raises(anthropic.BadRequestError, match="no_such_field = 0 is not supported"):
        client.messages.create(model="nano", max_tokens=500, messages=messages, tools=[TOOL])


def test_choice_and_schema_become_grammars(live: Live) -> None:
    client = live.anthropic()
    client.messages.create(model="nano", max_tokens=5, messages=ask("x"), tools=[TOOL], tool_choice={"type": "any"})
    assert live.engine.requests[-1].grammar is not None
    client.messages.create(model="nano", max_tokens=5, messages=ask("x"), tools=[TOOL], tool_choice={"type": "none"})
    assert live.engine.requests[-1].grammar is None
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    client.messages.create(
        model="nano",
        max_tokens=5,
        messages=ask("x"),
        thinking={"type": "disabled"},
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    grammar = live.engine.requests[-1].grammar
    assert grammar is not None
    assert json.loads(grammar.source) == schema


def test_errors_in_this_api_s_words(live: Live) -> None:
    client = live.anthropic()
    with pytest.raises(anthropic.BadRequestError, match="at least 1"):
        client.messages.create(model="nano", max_tokens=0, messages=ask("x"))
    with pytest.raises(anthropic.NotFoundError, match="not served"):
        client.messages.create(model="another", max_tokens=5, messages=ask("x"))
    with pytest.raises(anthropic.BadRequestError, match="no place"):
        client.messages.create(
            model="nano",
            max_tokens=5,
            messages=[{"role": "user", "content": [{"type": "thinking", "thinking": "", "signature": ""}]}],
        )
    source = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
    with pytest.raises(anthropic.BadRequestError, match="no vision"):
        client.messages.create(
            model="nano", max_tokens=5, messages=[{"role": "user", "content": [{"type": "image", "source": source}]}]
        )


def test_error_in_a_stream() -> None:
    failure = ApiError("engine_error", "the reason")
    with serving(says("text", Pause(0.05), failure)) as live:
        stream = live.anthropic().messages.create(model="nano", max_tokens=50, messages=ask("x"), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="the reason"):
            list(stream)
