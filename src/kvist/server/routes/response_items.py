"""The output of a response as a list of items that grows, and the events that tell of every step.

Owns the order of `/v1/responses` events. Pure: fed with a reply's events, it returns this API's. Must not know HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvist.text import ContentDelta, Event, ReasoningDelta, ToolArgumentsDelta, ToolCallEnd, ToolCallStart

Shape = dict[str, Any]


class ResponseItems:
    """Items of one response: reasoning, messages and calls in the order in which they come."""

    def __init__(self, number: str) -> None:
        self._number = number
        self.output: list[Shape] = []
        self._open: Shape | None = None
        self._logprobs: list[Shape] = []

    def feed(self, events: Sequence[Event], logprobs: Sequence[Shape] = ()) -> list[Shape]:
        """What the next events of a reply make happen. Log-probabilities go to the message's text."""
        told: list[Shape] = []
        self._logprobs += logprobs
        for event in events:
            match event:
                case ReasoningDelta(text):
                    told += [*self._ensure("reasoning"), self._grown("response.reasoning_text.delta", text)]
                case ContentDelta(text):
                    told += [*self._ensure("message"), self._grown("response.output_text.delta", text)]
                case ToolCallStart(at, name):
                    told += [*self._close("completed"), *self._begin_call(at, name)]
                case ToolArgumentsDelta(_, text):
                    told.append(self._more_arguments(text))
                case ToolCallEnd():
                    told += self._close("completed")
        return told

    def finish(self, *, whole: bool) -> list[Shape]:
        """The reply has ended; `whole` False: it was cut."""
        return self._close("completed" if whole else "incomplete")

    @property
    def _at(self) -> int:
        return len(self.output) - 1

    def _ensure(self, kind: str) -> list[Shape]:
        if self._open is not None and self._open["type"] == kind:
            return []
        told = self._close("completed")
        if kind == "reasoning":
            item: Shape = {"id": self._id("rs"), "type": kind, "summary": [], "content": [], "status": "in_progress"}
            part: Shape = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": self._id("msg"), "type": kind, "role": "assistant", "content": [], "status": "in_progress"}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        told.append(self._added(item))
        told.append({"type": "response.content_part.added", **self._place(), "part": dict(part)})
        item["content"] = [part]
        return told

    def _grown(self, kind: str, text: str) -> Shape:
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += text
        told = {"type": kind, **self._place(), "delta": text}
        if part["type"] == "output_text":
            taken, self._logprobs = self._logprobs, []
            part["logprobs"] += taken
            told["logprobs"] = taken
        return told

    def _begin_call(self, at: int, name: str) -> list[Shape]:
        item = {
            "id": self._id("fc"),
            "type": "function_call",
            "call_id": f"call_{self._number}_{at}",
            "name": name,
            "arguments": "",
            "status": "in_progress",
        }
        return [self._added(item)]

    def _more_arguments(self, text: str) -> Shape:
        assert self._open is not None
        self._open["arguments"] += text
        place = {"item_id": self._open["id"], "output_index": self._at}
        return {"type": "response.function_call_arguments.delta", **place, "delta": text}

    def _close(self, status: str) -> list[Shape]:
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = status
        place = {"item_id": item["id"], "output_index": self._at}
        told: list[Shape] = []
        if item["type"] == "function_call":
            told.append(
                {
                    "type": "response.function_call_arguments.done",
                    **place,
                    "name": item["name"],
                    "arguments": item["arguments"],
                }
            )
        else:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            done: Shape = {"type": f"response.{kind}.done", **place, "content_index": 0, "text": part["text"]}
            if kind == "output_text":
                done["logprobs"] = part["logprobs"]
            told += [done, {"type": "response.content_part.done", **place, "content_index": 0, "part": part}]
        return [*told, {"type": "response.output_item.done", "output_index": self._at, "item": item}]

    def _added(self, item: Shape) -> Shape:
        self.output.append(item)
        self._open = item
        return {"type": "response.output_item.added", "output_index": self._at, "item": dict(item)}

    def _place(self) -> Shape:
        return {"item_id": self.output[-1]["id"], "output_index": self._at, "content_index": 0}

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._number}_{len(self.output)}"
