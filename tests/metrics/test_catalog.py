from __future__ import annotations

from quire.metrics.catalog import METRICS, PREFIX, reference_markdown

FAMILIAR = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total prefix_cache_hits_total
prompt_tokens_total generation_tokens_total time_to_first_token_seconds inter_token_latency_seconds
e2e_request_latency_seconds request_queue_time_seconds num_preemptions_total request_success_total
request_prompt_tokens request_generation_tokens iteration_tokens_total request_prefill_time_seconds
request_decode_time_seconds request_time_per_output_token_seconds cache_config_info
"""


def test_names_that_dashboards_know_are_there() -> None:
    assert set(FAMILIAR.split()) <= {metric.name for metric in METRICS}


def test_metrics_are_well_formed() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert metric.name.endswith("_total") or metric.kind != "counter"
        assert metric.help.endswith(".")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_the_page_names_every_metric_label_and_bucket() -> None:
    page = reference_markdown()
    for metric in METRICS:
        assert f"`{PREFIX}{metric.name}`" in page
        assert metric.help in page
        assert all(f"`{label}`" in page for label in metric.labels)
        assert all(f"{bound:.10g}" in page for bound in metric.buckets)
