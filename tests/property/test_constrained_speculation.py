"""A grammar under speculation: drafts verified under the masks behind them give the very tokens of plain decoding."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kvist.engine.sampler import SamplingParams, choose
from kvist.engine.sampling.constraint import Constraint, GrammarVocabulary
from kvist.engine.sampling.grammar_text import Grammar
from kvist.engine.sampling.history import History
from kvist.text.tokenizer import Tokenizer

NANO = Path(__file__).resolve().parents[2] / "models" / "nano"
END = 1
LIMIT = 48
LEAD = 5
GRAMMARS = {
    "schema": Grammar.json_schema(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog", "crow"]}, "count": {"type": "integer", "minimum": 0, "maximum": 500}},
            "required": ["kind", "count"],
            "additionalProperties": False,
        }
    ),
    "regex": Grammar.regex(r"(ab|cd|[0-9]{2}){1,6}\."),
    "lark": Grammar.lark('start: item ("," item)*\nitem: NAME "=" /[0-9]+/ | "(" start ")"\nNAME: "x" | "yy"'),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(NANO)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, [END])


def logits_behind(prefix: Sequence[int], size: int, marker: Sequence[int] = ()) -> Tensor:
    """Stands for a model: logits that depend on every token before them; it says `marker` from its fifth token on."""
    seed = int.from_bytes(hashlib.blake2b(repr(list(prefix)).encode(), digest_size=7).digest(), "little")
    row = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3
    row[END] += 4
    if 0 <= len(prefix) - LEAD < len(marker):
        row[marker[len(prefix) - LEAD]] += 50
    return row


def plain(params: SamplingParams, state: Constraint, size: int) -> list[int]:
    tokens, history = [], History([7])
    while len(tokens) < LIMIT and END not in tokens:
        row = logits_behind(tokens, size, state.start_after)
        choice = choose(row[None], [params], [len(tokens)], [history], [state.mask()])[0]
        state.accept(choice.token)
        history.append(choice.token)
        tokens.append(choice.token)
    return tokens


def speculated(
    params: SamplingParams, state: Constraint, size: int, truth: list[int], dice: random.Random
) -> tuple[list[int], int]:
    """Drafts are what will come, with mistakes; rows are verified as the engine does it, with a rollback after each round."""
    tokens, history, accepted = [], History([7]), 0
    while len(tokens) < LIMIT and END not in tokens:
        ahead = truth[len(tokens) : len(tokens) + dice.randrange(6)]
        drafts = [token if dice.random() < 0.8 else dice.randrange(size) for token in ahead]
        masks = state.masks(drafts)
        drafts = drafts[: len(masks) - 1]
        prefixes = [[*tokens, *drafts[:i]] for i in range(len(drafts) + 1)]
        rows = torch.stack([logits_behind(prefix, size, state.start_after) for prefix in prefixes])
        positions = range(len(tokens), len(tokens) + len(rows))
        found = choose(rows, [params] * len(rows), positions, [history.ahead(drafts[:i]) for i in range(len(rows))], list(masks))
        for token in drafts:
            state.accept(token)
        right = next((i for i, draft in enumerate(drafts) if found[i].token != draft), len(drafts))
        state.rollback(len(drafts) - right)
        for choice in found[: right + 1]:
            history.append(choice.token)
            tokens.append(choice.token)
            if choice.token == END:
                break
        if len(tokens) == state.accepted + 1:
            state.accept(tokens[-1])
        accepted += right
    return tokens, accepted


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("seed", range(4))
def test_speculation_changes_no_token_of_a_constrained_reply(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary, name: str, seed: int
) -> None:
    params = SamplingParams(temperature=[0.0, 0.8][seed % 2], seed=seed, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.1)
    size = len(tokenizer) + 24  # logits are wider than the tokenizer
    truth = plain(params, Constraint(vocabulary, GRAMMARS[name]), size)
    tokens, accepted = speculated(params, Constraint(vocabulary, GRAMMARS[name]), size, truth, random.Random(seed))
    assert tokens[: len(truth)] == truth and len(tokens) - len(truth) <= 5
    assert accepted > 0 or len(truth) < 5
    if truth[-1] == END and name == "schema":
        assert json.loads(tokenizer.decode(truth[:-1]))["kind"] in ("cat", "dog", "crow")


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("marker", ["</think>", "so: ", "</think>\n\n"])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 40))])
def test_a_grammar_that_begins_inside_a_block_of_drafts(
    tokenizer: Tokenizer, vocabulary: GrammarVocabulary, name: str, marker: str, seed: int
) -> None:
    """Drafts run over the marker, stop inside it and miss it: the reply is the plain one, free text, marker, then the grammar."""
    params = SamplingParams(temperature=[0.0, 0.8][seed % 2], seed=seed)
    size, ids = len(tokenizer) + 24, tokenizer.encode(marker, allow_special=True)
    made = [Constraint(vocabulary, GRAMMARS[name], start_after=ids) for _ in range(2)]
    truth = plain(params, made[0], size)
    tokens, accepted = speculated(params, made[1], size, truth, random.Random(seed))
    assert tokens[: len(truth)] == truth and len(tokens) - len(truth) <= 5
    assert accepted > 0
    assert truth[LEAD : LEAD + len(ids)] == ids
    assert END not in truth[:LEAD] and not any(tokenizer.is_control(token) for token in truth[:LEAD])
    behind = Constraint(vocabulary, GRAMMARS[name])
    for token in truth[LEAD + len(ids) :]:
        behind.accept(token)
    assert len(truth) == LIMIT or behind.finished
