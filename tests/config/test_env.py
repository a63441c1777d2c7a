"""The environment: which variables count, and what they mean when unset."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.config import env


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/me")
    assert env.cache_dir() == Path("/home/me/.cache/quire")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert env.cache_dir() == Path("/caches/quire")
    monkeypatch.setenv("QUIRE_CACHE", "~/models")
    assert env.cache_dir() == Path("/home/me/models")


def test_the_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.log_level() == "INFO"
    assert env.log_level("warning") == "WARNING"
    monkeypatch.setenv("QUIRE_LOG_LEVEL", "debug")
    assert env.log_level("warning") == "DEBUG"


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), ("1", True), ("yes", True)])
def test_debug_checks(monkeypatch: pytest.MonkeyPatch, value: str | None, on: bool) -> None:
    if value is not None:
        monkeypatch.setenv("QUIRE_DEBUG", value)
    assert env.debug_checks() is on


def test_a_childs_environment_is_ours_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEPT", "1")
    child = env.child_environment(TMPDIR="/elsewhere")
    assert (child["KEPT"], child["TMPDIR"]) == ("1", "/elsewhere")
