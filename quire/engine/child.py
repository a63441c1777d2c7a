"""EngineChild: the parent's hand on an engine process. Launches it, passes its log on, notices its end, stops it.

Knows processes, not messages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from quire.config.env import child_environment, import_path
from quire.utils.log import get_logger

logger = get_logger(__name__)

# -P: whatever lies in the current folder is not imported.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "quire.engine.process")

TICK = 0.5  # seconds between two looks at a process's heartbeats
BEAT_EVERY = 0.2  # seconds
_LAST_LINES = 20
_LOG_GRACE = 0.5  # seconds to read what a dead process has left in its pipe, should others hold it open

TakeLine = Callable[[str], None]


def print_line(line: str) -> None:
    """The log of an engine joins this process's own."""
    sys.stderr.write(line)
    sys.stderr.flush()


def processor_ticks(pid: int) -> int:
    """The processor time that a process has used, in ticks of the system; 0 where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


class EngineChild:
    """One engine process. `exit_fd` becomes readable when it is dead and its log has been read."""

    def __init__(
        self,
        command: Sequence[str] = ENGINE_COMMAND,
        take_line: TakeLine = print_line,
        environment: Mapping[str, str] | None = None,
        who: str = "engine process",
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Launch it; it waits for its order. Its stdin stays open as long as this process lives.

        `environment` is added to this process's; `who` it is in words, and which files it gets beside its pipes.
        """
        self._who = who
        self._take_line = take_line
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._exited = threading.Event()
        self._beats, self.beat_fd = os.pipe()
        os.set_blocking(self._beats, False)
        self._still_for = -1  # ticks since its last sign of life; -1: it has not begun
        self._used = 0  # processor time at the last tick
        self._process = self._launch(command, environment or {}, [self.beat_fd, *pass_fds])
        self.exit_fd, self._exit_signal = os.pipe()
        self._log_reader = threading.Thread(target=self._read_log, name="quire-engine-log", daemon=True)
        self._log_reader.start()
        threading.Thread(target=self._wait, name="quire-engine-wait", daemon=True).start()

    def _launch(self, command: Sequence[str], changes: Mapping[str, str], fds: list[int]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=fds,
                env=child_environment(**import_path(), **changes),
            )
        except OSError:
            os.close(self._beats)
            raise
        finally:
            os.close(self.beat_fd)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        return self._process.returncode if self._exited.is_set() else None

    def give_order(self, order: bytes) -> None:
        """Hand it the one line that it reads from its stdin."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(order + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            logger.debug("the %s %d died before it read its order", self._who, self.pid)

    def cause_of_death(self) -> str:
        """How it ended, and the last thing it said."""
        code = self.returncode
        assert code is not None, "it lives"
        if code == -signal.SIGKILL:  # it had no time for last words
            return f"the {self._who} {self.pid} was killed by SIGKILL: by hand, or because memory ran out"
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"exited with status {code}"
        said = next((line for line in reversed(self._last_lines) if line), None)
        return f"the {self._who} {self.pid} {how}" + (f"; its last line was: {said}" if said else "")

    def stands_still(self, limit: int) -> bool:
        """Once a tick: whether it has neither beaten nor used a processor for `limit` ticks.

        One that has not begun is not judged. One that computes without heartbeats, since a library holds Python's
        lock, does not stand still. Ticks are counted, not seconds: when the machine stood still, so did we.
        """
        used, before = processor_ticks(self.pid), self._used
        self._used = used
        try:
            self._still_for = 0 if os.read(self._beats, 1 << 16) else self._still_for
        except BlockingIOError:
            if self._still_for >= 0:
                self._still_for = self._still_for + 1 if used == before else 0
        return self._still_for >= limit

    def dump_stacks(self) -> None:
        """Ask it to write where all its threads are to its log."""
        self._process.send_signal(signal.SIGUSR1)

    def stop(self, grace: float) -> None:
        """Ask it to leave by closing its stdin, and kill it after `grace` seconds. Blocks; may be called twice."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self._exited.wait(grace):
            logger.warning("the %s %d did not leave within %g s; killing it", self._who, self.pid, grace)
            self._process.kill()
            self._exited.wait()

    def order_kill(self) -> None:
        """End it at once, also where it stands still; does not wait until it is gone."""
        self._process.kill()

    def kill(self) -> None:
        """End it at once. Blocks until it is gone; may be called twice."""
        assert self._process.stdin is not None
        self.order_kill()
        self._exited.wait()
        self._process.stdin.close()

    def close(self) -> None:
        """Give back what it was watched by, once nobody waits on it."""
        assert self._exited.is_set()
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
            os.close(self._beats)
            self.exit_fd = -1

    def _read_log(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as log:
            for raw in log:
                line = raw.decode(errors="replace")
                self._last_lines.append(line.strip())
                self._take_line(line)

    def _wait(self) -> None:
        self._process.wait()
        self._log_reader.join(_LOG_GRACE)
        self._exited.set()
        os.close(self._exit_signal)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
