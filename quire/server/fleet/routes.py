"""What a server of several models answers for all of them: lists, health, load and metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Exposed
from prometheus_client.registry import Collector
from starlette.responses import Response

from quire.metrics.catalog import MODEL_RESIDENT, MODELS_MEMORY, PREFIX
from quire.server.admin import ALIVE, READY
from quire.server.errors import json_response
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.member import ServedModel
from quire.server.load import Load
from quire.server.models import models_answer
from quire.server.ollama.models import model_list, running_models


class ModelHealth(msgspec.Struct):
    status: str
    detail: str


class FleetHealth(msgspec.Struct):
    status: str
    detail: str
    models: dict[str, ModelHealth]


def fleet_health(fleet: Fleet) -> FleetHealth:
    health = fleet.health()
    models = {name: fleet.member_health(name) for name in fleet.names}
    each = {name: ModelHealth(found.status, found.detail) for name, found in models.items()}
    return FleetHealth(health.status, health.detail, each)


class FleetMetrics(Collector):
    """The metrics of all models, with the label model_name, and which models are resident."""

    def __init__(self, fleet: Fleet, models: Mapping[str, ServedModel]) -> None:
        self._fleet, self._models = fleet, models
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterable[Exposed]:
        families: dict[str, Exposed] = {}
        for model in self._models.values():
            for family in model.prometheus.collect():
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        yield from families.values()
        resident = GaugeMetricFamily(PREFIX + MODEL_RESIDENT.name, MODEL_RESIDENT.help, labels=["model_name"])
        taken = GaugeMetricFamily(PREFIX + MODELS_MEMORY.name, MODELS_MEMORY.help, labels=["memory"])
        for name in self._models:
            resident.add_metric([name], float(self._fleet.is_resident(name)))
        for pool, count in self._fleet.residency.usage().items():
            taken.add_metric([pool], count)
        yield from (resident, taken)

    def expose(self, accept: str) -> tuple[bytes, str]:
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type


def fleet_router(fleet: Fleet, models: Mapping[str, ServedModel]) -> APIRouter:
    router = APIRouter(tags=["Server"])
    metrics = FleetMetrics(fleet, models)

    def report(good: frozenset[str]) -> Response:
        health = fleet_health(fleet)
        return json_response(health, 200 if health.status in good else 503)

    @router.get("/health", response_class=Response)
    @router.get("/ping", response_class=Response)
    @router.post("/ping", response_class=Response, include_in_schema=False)
    async def health() -> Response:
        """200 while any model is or can be served; `models` has the health of each."""
        return report(ALIVE)

    @router.get("/ready", response_class=Response)
    async def ready() -> Response:
        """200 when requests are taken."""
        return report(frozenset({READY}))

    @router.get("/load", response_class=Response)
    async def load() -> Response:
        """How many completions run or wait, of all models."""
        return json_response(Load(sum(model.num_open for model in models.values())))

    @router.get("/metrics", response_class=Response)
    async def show_metrics(request: Request) -> Response:
        """Metrics of all models for Prometheus."""
        body, content_type = metrics.expose(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @router.get("/v1/models", response_class=Response)
    async def list_models(request: Request) -> Response:
        """All models, each once for each of its names, and their adapters."""
        return models_answer(request, *(model.context for model in models.values()))

    @router.get("/api/tags", response_class=Response)
    async def tags() -> Response:
        """The same for Ollama's clients."""
        return json_response(model_list(*(model.context for model in models.values())))

    @router.get("/api/ps", response_class=Response)
    async def ps() -> Response:
        """The models that are in memory."""
        resident = [model.context for model in models.values() if fleet.is_resident(model.name)]
        return json_response(running_models(*resident))

    return router
