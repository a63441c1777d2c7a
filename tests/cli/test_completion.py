"""quire completion: every command and flag, as the shells themselves complete them."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from quire.cli.completion import SHELLS, tree
from quire.cli.main import COMMANDS, main

SCRIPTS = {name: make() for name, make in SHELLS.items()}


def bash(*words: str) -> set[str]:
    """What bash offers after these words, the last of which is being typed."""
    quoted = " ".join(f"'{word}'" for word in ("quire", *words))
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _quire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = f"quire() {{ echo my-model; }}\n{SCRIPTS['bash']}\n{ask}\n"
    done = subprocess.run(["bash", "--norc", "-s"], input=script, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash() -> None:
    assert bash("se") == {"serve"}
    assert set(COMMANDS) == bash("")
    assert bash("serve", "--max-model") == {"--max-model-len"}
    assert bash("serve", "--dtype", "b") == {"bfloat16"}
    assert "my-model" in bash("run", "my")
    assert bash("bench", "lat") == {"latency"}
    assert "--batch-size" in bash("bench", "latency", "--batch")
    assert bash("completion", "") >= set(SHELLS)


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_know_every_command_and_flag(shell: str) -> None:
    for path, flags in tree().items():
        assert path.split()[-1] in SCRIPTS[shell]
        for flag in flags:
            assert flag.name.removeprefix("--") in SCRIPTS[shell]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_shell_reads_its_script(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell} to be installed")
    done = subprocess.run([shell, "-n"], input=SCRIPTS[shell], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_models_are_printed_for_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--models"]) == 0
    assert "smollm2" in capsys.readouterr().out.splitlines()
