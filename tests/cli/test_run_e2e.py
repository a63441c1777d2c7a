"""The first thing a newcomer types works, with the real default model and in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_quire_run_answers_from_the_default_model() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "run", "What is the capital of France?"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "The capital of France is Paris.\n"), done.stderr
