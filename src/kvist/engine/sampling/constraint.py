"""Grammars over a vocabulary: which tokens may come next, for a reply and for drafts that may still be rejected.

Owns `GrammarVocabulary` (one per tokenizer) and `Constraint` (one per reply). Must not know logits or requests. The work is
llguidance's (optional, extra `grammar`); this file bounds it, names its failures and keeps hostile grammars harmless.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvist.engine.sampling.grammar_text import Grammar, GrammarError, GrammarSupportMissing, GrammarTooLarge, GrammarUnsatisfiable
from kvist.engine.sampling.schema_reach import endless
from kvist.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask: TypeAlias = NDArray[np.uint8]
R = TypeVar("R")

# The compiler recurses once a rule: 64 KiB of text hold at most some ten thousand, and each takes a few KiB of stack.
_STACK_BYTES = 256 << 20
_STACK_LOCK = threading.Lock()
# A step's work stays at some milliseconds; a row of 10,000 items admits schemas with a thousand optional properties.
_LIMITS = {
    "step_lexer_fuel": 50_000,
    "step_max_items": 50_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
}
# JSON allows white space without end between tokens, and a model may take it; a line break and deep indentation still fit.
_JSON_SPACE = r"[\x20\x0A\x0D\x09]{0,32}"
_SIGNS_OF_SIZE = ("too many", "limit", "too complex", "too deep", "too large", "too big", "max is")


class GrammarVocabulary:
    """The tokens of a tokenizer in the form that grammars are matched against. Safe to share; built once (see the benchmark)."""

    def __init__(self, tokenizer: Tokenizer, end_ids: Sequence[int]) -> None:
        """Control tokens and ids that the tokenizer lacks (logits may be wider) are never allowed by a grammar, except `end_ids`,
        which are allowed where the grammar is complete. Raises ValueError, GrammarSupportMissing."""
        size = len(tokenizer)
        if not end_ids or any(not 0 <= token < size for token in end_ids):
            raise ValueError(f"end ids {list(end_ids)} must be one or more of 0..{size - 1}: without one no reply can end")
        library = _library()
        self.end_ids = tuple(end_ids)
        self.mask_bytes = (size + 31) // 32 * 4
        self._tokenizer = tokenizer
        # What the library's wrapper reads; bytes that are no UTF-8 are spelled token by token by the library itself.
        self.eos_token_id, self.bos_token_id = self.end_ids[0], None
        self.tokens = [tokenizer.token_bytes(token) for token in range(size)]
        self.special_token_ids = [token for token in range(size) if tokenizer.is_control(token)]
        wrapper = library.TokenizerWrapper(self)
        self.compiled = library.LLTokenizer(wrapper, eos_token=list(self.end_ids))
        self._control = np.zeros(8 * self.mask_bytes, np.bool_)
        self._control[[*self.special_token_ids, *range(size, 8 * self.mask_bytes), *self.end_ids]] = True

    def free_text(self, marker: Sequence[int]) -> Mask:
        """uint8 [mask_bytes]: every token of text, and those of `marker`. Raises ValueError for an id that is no token's."""
        if bad := [token for token in marker if not 0 <= token < len(self.tokens)]:
            raise ValueError(f"the marker that a grammar waits for has token id {bad[0]}; ids are 0..{len(self.tokens) - 1}")
        allowed = ~self._control
        allowed[list(marker)] = True
        return np.packbits(allowed, bitorder="little")

    def __call__(self, text: str) -> list[int]:
        """Ids of a text, for the library."""
        return self._tokenizer.encode(text)


class Constraint:
    """Where one reply stands in its grammar. Not thread-safe; `fork` for copies.

    Making one compiles the grammar (up to seconds for hostile ones, with the interpreter's lock released): do it when the
    request arrives, not in a step. `start_after`: the grammar begins behind the first time that these tokens come in a row (the
    mark that ends reasoning); until then any text may come, and no control token but the marker's: no reply ends before its
    grammar has begun. Raises GrammarError, GrammarTooLarge, GrammarUnsatisfiable, ValueError.
    """

    def __init__(self, vocabulary: GrammarVocabulary, grammar: Grammar, *, start_after: Sequence[int] = ()) -> None:
        self.vocabulary, self.grammar, self.start_after = vocabulary, grammar, list(start_after)
        self._free = vocabulary.free_text(self.start_after) if start_after else None
        self._tokens: list[int] = []
        self._begun = None if start_after else 0  # accepted tokens before the grammar's first
        self._behind = 0  # end tokens after the grammar's last token, which the stopped matcher does not take
        source = _checked_source(grammar)
        self._matcher = _with_deep_stack(lambda: _compile(vocabulary, source))
        self._raise_on_error()
        self._start = self._matcher.deep_copy()
        self._probe()

    @property
    def accepted(self) -> int:
        """Tokens accepted so far."""
        return len(self._tokens)

    @property
    def complete(self) -> bool:
        """Whether the text so far satisfies the grammar, so that an end token may come."""
        return self._begun is not None and self._matcher.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token may come, or one came."""
        return self._begun is not None and self._matcher.is_stopped()

    def mask(self) -> Mask:
        """uint8 [mask_bytes]: id i is allowed next if bit i % 8 of byte i // 8 is set. Raises GrammarError."""
        return self.masks(())[0]

    def masks(self, drafts: Sequence[int]) -> Mask:
        """uint8 [k + 1, mask_bytes]: what is allowed after the first 0..k drafts, the state unchanged afterwards.

        k is how many drafts in a row the grammar allows: a draft behind them cannot be accepted, so verify `drafts[:k]` only.
        Raises GrammarError if the grammar runs into a limit.
        """
        masks = np.empty((len(drafts) + 1, self.vocabulary.mask_bytes), np.uint8)
        self._fill(masks[0])
        passed, before = 0, self._tokens.copy()
        try:
            while passed < len(drafts) and self._advance(drafts[passed]):
                self._fill(masks[passed + 1])
                passed += 1
        except GrammarError:
            # A limit that a draft runs into must not end a reply that would never have taken that way.
            self._restore(before)
            return masks[: passed + 1]
        self.rollback(passed)
        return masks[: passed + 1]

    def _fill(self, row: Mask) -> None:
        if self._begun is None:
            assert self._free is not None
            row[:] = self._free
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._raise_on_error()

    def accept(self, token: int) -> None:
        """Move past a token. Raises GrammarError, the state unchanged, if the grammar does not allow it."""
        if not self._advance(token):
            raise GrammarError(
                f"token {token} is not allowed as token {self.accepted} of this {self.grammar.name}; choose under `mask()`"
            )

    def _advance(self, token: int) -> bool:
        if self._begun is None:
            return self._advance_freely(token)
        if not self._matcher.try_consume_tokens([token]):
            self._raise_on_error()
            if not (self._matcher.is_stopped() and token in self.vocabulary.end_ids):
                return False
            self._behind += 1
        self._tokens.append(token)
        return True

    def _advance_freely(self, token: int) -> bool:
        assert self._free is not None
        if not (0 <= token < 8 * len(self._free) and self._free[token // 8] >> token % 8 & 1):
            return False
        self._tokens.append(token)
        if self._tokens[-len(self.start_after) :] == self.start_after:
            self._begun = self.accepted
        return True

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens. Raises ValueError if fewer were accepted."""
        if not 0 <= count <= self.accepted:
            raise ValueError(f"cannot take back {count} of {self.accepted} tokens; take back at most all of them")
        if self._begun is not None:
            behind = min(count, self._behind)
            self._behind -= behind
            if inside := min(count, self.accepted - self._begun) - behind:
                self._matcher.rollback(inside)
                self._raise_on_error()
        del self._tokens[self.accepted - count :]
        if self._begun is not None and self.accepted < self._begun:
            self._begun = None

    def fork(self) -> Constraint:
        """An independent copy in the same state; the compiled grammar is shared."""
        other = object.__new__(Constraint)
        other.vocabulary, other.grammar, other.start_after = self.vocabulary, self.grammar, self.start_after
        other._free = self._free
        other._tokens, other._begun, other._behind = self._tokens.copy(), self._begun, self._behind
        other._matcher, other._start = self._matcher.deep_copy(), self._start
        return other

    def _restore(self, tokens: list[int]) -> None:
        """Come back from a failed matcher, which cannot go on, by taking the accepted way again from the start."""
        self._matcher = self._start.deep_copy()
        self._tokens, self._begun, self._behind = [], None if self.start_after else 0, 0
        for token in tokens:
            self.accept(token)

    def _probe(self) -> None:
        """One step on a copy: a grammar that has no first token, or that no step can afford, fails here and not in a batch."""
        copy = self.fork()
        copy._begun = 0
        allowed = np.flatnonzero(np.unpackbits(copy.mask(), bitorder="little"))
        inside = allowed[~np.isin(allowed, self.vocabulary.end_ids)]
        if not len(inside) and not copy.complete:
            raise GrammarUnsatisfiable(_no_text(self.grammar))
        if len(inside):
            copy.accept(int(inside[0]))
            copy.mask()

    def _raise_on_error(self) -> None:
        if not self._matcher.is_error():
            return
        reason = " ".join(self._matcher.get_error().replace("<non-verbose/>", "").split())
        reason = reason if len(reason) <= 400 else f"{reason[:400]}..."
        if reason.startswith(("Unsatisfiable", "NoExtension")):
            raise GrammarUnsatisfiable(f"{_no_text(self.grammar)} ({reason})")
        if any(sign in reason.lower() for sign in _SIGNS_OF_SIZE):
            raise GrammarTooLarge(
                f"this {self.grammar.name} goes beyond a limit after {self.accepted} tokens: {reason}; simplify it"
            )
        raise GrammarError(f"this {self.grammar.name} cannot be compiled: {reason}; correct or leave out that part")


def _no_text(grammar: Grammar) -> str:
    return f"no text of this vocabulary satisfies this {grammar.name}; loosen what contradicts itself"


def _checked_source(grammar: Grammar) -> str:
    """The grammar in the library's form. Raises GrammarError for a schema that is no JSON, GrammarUnsatisfiable if endless."""
    matcher = _library().LLMatcher
    if grammar.kind == "regex":
        return matcher.grammar_from_regex(grammar.source)
    if grammar.kind == "lark":
        return matcher.grammar_from_lark(grammar.source)
    try:
        schema = json.loads(grammar.source)
    except RecursionError as error:
        raise GrammarTooLarge("the schema is nested too deeply to read; flatten it with $defs and $ref") from error
    except ValueError as error:
        raise GrammarError(f"the schema is no JSON: {error}; send a JSON object or a boolean") from error
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"a schema is a JSON object or a boolean, got {type(schema).__name__}; wrap it")
    if schema is False:
        raise GrammarUnsatisfiable(f"{_no_text(grammar)} (the schema is false)")
    source = "{}" if schema is True else grammar.source
    try:
        if endless(schema):
            raise GrammarUnsatisfiable(f"{_no_text(grammar)} (every value would be infinitely deep: a required part is itself)")
        return matcher.grammar_from_json_schema(source, overrides={"whitespace_pattern": _JSON_SPACE})
    except GrammarError:
        raise
    except (RecursionError, ValueError) as error:  # the library reads at most 128 levels, and no lone surrogates
        if isinstance(error, RecursionError) or "recursion" in str(error):
            raise GrammarTooLarge(f"the schema is nested too deeply ({error}); flatten it with $defs and $ref") from error
        raise GrammarError(f"the schema cannot be read: {error}; correct that part") from error


def _compile(vocabulary: GrammarVocabulary, source: str) -> LLMatcher:
    library = _library()
    limits = library.LLParserLimits(verbose_errors=False, **_LIMITS)
    matcher: LLMatcher = library.LLMatcher(vocabulary.compiled, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first one builds tables, which recurses as deeply as compiling does
    return matcher


def _with_deep_stack(work: Callable[[], R]) -> R:
    """Run `work` in a thread whose stack the library cannot exhaust: overflowing it would end the whole process."""
    results: list[R] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except Exception as error:  # noqa: BLE001  # handed to the caller's thread
            errors.append(error)

    with _STACK_LOCK:
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="kvist-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise GrammarSupportMissing(
            "this request has a grammar and llguidance, which compiles it, is missing; pip install '.[grammar]' in the checkout"
        ) from error
    return llguidance
