"""A pytest plugin that fills memory which nobody has written yet with bytes that are no number: `pytest -p tests.poison ...`.

`torch.empty` and its like give what lies there, usually zeros or the last step's values, so a kernel that reads too much may pass
every test for months. With this, such a read gives NaN in every float format of the project and -1 in integers, and results
change. Not loaded by default: it costs a fill an allocation. Pinned memory and flags are left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_BYTE = 0xFF
_MAKERS = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (torch.Tensor, "new_empty"))


def _poisoned(made: Tensor) -> Tensor:
    if made.device.type in ("cpu", "cuda") and made.dtype is not torch.bool and not made.is_pinned():
        # The bytes of its storage, which nobody else has, whatever its strides.
        torch.zeros(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).fill_(_BYTE)
    return made


def _wrap(owner: Any, name: str) -> None:
    plain = getattr(owner, name)
    setattr(owner, name, lambda *arguments, **options: _poisoned(plain(*arguments, **options)))


def pytest_configure() -> None:
    """Before any test is collected."""
    for owner, name in _MAKERS:
        _wrap(owner, name)
