"""Settings for every test: one torch thread a process, since the suite itself runs in two processes on two cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
