"""A terminal that a test types into and looks at: a tmux session of its own."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.needs import needs_program

ROOT = Path(__file__).parents[2]
LIMIT = 60.0


class Terminal:
    def __init__(self, socket: str) -> None:
        self._tmux = ["tmux", "-L", socket, "-f", os.devnull]

    def start(self, arguments: Sequence[str], width: int = 80, height: int = 24) -> None:
        """Run `quire ARGUMENTS`; the terminal stays when it has ended, and says so."""
        command = shlex.join([sys.executable, "-m", "quire", *arguments])
        # A shell that is not told otherwise ends by a Ctrl-C that its program takes.
        shell = f"trap : INT; unset COLUMNS LINES; cd {shlex.quote(str(ROOT))}; {command}; echo ended with $?; read _"
        self._run("new-session", "-d", "-x", str(width), "-y", str(height), f"sh -c {shlex.quote(shell)}")

    def type(self, text: str) -> None:
        self._run("send-keys", "-l", text)
        self.press("Enter")

    def press(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def screen(self) -> str:
        return self._run("capture-pane", "-p")

    def history(self) -> str:
        """The screen and what has scrolled out of it."""
        return self._run("capture-pane", "-p", "-S", "-500")

    def wait_for(self, *texts: str) -> str:
        """The history, once it shows all of them."""
        limit = time.monotonic() + LIMIT
        while True:
            shown = self.history()
            if all(text in shown for text in texts):
                return shown
            assert time.monotonic() < limit, f"{texts} did not come within {LIMIT} s:\n{shown}"
            time.sleep(0.05)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True)

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@contextmanager
def terminal() -> Iterator[Terminal]:
    needs_program("tmux")
    opened = Terminal(f"quire-test-{secrets.token_hex(4)}")
    try:
        yield opened
    finally:
        opened.close()
