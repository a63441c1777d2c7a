"""The metrics say what clients counted themselves, whatever became of their requests."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from quire.engine.client import InProcClient
from quire.engine.loop import EngineLoop
from quire.frontend.async_engine import AsyncEngine
from quire.frontend.output_processor import ProcessedOutputs
from quire.frontend.text_model import GenerationDefaults, TextModel
from quire.metrics import catalog
from quire.metrics.prometheus import PrometheusObserver
from quire.metrics.stats import HttpEnd
from quire.types.errors import EngineDeadError, GenerationError
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineOutput, EngineOutputs, EngineStats, RequestOutput
from quire.types.sampling import SamplingParams
from tests.engine.test_core import MAX_LEN, make_core
from tests.fakes import VOCAB_SIZE
from tests.frontend.fake_client import FakeClient, Running, text_model
from tests.metrics.scrape import Scrape, scrape

STEP_TIME = 0.25  # sums of it are exact
QUEUE_TIME = 0.5
INFO = EngineInfo(VOCAB_SIZE, MAX_LEN, 4, 65, 8)


class StatsClient(FakeClient):
    """A fake engine that tells stats, queue times and cached tokens, and fails requests at the token it is told."""

    def __init__(self, *args: Any, fail_at: dict[str, int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_tokens = 0
        self._fail_at = fail_at or {}

    def get_outputs(self) -> EngineOutputs:
        steps = self.num_steps
        outputs = super().get_outputs()
        tokens = sum(len(output.token_ids) for output in outputs.outputs)
        self.num_tokens += tokens
        running = len(self._running)
        step_time = STEP_TIME if self.num_steps > steps else 0.0
        counts = (min(running, 4), max(0, running - 4), 64, 64 - running % 64, steps, 10 * steps, 3 * steps)
        stats = EngineStats(*counts, tokens, step_time)
        return EngineOutputs(outputs.outputs, stats)

    def _step(self, running: Running) -> EngineOutput:
        first = running.num_tokens == 0
        name = running.request.request_id
        if running.num_tokens == self._fail_at.get(name):
            self._errors[name] = "boom"
        output = super()._step(running)
        if first:
            cached = len(running.request.token_ids) // 2
            return msgspec.structs.replace(output, queue_time=QUEUE_TIME, num_cached_tokens=cached)
        return output


@dataclass
class Account:
    """What one client knows about its own request, by completion."""

    how: str
    params: SamplingParams
    tokens: Counter[int] = field(default_factory=Counter)
    reasons: dict[int, str] = field(default_factory=dict)

    def hear(self, output: RequestOutput) -> None:
        for completion in output.outputs:
            before = self.tokens[completion.index] if self.params.output_kind == "delta" else 0
            self.tokens[completion.index] = before + len(completion.token_ids)
            if completion.finish_reason is not None:
                self.reasons[completion.index] = completion.finish_reason


class Books:
    """The sums over all clients whose requests reached the engine."""

    def __init__(self, accounts: Iterable[tuple[Account, int]]) -> None:
        self.reasons: Counter[str] = Counter()
        self.totals: Counter[str] = Counter()
        for account, num_prompt_tokens in accounts:
            assert len(account.reasons) == account.params.n
            num_tokens = account.tokens.total()
            self.reasons.update(account.reasons.values())
            self.totals.update(
                requests=1,
                completions=account.params.n,
                max_tokens=account.params.max_tokens or 0,
                longest=max(account.tokens.values(), default=0),
                all_prompt_tokens=num_prompt_tokens,
                generation_tokens=num_tokens,
                done=set(account.reasons.values()) <= {"stop", "length"},
                begun=sum(count > 0 for count in account.tokens.values()),
            )
            if num_tokens:
                self.totals.update(answered=1, prompt_tokens=num_prompt_tokens, cached_tokens=num_prompt_tokens // 2)


def check(found: Scrape, books: Books, client: StatsClient) -> None:
    totals = books.totals
    assert {reason: found.get("request_success_total", finished_reason=reason) for reason in REASONS} == {
        reason: books.reasons[reason] for reason in REASONS
    }
    assert found.get("generation_tokens_total") == totals["generation_tokens"]
    assert found.get("prompt_tokens_total") == totals["prompt_tokens"]
    assert found.get("prompt_tokens_cached_total") == totals["cached_tokens"]
    assert found.histogram("request_prompt_tokens") == (totals["requests"], totals["all_prompt_tokens"])
    assert found.histogram("request_generation_tokens") == (totals["completions"], totals["generation_tokens"])
    assert found.histogram("request_queue_time_seconds") == (totals["done"], totals["done"] * QUEUE_TIME)
    assert found.get("e2e_request_latency_seconds_count") == totals["done"]
    assert found.get("request_prefill_time_seconds_count") == totals["done"]
    assert found.get("request_decode_time_seconds_count") == totals["done"]
    assert found.get("request_inference_time_seconds_count") == totals["done"]
    assert found.histogram("request_params_n") == (totals["requests"], totals["completions"])
    assert found.histogram("request_params_max_tokens") == (totals["requests"], totals["max_tokens"])
    assert found.histogram("request_max_num_generation_tokens") == (totals["requests"], totals["longest"])
    assert found.get("time_to_first_token_seconds_count") == totals["answered"]
    assert found.get("inter_token_latency_seconds_count") == totals["generation_tokens"] - totals["begun"]
    assert found.histogram("step_time_seconds") == (client.num_steps, client.num_steps * STEP_TIME)
    assert found.histogram("iteration_tokens_total") == (client.num_steps, client.num_tokens)
    assert found.get("num_requests_running") == found.get("num_requests_waiting") == 0
    assert found.get("kv_cache_usage_perc") == 0


REASONS = ("stop", "length", "abort", "error")


async def use(engine: AsyncEngine, name: str, account: Account, after: int) -> None:
    prompt = name + "." * (len(name) % 3)
    async with aclosing(engine.generate(prompt, account.params, name)) as stream:
        count = 0
        async for output in stream:
            account.hear(output)
            count += 1
            if count == after and account.how == "close":
                return
            if count == after and account.how == "abort":
                await engine.abort(name)


def draw_account(chance: random.Random) -> Account:
    how = chance.choice(["read", "read", "stop", "close", "abort", "cancel", "fail"])
    n = 1 if how == "fail" else chance.randint(1, 3)
    kind: Any = chance.choice(["delta", "cumulative", "final_only"])
    if how in ("close", "cancel"):
        kind = "cumulative"  # so that what was computed but not read can be known
    if how in ("fail", "abort"):
        kind = "delta"
    stop = ("st",) if how == "stop" else ()
    return Account(how, SamplingParams(n=n, output_kind=kind, stop=stop, max_tokens=chance.randint(1, 12)))


def tell_what_is_not_read(engine: AsyncEngine, accounts: dict[str, Account]) -> None:
    """Whoever leaves early does not hear the last outputs made for it; its account does."""
    abort, process = engine._outputs.abort, engine._outputs.process

    def hear(output: RequestOutput | None) -> None:
        if output is not None and accounts[output.request_id].how in ("close", "cancel"):
            accounts[output.request_id].hear(output)

    def spy_abort(request_id: str) -> tuple[list[str], RequestOutput | None]:
        ids, last = abort(request_id)
        hear(last)
        return ids, last

    def spy_process(outputs: Iterable[EngineOutput]) -> ProcessedOutputs:
        result = process(outputs)
        for output in result.outputs:
            hear(output)
        return result

    engine._outputs.abort = spy_abort  # type: ignore[method-assign]
    engine._outputs.process = spy_process  # type: ignore[method-assign]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_metrics_reconcile_with_the_clients_counts(seed: int) -> None:
    chance = random.Random(seed)
    accounts = {f"best-{i}": draw_account(chance) for i in range(40)}
    fail_at = {name: chance.randint(0, 4) for name, account in accounts.items() if account.how == "fail"}

    async def run() -> None:
        observer = PrometheusObserver("m")
        client = StatsClient(fail_at=fail_at)
        engine = AsyncEngine(client, text_model(), observer=observer)
        tell_what_is_not_read(engine, accounts)
        tasks = {
            name: asyncio.create_task(use(engine, name, account, chance.randint(1, 8)))
            for name, account in accounts.items()
        }
        for name, task in tasks.items():
            if accounts[name].how == "cancel":
                for _ in range(chance.randint(0, 5)):
                    await asyncio.sleep(0)
                task.cancel()
        await asyncio.wait(tasks.values())
        for name, task in tasks.items():
            if not task.cancelled() and isinstance(task.exception(), GenerationError):
                accounts[name].reasons[0] = "error"
        while client.has_unfinished() or engine._outputs._aborting:
            await asyncio.sleep(0)
        served = {request.request_id.split("_")[-1]: len(request.token_ids) for request in client.added}
        check(scrape(observer), Books((accounts[name], length) for name, length in served.items()), client)
        engine.shutdown()

    asyncio.run(run())


async def test_requests_of_a_dying_engine_are_errors_and_a_restart_goes_on_counting() -> None:
    observer = PrometheusObserver("m")
    for round_number in range(3):
        engine = AsyncEngine(StatsClient("x" * 50, dies_at_step=5), text_model(), observer=observer)
        assert scrape(observer).get("engine_up") == 1
        params = SamplingParams(n=2, output_kind="delta")
        readers = [asyncio.create_task(use(engine, f"r{i}", Account("read", params), 0)) for i in range(3)]
        await asyncio.wait(readers)
        assert all(isinstance(reader.exception(), EngineDeadError) for reader in readers)
        found = scrape(observer)
        assert found.get("request_success_total", finished_reason="error") == 6 * (round_number + 1)
        assert found.get("generation_tokens_total") == 30 * (round_number + 1)
        assert found.get("num_preemptions_total") == 4 * (round_number + 1)
        assert found.get("prefix_cache_hits_total") == 12 * (round_number + 1)
        assert found.get("engine_restarts_total") == round_number
        assert found.get("engine_up") == found.get("num_requests_running") == found.get("kv_cache_usage_perc") == 0
        engine.shutdown()


async def test_a_failing_completion_takes_its_siblings_with_it() -> None:
    observer = PrometheusObserver("m")
    engine = AsyncEngine(StatsClient("x" * 50, fail_at={"1_r": 2}), text_model(), observer=observer)
    with pytest.raises(GenerationError):
        await use(engine, "r", Account("read", SamplingParams(n=3)), 0)
    found = scrape(observer)
    assert found.get("request_success_total", finished_reason="error") == 1
    assert found.get("request_success_total", finished_reason="abort") == 2
    assert found.get("e2e_request_latency_seconds_count") == 0


async def test_counts_of_the_real_scheduler_arrive() -> None:
    observer = PrometheusObserver("m")
    core, _ = make_core(steps_in_flight=2)
    client = InProcClient(core, EngineLoop(core, debug_checks=True), INFO)
    text = TextModel(None, GenerationDefaults(SamplingParams()))
    engine = AsyncEngine(client, text, observer=observer)
    params = SamplingParams(max_tokens=6, ignore_eos=True, detokenize=False)
    prompts = [[7] * 20 + [number] for number in range(12)]
    accounts = [Account("read", params) for _ in prompts]

    async def read(prompt: list[int], account: Account) -> None:
        async for output in engine.generate(prompt, params):
            account.hear(output)

    await read(prompts[0], accounts[0])
    await asyncio.gather(*map(read, prompts[1:], accounts[1:]))
    found = scrape(observer)
    stats = core.scheduler.stats()
    assert found.get("generation_tokens_total") == sum(account.tokens.total() for account in accounts) == 72
    assert found.get("prompt_tokens_total") == found.get("prefix_cache_queries_total") == 12 * 21
    assert found.get("prompt_tokens_cached_total") == found.get("prefix_cache_hits_total") == stats.prefix_hits >= 220
    assert found.get("num_preemptions_total") == stats.num_preemptions
    assert found.get("request_queue_time_seconds_count") == 12
    computed = 12 * 21 - stats.prefix_hits + 12 * 5
    assert found.get("iteration_tokens_total_sum") == pytest.approx(computed, abs=stats.num_preemptions * MAX_LEN)
    parts = ("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds")
    total = sum(found.get(f"{name}_sum") for name in parts)
    assert total == pytest.approx(found.get("e2e_request_latency_seconds_sum"), abs=1e-6)
    engine.shutdown()


def test_gauges_show_the_last_stats() -> None:
    observer = PrometheusObserver("m")
    observer.on_stats(EngineStats(3, 2, 200, 150))
    found = scrape(observer)
    assert found.get("num_requests_running") == 3
    assert found.get("num_requests_waiting") == 2
    assert found.get("kv_cache_usage_perc") == 0.25
    assert found.get("step_time_seconds_count") == 0  # not from a step


def test_loads_of_experts_are_added_up_over_engines() -> None:
    observer = PrometheusObserver("m")
    for load in ({0: [3, 1], 2: [2, 2]}, {}, {0: [1, 0]}):
        observer.on_engine_down()
        observer.on_stats(EngineStats(expert_load=load))
    found = scrape(observer)
    assert found.get("expert_tokens_total", layer="0", expert="0") == 4
    assert found.get("expert_tokens_total", layer="2", expert="1") == 2


def test_http_calls_are_counted_by_route_and_status() -> None:
    observer = PrometheusObserver("m")
    for status in (200, 200, 503):
        observer.on_http_end(HttpEnd("POST", "/v1/completions", status, 0.5))
    found = scrape(observer)
    route = {"method": "POST", "route": "/v1/completions"}
    assert found.get("http_requests_total", **route, status="200") == 2
    assert found.get("http_requests_total", **route, status="503") == 1
    assert found.histogram("http_request_duration_seconds", route="/v1/completions") == (3, 1.5)


def test_the_engines_set_up_is_shown_and_replaced() -> None:
    observer = PrometheusObserver("m")
    observer.on_engine_start(INFO)
    observer.on_engine_start(msgspec.structs.replace(INFO, num_kv_blocks=99))
    labels = {"block_size": "4", "max_model_len": str(MAX_LEN), "max_num_seqs": "8"}
    found = scrape(observer)
    assert [name for name, _ in found.samples].count("cache_config_info") == 1
    assert found.get("cache_config_info", num_kv_blocks="99", **labels) == 1


def test_every_metric_of_the_catalog_is_scraped_under_its_name_and_type() -> None:
    observer = PrometheusObserver("org/model")
    observer.on_engine_start(INFO)
    observer.on_http_end(HttpEnd("GET", "/health", 200, 0.1))
    found = scrape(observer)
    families = {metric.name.removesuffix("_total") if metric.kind == "counter" else metric.name: metric.kind
                for metric in catalog.METRICS}  # fmt: skip
    assert found.types == families
    assert found.model_names == {"org/model"}


def test_openmetrics_is_spoken_to_those_who_ask() -> None:
    observer = PrometheusObserver("m")
    body, content_type = observer.expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert "quire:request_success" in {family.name for family in parse_openmetrics(body.decode())}
    assert observer.expose("text/plain")[1].startswith("text/plain")


def test_two_servers_in_one_process_do_not_clash() -> None:
    first, second = PrometheusObserver("a"), PrometheusObserver("b")
    first.on_stats(EngineStats(num_running=1))
    assert scrape(first).get("num_requests_running") == 1
    assert scrape(second).get("num_requests_running") == 0
    assert b"process_resident_memory_bytes" in first.expose()[0]
