"""Control verbs of operators: pause, sleep, other weights, limits, the log's level. Imports no torch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from quire.engine.control import Verb
from quire.types.control import EngineState, LiveLimits, WeightsUpdate
from quire.types.errors import ConfigError
from quire.utils.log import LEVELS, ROOT_NAME

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


def _set_limits(core: EngineCore, limits: LiveLimits) -> EngineState:
    core.scheduler.set_limits(limits)
    return core.hold.state()


def _set_log_level(core: EngineCore, level: str) -> None:
    set_level(level)


def set_level(level: str) -> None:
    """Of this process's log, from now on."""
    if level.upper() not in LEVELS:
        raise ConfigError(f"the log level is {level!r} but must be one of {', '.join(LEVELS)}")
    logging.getLogger(ROOT_NAME).setLevel(level.upper())


def _state(core: EngineCore, argument: None) -> EngineState:
    core.hold.advance()
    return core.hold.state()


STATE = Verb(_state, None, EngineState)
"""What the operator has made of the engine."""
PAUSE = Verb(lambda core, is_paused: core.hold.pause(is_paused), bool)
"""Plan no more steps, or go on."""
SLEEP = Verb(lambda core, level: core.hold.sleep(level), int)
"""Begin to give memory back; STATE says when it has ended, as for the next two."""
WAKE = Verb(lambda core, _: core.hold.wake())
UPDATE_WEIGHTS = Verb(lambda core, wanted: core.hold.update(wanted), WeightsUpdate)
SET_LIMITS = Verb(_set_limits, LiveLimits, EngineState)
SET_LOG_LEVEL = Verb(_set_log_level, str)
