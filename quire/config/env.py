"""The only reader of os.environ."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path


def cache_dir() -> Path:
    """Where downloaded models and probe results are kept: QUIRE_CACHE, else the user's cache folder."""
    explicit = os.environ.get("QUIRE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "quire"


def log_level(default: str = "info") -> str:
    """QUIRE_LOG_LEVEL: debug, info, warning or error. Unset: info, and warning for commands that print a text."""
    return os.environ.get("QUIRE_LOG_LEVEL", default).upper()


def debug_checks() -> bool:
    """QUIRE_DEBUG=1 runs integrity checks when the engine is idle."""
    return os.environ.get("QUIRE_DEBUG", "") not in ("", "0")


def cpu_instruction_set() -> str | None:
    """QUIRE_CPU_ISA: the CPU kernels to use, such as avx2. Unset: the best that the processor runs."""
    return os.environ.get("QUIRE_CPU_ISA") or None


def use_cpu_instruction_set(name: str) -> None:
    """Choose the CPU kernels of an engine that this process has not built yet."""
    os.environ["QUIRE_CPU_ISA"] = name


def cpu_sanitizers() -> bool:
    """QUIRE_CPU_SANITIZE=1 uses CPU kernels that check every memory access; tools/sanitize.py starts such a run."""
    return os.environ.get("QUIRE_CPU_SANITIZE", "") not in ("", "0")


def api_keys() -> tuple[str, ...]:
    """QUIRE_API_KEY: API keys of `quire serve`, separated by commas, besides those of its flags."""
    return tuple(key.strip() for key in os.environ.get("QUIRE_API_KEY", "").split(",") if key.strip())


def admin_keys() -> tuple[str, ...]:
    """QUIRE_ADMIN_KEY: keys of the admin surface, separated by commas, besides those of --admin-key-file."""
    return tuple(key.strip() for key in os.environ.get("QUIRE_ADMIN_KEY", "").split(",") if key.strip())


def hosts_secret() -> str:
    """QUIRE_HOSTS_SECRET: what an engine and workers on other hosts share, where no file is given."""
    return os.environ.get("QUIRE_HOSTS_SECRET", "").strip()


def prepare_ray() -> None:
    """Before Quire starts or joins Ray: RAY_USAGE_STATS_ENABLED is 0 unless the user has set it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def replica_links() -> list[int]:
    """QUIRE_REPLICA_LINKS: by which replicas that share experts find each other; set by `quire serve`, not by you."""
    return [int(number) for number in os.environ.get("QUIRE_REPLICA_LINKS", "").split(",") if number]


def links_environment(rank: int, links: Sequence[int]) -> dict[str, str]:
    """What `replica_links` reads: the rank of a replica, and descriptors."""
    return {"QUIRE_REPLICA_LINKS": ",".join(map(str, [rank, *links] if links else []))}


def system_date() -> str | None:
    """QUIRE_SYSTEM_DATE: what --system-date is when it is not set."""
    return os.environ.get("QUIRE_SYSTEM_DATE") or None


def child_environment(**changes: str) -> dict[str, str]:
    """This process's environment with some values replaced, for a program that Quire starts."""
    return {**os.environ, **changes}


def import_path() -> dict[str, str]:
    """Let a program that Quire starts import this Quire, where it is not installed for all."""
    root = Path(__file__).parents[2]
    if root.name in ("site-packages", "dist-packages"):
        return {}
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": str(root) if before is None else os.pathsep.join([str(root), before])}


# What a rank on another node needs of its engine's environment to behave alike. Secrets are not among them: they
# would be seen in the list of processes, and a rank needs none but the one in its order.
_RANK_VARIABLES = (
    *("QUIRE_CACHE", "QUIRE_CPU_ISA", "QUIRE_DEBUG", "QUIRE_LOG_LEVEL"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME"),
    *("TRITON_CACHE_DIR", "NCCL_DEBUG", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA"),
)


def rank_environment() -> dict[str, str]:
    """What a rank that is started on any node gets of this process's environment."""
    return {name: os.environ[name] for name in _RANK_VARIABLES if name in os.environ} | import_path()


def visible_devices() -> list[str]:
    """CUDA_VISIBLE_DEVICES: the GPUs that may be used, in order; empty if it is not set."""
    return [device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
