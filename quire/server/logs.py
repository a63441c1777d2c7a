"""The server's log lines, as text or as one JSON object each, for Quire and for the HTTP server below it."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from typing import Any

import msgspec

from quire.config.groups import LogFormat
from quire.utils.log import ROOT_NAME, get_logger

_LIBRARIES = ("uvicorn", "opentelemetry")
# A log line of quire.utils.log, as the engine process writes it.
_ENGINE_LINE = re.compile(r"\d\d:\d\d:\d\d(?:\.\d{3})? ([DIWE]) (.*)")
_LEVELS = {"D": logging.DEBUG, "I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR}

engine_logger = get_logger("quire.engine.process")


class JsonFormatter(logging.Formatter):
    """Time, level, logger and message, the record's `fields` if it has any, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **vars(record).get("fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_encodable(line)).decode()


def is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for the traceback of a request that was cancelled, which happens only where the server ends."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def setup_server_logging(log_format: LogFormat) -> None:
    """Give Quire's handlers the chosen form, and send those of the libraries through them too."""
    own = logging.getLogger(ROOT_NAME)
    if log_format == "json":
        for handler in own.handlers:
            handler.setFormatter(JsonFormatter())
    for name in _LIBRARIES:
        library = logging.getLogger(name)
        library.handlers = list(own.handlers)
        library.propagate = own.propagate
        library.setLevel(logging.DEBUG if own.level == logging.DEBUG else logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(is_no_cancellation)


def relay_engine_line(line: str) -> None:
    """Print a line of the engine process, a log line or any other, in the format of this process."""
    found = _ENGINE_LINE.fullmatch(line.rstrip())
    level, message = (_LEVELS[found[1]], found[2]) if found else (logging.INFO, line.rstrip())
    engine_logger.log(level, "%s", message)


def _encodable(line: dict[str, Any]) -> dict[str, Any]:
    """Lone surrogates, which clients can send, have no UTF-8 form."""
    return {
        key: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for key, value in line.items()
    }
