"""Control messages: what a client has the engine do beside its requests. Each has an id and gets a reply or an error.

A verb is a line in VERBS. Imports no torch: the frontend's side is here, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from quire.types.errors import EngineDeadError, EngineError, QuireError
from quire.types.messages import Command, Reply
from quire.types.structured import Vocabulary
from quire.utils.log import get_logger
from quire.utils.registry import Registry

if TYPE_CHECKING:
    from quire.engine.core import EngineCore

logger = get_logger(__name__)

REPLY_LIMIT = 60.0  # seconds; the engine looks at its messages between two steps


@dataclass(frozen=True)
class Verb:
    """Something that the engine does, between two steps, on command. `run` must not block for long."""

    run: Callable[[EngineCore, Any], Any]
    argument: Any = None  # types, as msgspec takes them
    result: Any = None


RESET_PREFIX_CACHE = Verb(lambda core, _: core.scheduler.reset_prefix_cache())
"""Forget all cached blocks that nobody uses."""

WATCH_CACHE = Verb(lambda core, _: core.watch_cache())
"""Tell with the outputs, from now on, which blocks are cached and evicted."""

SET_VOCABULARY = Verb(lambda core, vocabulary: core.constraints.set_vocabulary(vocabulary), Vocabulary)
"""Say what the tokens stand for; comes before the first request with a grammar."""

CAPTURE_NEXT = Verb(lambda core, _: core.capture_next(), None, bool)
"""Capture a CUDA graph, or kernel list, that later steps will need; False if there is none, or there is work."""

VERBS: Registry[Verb] = Registry(
    "control verb",
    "quire.engine",
    {
        "reset_prefix_cache": "control:RESET_PREFIX_CACHE",
        "watch_cache": "control:WATCH_CACHE",
        "set_vocabulary": "control:SET_VOCABULARY",
        "capture_next": "control:CAPTURE_NEXT",
        "console": "recorder:CONSOLE",
        "read_adapter": "adapters:READ_ADAPTER",
        "forget_adapter": "adapters:FORGET_ADAPTER",
        "state": "hold_verbs:STATE",
        "pause": "hold_verbs:PAUSE",
        "sleep": "hold_verbs:SLEEP",
        "wake": "hold_verbs:WAKE",
        "update_weights": "hold_verbs:UPDATE_WEIGHTS",
        "set_limits": "hold_verbs:SET_LIMITS",
        "set_log_level": "hold_verbs:SET_LOG_LEVEL",
    },
)


def obey(core: EngineCore, command: Command) -> Reply:
    """Do what a command says. Whatever goes wrong is in the reply, unless the engine cannot go on."""
    try:
        verb = VERBS.get(command.verb)
        return Reply(command.id, verb.run(core, msgspec.convert(command.argument, verb.argument)))
    except EngineDeadError:
        raise
    except (QuireError, msgspec.ValidationError) as error:
        return Reply(command.id, error=str(error))
    except Exception as error:  # a bug in a verb is its caller's error, and ends nobody else
        logger.error("control verb %r failed", command.verb, exc_info=error)
        return Reply(command.id, error=repr(error))


class Calls:
    """Commands whose replies have not come yet. `settle` and `fail_all` may be called from another thread."""

    def __init__(self) -> None:
        self._ids = count()
        self._waiting: dict[int, tuple[str, Future[Any]]] = {}
        self._end: EngineError | None = None

    def open(self, verb: str, argument: object) -> tuple[Command, Future[Any]]:
        """A command to send, and what will have the result of its verb, or an EngineError."""
        command = Command(next(self._ids), verb, argument)
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # whoever stops waiting cannot cancel it under the other thread
        self._waiting[command.id] = (verb, future)
        if self._end is not None:
            self.fail_all(self._end)
        return command, future

    def close(self, command: Command) -> None:
        """Nobody waits for its reply any more."""
        self._waiting.pop(command.id, None)

    async def wait_async(self, command: Command, future: Future[Any], limit: float | None) -> Any:
        """The result of a command that was sent; EngineError after `limit` seconds without it."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), limit)
        except TimeoutError:
            raise no_reply(command.verb, limit) from None
        finally:
            self.close(command)

    def settle(self, reply: Reply) -> None:
        verb, future = self._waiting.pop(reply.id, (None, None))
        if verb is None or future is None:
            return
        if reply.error is not None:
            future.set_exception(EngineError(f"the engine refused {verb!r}: {reply.error}"))
            return
        future.set_result(msgspec.convert(reply.value, VERBS.get(verb).result))

    def fail_all(self, error: EngineError) -> None:
        """The engine is gone: no more replies will come, nor to calls that are made from now on."""
        self._end = error
        while self._waiting:
            _, (_, future) = self._waiting.popitem()
            future.set_exception(type(error)(str(error)))


def no_reply(verb: str, limit: float | None) -> EngineError:
    return EngineError(f"the engine has not answered {verb!r} within {limit} s; it may be busy with a long step")
