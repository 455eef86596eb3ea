"""Errors that a request can cause, each with the offending value, the limit and the way out in its message."""

from __future__ import annotations


class RequestTooLong(ValueError):
    """Prompt and wanted tokens exceed the model's context."""


class EmptyPrompt(ValueError):
    """A request without a single token."""


class NonFiniteLogits(RuntimeError):
    """The model produced NaN or infinity for a request; its state is not to be used again."""
