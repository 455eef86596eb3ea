"""The inside of one tool call of a reply, as it streams in: parameters or one JSON object, to the text of a JSON object.

Owns what makes arguments valid JSON under every fault. Must not know reasoning, content or where calls begin and end; it is
handed parameter values and body text already cut out of their tags. Source: facts section 12; bug cases PAR-01, PAR-05.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

_OUTSIDE_STRING = re.compile(r'["{}]')
_INSIDE_STRING = re.compile(r'["\\]')


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def json_problem(text: str, *, want_object: bool = False) -> str:
    """Why `text` is not a JSON value (or object), empty if it is. NaN and infinities are none; digits are not converted."""
    try:
        value: Any = json.loads(text, parse_int=lambda _: 0, parse_float=lambda _: 0, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"not valid JSON ({error})"
    return "" if not want_object or isinstance(value, dict) else "not a JSON object"


def quoted_inside(text: str) -> str:
    """`text` as the inside of a JSON string; pieces can be converted one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class ParameterArguments:
    """Builds the arguments from parameters. Every method returns the JSON text that its step adds."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._raw: list[str] | None = None  # pieces of a JSON value, which is checked before it is shown
        self._skipping = False
        self.problem = ""

    def open(self, name: str, *, string: bool) -> str:
        """A parameter begins. Of parameters of one name the first counts."""
        self._raw = None if string else []
        self._skipping = name in self._names
        if self._skipping:
            self.problem = self.problem or f"parameter {name!r} given twice; the first one counts"
            return ""
        lead = ", " if self._names else "{"
        self._names.add(name)
        return lead + json.dumps(name, ensure_ascii=False) + (': "' if string else ": ")

    def value(self, text: str) -> str:
        """More of the value, exactly as it stands between the tags."""
        if self._raw is not None:
            self._raw.append(text)
            return ""
        return "" if self._skipping else quoted_inside(text)

    def close(self) -> str:
        """The parameter ends. A value that should be JSON and is not becomes a JSON string of its text."""
        if self._skipping:
            return ""
        if self._raw is None:
            return '"'
        text = "".join(self._raw).strip()
        fault = json_problem(text)
        if fault:
            self.problem = self.problem or f"a parameter value is {fault}; taken as text"
            return json.dumps("".join(self._raw), ensure_ascii=False)
        return text

    def end(self) -> str:
        """The call ends."""
        return "}" if self._names else "{}"


class ObjectBody:
    """Collects a body that is one JSON object, fed in pieces, and finds its end; braces and tags inside strings are data."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    @property
    def in_string(self) -> bool:
        """Whether the next character is inside a JSON string."""
        return self._in_string

    def feed(self, text: str) -> int:
        """Takes body text up to the end of the object and returns how many characters that were."""
        at = 0
        while at < len(text) and not self.complete:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_INSIDE_STRING if self._in_string else _OUTSIDE_STRING).search(text, at)
            if found is None:
                at = len(text)
                break
            at = found.end()
            self._step(found.group())
        self._pieces.append(text[:at])
        return at

    def _step(self, character: str) -> None:
        if character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = not self._in_string
        else:
            self._depth += 1 if character == "{" else -1
            self.complete = self._depth == 0

    def arguments(self) -> tuple[str, str]:
        """The JSON text and what was wrong with it; a broken body is kept as text under the key "arguments"."""
        text = "".join(self._pieces)
        fault = json_problem(text, want_object=True)
        if fault:
            return json.dumps({"arguments": text}, ensure_ascii=False), f"the body is {fault}"
        return text, ""
