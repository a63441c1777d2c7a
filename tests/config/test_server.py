"""Settings of the server: flags, checks and where API keys come from."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import args
from quire.config.groups import ServerConfig
from quire.config.server import check_server, collect_admin_keys, collect_api_keys
from quire.types.errors import ConfigError
from tests.config.test_args import as_flags, values_of


def parsed(*flags: str) -> ServerConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    args.add_server_arguments(parser)
    args.add_engine_arguments(parser)
    return args.server_config_from(parser.parse_args(flags))


@given(st.data())
def test_any_settings_round_trip(data: st.DataObject) -> None:
    settings = [
        s
        for s in args.server_settings()
        if s.name not in ("port", "root_path", "ssl_keyfile", "tool_server", "admin")
    ]
    values = {s.name: data.draw(values_of(s)) for s in settings if data.draw(st.booleans())}
    flags = [flag for s in settings if s.name in values for flag in as_flags(s, values[s.name])]
    expected = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    assert parsed(*flags) == ServerConfig(**expected)


def test_the_defaults_are_safe() -> None:
    config = parsed()
    assert config == ServerConfig()
    assert config.host == "127.0.0.1"
    assert not config.allowed_origins
    assert not config.allow_request_chat_template
    assert not config.log_requests


@pytest.mark.parametrize(
    "wrong",
    [
        {"port": 70000},
        {"port": -1},
        {"max_queue": -1},
        {"max_body_bytes": 0},
        {"max_n": 0},
        {"max_logprobs": -2},
        {"drain_timeout": -1.0},
        {"stall_timeout": float("nan")},
        {"stall_timeout": 0.0},
        {"ssl_keyfile": "key.pem"},
        {"root_path": "llm"},
        {"api_key": ("",)},
        {"served_model_name": ("a", "")},
        {"max_stored_responses": -1},
        {"max_stored_bytes": -1},
        {"tool_call_timeout": -1.0},
        {"max_tool_turns": 0},
        {"max_tool_result_bytes": 0},
        {"tool_server": ("",)},
        {"tool_server": ("http://127.0.0.1:9/mcp",)},
        {"tool_server": ("a__b=http://127.0.0.1:9/mcp",)},
        {"tool_server": ("a=stdio:",)},
        {"tool_server": ("a=stdio:'open",)},
        {"tool_server": ("a=ftp://127.0.0.1",)},
        {"tool_server": ("a=stdio:x", "a=stdio:y")},
    ],
)
def test_values_that_cannot_work_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        check_server(ServerConfig(**wrong))


def test_keys_come_from_flags_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n  another \n")
    monkeypatch.setenv("QUIRE_API_KEY", "from-env, second,")
    config = ServerConfig(api_key=("flag", "from-env"), api_key_file=str(file))
    assert collect_api_keys(config) == ("flag", "from-env", "second", "from-file", "another")
    monkeypatch.delenv("QUIRE_API_KEY")
    assert collect_api_keys(ServerConfig()) == ()


def test_a_key_file_that_is_a_pipe_is_read_once_for_all_who_ask() -> None:
    """The shell's `--admin-key-file <(pass show quire)` is such a file."""
    reader, writer = os.pipe()
    os.write(writer, b"from-pipe\n")
    os.close(writer)
    config = ServerConfig(admin="127.0.0.1:0", admin_key_file=f"/dev/fd/{reader}")
    check_server(config)
    assert collect_admin_keys(config) == collect_admin_keys(config) == ("from-pipe",)
    os.close(reader)


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n\n", b"\xff\xfe"])
def test_a_key_file_without_keys_lets_nobody_in(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="api_key_file"):
        collect_api_keys(ServerConfig(api_key_file=str(file)))
