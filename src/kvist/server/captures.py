"""Looks through the microscope: one at a time, so many a minute and key, stopped when nobody waits for them any more.

Owns the thread they run in and what they may cost. Must not know HTTP or what is seen.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvist.server.admission import Admission
from kvist.server.errors import ApiError, failed, refused
from kvist.server.figures import Figures
from kvist.server.history import Trace
from kvist.server.logs import note
from kvist.server.served import Looking

if TYPE_CHECKING:
    from kvist.engine.microscope import View

NICENESS = 10
"""A tenth of the time of a thread that serves on the same core; all of an idle one."""


def _give_way() -> None:
    """Put this thread behind those that serve, where an operating system knows priorities of single threads."""
    if sys.platform == "linux":
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(NICENESS, os.getpriority(os.PRIO_PROCESS, own)))


class _Stopped(Exception):
    """Nobody waits for this look any more."""


class Captures:
    """Runs looks in a thread of its own. `limit_tokens`: most positions that one may run again."""

    def __init__(
        self,
        microscope: Looking | None,
        admission: Admission,
        figures: Figures,
        *,
        limit_tokens: int,
        per_minute: int,
        retry_after_s: int,
        deadline_s: float,
    ) -> None:
        self._microscope, self._admission, self._figures = microscope, admission, figures
        self.limit_tokens, self.per_minute = limit_tokens, per_minute
        self._retry_after_s, self._deadline_s = retry_after_s, deadline_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvist-microscope", initializer=_give_way)
        self._running: Future[View] | None = None

    @property
    def running(self) -> bool:
        """Whether a look is under way."""
        return self._running is not None and not self._running.done()

    async def look(self, tenant: str, trace: Trace, token: int) -> View:
        """What the position that gave output token `token` read. Cancelling it stops the work. Raises ApiError."""
        microscope = self._allowed(trace, token)
        if self.running:
            raise ApiError(
                "too_many_requests",
                "another look through the microscope is under way; try again",
                retry_after_s=self._retry_after_s,
            )
        self._admission.take("captures", tenant, self.per_minute)
        stop, began = threading.Event(), time.monotonic()

        def proceed() -> None:
            self._admission.require_open()
            if time.monotonic() - began > self._deadline_s:
                raise ApiError(
                    "deadline_exceeded", f"the look did not end within {self._deadline_s:g} s; choose an earlier token"
                )
            if stop.is_set():
                raise _Stopped

        prompt, output = trace.prompt, trace.tokens[: token + 1]
        self._running = self._thread.submit(
            microscope.look, prompt, output, images=trace.images, replay=trace.replay, proceed=proceed
        )
        try:
            view = await asyncio.wrap_future(self._running)
        except asyncio.CancelledError:
            self._figures.capture("left", time.monotonic() - began)
            raise
        except Exception as error:
            self._figures.capture("failed", time.monotonic() - began)
            raise _told(error) from error
        finally:
            stop.set()
        self._figures.capture("seen", time.monotonic() - began)
        return view

    def _allowed(self, trace: Trace, token: int) -> Looking:
        self._admission.require_open()
        if self._microscope is None or not self.limit_tokens:
            raise ApiError("microscope_off", "this server has no microscope; set microscope_context to the positions it may run")
        made = len(trace.tokens)
        if not 0 <= token < made:
            so_far = "" if trace.over else " so far"
            raise ApiError("invalid_value", f"token {token} is none of the {made} tokens of the output{so_far}", param="token")
        positions = len(trace.prompt) + token
        if positions > self.limit_tokens:
            raise ApiError(
                "capture_too_long",
                f"{positions} positions would have to run again, at most {self.limit_tokens} may (microscope_context); "
                "choose an earlier token or a shorter request",
                param="token",
            )
        return self._microscope


def _told(error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    note("capture failed", error=error)
    return refused(error) if isinstance(error, ValueError) else failed(error)
