"""npm packages for tests: installed once into pytest's cache folder, at fixed versions; and the `openai` client."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.needs import lacking

PACKAGE = "openai@6.49.0"
_SCRIPT = Path(__file__).parent / "check.mjs"


def package_folder(config: pytest.Config, *packages: str, limit: float = 60) -> Path:
    """A folder in which node finds the packages; it is kept between runs. Skips the test where they cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("needs node and npm; install Node.js 20 or newer")
    assert config.cache is not None
    name = hashlib.sha256(" ".join(packages).encode()).hexdigest()[:12]
    folder = config.cache.mkdir(f"npm-{name}")
    # Another worker may need the same packages at the same time.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(folder, packages, limit)
    return folder


def needed_folder(config: pytest.Config, *packages: str) -> Path:
    """The same for packages that CI can have: there, a test that lacks them fails."""
    try:
        return package_folder(config, *packages)
    except pytest.skip.Exception as reason:
        lacking(str(reason))


def _install(folder: Path, packages: tuple[str, ...], limit: float) -> None:
    done_mark = folder / "installed"
    if not done_mark.is_file():
        options = ["--no-audit", "--no-fund", "--fetch-retries=0", "--prefix", str(folder)]
        try:
            done = subprocess.run(
                ["npm", "install", *options, *packages], capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm cannot install {packages} here within {limit:.0f} s, which needs the network")
        if done.returncode != 0:
            pytest.skip(f"npm cannot install {packages} here, which needs the network: {done.stderr[-200:]}")
        done_mark.touch()


def talk(config: pytest.Config, url: str) -> dict[str, Any]:
    """What the client heard of the server; see check.mjs for what it says."""
    folder = package_folder(config, PACKAGE)
    script = folder / _SCRIPT.name  # node looks for packages beside the script
    shutil.copy(_SCRIPT, script)
    done = subprocess.run(["node", str(script), url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    heard: dict[str, Any] = json.loads(done.stdout)
    return heard
