"""Threads for calls that wait for a disk: one that never returns keeps neither a close nor the interpreter's end waiting.

`concurrent.futures.ThreadPoolExecutor` joins its threads when the interpreter ends; these are daemons. Must not know what is
called.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Workers:
    """Up to `count` daemon threads, started as they are needed, that run calls in the order in which they come."""

    def __init__(self, count: int, name: str) -> None:
        self._count, self._name, self._idle, self._closed = count, name, 0, False
        self._waiting = deque[tuple[Future[Any], Callable[[], Any]]]()
        self._threads = list[threading.Thread]()
        self._changed = threading.Condition()

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a call run; its result or error is the future's. Raises RuntimeError after `stop`."""
        future = Future[T]()
        with self._changed:
            if self._closed:
                raise RuntimeError(f"{self._name}: no call is taken after the end")
            self._waiting.append((future, partial(call, *args, **kwargs)))
            if self._idle < len(self._waiting) and len(self._threads) < self._count:
                name = f"{self._name}-{len(self._threads)}"
                self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        return future

    def stop(self) -> None:
        """Cancel what has not begun; threads end with what they run. Waits for nothing."""
        with self._changed:
            self._closed = True
            while self._waiting:
                self._waiting.popleft()[0].cancel()
            self._changed.notify_all()

    def close(self, timeout_s: float | None = None) -> bool:
        """`stop`, and wait for what runs; False if something still does after `timeout_s`."""
        self.stop()
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (piece := self._next()) is not None:
            _run(*piece)
            del piece  # who waits for work keeps nothing alive

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._changed:
            self._idle += 1
            self._changed.wait_for(lambda: self._waiting or self._closed)
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


def within(timeout_s: float | None, call: Callable[[], object], name: str) -> bool:
    """Run a call that may wait for a disk; False if it has not returned after `timeout_s` (None waits), and goes on in a thread
    of its own. Raises what the call does."""
    if timeout_s is None:
        call()
        return True
    future = Future[object]()
    threading.Thread(target=_run, args=(future, call), name=name, daemon=True).start()
    wait([future], timeout_s)
    if not future.done():
        return False
    future.result()
    return True


def _run(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001  # raised where the future is asked
        future.set_exception(error)
    else:
        future.set_result(result)
