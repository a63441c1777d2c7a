"""Admin verbs: what an operator may have a running server do. A verb is a line in VERBS, with its access rule."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from quire.utils.registry import Registry

Access = Literal["reads", "changes"]


class Controlled(Protocol):
    """What verbs act on: the server's supervisor."""

    @property
    def num_restarts(self) -> int: ...

    @property
    def engine_pid(self) -> int | None: ...

    def health(self) -> Any: ...

    async def restart_engine(self) -> int:
        """Replace the engine by a new process; open requests go on in it. Returns its pid."""
        ...


@dataclass(frozen=True)
class AdminVerb:
    """`run` may take long. Nothing has a default, so that a new verb has to say who may use it and what it takes."""

    summary: str
    access: Access
    """`reads`: GET or POST; `changes`: POST only. Both need the admin key where there is one."""
    argument: Any
    """The type of its JSON body; None: it takes none."""
    run: Callable[[Controlled, Any], Awaitable[Any]]


class EngineStatus(msgspec.Struct):
    status: str
    detail: str
    pid: int | None
    num_restarts: int
    num_requests: int


async def _status(server: Controlled, argument: None) -> EngineStatus:
    health = server.health()
    return EngineStatus(health.status, health.detail, server.engine_pid, server.num_restarts, health.num_requests)


async def _restart_engine(server: Controlled, argument: None) -> dict[str, Any]:
    before = server.engine_pid
    return {"old_pid": before, "new_pid": await server.restart_engine()}


STATUS = AdminVerb("how the engine is", "reads", None, _status)
RESTART_ENGINE = AdminVerb(
    "replace the engine process; open streams pause and go on", "changes", None, _restart_engine
)

VERBS: Registry[AdminVerb] = Registry(
    "admin verb",
    "quire.server.control",
    {
        "status": "verbs:STATUS",
        "restart-engine": "verbs:RESTART_ENGINE",
    },
)
