"""The admin surface: its verbs, who may use them, and a rolling restart without an error."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.config.groups import ServerConfig
from quire.config.server import admin_address, admin_address_of
from quire.engine.replicas import ReplicaClient
from quire.engine.spare import StandbyEngine
from quire.engine.zmq_client import OnPhase, ZmqClient
from quire.frontend.async_engine import AsyncEngine
from quire.server.adapter_loading import AdapterLoader, LoadAdapter
from quire.server.adapters import ServedAdapters
from quire.server.control.app import build_admin_app
from quire.server.control.listen import admin_settings, serving_admin
from quire.server.control.operator import EngineOperator, Wanted
from quire.server.control.verbs import MAX_BODY, VERBS, Controlled
from quire.server.launch import listening_socket
from quire.server.supervisor import EngineSupervisor, Health, SupervisorOptions
from quire.types.errors import ConfigError, EngineDeadError, EngineError, EngineUnavailableError
from quire.types.request import AdapterRef
from tests.engine.fake_engine import COMMAND
from tests.engine.processes import LIMIT
from tests.frontend.fake_client import FakeClient, text_model
from tests.server.helpers import FakeProvider
from tests.server.test_supervisor import complete, expected, keeper


class FakeServer:
    num_restarts = 2
    engine_pid: int | None = 7
    wanted = Wanted(EngineConfig.from_flat(model="fake"))

    @property
    def operated_engine(self) -> AsyncEngine:
        raise EngineUnavailableError("there is none")

    def health(self) -> Health:
        return Health("ready", "it takes requests", 2, 5)

    num_replicas = 2

    async def resize(self, count: int) -> int:
        self.num_replicas = count
        return count

    async def drain_replica(self, index: int) -> None:
        self.drained = index

    async def restore_replica(self, index: int) -> None:
        assert self.drained == index

    async def restart_engine(self) -> int:
        if self.engine_pid is None:
            raise EngineUnavailableError("the engine is starting and cannot be restarted now")
        return self.engine_pid + 1


def controlled(server: FakeServer) -> Controlled:
    loader = AdapterLoader(ServedAdapters(), FakeProvider(FakeClient("x")), None, ())
    return Controlled(server, loader, EngineOperator(server))


def client(server: FakeServer, *keys: str) -> httpx.AsyncClient:
    app = build_admin_app(controlled(server), keys)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin")


async def test_verbs_are_listed_and_run() -> None:
    async with client(FakeServer()) as http:
        listed = (await http.get("/admin")).json()
        assert [verb["verb"] for verb in listed] == list(VERBS)
        assert {verb["access"] for verb in listed} <= {"reads", "changes"}
        assert (await http.get("/admin/status")).json()["num_requests"] == 5
        assert (await http.post("/admin/restart-engine")).json() == {"old_pid": 7, "new_pid": 8}
        assert (await http.post("/admin/replicas", json=3)).json() == {"before": 2, "replicas": 3}
        assert (await http.get("/admin/status")).json()["num_replicas"] == 3
        assert (await http.post("/admin/drain-replica", json=1)).json() == {"drained": 1}
        assert (await http.post("/admin/restore-replica", json=1)).json() == {"restored": 1}
        for wrong in (0, -1, 1.5, "two", None):
            assert (await http.post("/admin/replicas", json=wrong)).status_code == 400, wrong


async def test_loads_of_experts_are_told_if_they_are_counted() -> None:
    class Counting(FakeServer):
        wanted = Wanted(EngineConfig.from_flat(model="fake", expert_load_stats=True))

        @property
        def operated_engine(self) -> AsyncEngine:
            return cast(AsyncEngine, SimpleNamespace(expert_load={1: [5, 0]}))

    async with client(Counting()) as http:
        assert (await http.get("/admin/expert-load")).json() == {"1": [5, 0]}
    async with client(FakeServer()) as http:
        refused = await http.get("/admin/expert-load")
        assert (refused.status_code, "--expert-load-stats" in refused.json()["error"]) == (409, True)


@pytest.mark.parametrize(
    ("failure", "after"), [(None, None), (EngineError("no memory"), "asleep"), (EngineDeadError("it died"), None)]
)
async def test_an_engine_that_wakes_is_not_asleep(failure: EngineError | None, after: str | None) -> None:
    """Its answers may come before the end of the call that wakes it; one that dies meanwhile comes back awake."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    class Engine:
        async def wake_up(self) -> None:
            begun.set()
            await may_end.wait()
            if failure is not None:
                raise failure

        async def state(self) -> None: ...

    class Sleeping(FakeServer):
        wanted = Wanted(EngineConfig.from_flat(model="fake"))

        @property
        def operated_engine(self) -> AsyncEngine:
            return cast(AsyncEngine, Engine())

    server = Sleeping()
    server.wanted.level, server.wanted.refuses = 1, True
    waking = asyncio.create_task(EngineOperator(server).wake())
    await begun.wait()
    assert (server.wanted.word, server.wanted.refuses) == ("changing", False)
    may_end.set()
    assert (await asyncio.gather(waking, return_exceptions=True))[0] is failure
    assert (server.wanted.word, server.wanted.refuses) == (after, after is not None)


async def test_what_is_refused() -> None:
    server = FakeServer()
    async with client(server, "secret", "other") as http:
        assert (await http.get("/admin/status")).status_code == 401
        assert (await http.get("/admin/status", headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await http.get("/admin/status", headers={"authorization": "Basic secret"})).status_code == 401
        http.headers["authorization"] = "Bearer other"
        assert (await http.get("/admin/status")).status_code == 200
        assert (await http.get("/admin/status", headers={"origin": "http://evil"})).status_code == 403
        assert (await http.get("/admin/restart-engine")).status_code == 405
        unknown = await http.post("/admin/dance")
        assert (unknown.status_code, "restart-engine" in unknown.json()["error"]) == (404, True)
        assert (await http.post("/admin/status", content=b"x" * (MAX_BODY + 1))).status_code == 413
        server.engine_pid = None
        answer = await http.post("/admin/restart-engine")
        assert (answer.status_code, answer.json()["error"][:18]) == (409, "the engine is star")


async def test_a_field_that_a_verb_does_not_have_is_refused_by_name() -> None:
    """Else `sleep` with "request" for "requests" would do what nobody asked for."""
    async with client(FakeServer()) as http:
        for name in VERBS:
            if VERBS.get(name).argument not in (None, int):
                answer = await http.post(f"/admin/{name}", json={"requestz": "refuse"})
                assert (answer.status_code, "`requestz`" in answer.json()["error"]) == (400, True), name


async def test_an_adapter_that_is_loaded_is_told_by_field() -> None:
    class Loader:
        async def load(self, wanted: LoadAdapter) -> AdapterRef:
            return AdapterRef(wanted.lora_name, "abc", "/adapters/a", 8)

        unload = load

    server = FakeServer()
    app = build_admin_app(Controlled(server, cast(AdapterLoader, Loader()), EngineOperator(server)), ())
    told = {"lora_name": "a", "lora_path": "/adapters/a", "rank": 8, "digest": "abc"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as http:
        body = {"lora_name": "a", "lora_path": "a"}
        assert (await http.post("/admin/load-adapter", json=body)).json() == told
        assert (await http.post("/admin/unload-adapter", json={"lora_name": "a"})).json() == told


async def test_every_verb_needs_the_key() -> None:
    key = {"authorization": "Bearer secret"}
    async with client(FakeServer(), "secret") as http:
        for verb in VERBS:
            for headers in ({}, {"authorization": "Bearer wrong"}, {**key, "origin": "http://a"}):
                answer = await http.post(f"/admin/{verb}", json={}, headers=headers)
                assert answer.status_code in (401, 403), verb
            if VERBS.get(verb).access != "reads":
                assert (await http.get(f"/admin/{verb}", headers=key)).status_code == 405


def test_addresses() -> None:
    assert admin_address_of("unix:/run/quire").path == "/run/quire"
    assert (admin_address_of("[::1]:80").host, admin_address_of("localhost:80").port) == ("::1", 80)
    for wrong in ("unix:", "8000", "host:port", "host:70000"):
        with pytest.raises(ConfigError, match=r"must be unix:PATH or HOST:PORT"):
            admin_address_of(wrong)
    with pytest.raises(ConfigError, match="there is no key"):
        admin_address(ServerConfig(admin="127.0.0.1:9000"))
    assert admin_settings(ServerConfig()) is None


async def test_ctl_talks_to_the_unix_socket_which_is_its_owners_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "admin"
    settings = ServerConfig(admin=f"unix:{path}")
    where = admin_settings(settings)
    assert where is not None
    with listening_socket(where) as listener:
        async with serving_admin(settings, listener, controlled(FakeServer()), str(settings.admin)):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert await asyncio.to_thread(main, ["ctl", "restart-engine", "--admin", f"unix:{path}"]) == 0
            assert '"new_pid": 8' in capsys.readouterr().out
            assert await asyncio.to_thread(main, ["ctl", "--admin", f"unix:{path}"]) == 0
            assert "replace the engine process" in capsys.readouterr().out
            assert await asyncio.to_thread(main, ["ctl", "dance", "--admin", f"unix:{path}"]) == 1
            assert "unknown admin verb 'dance'" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["ctl", "status", "--admin", f"unix:{path}"]) == 1
    assert "no admin surface answers" in capsys.readouterr().err


async def test_a_rolling_restart_ends_no_stream_and_blames_nobody() -> None:
    async with keeper("long,slow") as kept:
        supervisor = kept.supervisor
        prompts = [[1, 2, i] for i in range(6)]
        streams = [asyncio.create_task(complete(supervisor, prompt, 200)) for prompt in prompts]
        for _ in range(4):
            before = supervisor.engine_pid
            now = await asyncio.wait_for(supervisor.restart_engine(), LIMIT)
            assert now == supervisor.engine_pid != before
        assert await asyncio.wait_for(asyncio.gather(*streams), LIMIT) == [expected(p, 200) for p in prompts]
        assert supervisor.num_restarts == 0
        assert supervisor.health().status == "ready"


async def test_an_engine_that_is_not_ready_is_not_restarted() -> None:
    async with keeper("long") as kept:
        kept.supervisor._set_status("draining", "")
        with pytest.raises(EngineUnavailableError, match="draining"):
            await kept.supervisor.restart_engine()


async def test_replicas_come_and_go_while_streams_run() -> None:
    """From one engine, which is restarted once as one that can grow; a replica that cannot start changes nothing."""
    config = EngineConfig.from_flat(model="fake")
    engines: list[ZmqClient] = []

    def launch(config: EngineConfig, on_phase: OnPhase) -> ZmqClient | ReplicaClient:
        def one(index: int, count: int) -> ZmqClient:
            words = EngineConfig.from_flat(model="long,slow" if index < 3 else "fail-at-start")
            engines.append(ZmqClient(words, command=COMMAND, on_phase=on_phase))
            return engines[-1]

        if not config.parallel.elastic:
            return one(0, 1)
        return ReplicaClient(config.parallel.data_parallel_size, one)

    supervisor = EngineSupervisor(config, text_model(), SupervisorOptions(drain_timeout=0.1), launch=launch)
    await asyncio.wait_for(supervisor.start(), LIMIT)
    try:
        prompts = [[1, 2, i] for i in range(6)]
        streams = [asyncio.create_task(complete(supervisor, prompt, 500)) for prompt in prompts]
        assert await asyncio.wait_for(supervisor.resize(3), LIMIT) == 3
        streams += [asyncio.create_task(complete(supervisor, prompt, 500)) for prompt in prompts]
        with pytest.raises(EngineError, match="replica 3 does not come up"):
            await supervisor.resize(4)
        assert supervisor.num_replicas == 3
        assert await asyncio.wait_for(supervisor.resize(1), LIMIT) == 1
        answers = await asyncio.wait_for(asyncio.gather(*streams), LIMIT)
        assert answers == [expected(prompt, 500) for prompt in prompts * 2]
        assert supervisor.num_restarts == 0
        assert sum(engine.lives for engine in engines) == 1
        supervisor._set_status("draining", "")
        with pytest.raises(EngineUnavailableError, match="cannot be changed now"):
            await supervisor.resize(2)
    finally:
        await supervisor.stop()


async def test_replicas_that_share_experts_are_a_matter_of_the_start() -> None:
    settings: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
    async with keeper("long") as kept:
        kept.supervisor.wanted.config = EngineConfig.from_flat(model="fake", **settings)
        with pytest.raises(EngineError, match=r"share experts .*; start the server again with -dp 3"):
            await kept.supervisor.resize(3)


async def test_a_standby_takes_over_with_all_streams() -> None:
    lines: list[str] = []
    config = EngineConfig.from_flat(model="long,slow")
    second = partial(ZmqClient, config, command=COMMAND, take_line=lines.append)
    standby = StandbyEngine(second)

    def launch(config: EngineConfig, on_phase: OnPhase) -> ZmqClient:
        return standby.take_client() or second()

    options = SupervisorOptions(spare_delay=0.01, restart_backoff=0.001)
    supervisor = EngineSupervisor(config, text_model(), options, launch=launch, spare=standby)
    await asyncio.wait_for(supervisor.start(), LIMIT)
    try:
        for _ in range(2):
            await _until(lambda: standby.pid is not None)
            waiting = standby.pid
            stream = asyncio.create_task(complete(supervisor, [1, 2, 3], 300))
            assert supervisor.engine_pid is not None
            await _until(lambda: supervisor.stats.num_running == 1)
            os.kill(supervisor.engine_pid, signal.SIGKILL)
            assert await asyncio.wait_for(stream, LIMIT) == expected([1, 2, 3], 300)
            assert supervisor.engine_pid == waiting
    finally:
        await supervisor.stop()
    assert standby.pid is None


async def test_a_dead_standby_is_not_waited_for() -> None:
    standby = StandbyEngine(partial(ZmqClient, EngineConfig.from_flat(model="die-at-start"), command=COMMAND))
    standby.start()
    await _until(lambda: standby._client is not None and not standby._client.lives)
    assert standby.take_client() is None


async def _until(condition: object) -> None:
    async def look() -> None:
        while not condition():  # type: ignore[operator]
            await asyncio.sleep(0.005)

    await asyncio.wait_for(look(), LIMIT)


async def test_an_engine_that_hangs_while_it_starts_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.zmq_client.STOP_GRACE", 0.05)
    words = iter(["hang-at-start", "long", "long"])

    def launch(config: EngineConfig, on_phase: OnPhase) -> ZmqClient:
        return ZmqClient(EngineConfig.from_flat(model=next(words)), command=COMMAND, on_phase=on_phase)

    options = SupervisorOptions(stall_timeout=2.5, start_patience=1.0, stacks_grace=0.05, restart_backoff=0.001)
    supervisor = EngineSupervisor(EngineConfig.from_flat(model="fake"), text_model(), options, launch=launch)
    try:
        await asyncio.wait_for(supervisor.start(), LIMIT)
        assert supervisor.num_restarts == 1
    finally:
        await supervisor.stop()
