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
    },
)
