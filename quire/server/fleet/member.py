"""ServedModel: one model of a server of several: its application, its engine's supervisor, and its operator."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI

from quire.metrics.prometheus import PrometheusObserver
from quire.metrics.stats import Observer
from quire.server.context import HealthReport, ServerContext
from quire.server.control.operator import EngineOperator, SleepWanted
from quire.server.control.verbs import Controlled
from quire.server.fleet.fleet import Fleet
from quire.server.supervisor import EngineSupervisor
from quire.types.control import EngineState
from quire.types.errors import EngineError, EngineUnavailableError, RequestError


@dataclass
class ServedModel:
    """A `Member` of the fleet."""

    name: str
    app: FastAPI
    supervisor: EngineSupervisor
    observer: Observer
    prometheus: PrometheusObserver
    _is_started: bool = False

    def __post_init__(self) -> None:
        self._operator = EngineOperator(self.supervisor)

    @property
    def context(self) -> ServerContext:
        context: ServerContext = self.app.state.context
        return context

    @property
    def num_open(self) -> int:
        return self.context.admission.num_open

    @property
    def max_waiting(self) -> int:
        return max(1, self.context.settings.max_queue)

    @property
    def has_failed(self) -> bool:
        return self.supervisor.health().status in ("failed", "stopped")

    @property
    def refuses(self) -> bool:
        return self.supervisor.wanted.refuses

    async def load(self) -> None:
        if self._is_started:
            await self.supervisor.wait_serving()
            return
        self._is_started = True
        await self.supervisor.start()
        for work in self.context.on_ready:
            await work()

    async def sleep(self, level: int) -> None:
        await self._operator.sleep(SleepWanted(level))

    async def wake(self) -> None:
        await self._operator.wake()

    def prepare_to_wake(self) -> None:
        self.supervisor.wanted.level = 0

    async def wait_failed(self) -> EngineError:
        return await self.supervisor.wait_failed()

    def health(self) -> HealthReport:
        return self.supervisor.health()

    async def drain(self) -> bool:
        return await self.supervisor.drain()

    async def stop(self) -> None:
        await self.supervisor.stop()


class FleetOperator(EngineOperator):
    """Sleep and wake go by the fleet, which knows what fits into memory."""

    def __init__(self, model: ServedModel, fleet: Fleet) -> None:
        super().__init__(model.supervisor)
        self._name, self._fleet = model.name, fleet

    async def sleep(self, wanted: SleepWanted) -> EngineState:
        if not self._fleet.is_loaded(self._name):
            raise EngineUnavailableError(
                f"the model {self._name!r} is not loaded; there is nothing to put to sleep", 1
            )
        await self._fleet.hold(self._name, wanted.level)
        self._wanted.refuses = wanted.requests == "refuse"
        return await self.state()

    async def wake(self) -> EngineState:
        self._wanted.refuses = False
        await self._fleet.release(self._name)
        return await self.state()


@dataclass(frozen=True)
class ModelStatus:
    status: str
    detail: str
    num_requests: int


class OperatedEngine:
    """A model's engine to verbs: what it is, as the fleet sees it."""

    def __init__(self, model: ServedModel, fleet: Fleet) -> None:
        self._model, self._fleet = model, fleet

    @property
    def num_restarts(self) -> int:
        return self._model.supervisor.num_restarts

    @property
    def engine_pid(self) -> int | None:
        return self._model.supervisor.engine_pid

    @property
    def num_replicas(self) -> int:
        return 1

    async def resize(self, count: int) -> int:
        raise RequestError("replicas are for a server of one model; start one for each", "replicas")

    async def drain_replica(self, index: int) -> None:
        await self.resize(index)

    async def restore_replica(self, index: int) -> None:
        await self.resize(index)

    def health(self) -> ModelStatus:
        health = self._fleet.member_health(self._model.name)
        return ModelStatus(health.status, health.detail, self._model.num_open)

    async def restart_engine(self) -> int:
        async with self._fleet.using(self._model.name):
            return await self._model.supervisor.restart_engine()


def controlled(model: ServedModel, fleet: Fleet) -> Controlled:
    """What admin verbs act on."""
    return Controlled(OperatedEngine(model, fleet), model.app.state.adapter_loader, FleetOperator(model, fleet))
