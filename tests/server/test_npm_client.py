"""The npm `openai` client against a server on a loopback socket, with the fake engine behind it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, live_server

SCRIPT = Path(__file__).parent / "npm" / "check.mjs"
PACKAGE = "openai@6.49.0"


@pytest.fixture(scope="module")
def package_dir(request: pytest.FixtureRequest) -> Path:
    """A folder in which node finds the client; it is kept between runs."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm; install Node.js 20 or newer")
    assert request.config.cache is not None
    folder = request.config.cache.mkdir(f"npm-{PACKAGE.replace('@', '-')}")
    if not (folder / "node_modules" / "openai" / "package.json").is_file():
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), PACKAGE]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install {PACKAGE} here, which needs the network: {done.stderr[-200:]}")
    return folder


def test_the_npm_client(package_dir: Path) -> None:
    script = package_dir / SCRIPT.name  # node looks for packages beside the script
    shutil.copy(SCRIPT, script)
    with live_server(FakeClient("Hi there"), api_keys=("secret",)) as server:
        done = subprocess.run(["node", str(script), server.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "models": [MODEL, "alias/name"],
        "chat": ["Hi there", "Hi there"],
        "tokens": 9,
        "cached": 0,
        "streamed": "Hi there",
        "usage": 9,
        "helper": "Hi there",
        "completion": "aHi there",
        "errors": [["NotFoundError", "model"], ["BadRequestError", "temperature"], ["AuthenticationError", None]],
    }
