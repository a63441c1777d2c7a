"""With --metrics-names vllm, what dashboards made for vLLM ask for is there."""

from __future__ import annotations

import asyncio

from quire.frontend.async_engine import AsyncEngine
from quire.metrics.catalog import METRICS
from quire.metrics.prometheus import PrometheusObserver
from tests.frontend.fake_client import text_model
from tests.metrics.scrape import Scrape
from tests.metrics.test_prometheus import StatsClient

# What the queries of vLLM's own Grafana dashboards and of autoscalers name, without those of features not here.
ASKED_FOR = """
e2e_request_latency_seconds_bucket e2e_request_latency_seconds_sum e2e_request_latency_seconds_count
prompt_tokens_total generation_tokens_total inter_token_latency_seconds_bucket time_per_output_token_seconds_bucket
time_per_output_token_seconds_sum num_requests_running num_requests_waiting time_to_first_token_seconds_bucket
kv_cache_usage_perc gpu_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
gpu_prefix_cache_queries_total gpu_prefix_cache_hits_total request_prompt_tokens_bucket
request_generation_tokens_bucket request_success_total request_queue_time_seconds_sum
request_prefill_time_seconds_sum request_decode_time_seconds_sum request_inference_time_seconds_sum
request_max_num_generation_tokens_bucket request_params_n_bucket request_params_max_tokens_bucket
num_preemptions_total iteration_tokens_total_bucket cache_config_info
"""


async def exposed(vllm_names: bool) -> str:
    observer = PrometheusObserver("m", vllm_names=vllm_names)
    engine = AsyncEngine(StatsClient(), text_model(), observer=observer)
    async for _ in engine.generate("some text"):
        pass
    engine.shutdown()
    return observer.expose()[0].decode()


def test_dashboards_for_vllm_find_their_metrics() -> None:
    text = asyncio.run(exposed(vllm_names=True))
    ours, theirs = Scrape(text), Scrape(text, "vllm:")
    assert set(ASKED_FOR.split()) <= {name for name, _ in theirs.samples}
    assert all(("engine", "0") in labels for _, labels in theirs.samples)
    assert theirs.model_names == {"m"}
    assert theirs.get("generation_tokens_total", engine="0") == ours.get("generation_tokens_total") == 10
    assert theirs.get("gpu_cache_usage_perc", engine="0") == ours.get("kv_cache_usage_perc")
    (info,) = [dict(labels) for name, labels in theirs.samples if name == "cache_config_info"]
    assert info["num_gpu_blocks"] == "64"
    assert "engine_up" not in theirs.types
    assert len(ours.types) == len(METRICS)


def test_vllms_names_are_off_unless_asked_for() -> None:
    assert "vllm:" not in asyncio.run(exposed(vllm_names=False))
