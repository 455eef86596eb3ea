"""Log lines: one JSON object or one sentence a line, with a request's id and figures; never prompt text, bodies or keys.

Owns the line's form. Must not know what is logged.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

log = logging.getLogger("kvist.server")


class JsonLines(logging.Formatter):
    """`{"time": ..., "level": ..., "event": ..., ...}`: what was given under `fields` stands beside."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": stamp, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class Words(logging.Formatter):
    """`12:00:00 info request route=/v1/models status=200`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and a trace if there is one."""
        fields = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        stamp = time.strftime("%H:%M:%S", time.gmtime(record.created))
        line = f"{stamp} {record.levelname.lower()} {record.getMessage()} {fields}".rstrip()
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def note(event: str, *, level: int = logging.INFO, error: BaseException | None = None, **fields: Any) -> None:
    """Log an event with its fields; `error` adds its trace."""
    log.log(level, event, extra={"fields": fields}, exc_info=error)


def configure(level: str, form: str) -> None:
    """Send this package's and uvicorn's lines to standard error in one form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Words())
    for name in ("kvist", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
