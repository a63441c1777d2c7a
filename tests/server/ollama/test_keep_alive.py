"""keep_alive of Ollama's requests: the idle engine sleeps when its time has come, and any request wakes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest

from quire.config.groups import ServerConfig
from quire.server.app import build_app
from quire.server.control.operator import SleepWanted
from quire.server.ollama.convert import keep_alive_seconds
from quire.types.errors import EngineError, RequestError
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import MODEL, FakeProvider, http, serving
from tests.server.waiting import WaitingClient

UNLOAD = {"keep_alive": 0}
SHORT = {"prompt": "Hi", "stream": False, "keep_alive": "1ms"}


class FakeOperator:
    """Sleeps and wakes when it is told to; `may_change` lets it."""

    def __init__(self) -> None:
        self.is_asleep = False
        self.begun: list[str] = []
        self.done: list[str] = []
        self.may_change = asyncio.Event()
        self.may_change.set()
        self.problem: EngineError | None = None

    async def sleep(self, wanted: SleepWanted) -> None:
        await self._change("sleep")
        self.is_asleep = True

    async def wake(self) -> None:
        await self._change("wake")
        self.is_asleep = False

    async def _change(self, what: str) -> None:
        self.begun.append(what)
        await self.may_change.wait()
        if self.problem is not None:
            raise self.problem
        self.done.append(what)


@asynccontextmanager
async def sleeping_server(
    client: FakeClient, operator: FakeOperator, **settings: bool
) -> AsyncIterator[httpx.AsyncClient]:
    provider = FakeProvider(client)
    config = ServerConfig(**{"keep_alive": True, **settings})
    async with http(build_app(provider, provider.text, config, model_names=(MODEL,), sleeper=operator)) as session:
        yield session


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


async def test_an_engine_sleeps_when_it_is_idle_and_any_request_wakes_it() -> None:
    operator = FakeOperator()
    async with sleeping_server(FakeClient("Hi"), operator) as session:
        assert (await session.post("/api/generate", json=SHORT)).json()["response"] == "Hi"
        await until(lambda: operator.is_asleep)
        assert (await session.get("/api/ps")).json()["models"] == []
        await session.post("/v1/completions", json={"prompt": "Hello"})
        await until(lambda: operator.done == ["sleep", "wake", "sleep"])
        await session.post("/api/generate", json={"prompt": "Hi", "keep_alive": "1h"})
        await until(lambda: not operator.is_asleep)
        (listed,) = (await session.get("/api/ps")).json()["models"]
        assert not listed["expires_at"].startswith("2318")
        await session.post("/api/chat", json={"keep_alive": -1})
        (listed,) = (await session.get("/api/ps")).json()["models"]
        assert listed["expires_at"].startswith("2318")


async def test_a_request_without_a_prompt_unloads_at_once() -> None:
    operator = FakeOperator()
    async with sleeping_server(FakeClient("Hi"), operator) as session:
        assert (await session.post("/api/generate", json=UNLOAD)).json()["done_reason"] == "unload"
        await until(lambda: operator.is_asleep)
        assert (await session.post("/api/chat", json={"keep_alive": "5m"})).json()["done_reason"] == "load"


async def test_no_engine_sleeps_while_requests_run_and_none_that_come_meanwhile_are_left_waiting() -> None:
    operator, client = FakeOperator(), WaitingClient("Hi")
    async with sleeping_server(client, operator) as session:
        running = asyncio.create_task(session.post("/v1/completions", json={"prompt": "Hello"}))
        await until(lambda: bool(client.added))
        await session.post("/api/generate", json=UNLOAD)
        for _ in range(50):
            await asyncio.sleep(0)
        assert operator.done == []
        operator.may_change.clear()  # it takes long to fall asleep
        client.go_on()
        await running
        await until(lambda: operator.begun == ["sleep"])
        second = asyncio.create_task(session.post("/v1/completions", json={"prompt": "Hello"}))
        await until(lambda: len(client.added) == 2)
        operator.may_change.set()
        await second
        await until(lambda: operator.done[:2] == ["sleep", "wake"])


async def test_an_engine_that_an_operator_put_to_sleep_is_left_alone() -> None:
    operator = FakeOperator()
    operator.is_asleep = True
    async with sleeping_server(FakeClient("Hi"), operator) as session:
        await session.post("/api/generate", json=SHORT)
        await session.post("/api/generate", json=UNLOAD)
        await session.post("/v1/completions", json={"prompt": "Hello"})
    assert operator.done == []


async def test_an_engine_that_cannot_sleep_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    operator = FakeOperator()
    operator.problem = EngineError("it is being changed")
    async with sleeping_server(FakeClient("Hi"), operator) as session:
        await session.post("/api/generate", json=UNLOAD)
        await until(lambda: "kept awake" in caplog.text)
        assert (await session.post("/v1/completions", json={"prompt": "Hello"})).status_code == 200
    assert operator.done == []


async def test_without_the_setting_it_is_checked_and_has_no_effect() -> None:
    operator = FakeOperator()
    async with sleeping_server(FakeClient("Hi"), operator, keep_alive=False) as session:
        assert (await session.post("/api/generate", json=UNLOAD)).json()["done_reason"] == "load"
        await session.post("/api/generate", json=SHORT)
    assert operator.done == []
    async with serving() as session:
        wrong = await session.post("/api/generate", json={"prompt": "Hi", "keep_alive": "soon"})
    assert (wrong.status_code, "keep_alive is 'soon'" in wrong.text) == (400, True)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (0, 0.0),
        (1.5, 1.5),
        ("300", 300.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        (-1, None),
        ("-1m", None),
    ],
)
def test_durations_are_those_of_ollama(given: int | float | str, seconds: float | None) -> None:
    assert keep_alive_seconds(given) == seconds


@pytest.mark.parametrize("given", ["soon", "5 m", "m", "1d", "--1", "1h-2m", "nan", "1e99"])
def test_what_is_no_duration_is_refused(given: str) -> None:
    with pytest.raises(RequestError, match="keep_alive is"):
        keep_alive_seconds(given)
