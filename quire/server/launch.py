"""Runs the server: binds the address, starts the engine, serves until a signal or a failure, and cleans up.

The address is bound first, so that a taken port is known before a model is loaded; until the engine is ready,
requests get a 503, and /health names the phase of the start.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from quire.config import env
from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.config.server import collect_admin_keys, collect_api_keys
from quire.engine.child import print_line
from quire.engine.settings import check_settings
from quire.engine.spare import NO_SPARE, SPARE_MEMORY, NoSpare, SpareEngine, StandbyEngine, standby_config
from quire.engine.zmq_client import ZmqClient
from quire.frontend.text_model import load_text_model
from quire.frontend.topology import with_topology
from quire.loader.describe import describe_model
from quire.loader.hub import find_model
from quire.metrics.telemetry import make_telemetry
from quire.platform.allocator import keep_little_free_memory
from quire.server.adapters import read_lora_modules
from quire.server.app import build_app
from quire.server.connection import make_connection
from quire.server.console.feed import ConsoleFeed
from quire.server.console.monitor import ConsoleMonitor
from quire.server.console.router import console_router
from quire.server.control.listen import admin_settings, serving_admin
from quire.server.control.operator import EngineOperator
from quire.server.control.verbs import Controlled
from quire.server.journal import held_folder
from quire.server.logs import relay_engine_line, setup_server_logging
from quire.server.metrics_route import make_metrics_router
from quire.server.state import announced
from quire.server.supervisor import (
    EngineSupervisor,
    LaunchClient,
    SupervisorOptions,
    launch_client,
    launch_standby,
)
from quire.server.tool_servers import make_tool_servers
from quire.types.errors import ConfigError, EngineError
from quire.types.messages import StartupPhase
from quire.utils.log import ROOT_NAME, get_logger

logger = get_logger(__name__)

_BACKLOG = 2048
_LAST_WRITES = 2  # seconds to deliver answers that are complete
_IDLE = 75  # seconds that an unused connection is kept: proxies keep theirs for 60, and would use a closed one


class Supervisor(Protocol):
    """What `serve` needs of a supervisor."""

    async def start(self) -> None: ...

    async def wait_failed(self) -> EngineError: ...

    async def drain(self) -> bool: ...

    async def stop(self) -> None: ...


class HttpServer(Protocol):
    """What `serve` needs of a server: of uvicorn's, or of API processes."""

    should_exit: bool
    force_exit: bool

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        ...

    async def end_answers(self) -> None: ...


def run_server(config: EngineConfig, settings: ServerConfig, launch: LaunchClient | None = None) -> None:
    """Serve a model until SIGTERM or SIGINT; raises the cause if the engine cannot be kept running.

    `launch` starts the engine process; tests and benchmarks give others.
    """
    setup_server_logging(settings.log_format)
    monitor = ConsoleMonitor(shows_text=settings.console_show_text)
    if settings.ui:
        logging.getLogger(ROOT_NAME).addHandler(monitor.log)
    keep_little_free_memory()
    config, launch, spare = prepare_engine(config, settings, launch, monitor)
    api_keys = collect_api_keys(settings)
    check_tls(settings)
    tool_servers = make_tool_servers(settings)
    model_names = settings.served_model_name or (config.model.model,)
    adapters = read_lora_modules(settings.lora_modules, model_names)
    if (adapters.names or settings.lora_root) and not config.lora.enable_lora:
        raise ConfigError("lora_modules or lora_root is set; set --enable-lora too")
    telemetry = make_telemetry(
        model_names[0],
        otlp_traces_endpoint=settings.otlp_traces_endpoint,
        log_interval=settings.stats_interval,
        vllm_names=settings.metrics_names == "vllm",
        others=[monitor] if settings.ui else [],
    )
    admin = admin_settings(settings)
    with (
        listening_socket(settings) as listener,
        admin_socket(admin) as admin_listener,
        announced(address_of(settings, listener), model_names),
        held_folder(settings.journal),
    ):
        logger.info("loading %s for %s", config.model.model, address_of(settings, listener))
        text = load_text_model(config.model)
        description = describe_model(find_model(config.model))
        options = supervisor_options(settings)

        async def main() -> None:
            supervisor = EngineSupervisor(
                config,
                text,
                options,
                on_phase=PhaseLog(),
                observer=telemetry.observer,
                launch=launch,
                spare=spare,
                adapters=adapters.refs,
            )
            feed = ConsoleFeed(
                supervisor,
                monitor,
                model_names,
                shows_text=settings.console_show_text,
                is_ending=lambda: server.should_exit,
            )
            operator = EngineOperator(supervisor)
            app = build_app(
                supervisor,
                text,
                settings,
                model_names=model_names,
                api_keys=api_keys,
                admin_keys=collect_admin_keys(settings),
                observer=telemetry.observer,
                extra_routers=[
                    make_metrics_router(telemetry.prometheus),
                    *([console_router(feed)] if settings.ui else []),
                ],
                tool_servers=tool_servers,
                adapters=adapters,
                description=description,
                sleeper=operator,
            )
            server = Server(uvicorn_config(app, settings))
            controlled = Controlled(supervisor, app.state.adapter_loader, operator)
            # A full collection would walk over all objects made until now and block the event loop.
            gc.collect()
            gc.freeze()
            try:
                async with serving_admin(settings, admin_listener, controlled, str(settings.admin)):
                    await serve(server, supervisor, listener, address_of(settings, listener), app.state.on_ready)
            finally:
                await tool_servers.close()
                telemetry.observer.close()

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(main())


def prepare_engine(
    config: EngineConfig, settings: ServerConfig, launch: LaunchClient | None, monitor: ConsoleMonitor
) -> tuple[EngineConfig, LaunchClient, NoSpare]:
    """What the engine is to be, how it is launched, and the process that stands by for it."""
    check_settings(config)
    config = with_topology(config, most_replicas=1 if config.device.standby else None)
    config = config.keeping_dumps_in(str(env.cache_dir() / "dumps"))
    spare: NoSpare = NO_SPARE
    if launch is None:
        take_line = relay_engine_line if settings.log_format == "json" else monitor.log.tee(print_line)
        if config.device.standby:
            second = partial(ZmqClient, standby_config(config), take_line=take_line)
            spare = standby = StandbyEngine(second)
            launch = partial(launch_standby, standby=standby, take_line=take_line)
        else:
            if settings.spare_engine:
                spare = SpareEngine(take_line=take_line)
                config = config.reserving(SPARE_MEMORY)
            launch = partial(launch_client, take_line=take_line, spare=spare)
    return config, launch, spare


def supervisor_options(settings: ServerConfig) -> SupervisorOptions:
    return SupervisorOptions(
        stall_timeout=settings.stall_timeout,
        max_restarts=settings.max_restarts,
        drain_timeout=settings.drain_timeout,
    )


def check_tls(settings: ServerConfig) -> None:
    """Refuse an unusable certificate or key before a model is loaded."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
    except OSError as error:
        raise ConfigError(
            f"ssl_certfile {settings.ssl_certfile!r} with ssl_keyfile {settings.ssl_keyfile!r} cannot be used:"
            f" {error}; give a PEM certificate and its key"
        ) from error


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: what a signal means is decided in `serve`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def end_answers(self) -> None:
        """Let answers that were cut off send their last event; cancel those that take too long."""
        answers = set(self.server_state.tasks)
        if not answers:
            return
        _, late = await asyncio.wait(answers, timeout=_LAST_WRITES)
        for answer in late:
            answer.cancel()
        await asyncio.gather(*late, return_exceptions=True)


def uvicorn_config(app: FastAPI, settings: ServerConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=make_connection(settings.header_timeout),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        root_path=settings.root_path,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        timeout_graceful_shutdown=_LAST_WRITES,
        timeout_keep_alive=_IDLE,
        backlog=_BACKLOG,
    )


async def serve(
    server: HttpServer,
    supervisor: Supervisor,
    listener: socket.socket,
    address: str,
    on_ready: Sequence[Callable[[], Awaitable[None]]] = (),
) -> None:
    """Serve until a signal or a failure. The first signal drains, a second SIGINT stops at once."""
    stop = _Stop(server, supervisor)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    http = asyncio.create_task(server.serve(sockets=[listener]), name="quire-http")
    engine = asyncio.create_task(_keep_engine(supervisor, address, on_ready), name="quire-engine")
    try:
        await asyncio.wait((http, engine), return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await http
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        failed = engine.done()
        engine.cancel()
        await supervisor.stop()
        await stop.finished()
        await server.end_answers()
    if failed:
        await engine  # raises why the engine cannot be kept running
    logger.info("stopped")


async def _keep_engine(
    supervisor: Supervisor, address: str, on_ready: Sequence[Callable[[], Awaitable[None]]]
) -> None:
    """Start the engine and wait for its final failure, which is raised."""
    await supervisor.start()
    for work in on_ready:
        await work()
    logger.info("serving on %s, ready for requests", address)
    if not address.startswith("unix:"):
        # The address that means all of this machine's is none to go to.
        page = address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        logger.info("open %s/ in a browser", page)
    raise await supervisor.wait_failed()


class _Stop:
    """Acts on signals: drain, or stop at once."""

    def __init__(self, server: HttpServer, supervisor: Supervisor) -> None:
        self._server = server
        self._supervisor = supervisor
        self._drain: asyncio.Task[None] | None = None

    def on_signal(self, number: signal.Signals) -> None:
        if self._drain is None:
            hint = "; press Ctrl-C again to stop now" if number == signal.SIGINT else ""
            logger.info("%s: finishing what runs and taking no more requests%s", number.name, hint)
            self._drain = asyncio.create_task(self._drain_and_exit(), name="quire-drain")
        elif number == signal.SIGINT:
            logger.info("stopping now")
            self._drain.cancel()
            self._server.force_exit = True
            self._server.should_exit = True

    async def finished(self) -> None:
        if self._drain is not None:
            self._drain.cancel()
            await asyncio.gather(self._drain, return_exceptions=True)

    async def _drain_and_exit(self) -> None:
        if not await self._supervisor.drain():
            await self._supervisor.stop()  # so that streams which are cut off end with the reason
        self._server.should_exit = True


@contextmanager
def listening_socket(settings: ServerConfig) -> Iterator[socket.socket]:
    """The bound socket; a Unix socket's file is removed at the end."""
    if settings.uds is None:
        with _tcp_socket(settings) as listener:
            yield listener
        return
    path = Path(settings.uds)
    with _unix_socket(path) as listener:
        inode = path.stat().st_ino
        try:
            yield listener
        finally:
            # Another server may have taken the name meanwhile.
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()


@contextmanager
def admin_socket(settings: ServerConfig | None) -> Iterator[socket.socket | None]:
    if settings is None:
        yield None
        return
    with listening_socket(settings) as listener:
        yield listener


def address_of(settings: ServerConfig, listener: socket.socket) -> str:
    if settings.uds is not None:
        return f"unix:{settings.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if settings.ssl_certfile is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _tcp_socket(settings: ServerConfig) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address of this machine: {error}; give another --host") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        fix = "choose another with --port" if error.errno == errno.EADDRINUSE else "give another --host or --port"
        raise ConfigError(f"cannot listen on {host} port {port}: {os.strerror(error.errno or 0)}; {fix}") from error
    return listener


def _unix_socket(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()  # left behind by a server that was killed
        # Only the owner may connect: whoever may use the socket may use the model.
        mask = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(mask)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen on the Unix socket {str(path)!r}: {error}; give another --uds") from error
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(str(path)) == 0


class PhaseLog:
    """Logs the phases of the start: each one when it begins, and long ones at every quarter."""

    def __init__(self, who: str = "engine") -> None:
        self._who = who
        self._name = ""
        self._quarter = 0

    def __call__(self, phase: StartupPhase) -> None:
        quarter = int((phase.progress or 0.0) * 4)
        if phase.name != self._name:
            logger.info("%s: %s", self._who, phase.name)
        elif quarter > self._quarter:
            logger.info("%s: %s %.0f %%", self._who, phase.name, quarter * 25)
        self._name, self._quarter = phase.name, quarter


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where there is one (not on Windows)."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
