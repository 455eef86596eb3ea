"""The body of `/kvist/microscope`.

Owns its fields and limits. Must not know how a look is taken.
"""

from __future__ import annotations

from pydantic import Field

from kvist.server.body import Body


class MicroscopeRequest(Body):
    """A reply's token: the request's id (as in its answer), the index in the output, and which of several replies."""

    request_id: str = Field(min_length=1, max_length=128)
    token: int = Field(ge=0)
    reply: int = Field(0, ge=0)
