"""Log lines as JSON."""

from __future__ import annotations

import json
import logging

import pytest

from quire.server.logs import JsonFormatter, relay_engine_line, setup_server_logging


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("quire.server", logging.WARNING, "file", 1, message, (), None)
    vars(made).update(extra)
    return made


def test_a_line_is_one_json_object() -> None:
    line = JsonFormatter().format(record("two\nlines \ud800", fields={"status": 200, "path": "/x"}))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry.pop("time").endswith("Z")
    assert entry == {
        "level": "warning",
        "logger": "quire.server",
        "message": "two\nlines \\ud800",
        "status": 200,
        "path": "/x",
    }


def test_a_traceback_is_part_of_it() -> None:
    try:
        raise ValueError("oops")
    except ValueError as error:
        failed = record("failed", exc_info=(type(error), error, error.__traceback__))
        entry = json.loads(JsonFormatter().format(failed))
    assert "ValueError: oops" in entry["traceback"]


def test_uvicorn_speaks_through_our_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    own, uvicorn = logging.getLogger("quire"), logging.getLogger("uvicorn")
    handler = logging.StreamHandler()
    monkeypatch.setattr(own, "handlers", [handler])
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(uvicorn, name, getattr(uvicorn, name))
    setup_server_logging("json")
    assert uvicorn.handlers == [handler]
    assert isinstance(handler.formatter, JsonFormatter)
    assert uvicorn.level == logging.WARNING


@pytest.mark.parametrize(
    ("line", "level", "message"),
    [
        ("06:44:02 I KV: 12 blocks\n", logging.INFO, "KV: 12 blocks"),
        ("06:44:02.123 D quire.worker: planned\n", logging.DEBUG, "quire.worker: planned"),
        ("06:44:02 E step 3 failed 100 %s\n", logging.ERROR, "step 3 failed 100 %s"),
        ("Thread 0x7f (most recent call first):\n", logging.INFO, "Thread 0x7f (most recent call first):"),
        ("\n", logging.INFO, ""),
    ],
)
def test_lines_of_the_engine_take_the_servers_form(
    line: str, level: int, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "quire"):
        relay_engine_line(line)
    (entry,) = caplog.records
    assert (entry.levelno, entry.getMessage()) == (level, message)
    assert json.loads(JsonFormatter().format(entry))["logger"] == "quire.engine.process"
