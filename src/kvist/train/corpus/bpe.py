"""Trains `nano`'s byte-level BPE: as many ids as its preset says, the prompt format's special tokens first (facts section 12).

Owns the vocabulary's recipe; it sees text only through the built corpus and knows nothing of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer

from kvist.presets import nano
from kvist.train.corpus.build import read_documents
from kvist.train.corpus.sources import TIERS

VOCABULARY_SIZE = nano().vocab_size

SPECIAL_TOKENS: dict[str, str] = {
    "bos": "<｜begin▁of▁sentence｜>",
    "eos": "<｜end▁of▁sentence｜>",
    "pad": "<｜▁pad▁｜>",
    "noise": "<｜noise｜>",
    "user": "<｜User｜>",
    "assistant": "<｜Assistant｜>",
    "system": "<｜System｜>",
    "latest_reminder": "<｜latest_reminder｜>",
    "think_start": "<think>",
    "think_end": "</think>",
    "dsml": "｜DSML｜",
    "image": "<｜deepseek_image｜>",
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}
"""Role to spelling, in the order of their ids from 0. `noise` is DSpark's: its spelling is ours, its role released."""

_HIDDEN_ROLES = frozenset(("bos", "eos", "pad", "noise", "image"))
"""Roles that decoding with skip_special_tokens drops; as in the release, roles and thinking marks stay visible."""

PIECES = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"  # a word with the blank or sign before it
    r"|\p{N}"  # digits one by one: every number is spelled the same way
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*"  # signs with the newline that follows them
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"  # indentation, all but the last blank
    r"|\s+"
)

SAMPLE_BYTES = {"prose": 24_000_000, "docs": 18_000_000, "code": 18_000_000}


def _sample(out: Path, tier: str, limit_bytes: int) -> Iterator[str]:
    """Training text of a tier up to a limit; the stored order is a hash order, so a prefix is a fair sample."""
    used = 0
    for document in read_documents(out, tier, "train"):
        text = document.text[: max(4096, limit_bytes // 50)]
        used += len(text.encode())
        yield text
        if used >= limit_bytes:
            return


def _untrained() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    split = Split(Regex(PIECES), "isolated")
    tokenizer.pre_tokenizer = Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = ByteLevelDecoder()
    return tokenizer


def train_on(texts: Iterator[str], vocabulary_size: int = VOCABULARY_SIZE) -> Tokenizer:
    """A BPE of exactly `vocabulary_size` ids: special tokens 0..17, the 256 bytes, then merges.

    Raises ValueError where the text is too small to yield that many merges.
    """
    tokenizer = _untrained()
    special = [AddedToken(text, special=role in _HIDDEN_ROLES, normalized=False) for role, text in SPECIAL_TOKENS.items()]
    trainer = BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        show_progress=False,
        max_token_length=24,
        initial_alphabet=sorted(ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    if size != vocabulary_size:
        raise ValueError(f"the text yields {size} ids, not {vocabulary_size}: give more text or ask for fewer ids")
    return tokenizer


def _with_flags(tokenizer: Tokenizer) -> str:
    """The tokenizer's compact JSON with the visible roles marked as not special (the trainer marks all as special)."""
    state = json.loads(tokenizer.to_str(pretty=False))
    hidden = {SPECIAL_TOKENS[role] for role in _HIDDEN_ROLES}
    for token in state["added_tokens"]:
        token["special"] = token["content"] in hidden
    return json.dumps(state, ensure_ascii=False, separators=(",", ":")) + "\n"


def train_tokenizer(out: Path, target: Path) -> dict[str, object]:
    """Trains on a tier-balanced sample of OUT/text, writes `target` and `special_tokens.json` beside it.

    Returns ids by role, the file's size and the bytes per token on the start of each tier's held-out text.
    """
    texts = (text for tier in TIERS for text in _sample(out, tier, SAMPLE_BYTES[tier]))
    tokenizer = train_on(texts)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(_with_flags(tokenizer), encoding="utf-8")
    ids = {role: tokenizer.token_to_id(text) for role, text in SPECIAL_TOKENS.items()}
    table = {"vocabulary_size": VOCABULARY_SIZE, "ids": ids, "text": SPECIAL_TOKENS}
    target.with_name("special_tokens.json").write_text(json.dumps(table, ensure_ascii=False, indent=1) + "\n")
    return {"ids": ids, "file_bytes": target.stat().st_size, "bytes_per_token": bytes_per_token(out, tokenizer)}


def bytes_per_token(out: Path, tokenizer: Tokenizer, limit: int = 60) -> dict[str, float]:
    """UTF-8 bytes per token on the first `limit` held-out documents of each tier."""
    rates = {}
    for tier in TIERS:
        texts = [d.text for d, _ in zip(read_documents(out, tier, "heldout"), range(limit), strict=False)]
        counts = [len(encoding.ids) for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        rates[tier] = round(sum(len(text.encode()) for text in texts) / int(np.sum(counts)), 3)
    return rates
