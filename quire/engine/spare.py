"""Processes that stand by, should the engine die: a spare, which has imported what an engine needs, or a standby.

A spare holds no model and waits for its order: the successor of an engine then need not wait for imports, which take
longer than loading a small model. Its stdin is its life: it ends when its parent does, however that ends. A standby
has the model loaded and serves at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.config.engine import EngineConfig
from quire.engine.child import ENGINE_COMMAND, EngineChild, TakeLine, print_line
from quire.engine.process import SPARE_FLAG
from quire.engine.zmq_client import ZmqClient
from quire.types.ledger import LedgerLine
from quire.utils.log import get_logger

logger = get_logger(__name__)

# What the ledger counts for one, in bytes; tests/engine/test_spare.py holds it to that.
SPARE_MEMORY = 300 << 20
SPARE_LINE = LedgerLine("spare engine", SPARE_MEMORY, "a process of `quire serve`, unless --no-spare-engine")


class NoSpare:
    """Every engine process is launched when it is needed."""

    starts_at_once = False
    """Whether it is launched beside a busy engine; if not, when that is idle."""

    def start(self) -> None:
        """Launch one, unless there is one. Does not wait for its imports."""

    def take(self) -> EngineChild | None:
        """Hand over the one there is, if it lives; it may still be importing."""
        return None

    def stop(self) -> None:
        """End the one there is. May be called twice."""


NO_SPARE = NoSpare()


class SpareEngine(NoSpare):
    """At most one spare at a time."""

    def __init__(self, command: Sequence[str] = ENGINE_COMMAND, take_line: TakeLine = print_line) -> None:
        self._command = (*command, SPARE_FLAG)
        self._take_line = take_line
        self._child: EngineChild | None = None

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        if self._child is not None and self._child.returncode is None:
            return
        self.stop()
        try:
            self._child = EngineChild(self._command, self._take_line)
        except OSError as error:
            logger.warning("no spare engine process can be launched: %s; a restart will take longer", error)

    def take(self) -> EngineChild | None:
        child, self._child = self._child, None
        if child is None or child.returncode is None:
            return child
        logger.warning("the spare was of no use: %s", child.cause_of_death())
        _end(child)
        return None

    def stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            _end(child)


def _end(child: EngineChild) -> None:
    """At once: it has nothing to finish, and would see that its stdin is closed only after its imports."""
    child.kill()
    child.close()


def standby_config(config: EngineConfig) -> EngineConfig:
    """What a standby is launched with: it plans for no other standby, and leaves no memory to one."""
    return replace(config, device=replace(config.device, standby=False))


class StandbyEngine(NoSpare):
    """At most one: a second process with the model loaded, idle until the engine dies. It is taken with its client.

    Its memory for KV blocks is taken when it computes, so that before it takes over it holds weights and workspace.
    """

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
