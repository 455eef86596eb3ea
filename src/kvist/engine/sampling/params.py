"""What a request may wish of the sampler: `SamplingParams`, checked when it is made, and the seeds of `n` copies.

Owns limits and their messages. Must not know logits or models; `check_vocabulary` is told the vocabulary's size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LEAST_TEMPERATURE = 1e-4
MAX_BIASES = 4096
MAX_COPIES = 128
MAX_LOGPROBS = 20
SEED_STOP = 1 << 64


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch a filter off.

    Penalties change the logits of tokens that occurred: `repetition_penalty` divides positive and multiplies negative ones
    (prompt and reply), `presence_penalty` subtracts once and `frequency_penalty` once an occurrence (reply only).
    `logit_bias` adds to single ids after that. `seed` keys the noise together with the position. `logprobs`: report the
    chosen token's and that many best tokens' log-probabilities (0: the chosen one's only; None: none). `n`: replies, see
    `copies`. Raises ValueError for a value outside its limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0
    n: int = 1
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _between("temperature", self.temperature, 0, 100, "0 is greedy, 1 is the model's own distribution")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise ValueError(f"temperature must be 0 or at least {LEAST_TEMPERATURE}, got {self.temperature}; 0 is greedy")
        _integer("top_k", self.top_k, 0, 1 << 31, "0 switches it off")
        _between("top_p", self.top_p, 0, 1, "1 switches it off; for the best token only use temperature 0", low_open=True)
        _between("min_p", self.min_p, 0, 1, "0 switches it off")
        _between("repetition_penalty", self.repetition_penalty, 0.01, 100, "1 switches it off, above 1 discourages repetition")
        _between("presence_penalty", self.presence_penalty, -100, 100, "0 switches it off")
        _between("frequency_penalty", self.frequency_penalty, -100, 100, "0 switches it off")
        _integer("seed", self.seed, 0, SEED_STOP - 1, "any integer in it is as good as another")
        _integer("n", self.n, 1, MAX_COPIES, "send several requests for more replies")
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, "None switches it off")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_BIASES} are allowed; use a grammar")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias token id", token, 0, None, "give ids of the vocabulary")
            _between(f"logit_bias of token {token}", bias, -100, 100, "-100 bans a token in practice, 100 forces it")

    @property
    def needs_history(self) -> bool:
        """Whether the tokens before a position change its logits."""
        return bool(self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases apply."""
        return self.needs_history or bool(self.logit_bias)

    def check_vocabulary(self, size: int) -> None:
        """Raise ValueError for a token id outside a vocabulary of `size` ids."""
        for token in self.logit_bias:
            if token >= size:
                raise ValueError(f"logit_bias names token id {token}, the vocabulary is 0..{size - 1}; leave it out")

    def copies(self) -> list[SamplingParams]:
        """The `n` replies' own parameters, each with `n` 1 and a seed of its own (`copy_seed`)."""
        return [replace(self, n=1, seed=copy_seed(self.seed, index)) for index in range(self.n)]


def copy_seed(seed: int, index: int) -> int:
    """The seed of copy `index` of a request: `seed` itself for copy 0, so that n = 1 is the first of n copies; for the others
    the first 8 bytes (little-endian) of BLAKE2b over seed and index as 8 little-endian bytes each."""
    if not index:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def _between(name: str, value: object, low: float, high: float, way_out: str, *, low_open: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not low <= value <= high or (low_open and value == low):  # type: ignore[operator]
        raise ValueError(f"{name} must lie in {'(' if low_open else '['}{low}, {high}], got {_shown(value)}; {way_out}")


def _integer(name: str, value: object, low: int, high: int | None, way_out: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise ValueError(f"{name} must be an integer {limit}, got {_shown(value)}; {way_out}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"
