"""`quire doctor`: looks at what Quire needs of this machine, and says what to do about what is wrong."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import quire
from quire.config import env
from quire.config.groups import ServerConfig
from quire.loader.local import models_folder
from quire.server.state import running_servers
from quire.types.errors import QuireError
from quire.utils.units import format_bytes

Verdict = Literal["ok", "note", "bad"]

_LITTLE_MEMORY = 2 << 30
_LITTLE_DISK = 2 << 30
_FEW_FILES = 1024
_GPU_DRIVER = ("nvidia-smi", "/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Finding:
    """What was found about one thing. What is `bad` keeps Quire from working, a `note` makes it slower or smaller."""

    verdict: Verdict
    about: str
    text: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.add_argument(
        "--port", type=int, default=ServerConfig.port, help=f"port to look at. Default: {ServerConfig.port}."
    )


def run(args: argparse.Namespace) -> int:
    findings = examine(args.port)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{finding.verdict:<5} {finding.about:<10} {finding.text}")
            if finding.fix:
                print(f"{'':<17}-> {finding.fix}")
    return 1 if any(finding.verdict == "bad" for finding in findings) else 0


def examine(port: int) -> list[Finding]:
    """All findings. A check that fails itself is a finding too."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("versions", check_versions),
        ("CPU", check_cpu),
        ("compiler", check_compiler),
        ("GPU", check_gpu),
        ("memory", check_memory),
        ("disk", check_disk),
        ("limits", check_limits),
        ("port", lambda: check_port(port)),
    ]
    findings: list[Finding] = []
    for about, check in checks:
        try:
            findings += check()
        except (OSError, ImportError, QuireError) as error:
            findings.append(Finding("bad", about, f"cannot be checked: {error}", "install Quire anew"))
    return findings


def check_versions() -> Iterator[Finding]:
    text = f"quire {quire.__version__}, Python {platform.python_version()}, PyTorch {version('torch')}"
    yield Finding("ok", "versions", text)


def check_cpu() -> Iterator[Finding]:
    from quire.kernels.cpu import build, library

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    name = build.library_name()
    built = [path for path in (library.INSTALLED / name, env.cache_dir() / "native" / name) if path.exists()]
    if not built:
        fix = "nothing: the first start compiles them, which takes a minute, if there is a compiler"
        yield Finding("note", "CPU", f"{usable} cores; the kernels are not compiled yet", fix)
        return
    loaded = library.load()
    if loaded is None:
        fix = f"delete {built[0]}: the next start compiles it again"
        yield Finding("note", "CPU", f"{usable} cores; the kernels cannot be loaded, PyTorch does the work", fix)
        return
    best, used = loaded.instruction_sets[0], loaded.instruction_set
    text = f"{usable} cores, kernels for {used} (this processor runs {', '.join(loaded.instruction_sets)})"
    if used != best:
        yield Finding("note", "CPU", text, f"unset QUIRE_CPU_ISA, or set it to {best}")
    else:
        yield Finding("ok", "CPU", text)


def check_compiler() -> Iterator[Finding]:
    from quire.kernels.cpu.build import BuildError, find_compiler

    try:
        yield Finding("ok", "compiler", find_compiler())
    except BuildError as error:
        fix = "install g++ or clang (Debian: apt install g++), if kernels are not compiled yet"
        yield Finding("note", "compiler", str(error), fix)


def check_gpu() -> Iterator[Finding]:
    from quire.platform.registry import gpu_names, torch_knows_gpus

    names = gpu_names()
    if names:
        for name in names:
            yield Finding("ok", "GPU", name)
        return
    has_driver = shutil.which(_GPU_DRIVER[0]) is not None or Path(_GPU_DRIVER[1]).exists()
    if has_driver and not torch_knows_gpus():
        fix = "install the PyTorch for GPUs: pip install torch --index-url https://download.pytorch.org/whl/cu130"
        yield Finding("note", "GPU", "there is a driver, but this PyTorch was built for CPUs", fix)
    elif has_driver:
        yield Finding("note", "GPU", "there is a driver, but PyTorch sees no GPU", "look at nvidia-smi: is it newer?")
    else:
        yield Finding("ok", "GPU", "none: models run on the CPU")


def check_memory() -> Iterator[Finding]:
    from quire.platform.limits import available_memory, machine_memory

    supply = available_memory()
    text = f"{format_bytes(supply.num_bytes)} of {format_bytes(machine_memory())} can be used ({supply.bound})"
    if supply.num_bytes < _LITTLE_MEMORY:
        yield Finding("note", "memory", text, f"{supply.more}; `quire fit MODEL` says what a model needs")
    else:
        yield Finding("ok", "memory", text)


def check_disk() -> Iterator[Finding]:
    folder = models_folder()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    text = f"{format_bytes(free)} free for models in {folder}"
    if not os.access(existing, os.W_OK):
        yield Finding("bad", "disk", f"{existing} cannot be written to", "set QUIRE_CACHE to a folder that can")
    elif free < _LITTLE_DISK:
        yield Finding("note", "disk", text, "free some, or set QUIRE_CACHE to a folder on another disk")
    else:
        yield Finding("ok", "disk", text)


def check_limits() -> Iterator[Finding]:
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _FEW_FILES:
        text = f"{files} open files: each connection of a server is one"
        yield Finding("note", "limits", text, f"ulimit -n {_FEW_FILES * 4}")
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if addresses != resource.RLIM_INFINITY:
        text = f"ulimit -v allows {format_bytes(addresses)} of addresses, which models take much of"
        yield Finding("note", "limits", text, "ulimit -v unlimited")
    if addresses == resource.RLIM_INFINITY and not (files != resource.RLIM_INFINITY and files < _FEW_FILES):
        yield Finding("ok", "limits", "open files and addresses are enough")


def check_port(port: int) -> Iterator[Finding]:
    own = [state for state in running_servers() if state.address.endswith(f":{port}")]
    if own:
        yield Finding("ok", "port", f"{port} serves {', '.join(own[0].models)} (pid {own[0].pid})")
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ServerConfig.host, port))
        except OSError as error:
            fix = f"serve with another one: quire serve --port {port + 1 if port < 65535 else 8000}"
            yield Finding("note", "port", f"{port} cannot be used: {error.strerror}", fix)
            return
    yield Finding("ok", "port", f"{port} is free")
