"""GET /load and the load report of ORCA."""

from __future__ import annotations

import asyncio
import json

import pytest

from quire.types.outputs import EngineOutputs, EngineStats
from tests.frontend.fake_client import FakeClient
from tests.server.helpers import FakeProvider, http, make_app, serving


class BusyClient(FakeClient):
    """Tells its load with every step."""

    def get_outputs(self) -> EngineOutputs:
        stats = EngineStats(num_running=2, num_waiting=3, num_blocks=8, num_free_blocks=6)
        return EngineOutputs(super().get_outputs().outputs, stats)


FORMAT = "endpoint-load-metrics-format"
REPORT = "endpoint-load-metrics"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_report_comes_with_the_answer(stream: bool) -> None:
    body = {"prompt": "x", "max_tokens": 4, "stream": stream}
    async with serving(BusyClient("y" * 50)) as session:
        plain = await session.post("/v1/completions", json=body)
        text = await session.post("/v1/completions", json=body, headers={FORMAT: "text"})
        as_json = await session.get("/v1/models", headers={FORMAT: "JSON"})
        other = await session.get("/v1/models", headers={FORMAT: "BIN"})
    assert REPORT not in plain.headers
    assert REPORT not in other.headers
    assert text.headers[REPORT] == (
        "TEXT named_metrics.kv_cache_usage_perc=0.25, named_metrics.num_requests_running=2,"
        " named_metrics.num_requests_waiting=3"
    )
    kind, _, report = as_json.headers[REPORT].partition(" ")
    assert kind == "JSON"
    assert json.loads(report) == {
        "named_metrics": {"kv_cache_usage_perc": 0.25, "num_requests_running": 2, "num_requests_waiting": 3}
    }


async def test_strangers_and_engines_that_are_away_get_no_report() -> None:
    async with serving(api_keys=("k",)) as session:
        assert REPORT not in (await session.get("/v1/models", headers={FORMAT: "TEXT"})).headers
    provider = FakeProvider(FakeClient(), unavailable="it is restarting")
    async with http(make_app(provider=provider)) as session:
        answer = await session.get("/v1/models", headers={FORMAT: "TEXT"})
    assert answer.status_code == 200
    assert REPORT not in answer.headers


async def test_load_counts_completions_that_are_open() -> None:
    class Held(FakeClient):
        def get_outputs(self) -> EngineOutputs:
            return super().get_outputs() if released.is_set() else EngineOutputs([])

    released = asyncio.Event()
    async with serving(Held("x")) as session:
        before = (await session.get("/load")).json()
        asking = asyncio.create_task(session.post("/v1/completions", json={"prompt": "x", "n": 3}))
        async with asyncio.timeout(20):
            while (during := (await session.get("/load")).json()) == before:
                await asyncio.sleep(0)
        released.set()
        await asking
        after = (await session.get("/load")).json()
    assert [before, during, after] == [{"server_load": count} for count in (0, 3, 0)]
