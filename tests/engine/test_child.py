"""The parent's hand on a process: its order, its log, its end."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence

import pytest

from quire.engine.child import ENGINE_COMMAND, EngineChild, TakeLine, print_line

STUBBORN = "import signal, sys, time\nprint('up', flush=True)\nwhile True: signal.pause()"


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def launch(order: bytes, command: Sequence[str], take_line: TakeLine = print_line) -> EngineChild:
    child = EngineChild(command, take_line)
    child.give_order(order)
    return child


def wait_exit(child: EngineChild) -> None:
    assert select.select([child.exit_fd], [], [], 20)[0]


def test_it_gets_its_order_and_its_lines_are_passed_on() -> None:
    lines: list[str] = []
    code = "import sys; print(sys.stdin.readline().strip().upper()); sys.stderr.write('\\n'); sys.exit(5)"
    child = launch(b"order", python(code), lines.append)
    wait_exit(child)
    assert "".join(lines) == "ORDER\n\n"
    assert child.returncode == 5
    assert child.cause_of_death() == f"the engine process {child.pid} exited with status 5; its last line was: ORDER"
    child.stop(1.0)
    child.close()


def test_closing_its_stdin_asks_it_to_leave() -> None:
    child = launch(b"", python("import sys; sys.stdin.read()"))
    assert child.returncode is None
    child.stop(20.0)
    assert child.returncode == 0
    child.close()
    child.close()


@pytest.mark.parametrize("work", ["pass", "time.sleep(0.1)"])
def test_one_that_computes_without_heartbeats_does_not_stand_still(work: str) -> None:
    """As one that holds Python's lock in a library; one that sleeps and gives none does."""
    code = f"import os, sys, time\nos.write(int(sys.stdin.readline()), b'0')\nwhile True: {work}"
    child = EngineChild(python(code))
    child.give_order(str(child.beat_fd).encode())
    assert select.select([child._beats], [], [], 20)[0]
    found = [child.stands_still(4) for _ in range(12) if not time.sleep(0.1)]
    assert any(found) == (work != "pass")
    child.kill()
    child.close()


def test_one_that_does_not_leave_is_killed(caplog: pytest.LogCaptureFixture) -> None:
    child = launch(b"", python(STUBBORN), lambda line: None)
    child.stop(0.05)
    assert child.returncode == -signal.SIGKILL
    assert "did not leave" in caplog.text
    assert "was killed by SIGKILL" in child.cause_of_death()
    child.close()


def test_one_that_dies_before_it_reads_its_order_is_a_death_like_any_other() -> None:
    child = launch(b"x" * 1_000_000, python("import sys; sys.exit('no')"), lambda line: None)
    wait_exit(child)
    assert child.cause_of_death().endswith("exited with status 1; its last line was: no")
    child.stop(1.0)
    child.close()


def test_the_end_is_noticed_though_others_hold_its_output_open() -> None:
    code = "import os, sys, time\nif os.fork() == 0: sys.stdin.read()\nelse: os.kill(os.getpid(), 9)"
    child = launch(b"", python(code), lambda line: None)
    wait_exit(child)
    assert child.returncode == -signal.SIGKILL
    child.stop(1.0)  # closes the stdin that the other one waits for
    child.close()


def test_the_engine_finds_this_quire_and_imports_nothing_from_the_current_folder(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("msgspec.py", "w") as file:
        file.write("raise SystemExit('imported from the current folder')")
    lines: list[str] = []
    command = (*ENGINE_COMMAND[:-2], "-c", "import msgspec, quire; print(quire.__file__)")
    child = launch(b"", command, lines.append)
    wait_exit(child)
    import quire

    assert lines == [f"{os.path.abspath(quire.__file__)}\n"]
    child.stop(1.0)
    child.close()
