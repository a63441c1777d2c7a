"""What every benchmark writes beside its numbers: commit, machine, versions and the exact command."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quire.types.errors import ConfigError


def environment(*packages: str, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """Where and how this process runs; `secrets` are arguments that must not be written down."""
    commit = _git("rev-parse", "HEAD") if _git("ls-files", Path(__file__).name) else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit,
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None,
        "machine": {"cpu": _cpu_name(), "cores": os.cpu_count(), "system": platform.platform()},
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "command": _command(secrets),
    }


def check_writable(flag: str, path: Path) -> None:
    """Refuse, before anything is measured, a path at which nothing could be written afterwards."""
    found = next(part for part in (path.absolute(), *path.absolute().parents) if part.exists())
    if found != path.absolute() and not found.is_dir():
        raise ConfigError(f"{flag} is {str(path)!r}, but {found} is not a folder; name another path")
    if not os.access(found, os.W_OK):
        raise ConfigError(f"{flag} is {str(path)!r}, but {found} cannot be written to; name another path")


def write_report(path: Path, environment: dict[str, Any], results: Any, **more: Any) -> Path:
    """Write the JSON file, whole or not at all, so that a file that exists is a finished one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"environment": environment, **more, "results": results}, indent=2) + "\n"
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
    return path


def _command(secrets: Sequence[str]) -> str:
    program = Path(sys.argv[0])
    start = ["quire"] if program.name in ("quire", "__main__.py") else ["python", os.path.relpath(program)]
    arguments = [_hide(argument, secrets) for argument in sys.argv[1:]]
    return shlex.join([*start, *arguments])


def _hide(argument: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        argument = argument.replace(secret, "***") if secret else argument
    return argument


def _git(*arguments: str) -> str:
    """Asked where this file lies: an installed copy inside somebody else's repository has no commit of its own."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
