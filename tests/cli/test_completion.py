"""quire completion: every command and flag, as the shells themselves complete them."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable

import pytest

from quire.cli.completion import SHELLS, tree
from quire.cli.main import COMMANDS, main
from tests.needs import needs_program

SCRIPTS = {name: make() for name, make in SHELLS.items()}


def bash(*words: str) -> set[str]:
    """What bash offers after these words, the last of which is being typed."""
    quoted = " ".join(f"'{word}'" for word in ("quire", *words))
    ask = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _quire; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = f"quire() {{ echo my-model; }}\n{SCRIPTS['bash']}\n{ask}\n"
    done = subprocess.run(["bash", "--norc", "-s"], input=script, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_know_every_command_and_flag(shell: str) -> None:
    for path, flags in tree().items():
        assert path.split()[-1] in SCRIPTS[shell]
        for flag in flags:
            assert flag.name.removeprefix("--") in SCRIPTS[shell]


# What zsh's completion system offers is printed here, one word per line, without the descriptions. `cat` is found by
# PATH, which a script must not change.
ZSH = """
quire() { command cat /dev/null && echo my-model }
compdef() { : }
_describe() { local list=$2; for one in ${(P)list}; do print -r -- ${one%%:*}; done }
compadd() { shift; print -rl -- $@ }
_files() { : }
"""


def zsh(*words: str) -> set[str]:
    ask = f"words=({shlex.join(['quire', *words])})\nCURRENT={len(words) + 1}\n_quire\n"
    done = subprocess.run(
        [needs_program("zsh"), "-f"], input=f"{ZSH}\n{SCRIPTS['zsh']}\n{ask}", capture_output=True, text=True
    )
    assert done.stderr == ""
    return {word for word in done.stdout.split() if word.startswith(words[-1])}


def fish(*words: str) -> set[str]:
    line = " ".join(("quire", *words))
    script = f"function quire; echo my-model; end\n{SCRIPTS['fish']}\ncomplete -C {shlex.quote(line)}\n"
    done = subprocess.run([needs_program("fish"), "--no-config"], input=script, capture_output=True, text=True)
    assert done.stderr == ""
    return {found.split("\t")[0] for found in done.stdout.splitlines()}


@pytest.mark.parametrize("complete", [bash, zsh, fish])
def test_what_a_shell_offers(complete: Callable[..., set[str]]) -> None:
    assert complete("se") == {"serve"}
    assert complete("") == set(COMMANDS)
    assert complete("serve", "--max-model") == {"--max-model-len"}
    assert complete("serve", "--dtype", "b") == {"bfloat16"}
    assert "my-model" in complete("run", "my")
    assert complete("bench", "lat") == {"latency"}
    assert complete("bench", "latency", "--batch-s") == {"--batch-size"}
    assert complete("serve", "--batch-s") == set()
    assert complete("completion", "fi") == {"fish"}


def test_models_are_printed_for_the_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--models"]) == 0
    assert "smollm2" in capsys.readouterr().out.splitlines()
