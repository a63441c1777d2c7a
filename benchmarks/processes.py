"""What a process has used, read from /proc; Linux only."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """CPU time that the process has used in all its threads."""
    return (int(_stat(pid)[11]) + int(_stat(pid)[12])) / _TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def children(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int(_stat(int(folder.name))[1])
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            if parent == pid:
                found.append(int(folder.name))
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on; the second may hold blanks."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
