"""A standby engine: a second process with the model loaded, idle until the engine dies. Then it serves at once.

Its memory for KV blocks is taken when it computes, so that before it takes over it holds weights and workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.config.engine import EngineConfig
from quire.engine.spare import NoSpare
from quire.engine.zmq_client import ZmqClient
from quire.utils.log import get_logger

logger = get_logger(__name__)


def standby_config(config: EngineConfig) -> EngineConfig:
    """What a standby is launched with: it plans for no other standby, and leaves no memory to one."""
    return replace(config, device=replace(config.device, standby=False))


class StandbyEngine(NoSpare):
    """At most one. It is taken with its client."""

    starts_at_once = True

    def __init__(self, launch: Callable[[], ZmqClient]) -> None:
        self._launch = launch
        self._client: ZmqClient | None = None

    @property
    def pid(self) -> int | None:
        return None if self._client is None else self._client.pid

    def start(self) -> None:
        """Launch one, unless one lives. Does not wait until it is loaded."""
        if self._client is not None and self._client.lives:
            return
        self.stop()
        try:
            self._client = self._launch()
        except OSError as error:
            logger.warning("no standby engine can be launched: %s; a restart will take longer", error)
            return
        logger.info("engine process %d loads the model to stand by", self._client.pid)

    def take_client(self) -> ZmqClient | None:
        """Hand over the one there is, if it lives; it may still be loading."""
        client, self._client = self._client, None
        if client is None or client.lives:
            return client
        logger.warning("the standby engine was of no use: process %d is gone", client.pid)
        client.shutdown()
        return None

    def stop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.shutdown()
