"""Which random numbers mean what: uses of a position's keyed stream, and Gumbel noise made of uniform numbers.

Must not know logits. The numbers themselves are `kernels/keyed_uniform`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kvist.kernels.keyed_uniform import Floats, uniform_stream

# A position is used for one choice, and by rejection sampling for more, each with a stream of its own.
CHOICE, ACCEPT, RESIDUAL, DRAFT = range(4)


def gumbel(uniform: Floats) -> Floats:
    """Standard Gumbel noise of uniform numbers, rounded to float32 and held as float64."""
    noise = -np.log(-np.log(np.clip(uniform, 1e-300, 1 - 1e-16)))
    return noise.astype(np.float32).astype(np.float64)


def gumbel_noise(seed: int, position: int, size: int) -> Tensor:
    """float32 [size] Gumbel noise that depends on (seed, position) only."""
    return torch.from_numpy(gumbel(uniform_stream(seed, position, size, use=CHOICE)).astype(np.float32))
