"""Admin verbs: what an operator may have a running server do. A verb is a line in VERBS, with its access rule."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from quire.loader.pushed import PushedTensor
from quire.server.adapter_loading import AdapterLoader, LoadAdapter, UnloadAdapter
from quire.server.control.operator import EngineOperator, PushedSoFar, SleepWanted
from quire.types.control import EngineState, LiveLimits, OpenRequests, WeightsUpdate
from quire.types.errors import RequestError
from quire.types.request import AdapterRef
from quire.utils.registry import Registry

Access = Literal["reads", "changes"]
MAX_BODY = 64 << 10  # bytes; arguments are names and numbers, if they are not tensors


class Supervised(Protocol):
    """The engine, as its supervisor lets verbs have it."""

    @property
    def num_restarts(self) -> int: ...

    @property
    def engine_pid(self) -> int | None: ...

    def health(self) -> Any: ...

    @property
    def num_replicas(self) -> int: ...

    async def restart_engine(self) -> int:
        """Replace the engine by a new process; open requests go on in it. Returns its pid."""
        ...

    async def resize(self, count: int) -> int:
        """Have as many replicas of the engine; no open request is lost. Returns their number."""
        ...

    async def drain_replica(self, index: int) -> None:
        """Let one replica finish what it has, and end it."""
        ...

    async def restore_replica(self, index: int) -> None:
        """Launch a replica that was drained."""
        ...


@dataclass(frozen=True)
class Controlled:
    """What verbs act on."""

    engine: Supervised
    adapters: AdapterLoader
    operator: EngineOperator


@dataclass(frozen=True)
class AdminVerb:
    """`run` may take long. Who may use a verb and what it takes have no default, so that a new one has to say it."""

    summary: str
    access: Access
    """`reads`: GET or POST; `changes`: POST only. Both need the admin key where there is one."""
    argument: Any
    """The type of its JSON body; None: it takes none."""
    run: Callable[[Controlled, Any], Awaitable[Any]]
    max_body: int = MAX_BODY


class LogLevel(msgspec.Struct, forbid_unknown_fields=True):
    level: str


class TensorsPush(msgspec.Struct, forbid_unknown_fields=True):
    tensors: list[PushedTensor]
    start_over: bool = False  # without what was pushed before and not applied


class PushedApply(msgspec.Struct, forbid_unknown_fields=True):
    requests: OpenRequests = "continue"


class EngineStatus(msgspec.Struct):
    status: str
    detail: str
    pid: int | None
    num_restarts: int
    num_requests: int
    num_replicas: int


async def _status(server: Controlled, argument: None) -> EngineStatus:
    engine, health = server.engine, server.engine.health()
    counts = engine.num_restarts, health.num_requests, engine.num_replicas
    return EngineStatus(health.status, health.detail, engine.engine_pid, *counts)


async def _restart_engine(server: Controlled, argument: None) -> dict[str, Any]:
    before = server.engine.engine_pid
    return {"old_pid": before, "new_pid": await server.engine.restart_engine()}


async def _replicas(server: Controlled, argument: int) -> dict[str, Any]:
    if argument < 1:
        raise RequestError(f"replicas is {argument} but must be at least 1", "replicas")
    before = server.engine.num_replicas
    return {"before": before, "replicas": await server.engine.resize(argument)}


async def _drain_replica(server: Controlled, argument: int) -> dict[str, int]:
    await server.engine.drain_replica(argument)
    return {"drained": argument}


async def _restore_replica(server: Controlled, argument: int) -> dict[str, int]:
    await server.engine.restore_replica(argument)
    return {"restored": argument}


async def _load_adapter(server: Controlled, argument: LoadAdapter) -> dict[str, Any]:
    return _by_field(await server.adapters.load(argument))


async def _unload_adapter(server: Controlled, argument: UnloadAdapter) -> dict[str, Any]:
    return _by_field(await server.adapters.unload(argument))


def _by_field(ref: AdapterRef) -> dict[str, Any]:
    return {"lora_name": ref.name, "lora_path": ref.path, "rank": ref.rank, "digest": ref.digest}


async def _state(server: Controlled, argument: None) -> EngineState:
    return await server.operator.state()


async def _sleep(server: Controlled, argument: SleepWanted | None) -> EngineState:
    return await server.operator.sleep(argument or SleepWanted())


async def _wake(server: Controlled, argument: None) -> EngineState:
    return await server.operator.wake()


async def _update_weights(server: Controlled, argument: WeightsUpdate) -> EngineState:
    return await server.operator.update_weights(argument)


async def _push_weights(server: Controlled, argument: TensorsPush) -> PushedSoFar:
    return await server.operator.push(argument.tensors, start_over=argument.start_over)


async def _apply_pushed(server: Controlled, argument: PushedApply | None) -> EngineState:
    return await server.operator.apply_pushed((argument or PushedApply()).requests)


async def _pause(server: Controlled, argument: None) -> EngineState:
    return await server.operator.pause(True)


async def _resume(server: Controlled, argument: None) -> EngineState:
    return await server.operator.pause(False)


async def _set_limits(server: Controlled, argument: LiveLimits) -> EngineState:
    return await server.operator.set_limits(argument)


async def _set_log_level(server: Controlled, argument: LogLevel) -> LogLevel:
    await server.operator.set_log_level(argument.level)
    return argument


async def _reset_prefix_cache(server: Controlled, argument: None) -> dict[str, Any]:
    await server.operator.reset_prefix_cache()
    return {}


async def _expert_load(server: Controlled, argument: None) -> dict[int, list[int]]:
    return await server.operator.expert_load()


STATUS = AdminVerb("how the engine is", "reads", None, _status)
RESTART_ENGINE = AdminVerb(
    "replace the engine process; open streams pause and go on", "changes", None, _restart_engine
)
REPLICAS = AdminVerb(
    "have N replicas: new ones are warm before they get requests, others finish what they have first",
    "changes",
    int,
    _replicas,
)
DRAIN_REPLICA = AdminVerb(
    "end replica N when it has finished what it has; the others go on", "changes", int, _drain_replica
)
RESTORE_REPLICA = AdminVerb("launch replica N again, which was drained", "changes", int, _restore_replica)
LOAD_ADAPTER = AdminVerb(
    'serve a LoRA adapter: {"lora_name": NAME, "lora_path": FOLDER}', "changes", LoadAdapter, _load_adapter
)
UNLOAD_ADAPTER = AdminVerb(
    'serve a LoRA adapter no more: {"lora_name": NAME}', "changes", UnloadAdapter, _unload_adapter
)
STATE = AdminVerb("what was made of the engine by these verbs", "reads", None, _state)
SLEEP = AdminVerb(
    'give memory back: {"level": 1 or 2, "requests": "wait" or "refuse"}', "changes", SleepWanted | None, _sleep
)
WAKE = AdminVerb("take the memory again; requests go on", "changes", None, _wake)
UPDATE_WEIGHTS = AdminVerb(
    'replace the weights: {"path": FOLDER, "requests": "continue", "drain" or "abort"}',
    "changes",
    WeightsUpdate,
    _update_weights,
)
PUSH_WEIGHTS = AdminVerb(
    'push some of the weights: {"tensors": [{"name": NAME, "dtype": "F32", "shape": [...], "data": BASE64}, ...]}',
    "changes",
    TensorsPush,
    _push_weights,
    max_body=1 << 30,
)
APPLY_PUSHED_WEIGHTS = AdminVerb(
    'put pushed weights in place: {"requests": "continue", "drain" or "abort"}',
    "changes",
    PushedApply | None,
    _apply_pushed,
)
PAUSE = AdminVerb("plan no more steps; requests wait", "changes", None, _pause)
RESUME = AdminVerb("plan steps again", "changes", None, _resume)
SET_LIMITS = AdminVerb(
    'change limits: {"max_num_seqs": N, "max_num_batched_tokens": N}', "changes", LiveLimits, _set_limits
)
SET_LOG_LEVEL = AdminVerb('change the log: {"level": "debug"}', "changes", LogLevel, _set_log_level)
RESET_PREFIX_CACHE = AdminVerb("forget cached prefixes that nobody uses", "changes", None, _reset_prefix_cache)
EXPERT_LOAD = AdminVerb("tokens of each expert, by layer, since the engine's start", "reads", None, _expert_load)

VERBS: Registry[AdminVerb] = Registry(
    "admin verb",
    "quire.server.control",
    {
        "status": "verbs:STATUS",
        "restart-engine": "verbs:RESTART_ENGINE",
        "replicas": "verbs:REPLICAS",
        "drain-replica": "verbs:DRAIN_REPLICA",
        "restore-replica": "verbs:RESTORE_REPLICA",
        "load-adapter": "verbs:LOAD_ADAPTER",
        "unload-adapter": "verbs:UNLOAD_ADAPTER",
        "state": "verbs:STATE",
        "sleep": "verbs:SLEEP",
        "wake": "verbs:WAKE",
        "update-weights": "verbs:UPDATE_WEIGHTS",
        "push-weights": "verbs:PUSH_WEIGHTS",
        "apply-pushed-weights": "verbs:APPLY_PUSHED_WEIGHTS",
        "pause": "verbs:PAUSE",
        "resume": "verbs:RESUME",
        "set-limits": "verbs:SET_LIMITS",
        "set-log-level": "verbs:SET_LOG_LEVEL",
        "reset-prefix-cache": "verbs:RESET_PREFIX_CACHE",
        "expert-load": "verbs:EXPERT_LOAD",
    },
)
