"""A grammar as a request states it: a JSON schema, a regular expression or a Lark grammar, as text with a size limit.

Owns `Grammar` and the errors about grammars. Must not know tokens or the library that compiles them (`constraint.py`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_GRAMMAR_BYTES = 64 * 1024
KINDS = {"json_schema": "JSON schema", "regex": "regular expression", "lark": "Lark grammar"}


class GrammarError(ValueError):
    """A grammar that cannot be compiled or followed; the message names the reason and the way out."""


class GrammarTooLarge(GrammarError):
    """A grammar beyond the limit of its text or of its compiled form."""


class GrammarUnsatisfiable(GrammarError):
    """A grammar that no text satisfies, or that no sequence of the vocabulary's tokens spells."""


class GrammarSupportMissing(RuntimeError):
    """The library that compiles grammars is not installed."""


@dataclass(frozen=True)
class Grammar:
    """`kind` is `json_schema`, `regex` or `lark`; `source` its text. Raises GrammarError, GrammarTooLarge."""

    kind: str
    source: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise GrammarError(f"a grammar is one of {', '.join(KINDS)}, got {self.kind!r}; name one of them")
        if not isinstance(self.source, str) or not self.source:
            raise GrammarError(f"the {self.name} must be a text that is not empty; leave the grammar out instead")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise GrammarError(
                f"character {error.start} of the {self.name} is half of a surrogate pair: it has no UTF-8 form; leave it out"
            ) from error
        if size > MAX_GRAMMAR_BYTES:
            raise GrammarTooLarge(
                f"the {self.name} has {size} bytes, at most {MAX_GRAMMAR_BYTES} are allowed; split it or simplify it"
            )

    @property
    def name(self) -> str:
        """The kind in words."""
        return KINDS[self.kind]

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Any JSON value that satisfies `schema` (JSON text or its parsed form); `{}` is any JSON value."""
        try:
            return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, GrammarError):
                raise
            raise GrammarError(f"the schema is no JSON: {error}; give JSON text or what json.loads returns") from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that `pattern` (Rust regex syntax, no look-around) matches as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, source: str) -> Grammar:
        """A text of a Lark grammar's `start` rule, in llguidance's dialect."""
        return cls("lark", source)
