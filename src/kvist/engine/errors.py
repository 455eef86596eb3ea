"""Errors that a request can cause, each with the offending value, the limit and the way out in its message."""

from __future__ import annotations


class RequestTooLong(ValueError):
    """Prompt and wanted tokens exceed the model's context or the whole cache."""


class EmptyPrompt(ValueError):
    """A request without a single token."""


class BudgetTooSmall(ValueError):
    """The memory given to an engine cannot hold even one request of the promised length."""


class QueueFull(RuntimeError):
    """More requests wait than the engine accepts: back-pressure, to be tried again later."""


class NonFiniteLogits(RuntimeError):
    """The model produced NaN or infinity for a request (`what` says where); its state is not to be used again."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; this request ends here. If every prompt does so, `kvist checkpoint verify` reads the weights")


class DeadlineExceeded(RuntimeError):
    """A request did not end within the time it was given."""


class EngineStopped(RuntimeError):
    """The engine was closed, or failed in a way that leaves its state unknown."""
