"""Lines from a person or a pipe, put together to messages that may have many lines.

Owns editing (prompt_toolkit where it is installed and a terminal is there) and the two ways to write more than one line: a
backslash at a line's end, and a block between lines of three quotes. Must not know commands.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

PROMPT, MORE = "> ", ". "
QUOTES = '"""'


class Reader:
    """Reads messages. `line(prompt)` gives the next line without its end; it raises EOFError and KeyboardInterrupt."""

    def __init__(self, line: Callable[[str], str]) -> None:
        self._line = line

    def message(self) -> str:
        """The next message. EOFError at the end of the input; an open block that the end closes is a message still."""
        lines = [self._line(PROMPT)]
        if lines[0].strip() == QUOTES:
            return self._block()
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(self._line(MORE))
            except EOFError:
                break
        return "\n".join(lines)

    def _block(self) -> str:
        lines: list[str] = []
        try:
            while (line := self._line(MORE)).strip() != QUOTES:
                lines.append(line)
        except EOFError:
            if not lines:
                raise
        return "\n".join(lines)


def plain_line(prompt: str) -> str:
    """A line of standard input; the prompt is shown only to a person. EOFError at its end."""
    if sys.stdin.isatty():
        sys.stderr.write(prompt)
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def open_reader() -> tuple[Reader, bool]:
    """A reader for this process's input, and whether it edits lines (kvist[chat] at a terminal)."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return Reader(plain_line), False
    try:
        return Reader(_edited_line()), True
    except ModuleNotFoundError:
        return Reader(plain_line), False


def _edited_line() -> Callable[[str], str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(key_bindings=keys, prompt_continuation=MORE)
    return session.prompt
