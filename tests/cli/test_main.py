"""The quire command: lazy, and every failure is one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import quire
from quire.cli import main as cli
from quire.types.errors import MemoryPlanError, WeightMismatchError


def install(monkeypatch: pytest.MonkeyPatch, action: Callable[[argparse.Namespace], int]) -> None:
    """Make `quire run` do `action`."""
    module = SimpleNamespace(add_arguments=lambda parser: None, run=action)
    monkeypatch.setattr(cli, "load_command", lambda name: module)


def failing(error: BaseException) -> Callable[[argparse.Namespace], int]:
    def action(args: argparse.Namespace) -> int:
        raise error

    return action


def test_the_exit_code_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, lambda args: 7)
    assert cli.main(["run"]) == 7


def test_an_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, failing(MemoryPlanError("needs 3 GiB, has 2; set --max-model-len 512")))
    assert cli.main(["run"]) == 1
    assert capsys.readouterr() == ("", "error: needs 3 GiB, has 2; set --max-model-len 512\n")


def test_details_come_before_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, failing(WeightMismatchError("2 tensors are missing; get the file again\n  a\n  b")))
    assert cli.main(["run"]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err == ["  a", "  b", "error: 2 tensors are missing; get the file again"]


@pytest.mark.parametrize(
    "error", [MemoryError("no"), ImportError("libtorch_cpu.so: failed to map segment from shared object")]
)
def test_memory_that_runs_out_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    install(monkeypatch, failing(error))
    assert cli.main(["run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"error: memory ran out while starting ({error}); raise ulimit -v, or free some memory"
    install(monkeypatch, failing(ImportError("No module named 'torch'")))
    with pytest.raises(ImportError, match="torch"):
        cli.main(["run"])


@pytest.mark.parametrize("how", ["flag", "environment"])
def test_debugging_shows_the_traceback(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    install(monkeypatch, failing(MemoryPlanError("x")))
    monkeypatch.setattr(cli, "setup_logging", lambda level: None)
    if how == "environment":
        monkeypatch.setenv("QUIRE_LOG_LEVEL", "debug")
    with pytest.raises(MemoryPlanError):
        cli.main(["run", "--debug"] if how == "flag" else ["run"])


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install(monkeypatch, failing(KeyboardInterrupt()))
    assert cli.main(["run"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("arguments", [[], ["fly"], ["run", "--no-such-flag"], ["run", "--top-k", "many"]])
def test_usage_errors_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main(arguments)
    assert exit_info.value.code == 2
    assert "error:" in capsys.readouterr().err.splitlines()[-1]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"quire {quire.__version__}\n"


# Commands that take no settings of an engine, and what their help has instead.
OWN_FLAGS = {"bench": "KIND", "ctl": "--admin", "explain": "DUMP", "plan": "--machine", "replay": "--minimize"}


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_explains_its_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        cli.main([name, "--help"])
    assert exit_info.value.code == 0
    help_text = capsys.readouterr().out
    assert cli.COMMANDS[name][1:] in " ".join(help_text.split())
    assert OWN_FLAGS.get(name, "MODEL" if "MODEL" in help_text else "--debug") in help_text


@pytest.mark.parametrize("name", ["run", "chat", "serve"])
def test_help_explains_ten_flags_and_says_where_the_others_are(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def help_text(flag: str) -> str:
        with pytest.raises(SystemExit) as exit_info:
            cli.main([name, flag])
        assert exit_info.value.code == 0
        return capsys.readouterr().out

    def flags(text: str) -> set[str]:
        return {line.split()[0] for line in text.splitlines() if line.startswith("  --")}

    short, whole = help_text("--help"), help_text("--help-all")
    assert len(flags(short)) == 10
    assert flags(short) < flags(whole)
    assert "--enforce-eager" in whole or "--block-size" in whole
    assert f"`quire {name} --help-all` explains all" in short


LONG = ["embed", "fit", "quantize", "verify", *(f"bench {kind}" for kind in ("latency", "steps", "throughput"))]


@pytest.mark.parametrize("name", LONG)
def test_help_is_short_where_flags_are_many(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main([*name.split(), flag])
        texts.append(capsys.readouterr().out)
    assert texts[0].count("\n") < 90 < texts[1].count("\n")
    assert f"`quire {name} --help-all` explains all" in texts[0]
    assert "--max-model-len" in texts[0]
    assert "--block-size" in texts[1]


def test_commands_are_listed_by_task(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    for task, commands in cli.TASKS.items():
        assert out.index(f"{task}:") < min(out.index(f"\n  {name} ") for name in commands)


@pytest.mark.parametrize(
    ("words", "hint"),
    [(["sevre"], "did you mean serve?"), (["serve", "--dtype", "float61"], "did you mean float16?")],
)
def test_a_wrong_choice_gets_a_suggestion(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(words)
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from quire.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: quire" in done.stdout


def test_a_closed_pipe_is_no_traceback() -> None:
    code = (
        "import sys; from types import SimpleNamespace; from quire.cli import main as cli\n"
        "def run(args):\n    while True: print('word ' * 1000)\n"
        "cli.load_command = lambda name: SimpleNamespace(add_arguments=lambda parser: None, run=run)\n"
        "sys.exit(cli.main(['run']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_one_line_and_no_traceback() -> None:
    code = (
        "import sys; from types import SimpleNamespace; from quire.cli import main as cli\n"
        "command = SimpleNamespace(add_arguments=lambda parser: None, run=lambda args: print('word ' * 10000) or 0)\n"
        "cli.load_command = lambda name: command\n"
        "sys.exit(cli.main(['run']))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: the output cannot be written: No space left on device; free some space")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR]
)
def test_a_path_that_cannot_be_used_is_one_line_and_no_traceback(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, failing(OSError(number, os.strerror(number), "models/vectors.npy")))
    assert cli.main(["run"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: models/vectors.npy cannot be used: {os.strerror(number)}; ")
    with pytest.raises(OSError, match="vectors"):
        cli.main(["run", "--debug"])
