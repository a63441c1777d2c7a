"""`--parallel auto`: settings with the sizes that suit this machine, found in a process of its own."""

from __future__ import annotations

import msgspec

from quire.config.engine import EngineConfig
from quire.config.topology import Topology
from quire.engine.footprint import planned_by
from quire.types.errors import ConfigError, MemoryPlanError
from quire.utils.log import get_logger

logger = get_logger(__name__)


class TopologyOrder(msgspec.Struct, frozen=True):
    config: EngineConfig
    most_replicas: int | None


class TopologyAnswer(msgspec.Struct, frozen=True):
    topology: Topology | None = None
    error: str = ""  # why there is none
    is_memory: bool = False  # it does not fit


def with_topology(config: EngineConfig, *, most_replicas: int | None = None) -> EngineConfig:
    """The settings with sizes for this machine, if they are to be chosen. Blocks while a process plans."""
    if config.parallel.parallel != "auto":
        return config
    said = planned_by("quire.cli.topology", TopologyOrder(config, most_replicas))
    answer = msgspec.json.decode(said, type=TopologyAnswer)
    if answer.topology is None:
        raise (MemoryPlanError if answer.is_memory else ConfigError)(answer.error)
    found = answer.topology
    logger.info("parallel auto chose %s: %s", found, found.reason)
    return config.with_sizes(found.tensor, found.stages, found.replicas)
