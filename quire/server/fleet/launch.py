"""Runs a server of several models: plans their memory, builds an application for each, and serves until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar
from urllib.parse import quote

from fastapi import FastAPI

import quire
from quire.config import env
from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.config.machines import CONTEXT_MEMORY
from quire.config.models_file import ModelEntry, ModelsFile
from quire.config.server import collect_admin_keys, collect_api_keys
from quire.engine.child import TakeLine, print_line
from quire.engine.footprint import PROCESS_MEMORY, PlannedEngine, PlannedEngines, plan_engines
from quire.engine.settings import check_settings
from quire.frontend.text_model import TextModel, load_text_model
from quire.loader.describe import UNKNOWN, ModelDescription, describe_model
from quire.loader.hub import find_model
from quire.metrics.telemetry import Telemetry, make_telemetry
from quire.platform.allocator import keep_little_free_memory
from quire.server.adapters import ServedAdapters, read_lora_modules
from quire.server.app import build_model_app, protect
from quire.server.console.feed import ConsoleFeed
from quire.server.console.monitor import ConsoleMonitor
from quire.server.console.router import console_router
from quire.server.control.listen import admin_settings, serving_admin
from quire.server.errors import install_error_handlers
from quire.server.fleet.dispatch import Dispatcher, NamesOfOthers
from quire.server.fleet.fleet import Fleet
from quire.server.fleet.member import ServedModel, controlled
from quire.server.fleet.residency import Footprint, Residency
from quire.server.fleet.routes import fleet_router
from quire.server.journal import held_folder
from quire.server.launch import (
    PhaseLog,
    Server,
    address_of,
    admin_socket,
    check_tls,
    listening_socket,
    loop_factory,
    serve,
    uvicorn_config,
)
from quire.server.logs import relay_engine_line, setup_server_logging
from quire.server.state import announced
from quire.server.supervisor import EngineSupervisor, LaunchClient, SupervisorOptions, launch_client
from quire.server.tool_servers import ToolServers, make_tool_servers
from quire.types.errors import ConfigError, MemoryPlanError, QuireError
from quire.utils.log import ROOT_NAME, get_logger
from quire.utils.units import format_bytes

logger = get_logger(__name__)

T = TypeVar("T")

_HEADER = 11  # characters before the message of an engine's log line


@dataclass(frozen=True)
class _Prepared:
    """What of a model is there before an event loop is."""

    entry: ModelEntry
    config: EngineConfig  # with the sizes that were planned
    plan: PlannedEngine
    text: TextModel
    description: ModelDescription
    adapters: ServedAdapters
    monitor: ConsoleMonitor
    telemetry: Telemetry


def run_fleet(models: ModelsFile, settings: ServerConfig, launch: LaunchClient | None = None) -> None:
    """Serve several models until SIGTERM or SIGINT; raises the cause if none of them can be served.

    `launch` starts the engine processes; tests give others.
    """
    setup_server_logging(settings.log_format)
    keep_little_free_memory()
    if settings.keep_alive:
        raise ConfigError("keep_alive is for a server of one model; of several, memory decides who sleeps")
    if settings.served_model_name:
        raise ConfigError("served_model_name is for a server of one model; set it in the model's table")
    check_tls(settings)
    for entry in models.models:
        _in_table(entry, partial(check_settings, entry.engine))
    tool_servers = make_tool_servers(settings)
    with (
        listening_socket(settings) as listener,
        admin_socket(admin_settings(settings)) as admin_listener,
        announced(address_of(settings, listener), [name for entry in models.models for name in entry.names]),
        held_folder(settings.journal),
        ExitStack() as stack,
    ):
        address = address_of(settings, listener)
        logger.info("planning the memory of %d models for %s", len(models.models), address)
        configs = [entry.engine for entry in models.models]
        plans = plan_engines(configs, models.memory_budget, models.host_memory_budget)
        prepared = [
            stack.enter_context(_prepared(entry, plan, settings))
            for entry, plan in zip(models.models, plans.engines, strict=True)
        ]
        residency = make_residency(models, plans)

        async def main() -> None:
            fleet = Fleet(residency)
            served: dict[str, ServedModel] = {}
            for each in prepared:
                _add(fleet, served, each, launch, tool_servers, lambda: server.should_exit)
            app = build_fleet_app(fleet, served, settings)
            server = Server(uvicorn_config(app, settings))
            gc.collect()
            gc.freeze()  # a full collection would walk over all objects made until now
            verbs = {name: controlled(model, fleet) for name, model in served.items()}
            try:
                async with serving_admin(settings, admin_listener, verbs, str(settings.admin)):
                    await serve(server, fleet, listener, address)
            finally:
                await tool_servers.close()

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(main())


def make_residency(models: ModelsFile, plans: PlannedEngines) -> Residency:
    """The policy over what was planned. MemoryPlanError if a model does not fit the budget."""
    budget = {"host": plans.host} if plans.device is None else {"device": plans.device, "host": plans.host}
    residency = Residency(budget, models.min_residence)
    spare = plans.host - sum(plan.num_ranks * PROCESS_MEMORY for plan in plans.engines)
    for entry, plan in zip(models.models, plans.engines, strict=True):
        footprint = footprint_of(plan, spare)
        residency.add(entry.name, footprint)
        taken = ", ".join(f"{pool} {format_bytes(count)}" for pool, count in footprint.awake.items())
        logger.info("model %s takes %s; asleep, %s of weights", entry.name, taken, format_bytes(plan.weights))
    residency.check()
    logger.info("budget: %s", ", ".join(f"{pool} {format_bytes(count)}" for pool, count in budget.items()))
    return residency


def footprint_of(plan: PlannedEngine, spare: int) -> Footprint:
    """What a model takes awake, asleep with its weights in host memory, and asleep without weights.

    A model that has slept keeps the copy of its weights in host memory, if that has room: it has `spare` bytes beside
    all models' processes.
    """
    if plan.error is not None:
        return Footprint({}, {}, {})
    process = plan.num_ranks * PROCESS_MEMORY
    if plan.on_host:
        return Footprint({"host": process + plan.total}, {"host": process + plan.weights}, {"host": process})
    device, weights = {"device": CONTEXT_MEMORY}, plan.num_ranks * plan.weights
    return Footprint(
        {"device": CONTEXT_MEMORY + plan.total, "host": process + (weights if weights <= spare else 0)},
        device | {"host": process + weights},
        device | {"host": process},
    )


def build_fleet_app(fleet: Fleet, served: Mapping[str, ServedModel], settings: ServerConfig) -> FastAPI:
    """What is for all models, and behind it the application of each."""
    app = FastAPI(title="Quire", version=quire.__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(fleet_router(fleet, served))
    install_error_handlers(app)
    app.add_middleware(Dispatcher, fleet=fleet, models=served)
    first = next(iter(served.values()))
    protect(app, settings, collect_api_keys(settings), collect_admin_keys(settings), first.observer)
    return app


@contextmanager
def _prepared(entry: ModelEntry, plan: PlannedEngine, settings: ServerConfig) -> Iterator[_Prepared]:
    monitor = ConsoleMonitor(shows_text=settings.console_show_text)
    if settings.ui:
        logging.getLogger(ROOT_NAME).addHandler(monitor.log)
    adapters = _in_table(entry, lambda: read_lora_modules(entry.server.lora_modules, entry.names))
    if (adapters.names or entry.server.lora_root) and not entry.engine.lora.enable_lora:
        raise ConfigError(f"[models.{entry.name}]: lora_modules or lora_root is set; set enable_lora = true too")
    telemetry = make_telemetry(
        entry.name,
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
        log_interval=settings.stats_interval,
        vllm_names=settings.metrics_names == "vllm",
        others=[monitor] if settings.ui else [],
        is_one_of_several=True,
    )
    text = _in_table(entry, lambda: load_text_model(entry.engine.model))
    try:
        description = describe_model(find_model(entry.engine.model))
    except QuireError as error:  # weights that cannot be read: requests hear of it, and other models serve
        logger.warning("[models.%s]: %s", entry.name, error)
        description = UNKNOWN
    config = (entry.engine if plan.error is not None else plan.pinned(entry.engine)).keeping_dumps_in(
        str(env.cache_dir() / "dumps")
    )
    try:
        yield _Prepared(entry, config, plan, text, description, adapters, monitor, telemetry)
    finally:
        telemetry.observer.close()
        logging.getLogger(ROOT_NAME).removeHandler(monitor.log)


def _add(
    fleet: Fleet,
    served: dict[str, ServedModel],
    model: _Prepared,
    launch: LaunchClient | None,
    tool_servers: ToolServers,
    is_ending: Callable[[], bool],
) -> None:
    """Make a model's supervisor and application, and let the fleet have it."""
    entry, name = model.entry, model.entry.name
    settings = entry.server
    if settings.journal is not None:
        settings = replace(settings, journal=f"{settings.journal}/model-{quote(name, safe='')}")
    if launch is None:
        launch = partial(launch_client, take_line=_named_lines(name, settings, model.monitor))
    observer = model.telemetry.observer
    options = SupervisorOptions(
        stall_timeout=settings.stall_timeout,
        max_restarts=settings.max_restarts,
        drain_timeout=settings.drain_timeout,
    )
    supervisor = EngineSupervisor(
        model.config,
        model.text,
        options,
        on_phase=PhaseLog(name),
        observer=observer,
        launch=launch,
        may_launch=partial(fleet.may_launch, name),
        adapters=model.adapters.refs,
    )
    feed = ConsoleFeed(
        supervisor, model.monitor, entry.names, shows_text=settings.console_show_text, is_ending=is_ending
    )
    app = build_model_app(
        supervisor,
        model.text,
        settings,
        model_names=entry.names,
        observer=observer,
        extra_routers=[console_router(feed)] if settings.ui else [],
        tool_servers=tool_servers,
        adapters=model.adapters,
        description=model.description,
        taken_names=NamesOfOthers(served, name),
    )
    found = served[name] = ServedModel(name, app, supervisor, observer, model.telemetry.prometheus)
    found.context.admission.watchers.append(fleet.look)
    fleet.add(name, found)
    if model.plan.error is not None:
        fleet.give_up(name, model.plan.error)


def _named_lines(name: str, settings: ServerConfig, monitor: ConsoleMonitor) -> TakeLine:
    """Engines' log lines say whose they are."""
    take = relay_engine_line if settings.log_format == "json" else monitor.log.tee(print_line)
    return lambda line: take(f"{line[:_HEADER]}[{name}] {line[_HEADER:]}")


def _in_table(entry: ModelEntry, work: Callable[[], T]) -> T:
    try:
        return work()
    except MemoryPlanError:
        raise
    except QuireError as error:
        raise ConfigError(f"[models.{entry.name}]: {error}") from error
