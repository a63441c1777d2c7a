"""Runs a server of several API processes: one socket, one engine (or its replicas), and the processes in between.

This process has the engine's supervisor, all metrics, the console and the admin surface, and accepts no connection of
clients.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from fastapi import FastAPI

from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.config.server import collect_admin_keys, collect_api_keys
from quire.engine.transport import Meeting
from quire.frontend.text_model import load_text_model
from quire.metrics.telemetry import Telemetry, make_telemetry
from quire.platform.allocator import keep_little_free_memory
from quire.server.adapter_loading import AdapterLoader, LoadAdapter, UnloadAdapter
from quire.server.adapters import ServedAdapters, read_lora_modules
from quire.server.console.feed import ConsoleFeed
from quire.server.console.monitor import ConsoleMonitor
from quire.server.console.router import console_router
from quire.server.control.listen import admin_settings, serving_admin, serving_beside
from quire.server.control.operator import EngineOperator
from quire.server.control.verbs import Controlled
from quire.server.errors import install_error_handlers, json_response
from quire.server.launch import (
    PhaseLog,
    address_of,
    admin_socket,
    check_tls,
    listening_socket,
    loop_factory,
    prepare_engine,
    serve,
    supervisor_options,
)
from quire.server.load import Load
from quire.server.logs import setup_server_logging
from quire.server.metrics_route import make_metrics_router
from quire.server.processes.forward import PARENT, Neighbours
from quire.server.processes.messages import ApiOrder
from quire.server.processes.parent import ApiProcess, ApiProcesses, ServedByProcesses
from quire.server.state import announced
from quire.server.supervisor import EngineSupervisor, LaunchClient
from quire.server.tool_servers import make_tool_servers
from quire.types.errors import ConfigError, RequestError
from quire.types.request import AdapterRef
from quire.utils.log import ROOT_NAME, get_logger

logger = get_logger(__name__)

_NO_MEETING = Meeting("", "", b"", None)


def check_processes(settings: ServerConfig) -> None:
    """Refuse what needs one process that answers all requests."""
    refused = {
        "models": (settings.models, "models come and go in one process"),
        "journal": (settings.journal, "the files of a journal belong to one process"),
        "lora_root": (settings.lora_root, "each process would know other adapters; name them with --lora-modules"),
        "keep_alive": (settings.keep_alive, "no process knows whether the others are idle"),
    }
    for name, (value, why) in refused.items():
        if value:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(
                f"api_server_count is {settings.api_server_count} and {name} is set: {why}; leave out {flag}, or set"
                " --api-server-count 1"
            )


class FixedAdapters(AdapterLoader):
    """The adapters of --lora-modules and no others: the processes would have to change theirs together."""

    async def load(self, wanted: LoadAdapter) -> AdapterRef:
        raise RequestError("adapters that come and go need --api-server-count 1", "lora_name")

    async def unload(self, wanted: UnloadAdapter) -> AdapterRef:
        raise RequestError("adapters that come and go need --api-server-count 1", "lora_name")


@contextmanager
def private_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="quire-api-")  # its owner's only
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_processes(config: EngineConfig, settings: ServerConfig, launch: LaunchClient | None = None) -> None:
    """Like `run_server`, with as many API processes as the settings say."""
    check_processes(settings)
    setup_server_logging(settings.log_format)
    monitor = ConsoleMonitor(shows_text=settings.console_show_text)
    if settings.ui:
        logging.getLogger(ROOT_NAME).addHandler(monitor.log)
    keep_little_free_memory()
    config, launch, spare = prepare_engine(config, settings, launch, monitor)
    api_keys = collect_api_keys(settings)
    check_tls(settings)
    make_tool_servers(settings)  # is the package there?
    model_names = settings.served_model_name or (config.model.model,)
    adapters = read_lora_modules(settings.lora_modules, model_names)
    if adapters.names and not config.lora.enable_lora:
        raise ConfigError("lora_modules is set; set --enable-lora too")
    telemetry = make_telemetry(
        model_names[0],
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
        log_interval=settings.stats_interval,
        vllm_names=settings.metrics_names == "vllm",
        others=[monitor] if settings.ui else [],
    )
    with (
        listening_socket(settings) as listener,
        admin_socket(admin_settings(settings)) as admin_listener,
        private_folder() as folder,
        announced(address_of(settings, listener), model_names),
    ):
        logger.info("loading %s for %s", config.model.model, address_of(settings, listener))
        text = load_text_model(config.model)
        secret = secrets.token_hex(16)
        concrete = replace(settings, api_key=api_keys)  # whichever environment they came from

        def order(index: int) -> ApiOrder:
            keys = api_keys, collect_admin_keys(settings)
            return ApiOrder(index, config, concrete, *keys, _NO_MEETING, listener.fileno(), -1, folder, secret)

        async def main() -> None:
            processes = ApiProcesses(
                settings.api_server_count,
                lambda index, take, on_exit, context: ApiProcess(index, order, take, on_exit, context),
                telemetry.observer,
                settings.max_restarts,
            )
            supervisor = EngineSupervisor(
                config,
                text,
                supervisor_options(settings),
                on_phase=PhaseLog(),
                observer=telemetry.observer,
                launch=launch,
                spare=spare,
                make_engine=processes.make_engine,
                adapters=adapters.refs,
            )
            processes.source = supervisor
            loader = FixedAdapters(ServedAdapters(), supervisor, None, model_names)
            controlled = Controlled(supervisor, loader, EngineOperator(supervisor))
            feed = ConsoleFeed(
                supervisor,
                monitor,
                model_names,
                shows_text=settings.console_show_text,
                is_ending=lambda: processes.should_exit,
            )
            app = parent_app(telemetry, processes, feed if settings.ui else None)
            try:
                async with (
                    serving_parent(app, Neighbours(folder, secret), settings),
                    serving_admin(settings, admin_listener, controlled, str(settings.admin)),
                ):
                    both = ServedByProcesses(supervisor, processes, settings.drain_timeout)
                    await serve(processes, both, listener, address_of(settings, listener))
            finally:
                telemetry.observer.close()

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(main())


def parent_app(telemetry: Telemetry, processes: ApiProcesses, feed: ConsoleFeed | None) -> FastAPI:
    """What API processes forward to this one."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.include_router(make_metrics_router(telemetry.prometheus, processes.flush))
    if feed is not None:
        app.include_router(console_router(feed))

    @app.get("/load")
    async def load() -> object:
        return json_response(Load(processes.num_requests))

    install_error_handlers(app)
    return app


@asynccontextmanager
async def serving_parent(app: FastAPI, neighbours: Neighbours, settings: ServerConfig) -> AsyncIterator[None]:
    """Answer API processes until the block ends."""
    with listening_socket(replace(settings, uds=neighbours.socket_path(PARENT))) as listener:
        async with serving_beside(app, listener, "quire-parent"):
            yield
