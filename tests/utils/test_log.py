"""Logging is set up once, on stderr, and yields to an application's own set-up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest

from quire.utils.log import get_logger, setup_logging


@pytest.fixture(autouse=True)
def fresh_logger() -> Iterator[None]:
    """The quire logger as a new process has it; put back as it was."""
    logger = logging.getLogger("quire")
    before = (logger.level, logger.handlers, logger.propagate)
    logger.setLevel(logging.NOTSET)
    logger.handlers, logger.propagate = [], True
    yield
    logger.setLevel(before[0])
    logger.handlers, logger.propagate = before[1], before[2]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """setup_logging as in a program whose root logger nobody (not even pytest) has touched."""

    def setup(level: str) -> None:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        setup_logging(level)

    return setup


def test_messages_go_to_stderr_from_the_level_on(
    alone: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    alone("warning")
    get_logger("quire.runner.runner").info("quiet")
    get_logger("quire.runner.runner").warning("loud %d", 1)
    out, err = capsys.readouterr()
    assert out == ""
    assert "quiet" not in err
    assert err.endswith(" W loud 1\n")


def test_the_first_call_decides(alone: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    alone("error")
    alone("debug")
    get_logger("quire.kv").warning("no")
    get_logger("quire.kv").error("once")
    assert capsys.readouterr().err.count("\n") == 1


def test_debug_names_the_module(alone: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    alone("debug")
    get_logger("quire.kv.block_pool").debug("x")
    assert "D quire.kv.block_pool: x" in capsys.readouterr().err


def test_an_unknown_level_is_said_and_survived(
    alone: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    alone("loud")
    assert "log level loud is unknown" in capsys.readouterr().err


def test_an_applications_handlers_are_kept(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    setup_logging("info")
    get_logger("quire.kv").info("hello")
    assert caplog.messages == ["hello"]
    assert logging.getLogger("quire").handlers == []
    assert capsys.readouterr().err == ""
