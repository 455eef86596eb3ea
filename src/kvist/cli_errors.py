"""What a failed command says: which errors a user or a machine can cause, and each one's single message.

Part of the command line and under its rules: nothing of ours is imported. Must not know commands.
"""

from __future__ import annotations

import re

_ALLOCATION = re.compile(r"tried to allocate ([\d,.]+ \w+)", re.IGNORECASE)


def is_users(error: Exception) -> bool:
    """True for what input or a small machine can cause: ValueError, OSError, no memory, and the package's named errors."""
    ours = type(error).__module__.partition(".")[0] == "kvist"
    return ours or isinstance(error, ValueError | OSError | MemoryError) or _refused_memory(error) is not None


def message(error: Exception) -> str:
    """The one message for an error of which `is_users` is true."""
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if (asked := _refused_memory(error)) is not None:
        return (
            f"out of memory: {asked} more are not to be had. Smaller steps need less: --chunk of generate, --expert-budget, "
            "memory and step_cost of a server, micro_tokens in a training's --recipe"
        )
    return str(error) or type(error).__name__


def _refused_memory(error: Exception) -> str | None:
    """What torch asked for in vain, on the host or a card; None for any other error. Torch raises RuntimeError for both."""
    found = _ALLOCATION.search(str(error)) if isinstance(error, RuntimeError) else None
    return found and found[1]
