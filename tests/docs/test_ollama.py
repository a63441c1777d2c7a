"""docs/guides/ollama.md is true: its clients are answered, and its commands are understood."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import httpx
import pytest

from quire.cli.main import COMMANDS, build_parser
from quire.server.access import ROUTES
from quire.server.missing import MISSING
from quire.server.ollama.convert import _UNSUPPORTED
from quire.server.ollama.protocol import Options
from tests.agents.test_npm_clients import run_node
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, LiveServer, live_server
from tests.server.npm import needed_folder

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "ollama.md").read_text(encoding="utf-8")
COMMANDS_SHOWN = re.findall(r"^\$ quire (.*)$", TEXT, flags=re.M)
ADDRESS = "http://127.0.0.1:11434"
PACKAGE = "ollama@0.6.4"


def block(language: str, server: LiveServer) -> str:
    (code,) = re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.M | re.S)
    return str(code).replace(ADDRESS, server.url).replace("smollm2", MODEL)


def test_the_python_client_works_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(FakeClient("Hi there")) as server:
        names: dict[str, object] = {}
        exec(compile(block("python", server), "ollama.md", "exec"), names)
        names["client"].close()  # type: ignore[attr-defined]
    assert capsys.readouterr().out == "Hi there\nHi there"


def test_the_npm_client_works_as_printed(pytestconfig: pytest.Config) -> None:
    folder = needed_folder(pytestconfig, PACKAGE)
    with live_server(FakeClient("Hi there")) as server:
        done = run_node(block("javascript", server), folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "Hi there\n"


def test_curl_is_answered_as_printed() -> None:
    """curl says that what it sends is a form."""
    with live_server(FakeClient("Hi")) as server:
        command = shlex.split(block("bash", server))
        url, body = command[1], command[3]
        headers = {"content-type": "application/x-www-form-urlencoded"}
        lines = httpx.post(url, content=body, headers=headers).text.splitlines()
    assert "".join(json.loads(line)["response"] for line in lines) == "Hi"


@pytest.mark.parametrize("command", COMMANDS_SHOWN)
def test_commands_are_understood(command: str) -> None:
    words = shlex.split(command)
    assert words[0] in COMMANDS
    build_parser(words[0]).parse_args(words)


def test_every_route_and_option_is_told_of() -> None:
    for method, path in ROUTES:
        if path.startswith("/api/"):
            assert f"`{method} {path}`" in TEXT
    for path in MISSING:
        if path.startswith("/api/") and path != "/api/blobs":
            assert f"`{path}`" in TEXT
    for name in (*Options.model_fields, "mirostat", "tfs_z", "typical_p"):
        assert f"`{name}`" in TEXT
    assert {"mirostat", "tfs_z", "typical_p"} <= _UNSUPPORTED.keys()
