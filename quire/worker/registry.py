"""Executors by name. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.utils.registry import Registry

if TYPE_CHECKING:
    from quire.config.engine import EngineConfig
    from quire.utils.phases import ReportPhase
    from quire.worker.executor import Executor

MakeExecutor = Callable[["EngineConfig", "ReportPhase"], "Executor"]
"""Takes all that the engine will need; the second argument is called with each phase of the work as it begins."""

DEFAULT_EXECUTOR = "inproc"
EXECUTORS: Registry[MakeExecutor] = Registry(
    "executor",
    "quire.worker",
    {
        "inproc": "inproc:make_inproc_executor",
        "replica": "replica:ReplicaExecutor",
        "multiproc": "multiproc:MultiProcExecutor",
        "hosts": "hosts:HostsExecutor",
        "ray": "ray_executor:RayExecutor",
    },
)


def executor_of(config: EngineConfig) -> str:
    """The name of the executor that the settings ask for."""
    name = config.parallel.executor
    if config.parallel.shares_experts:
        return "replica"
    if name != "auto":
        return name
    return "multiproc" if config.parallel.num_ranks > 1 else DEFAULT_EXECUTOR
