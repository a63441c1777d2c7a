"""When an engine that is silent counts as stalled: it is asked for its stacks, and given up a little later."""

from __future__ import annotations

from collections.abc import Callable

from quire.types.errors import EngineDeadError
from quire.utils.log import get_logger

logger = get_logger(__name__)

STALL_TIMEOUT = 120.0  # seconds without a finished step, while requests wait
LOOK_INTERVAL = 1.0  # seconds between two looks at the engine's progress
STACKS_GRACE = 5.0  # seconds for a stalled engine to write its stacks, before it is replaced
CHANGE_PATIENCE = 10.0  # weights are read and moved: sleep, wake and new weights may be silent for longer than a step
START_PATIENCE = 5.0  # and so may a start: kernels are built, files read
_LEAST_PATIENCE = 3.0  # seconds: before it has imported anything a process cannot say where it hangs


def start_limit(stall_timeout: float, patience: float = START_PATIENCE) -> float:
    """Seconds that a start may say nothing."""
    return max(_LEAST_PATIENCE, patience * stall_timeout)


class StallWatch:
    """Looks at one engine again and again; it is asked for its stacks once per stall."""

    def __init__(self, dump_stacks: Callable[[], None], grace: float | None = None) -> None:
        self._dump_stacks = dump_stacks
        self._grace = STACKS_GRACE if grace is None else grace
        self._has_dumped = False

    def look(self, silent: float, limit: float, what: str) -> None:
        """EngineDeadError once it has been silent for longer than `limit` seconds and has had time for its stacks."""
        if silent <= limit:
            self._has_dumped = False
            return
        if not self._has_dumped:
            logger.error("the engine stalls: %s for %.0f s; asking for its stacks", what, silent)
            self._dump_stacks()
            self._has_dumped = True
        if silent > limit + self._grace:
            raise EngineDeadError(f"the engine stalled: {what} for {silent:.0f} s")
