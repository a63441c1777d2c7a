"""The npm `openai` client for tests: installed once into pytest's cache folder, at a fixed version."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PACKAGE = "openai@6.49.0"
_SCRIPT = Path(__file__).parent / "check.mjs"


def package_folder(config: pytest.Config) -> Path:
    """A folder in which node finds the client; it is kept between runs. Skips the test where it cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm; install Node.js 20 or newer")
    assert config.cache is not None
    folder = config.cache.mkdir(f"npm-{PACKAGE.replace('@', '-')}")
    if not (folder / "node_modules" / "openai" / "package.json").is_file():
        options = ["--no-audit", "--no-fund", "--fetch-retries=0", "--prefix", str(folder)]
        try:
            done = subprocess.run(["npm", "install", *options, PACKAGE], capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm cannot install {PACKAGE} here within a minute, which needs the network")
        if done.returncode != 0:
            pytest.skip(f"npm cannot install {PACKAGE} here, which needs the network: {done.stderr[-200:]}")
    return folder


def talk(config: pytest.Config, url: str) -> dict[str, Any]:
    """What the client heard of the server; see check.mjs for what it says."""
    folder = package_folder(config)
    script = folder / _SCRIPT.name  # node looks for packages beside the script
    shutil.copy(_SCRIPT, script)
    done = subprocess.run(["node", str(script), url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heard: dict[str, Any] = json.loads(done.stdout)
    return heard
