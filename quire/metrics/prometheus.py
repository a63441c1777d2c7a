"""PrometheusObserver: counts the events and shows the counts to one registry. Holds nothing global."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Exposed
from prometheus_client.registry import Collector

from quire.metrics import catalog
from quire.metrics.catalog import Metric
from quire.metrics.series import Histogram, Number, Series
from quire.metrics.stats import CompletionEnd, EngineCounters, HttpEnd, Observer, RequestEnd, TokenEvent
from quire.types.messages import EngineInfo
from quire.types.outputs import EngineStats
from quire.types.request import FinishReason

_DONE = ("stop", "length", "repetition")


class PrometheusObserver(Observer, Collector):
    """All metrics of one server. Events and scrapes must come on one thread."""

    def __init__(self, model_name: str, *, vllm_names: bool = False) -> None:
        """With `vllm_names` every metric is exposed under vLLM's names too."""
        self._model_name = model_name
        self._vllm_names = vllm_names
        self._series: list[Series[Number] | Series[Histogram]] = []
        self._counters = EngineCounters()
        self._num_starts = 0
        self._make_engine_series()
        self._make_request_series()
        self._http_requests = self._numbers(catalog.HTTP_REQUESTS)
        self._http_time = self._histograms(catalog.HTTP_TIME)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """Everything as text and its content type, in the format that an Accept header asks for."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def collect(self) -> Iterable[Exposed]:
        for series in self._series:
            yield series.expose(self._model_name)
            if self._vllm_names:
                yield from series.expose_for_vllm(self._model_name)

    def on_stats(self, stats: EngineStats) -> None:
        self._running.value = stats.num_running
        self._waiting.value = stats.num_waiting
        self._prefilling.value = stats.num_prefilling
        if stats.num_blocks:
            self._kv_usage.value = stats.kv_cache_usage
        counters = self._counters
        counters.add(stats)
        self._preemptions.value = counters.num_preemptions
        self._prefix_queries.value = counters.prefix_queries
        self._prefix_hits.value = counters.prefix_hits
        missed = counters.prefix_queries - counters.prefix_hits - counters.prefix_without_state
        self._prefix_misses.at("new").value = missed
        self._prefix_misses.at("no_state").value = counters.prefix_without_state
        self._computed_prompt_tokens.value = counters.prompt_tokens
        if counters.num_drafts:
            self._drafts.value = counters.num_drafts
            self._draft_tokens.value = counters.num_draft_tokens
            self._accepted_tokens.value = counters.num_accepted_tokens
            for position, count in enumerate(counters.accepted_per_position):
                self._accepted_per_position.at(str(position)).value = count
        for layer, counts in stats.expert_load.items():
            for expert, count in enumerate(counts):
                self._expert_tokens.at(str(layer), str(expert)).value += count
        if stats.step_time:
            self._step_time.observe(stats.step_time)
            self._step_tokens.observe(stats.step_tokens)

    def on_tokens(self, event: TokenEvent) -> None:
        self._generation_tokens.value += event.num_generation_tokens
        for latency, count in event.token_latencies.items():
            self._inter_token.observe(latency, count)
        self._prompt_tokens.value += event.num_prompt_tokens
        self._cached_tokens.value += event.num_cached_tokens
        for latency in event.first_token_latencies:
            self._first_token.observe(latency)

    def on_request_end(self, event: RequestEnd) -> None:
        self._request_prompt_tokens.observe(event.num_prompt_tokens)
        self._params_n.observe(event.params.n)
        if event.params.max_tokens is not None:
            self._params_max_tokens.observe(event.params.max_tokens)
        self._request_max_tokens.observe(max(completion.num_tokens for completion in event.completions))
        for completion in event.completions:
            self._success.at(completion.finish_reason).value += 1
            self._request_generation_tokens.observe(completion.num_tokens)
            if completion.finish_reason in _DONE:
                self._observe_rate(completion)
        if all(completion.finish_reason in _DONE for completion in event.completions):
            self._observe_times(event)

    def on_http_end(self, event: HttpEnd) -> None:
        self._http_requests.at(event.method, event.route, str(event.status)).value += 1
        self._http_time.at(event.route).observe(event.seconds)

    def on_engine_down(self) -> None:
        for gauge in (self._up, self._running, self._waiting, self._prefilling, self._kv_usage):
            gauge.value = 0
        self._counters.restart()

    def on_engine_start(self, info: EngineInfo) -> None:
        self.on_engine_down()
        self._up.value = 1
        self._restarts.value = self._num_starts
        self._num_starts += 1
        self._cache_info.clear()
        labels = (info.block_size, info.num_kv_blocks, info.max_model_len, info.max_num_seqs)
        self._cache_info.at(*map(str, labels)).value = 1

    def on_resume(self, num_requests: int) -> None:
        self._resumed.value += num_requests

    def on_journal_failure(self) -> None:
        self._journal_failures.value += 1

    def _observe_rate(self, completion: CompletionEnd) -> None:
        first, last = completion.first_token_time, completion.last_token_time
        if first is not None and last is not None and completion.num_tokens > 1:
            self._per_output_token.observe((last - first) / (completion.num_tokens - 1))

    def _observe_times(self, event: RequestEnd) -> None:
        self._e2e.observe(event.finished_time - event.arrival_time)
        if event.first_token_time is None or event.queue_time is None:
            return
        self._queue_time.observe(event.queue_time)
        planned = event.arrival_time + event.queue_time
        self._prefill_time.observe(max(0.0, event.first_token_time - planned))
        self._decode_time.observe(event.finished_time - event.first_token_time)
        self._inference_time.observe(max(0.0, event.finished_time - planned))

    def _make_engine_series(self) -> None:
        self._running = self._number(catalog.NUM_RUNNING)
        self._waiting = self._number(catalog.NUM_WAITING)
        self._prefilling = self._number(catalog.NUM_PREFILLING)
        self._kv_usage = self._number(catalog.KV_USAGE)
        self._up = self._number(catalog.ENGINE_UP)
        self._cache_info = self._numbers(catalog.CACHE_INFO)
        self._prefix_queries = self._number(catalog.PREFIX_QUERIES)
        self._prefix_hits = self._number(catalog.PREFIX_HITS)
        self._prefix_misses = self._numbers(catalog.PREFIX_MISSES)
        self._preemptions = self._number(catalog.PREEMPTIONS)
        self._drafts = self._number(catalog.DRAFTS)
        self._draft_tokens = self._number(catalog.DRAFT_TOKENS)
        self._accepted_tokens = self._number(catalog.ACCEPTED_TOKENS)
        self._accepted_per_position = self._numbers(catalog.ACCEPTED_PER_POSITION)
        self._expert_tokens = self._numbers(catalog.EXPERT_TOKENS)
        self._restarts = self._number(catalog.ENGINE_RESTARTS)
        self._resumed = self._number(catalog.REQUESTS_RESUMED)
        self._journal_failures = self._number(catalog.JOURNAL_FAILURES)
        self._step_time = self._histogram(catalog.STEP_TIME)
        self._step_tokens = self._histogram(catalog.STEP_TOKENS)

    def _make_request_series(self) -> None:
        self._prompt_tokens = self._number(catalog.PROMPT_TOKENS)
        self._computed_prompt_tokens = self._number(catalog.COMPUTED_PROMPT_TOKENS)
        self._cached_tokens = self._number(catalog.CACHED_TOKENS)
        self._generation_tokens = self._number(catalog.GENERATION_TOKENS)
        self._success = self._numbers(catalog.SUCCESS)
        for reason in get_args(FinishReason):
            self._success.at(reason)
        self._first_token = self._histogram(catalog.FIRST_TOKEN)
        self._inter_token = self._histogram(catalog.INTER_TOKEN)
        self._per_output_token = self._histogram(catalog.PER_OUTPUT_TOKEN)
        self._e2e = self._histogram(catalog.E2E)
        self._queue_time = self._histogram(catalog.QUEUE_TIME)
        self._prefill_time = self._histogram(catalog.PREFILL_TIME)
        self._decode_time = self._histogram(catalog.DECODE_TIME)
        self._inference_time = self._histogram(catalog.INFERENCE_TIME)
        self._request_prompt_tokens = self._histogram(catalog.REQUEST_PROMPT_TOKENS)
        self._request_generation_tokens = self._histogram(catalog.REQUEST_GENERATION_TOKENS)
        self._request_max_tokens = self._histogram(catalog.REQUEST_MAX_GENERATION_TOKENS)
        self._params_n = self._histogram(catalog.PARAMS_N)
        self._params_max_tokens = self._histogram(catalog.PARAMS_MAX_TOKENS)

    def _numbers(self, metric: Metric) -> Series[Number]:
        series = Series(metric, Number)
        self._series.append(series)
        return series

    def _histograms(self, metric: Metric) -> Series[Histogram]:
        series = Series(metric, lambda: Histogram(metric.buckets))
        self._series.append(series)
        return series

    def _number(self, metric: Metric) -> Number:
        return self._numbers(metric).at()

    def _histogram(self, metric: Metric) -> Histogram:
        return self._histograms(metric).at()
