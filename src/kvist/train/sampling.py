"""Which tokens a step sees: slices of the tiers in fixed proportions, each tier without replacement, and synthetic rows.

A pure function of (seed, sequence number): the data position of a run is one integer. Must not know models.
Sequences are plain slices of the documents' concatenation; BOS marks where a document starts, attention is not cut there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvist.train.shapes import Batch

PATTERN = 200
SYNTHETIC = "synthetic"
_AGAIN = "make it again by python -m kvist.train.corpus tokenise"


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Shares of the tiers in sequences; they and `synthetic` sum to 1."""

    prose: float = 0.36
    docs: float = 0.24
    code: float = 0.37
    synthetic: float = 0.03

    def __post_init__(self) -> None:
        for name, share in vars(self).items():
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ValueError(f"mixture share {name} must lie in 0..1, got {share!r:.60}")


class Corpus:
    """Token ids of every tier of one split, as uint16 arrays mapped from files; document bounds and UTF-8 sizes.

    Raises ValueError for a file that is missing, damaged or does not fit the others, and for an id that no model of `vocab_size`
    tokens has.
    """

    def __init__(self, folder: Path, split: str, vocab_size: int | None = None) -> None:
        self.ids: dict[str, np.ndarray] = {}
        self.offsets: dict[str, np.ndarray] = {}
        self.sizes: dict[str, np.ndarray] = {}
        for tier in ("prose", "docs", "code"):
            file = folder / f"{tier}.{split}.u16"
            if not file.is_file():
                raise ValueError(f"no {file}; make it: python -m kvist.train.corpus build, then tokenise (or unpack parts)")
            nbytes = file.stat().st_size
            if nbytes == 0 or nbytes % 2:
                raise ValueError(f"{file} has {nbytes} bytes; it holds ids of two bytes each, one at least: {_AGAIN}")
            self.ids[tier] = ids = np.memmap(file, "<u2", "r")
            self.offsets[tier] = offsets = _integers(folder / f"{tier}.{split}.offsets.npy")
            self.sizes[tier] = _integers(folder / f"{tier}.{split}.bytes.npy")
            if (
                offsets[0] != 0
                or offsets[-1] != len(ids)
                or (np.diff(offsets) < 0).any()
                or len(self.sizes[tier]) != len(offsets) - 1
            ):
                raise ValueError(f"{file}, its offsets and its bytes do not belong together: {_AGAIN}")
            if vocab_size is not None and (largest := int(ids.max())) >= vocab_size:
                where = f"tier {tier} holds token {largest}, the model's vocabulary ends at {vocab_size - 1}"
                raise ValueError(f"{where}; tokenise with its tokenizer")


def _integers(file: Path) -> np.ndarray:
    """int64 [n], n >= 1, of a .npy file."""
    try:
        array = np.load(file)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is damaged: {_AGAIN}") from error
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"{file} holds {array.dtype} {list(array.shape)}, not a list of integers: {_AGAIN}")
    return array.astype(np.int64)


class Sampler:
    """Sequences by number. `names`: token ids that may stand in keys, `digits`: ids of the values of recall rows."""

    def __init__(self, corpus: Corpus, mixture: Mixture, recall: Recall, seed: int) -> None:
        self.corpus, self.recall, self.seed = corpus, recall, seed
        shares = {"prose": mixture.prose, "docs": mixture.docs, "code": mixture.code, SYNTHETIC: mixture.synthetic}
        if abs(sum(shares.values()) - 1) > 1e-6 or min(shares.values()) < 0:
            raise ValueError(f"shares of the mixture are {shares}; they must be at least 0 and sum to 1")
        self.tiers = tuple(shares)
        self.pattern = _pattern(shares, seed)
        self.orders: dict[tuple[str, int, int], tuple[int, np.ndarray]] = {}

    def batch(self, numbers: range, length: int) -> Batch:
        """The sequences with these numbers, `length` tokens each."""
        rows, tiers = [], []
        for number in numbers:
            cycle, place = divmod(number, PATTERN)
            tier = int(self.pattern[place])
            order = cycle * int((self.pattern == tier).sum()) + int((self.pattern[:place] == tier).sum())
            rows.append(self._sequence(self.tiers[tier], order, length + 1))
            tiers.append(tier)
        ids = torch.from_numpy(np.stack(rows).astype(np.int64))
        tier_B = torch.tensor(tiers)
        counted = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        return Batch(tokens=ids[:, :-1].contiguous(), targets=ids[:, 1:].contiguous(), counted=counted, tier=tier_B)

    def _sequence(self, tier: str, order: int, length: int) -> np.ndarray:
        if tier == SYNTHETIC:
            rng = np.random.default_rng([self.seed, 7, order])
            base = self._anywhere("prose" if order % 2 else "code", rng, length)
            return self.recall.row(base, rng) if order % 3 else copy_row(base, rng)
        return self._slice(tier, order, length)

    def _anywhere(self, tier: str, rng: np.random.Generator, length: int) -> np.ndarray:
        at = int(rng.integers(len(self.corpus.ids[tier]) - length))
        return np.array(self.corpus.ids[tier][at : at + length])

    def _slice(self, tier: str, order: int, length: int) -> np.ndarray:
        ids = self.corpus.ids[tier]
        cells = len(ids) // (length - 1) - 1
        if cells < 1:
            raise ValueError(f"tier {tier} has {len(ids)} tokens, fewer than two sequences of {length - 1}")
        epoch, cell = divmod(order, cells)
        key = (tier, length, epoch)
        if key not in self.orders:
            rng = np.random.default_rng([self.seed, len(tier), length, epoch])
            self.orders = {k: v for k, v in self.orders.items() if k[:2] != key[:2] or k[2] >= epoch - 1}
            self.orders[key] = (int(rng.integers(length)), rng.permutation(cells))
        shift, order_of_cells = self.orders[key]
        at = int(order_of_cells[cell]) * (length - 1) + shift
        return np.array(ids[at : at + length])


def _pattern(shares: dict[str, float], seed: int) -> np.ndarray:
    counts = [round(share * PATTERN) for share in shares.values()]
    counts[0] += PATTERN - sum(counts)
    kinds = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng([seed, 1]).permutation(kinds)


def copy_row(base: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A sequence in which an earlier stretch stands again, at a random distance."""
    length = len(base)
    size = int(rng.integers(length // 16, length // 3))
    first = int(rng.integers(1, length - 2 * size))
    again = int(rng.integers(first + size, length - size + 1))
    row = base.copy()
    row[again : again + size] = row[first : first + size]
    return row


@dataclass(frozen=True, kw_only=True)
class Recall:
    """How statements to be recalled are written: `lead` + name + `middle` + value + `end`, all token ids.

    `names` are ids that may form names (three a name), `digits` ids of single digits (five a value).
    """

    lead: tuple[int, ...]
    middle: tuple[int, ...]
    end: tuple[int, ...]
    names: tuple[int, ...]
    digits: tuple[int, ...]

    def statement(self, rng: np.random.Generator) -> tuple[np.ndarray, int]:
        """(token ids, how many of them come before the value)."""
        name = rng.choice(self.names, 3)
        value = rng.choice(self.digits, 5)
        ids = np.concatenate([self.lead, name, self.middle, value, self.end])
        return ids.astype(np.uint16), len(self.lead) + 3 + len(self.middle)

    def row(self, base: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A sequence with several statements, each stated once and asked for once, later."""
        count = max(1, min(24, len(base) // 96))
        facts = [self.statement(rng)[0] for _ in range(count)]
        size = len(facts[0])
        places = np.sort(rng.choice(np.arange(1, len(base) - size, size), 2 * count, replace=False))
        row = base.copy()
        open_facts: list[int] = []
        fresh = list(range(count))
        for left, place in zip(range(2 * count, 0, -1), places, strict=True):
            ask = bool(open_facts) and (not fresh or rng.random() < len(open_facts) / left)
            fact = open_facts.pop(int(rng.integers(len(open_facts)))) if ask else fresh.pop()
            if not ask:
                open_facts.append(fact)
            row[place : place + size] = facts[fact]
        return row


def recall_from_tokenizer(file: Path) -> Recall:
    """The statements' token ids from a tokenizer file."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    texts = {i: tokenizer.decode([i], skip_special_tokens=False) for i in range(tokenizer.get_vocab_size())}
    names = tuple(
        i for i, text in texts.items() if text[:1] == " " and text[1:].isalpha() and text[1:].isascii() and len(text) > 4
    )
    digits = tuple(i for i, text in texts.items() if len(text) == 1 and text in "0123456789")
    lead, middle, end = (tuple(tokenizer.encode(t, add_special_tokens=False).ids) for t in ("\nThe code of", " is ", ".\n"))
    return Recall(lead=lead, middle=middle, end=end, names=names, digits=digits)
