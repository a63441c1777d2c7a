"""Files that say which servers run on this machine, for `quire ps`, `stop` and `top`.

Nobody else may read or write them. A file counts only while the process that it names lives and began when it says:
process ids are used again.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from quire.config import env
from quire.utils.log import get_logger

logger = get_logger(__name__)

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ServerState(msgspec.Struct, frozen=True):
    """A running server."""

    pid: int
    begun: str
    """When the process began, in whatever form the system tells it."""
    address: str
    models: list[str]
    started_at: float  # seconds since 1970


def state_folder() -> Path:
    return env.cache_dir() / "servers"


@contextmanager
def announced(address: str, models: Sequence[str]) -> Iterator[None]:
    """While it lasts, other programs of this user find this process. A server does not fail where they cannot."""
    path = state_folder() / f"{os.getpid()}.json"
    state = ServerState(os.getpid(), process_begin(os.getpid()) or "", address, list(models), time.time())
    try:
        _make_private(path.parent)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(state))
    except OSError as error:
        logger.warning("`quire ps` will not show this server: %s", error)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def running_servers() -> list[ServerState]:
    """The servers of this user, the oldest first. Files that others could have written are not believed."""
    folder = state_folder()
    if not folder.is_dir() or not _is_private(folder):
        return []
    found = []
    for path in folder.glob("*.json"):
        try:
            state = msgspec.json.decode(path.read_bytes(), type=ServerState) if _is_private(path) else None
        except (OSError, msgspec.DecodeError):  # it has just ended, or is writing
            continue
        if state is None:
            continue
        if state.begun and process_begin(state.pid) == state.begun:
            found.append(state)
        else:
            path.unlink(missing_ok=True)  # left behind by a server that was killed
    return sorted(found, key=lambda state: state.started_at)


def is_running(state: ServerState) -> bool:
    return process_begin(state.pid) == state.begun


def terminate(state: ServerState) -> bool:
    """Ask the server to finish what it does and leave; False if it is not there any more."""
    try:
        # A handle on the process, where there are such: its id may be another's by the time of the signal.
        handle = os.pidfd_open(state.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        handle = None
    try:
        if not is_running(state):
            return False
        if handle is None:
            os.kill(state.pid, signal.SIGTERM)
        else:
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        return False
    finally:
        if handle is not None:
            os.close(handle)
    return True


def process_begin(pid: int) -> str | None:
    """When a process began, None if there is none, or only what is left of one."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        if _BOOT_ID.exists():
            return None
    except OSError:
        return None
    else:
        fields = text.rpartition(")")[2].split()  # the name before it may hold anything
        # Ticks count from the start of the machine.
        return None if fields[0] in "ZX" else f"{_BOOT_ID.read_text().strip()}/{fields[19]}"
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True)
    return done.stdout.strip() or None


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def _is_private(path: Path) -> bool:
    state = path.stat()
    return state.st_uid == os.getuid() and stat.S_IMODE(state.st_mode) & 0o077 == 0
