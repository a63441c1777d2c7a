"""The tool server of docs/guides/agents.md, called by a scripted model and by a real `quire serve` that leaves it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from quire.config.groups import ServerConfig
from quire.server.tool_servers import make_tool_servers
from tests.agents.real_model import GREETING, write_model
from tests.agents.scripted import ANSWER, pointed_at, scripted_client, section
from tests.agents.test_python_clients import run_python
from tests.e2e.serving import start
from tests.engine.processes import Watch
from tests.server.helpers import live_server

ASKING = "Asking with a tool server"


def address(folder: Path) -> str:
    """The page's server in a file, and its address as the page's command gives it."""
    script = folder / "weather_server.py"
    script.write_text(section("A tool server", "python"), encoding="utf-8")
    words = shlex.split(section("A tool server", "bash"))
    assert words[:3] == ["quire", "serve", "--tool-server"]
    return words[3].replace("python weather_server.py", f"{sys.executable} {script}")


def test_the_model_calls_the_server(tmp_path: Path) -> None:
    settings = {"tool_server": (address(tmp_path),)}
    servers = make_tool_servers(ServerConfig(**settings))
    with live_server(scripted_client(), tool_servers=servers, **settings) as server:
        done = run_python(pointed_at(section(ASKING, "python"), server.url), "openai", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ['called weather with {"city": "Köln"}', ANSWER]


def test_a_real_server_starts_and_leaves_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    running = start(str(folder), "--served-model-name", "greeter", "--tool-server", address(tmp_path))
    try:
        done = run_python(pointed_at(section(ASKING, "python"), running.url, "greeter"), "openai", tmp_path)
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout == f"{GREETING}\n"
        tool_server = Watch(pid_of(str(tmp_path / "weather_server.py")))
    finally:
        status = running.stop()
    assert status == 0
    tool_server.wait()


def pid_of(argument: str) -> int:
    """The process that was started with an argument."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and argument.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return int(folder.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while we looked
    raise AssertionError(f"no process has the argument {argument}")
