"""A whole measurement over a real socket: counts reconcile with the server's, load and warm-up are as asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import deque
from typing import Any

import pytest

from quire.bench import serve
from quire.bench.options import DataOptions, LoadOptions, ServeOptions, TargetOptions
from quire.bench.serve import bench_serve
from quire.types.errors import BenchmarkError, ConfigError
from tests.bench.fake_server import Behaviour, FakeServer


def options(server: FakeServer, *, load: dict[str, Any] | None = None, **data: Any) -> ServeOptions:
    return ServeOptions(
        data=DataOptions(**{"num_prompts": 12, "input_len": 9, "output_len": 5, **data}),
        target=TargetOptions(base_url=server.url),
        load=LoadOptions(**(load or {})),
        goodput={"ttft": 10_000},
    )


def test_counts_reconcile_with_the_server() -> None:
    with FakeServer(Behaviour(faults=deque(["503", "error_event"]))) as server:
        result = bench_serve(options(server, load={"max_concurrency": 3}, range_ratio=0.5))
    summary = result.summary
    assert (summary.completed, summary.failed, summary.failures) == (10, 2, {"error_event": 1, "http_503": 1})
    assert summary.goodput is not None
    assert summary.goodput.good == 10
    assert [record.index for record in result.records] == list(range(12))
    failed = [record.index for record in result.records if record.error]
    by_prompt = {body["prompt"]: body for body in server.bodies}
    assert len(by_prompt) == 12
    assert sum(body["max_tokens"] for body in by_prompt.values()) == sum(
        record.output_tokens for record in result.records if record.index not in failed
    ) + sum(body["max_tokens"] for body in server.bodies[:2])
    assert summary.output_tokens == sum(body["max_tokens"] for body in server.bodies[2:])
    assert summary.prompt_tokens == sum(len(body["prompt"].split()) for body in server.bodies[2:])
    assert summary.cached_tokens == 10
    assert not summary.counted_chunks
    assert result.model == "fake-model"


def test_concurrency_is_bounded_at_the_server() -> None:
    with FakeServer(Behaviour(first=0.01)) as server:
        result = bench_serve(options(server, load={"max_concurrency": 4}))
    assert server.peak == 4
    assert result.summary.peak_in_flight == 4
    assert all(record.delay == 0 for record in result.records)


def test_a_rate_spreads_the_requests_and_lateness_is_told() -> None:
    with FakeServer(Behaviour(first=0.02)) as server:
        load = {"request_rate": 200, "arrival": "constant", "max_concurrency": 1}
        result = bench_serve(options(server, load=load, num_prompts=6, output_len=1))
    assert [record.due for record in result.records] == pytest.approx([index / 200 for index in range(6)])
    # One at a time and 20 ms each, while one is due every 5 ms: the last is late by 4 times 15 ms at least.
    assert result.records[-1].delay > 0.06
    assert result.summary.delay_ms is not None


def test_warm_up_requests_are_sent_first_and_not_counted() -> None:
    with FakeServer() as server:
        result = bench_serve(options(server, load={"warmup": 3, "max_concurrency": 1}))
    assert len(server.bodies) == 15
    assert len({body["prompt"] for body in server.bodies}) == 15
    assert result.summary.completed == 12


def test_without_usage_prompts_are_counted_here() -> None:
    with FakeServer(Behaviour(usage=False)) as server:
        summary = bench_serve(options(server)).summary
    assert summary.counted_chunks
    assert (summary.prompt_tokens, summary.output_tokens) == (12 * 9, 12 * 5)


@pytest.mark.parametrize("warmup", [0, 2])
def test_when_all_requests_fail_the_cause_is_the_message(warmup: int) -> None:
    with FakeServer(Behaviour(faults=deque(["503"] * 20))) as server:
        with pytest.raises(BenchmarkError, match=r"requests.* failed, the first with http_503: .*busy"):
            bench_serve(options(server, load={"warmup": warmup}))
        assert len(server.bodies) == (warmup or 12)


def test_a_mistake_in_the_prompts_is_one_clear_error() -> None:
    with FakeServer() as server:
        wrong = ServeOptions(
            data=DataOptions(token_ids=True), target=TargetOptions(base_url=server.url, endpoint="chat")
        )
        with pytest.raises(ConfigError, match="takes no token ids"):
            bench_serve(wrong)


def test_the_client_imports_no_torch() -> None:
    code = (
        f"import sys, json, {serve.__name__}, quire.bench.sweep, quire.bench.output; from quire.bench.data import *\n"
        "from quire.bench.options import DataOptions; load_samples(DataOptions(num_prompts=1))\n"
        "print(json.dumps('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is False
