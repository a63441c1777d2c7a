"""docs/tutorial.md works as printed: its commands run in order on the default model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.serving import Running, start

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)([^\n]*)\n(.*?)^```$", TEXT, flags=re.M | re.S)
ADDRESS = "http://127.0.0.1:8000"
INSTALL, SERVE, *COMMANDS = [code for language, _, code in BLOCKS if language == "bash"]


@dataclass(frozen=True)
class Reader:
    """Somebody who follows the page in a folder, with a server at another port than the page's."""

    folder: Path
    url: str

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.replace(ADDRESS, self.url)],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def follow(self) -> None:
        """Run everything after the server's start."""
        ((_, label, program),) = [block for block in BLOCKS if block[0] == "python"]
        name = label.partition("file=")[2]
        (self.folder / name).write_text(program.replace(ADDRESS, self.url), encoding="utf-8")
        asked, streamed, chosen, called, counted = (self.run(command) for command in COMMANDS)
        assert "Paris" in json.loads(asked)["choices"][0]["message"]["content"]
        assert streamed.endswith("data: [DONE]\n\n")
        assert json.loads(chosen)["choices"][0]["message"]["content"] in ("positive", "negative", "neutral")
        ((_, _, shown),) = [block for block in BLOCKS if block[0] == "text"]
        assert called.startswith(f"{shown}the model answers ")
        assert int(float(counted.split()[-1])) > 30


def test_the_page_from_the_servers_start_on(default_server: Running, tmp_path: Path) -> None:
    # What it installs is there already: see the nightly test.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    assert SERVE.split() == [".venv/bin/quire", "serve"]
    Reader(tmp_path, default_server.url).follow()


def test_its_installation_is_the_readmes() -> None:
    readme = re.findall(r"^```bash\n(.*?)\n```$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    printed = [line.removesuffix(" openai") for line in INSTALL.splitlines()]
    assert readme[0] == " && ".join([*printed, SERVE.strip()])


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_the_whole_page_in_a_fresh_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", ROOT, copy], check=True)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for line in INSTALL.splitlines():
        subprocess.run(["bash", "-c", line], cwd=copy, check=True, timeout=900, env=dict(os.environ))
    running = start(program=(str(copy / SERVE.split()[0]), *SERVE.split()[1:]))
    try:
        Reader(copy, running.url).follow()
    finally:
        assert running.stop() == 0, "".join(running.log)
