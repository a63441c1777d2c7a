"""Every metric: its name, meaning, labels and buckets. docs/reference/metrics.md is generated from here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

PREFIX = "quire:"

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """Every metric has the label model_name; `labels` are those besides it."""

    name: str  # without the prefix; a counter's as it is scraped, with _total
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _decades(first_power: int, last_power: int, digits: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(round(digit * 10.0**power, 10) for power in range(first_power, last_power + 1) for digit in digits)


# Wide enough for a laptop and for a large machine; finer where a service level is likely to be set.
_PER_TOKEN = _decades(-3, 0, (1, 2, 3, 5, 7))
_LATENCY = _decades(-3, 2, (1, 2, 3, 5, 7))
_STEP = _decades(-4, 0, (1, 2, 5))
_TOKENS = _decades(0, 5, (1, 2, 5))
_FEW = (1.0, 2.0, 5.0, 10.0, 20.0)
_STEP_TOKENS = tuple(2.0**power for power in range(15))

NUM_RUNNING = Metric("num_requests_running", "gauge", "Completions that the engine computes now.")
NUM_WAITING = Metric("num_requests_waiting", "gauge", "Completions that wait in the engine's queue.")
KV_USAGE = Metric("kv_cache_usage_perc", "gauge", "Share of KV blocks in use; 1 is all of them.")
ENGINE_UP = Metric("engine_up", "gauge", "1 while an engine serves, 0 while there is none.")
NUM_PREFILLING = Metric(
    "num_requests_prefilling", "gauge", "Of those that run: completions whose prompts are not computed yet."
)
CACHE_INFO = Metric(
    "cache_config_info",
    "gauge",
    "Always 1; the labels tell how the engine was set up.",
    ("block_size", "num_kv_blocks", "max_model_len", "max_num_seqs"),
)
PROMPT_TOKENS = Metric(
    "prompt_tokens_total", "counter", "Prompt tokens of requests that got a first token or a vector."
)
COMPUTED_PROMPT_TOKENS = Metric(
    "prompt_tokens_computed_total",
    "counter",
    "Prompt tokens that steps have computed, at once and not only with a first token; again after a preemption.",
)
CACHED_TOKENS = Metric(
    "prompt_tokens_cached_total", "counter", "Those of prompt_tokens_total that the prefix cache had already."
)
GENERATION_TOKENS = Metric(
    "generation_tokens_total", "counter", "Tokens generated, as usage.completion_tokens counts."
)
PREFIX_QUERIES = Metric(
    "prefix_cache_queries_total", "counter", "Prompt tokens that the engine looked up in the prefix cache."
)
PREFIX_HITS = Metric("prefix_cache_hits_total", "counter", "Prompt tokens that the engine found in the prefix cache.")
PREFIX_MISSES = Metric(
    "prefix_cache_missed_tokens_total",
    "counter",
    "Prompt tokens that the prefix cache did not have, by reason. new: not cached (any more); no_state: cached, but"
    " there is no state of recurrent layers to go on from.",
    ("reason",),
)
PREEMPTIONS = Metric(
    "num_preemptions_total", "counter", "Times that a running completion was put back because KV blocks ran out."
)
DRAFTS = Metric("spec_decode_num_drafts_total", "counter", "Times that a step verified draft tokens of a completion.")
DRAFT_TOKENS = Metric("spec_decode_num_draft_tokens_total", "counter", "Draft tokens that steps have verified.")
ACCEPTED_TOKENS = Metric(
    "spec_decode_num_accepted_tokens_total", "counter", "Draft tokens that were the right ones, so that they held."
)
ACCEPTED_PER_POSITION = Metric(
    "spec_decode_num_accepted_tokens_per_pos_total",
    "counter",
    "The same by their place among the draft tokens of a completion and step, from 0.",
    ("position",),
)
EXPERT_TOKENS = Metric(
    "expert_tokens_total",
    "counter",
    "Tokens that came to each expert of each layer (--expert-load-stats), told once in some steps. A series for every"
    " expert of every layer.",
    ("layer", "expert"),
)
SUCCESS = Metric(
    "request_success_total",
    "counter",
    "Completions that ended, by reason: stop, length, repetition (repetition_detection), abort (the client left or"
    " aborted) or error. A request has n.",
    ("finished_reason",),
)
ENGINE_RESTARTS = Metric("engine_restarts_total", "counter", "Engines started in place of one that died.")
REQUESTS_RESUMED = Metric(
    "requests_resumed_total",
    "counter",
    "Completions that went on in another engine after theirs died; each restart counts them again.",
)
JOURNAL_FAILURES = Metric(
    "journal_failures_total",
    "counter",
    "Responses that could not be written to the journal, and are served without it.",
)
STEP_TIME = Metric("step_time_seconds", "histogram", "Time of one step: planning, computing, sampling.", (), _STEP)
STEP_TOKENS = Metric("iteration_tokens_total", "histogram", "Tokens computed in one step.", (), _STEP_TOKENS)
FIRST_TOKEN = Metric(
    "time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.", (), _LATENCY
)
INTER_TOKEN = Metric(
    "inter_token_latency_seconds",
    "histogram",
    "Between two outputs of a completion, divided by the number of tokens in the later one.",
    (),
    _PER_TOKEN,
)
PER_OUTPUT_TOKEN = Metric(
    "request_time_per_output_token_seconds",
    "histogram",
    "A completion's mean time per token after the first. Only completions that ended by stop or length.",
    (),
    _PER_TOKEN,
)
E2E = Metric(
    "e2e_request_latency_seconds",
    "histogram",
    "From a request's arrival to its last token. Only requests whose completions all ended by stop or length, as with"
    " the three parts of this time below.",
    (),
    _LATENCY,
)
QUEUE_TIME = Metric(
    "request_queue_time_seconds",
    "histogram",
    "From arrival until the engine first planned the request.",
    (),
    _LATENCY,
)
PREFILL_TIME = Metric(
    "request_prefill_time_seconds", "histogram", "From when it was first planned to its first token.", (), _LATENCY
)
DECODE_TIME = Metric("request_decode_time_seconds", "histogram", "From the first token to the last.", (), _LATENCY)
INFERENCE_TIME = Metric(
    "request_inference_time_seconds", "histogram", "From when it was first planned to its last token.", (), _LATENCY
)
REQUEST_PROMPT_TOKENS = Metric(
    "request_prompt_tokens", "histogram", "Prompt tokens of a request, however it ended.", (), _TOKENS
)
REQUEST_GENERATION_TOKENS = Metric(
    "request_generation_tokens", "histogram", "Tokens of a completion, however it ended.", (), _TOKENS
)
REQUEST_MAX_GENERATION_TOKENS = Metric(
    "request_max_num_generation_tokens",
    "histogram",
    "Tokens of the longest completion of a request, however it ended.",
    (),
    _TOKENS,
)
PARAMS_N = Metric("request_params_n", "histogram", "Completions that a request asked for (n).", (), _FEW)
PARAMS_MAX_TOKENS = Metric(
    "request_params_max_tokens", "histogram", "The max_tokens of requests that set it.", (), _TOKENS
)
HTTP_REQUESTS = Metric(
    "http_requests_total",
    "counter",
    "HTTP calls answered. Those that reach no route (an unknown path, a wrong API key) count as route none.",
    ("method", "route", "status"),
)
HTTP_TIME = Metric(
    "http_request_duration_seconds",
    "histogram",
    "From an HTTP call's headers to the last byte of its answer.",
    ("route",),
    _LATENCY,
)

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))

VLLM_PREFIX = "vllm:"
VLLM_LABELS = {"engine": "0"}
"""What every metric of vLLM's has besides model_name."""
_VLLM_LABEL_NAMES = {"num_kv_blocks": "num_gpu_blocks"}
_NOT_IN_VLLM = frozenset(
    {
        ENGINE_UP,
        ENGINE_RESTARTS,
        REQUESTS_RESUMED,
        JOURNAL_FAILURES,
        STEP_TIME,
        HTTP_REQUESTS,
        HTTP_TIME,
        EXPERT_TOKENS,
    }
)
# What vLLM called some of them before; dashboards still ask for these.
_VLLM_OLD_NAMES = {
    KV_USAGE: "gpu_cache_usage_perc",
    PREFIX_QUERIES: "gpu_prefix_cache_queries_total",
    PREFIX_HITS: "gpu_prefix_cache_hits_total",
    INTER_TOKEN: "time_per_output_token_seconds",
}


def vllm_metrics(metric: Metric) -> list[Metric]:
    """The metric as vLLM has it, under each name it had there; none if it never had."""
    if metric in _NOT_IN_VLLM:
        return []
    labels = tuple(_VLLM_LABEL_NAMES.get(label, label) for label in metric.labels)
    names = [metric.name, *([_VLLM_OLD_NAMES[metric]] if metric in _VLLM_OLD_NAMES else [])]
    return [replace(metric, name=name, labels=labels) for name in names]


_OTHER_WAYS = (
    "## The log line and traces",
    "",
    "The same events make a line in the log, by default once in ten seconds and only while something happens"
    " (`--stats-interval`). With `--log-format json` its numbers are fields of their own.",
    "",
    "With `--otlp-traces-endpoint http://localhost:4318` and the extra `otel` (`pip install 'quire[otel]'`) every"
    " request becomes an OpenTelemetry span, sent as OTLP over HTTP. A call's `traceparent` header makes it part of"
    " the caller's trace. Attributes are named as in OpenTelemetry's conventions for generative AI:"
    " `gen_ai.request.*` for the settings, `gen_ai.usage.*` for the tokens, `gen_ai.response.finish_reasons`, and"
    " `gen_ai.latency.*` for queue, first token and whole, in seconds. Neither spans nor metrics hold what was asked"
    " or answered.",
)


MODEL_RESIDENT = Metric("model_resident", "gauge", "1 while a model is in memory and awake.")
MODELS_MEMORY = Metric(
    "models_memory_bytes",
    "gauge",
    "Memory that all models take by their plans; of the `device` or the `host`.",
    ("memory",),
)
FLEET_METRICS = (MODEL_RESIDENT, MODELS_MEMORY)
"""Of a server of several models, besides those of each."""


def reference_markdown() -> str:
    """docs/reference/metrics.md."""
    parts = [
        "# Metrics",
        "",
        "`GET /metrics` speaks Prometheus' text format, and OpenMetrics to those who ask for it."
        " [grafana/quire.json](../grafana/quire.json) is a dashboard to import. Every metric has the label"
        " `model_name`, the first of the served names. A histogram is scraped as `_bucket`, `_sum` and `_count`.",
        "",
        "*This page is generated from `quire/metrics/catalog.py` by `tools/gen_docs.py`.*",
    ]
    for kind, title in (("gauge", "Now"), ("counter", "Since the start"), ("histogram", "Distributions")):
        rows = [metric for metric in METRICS if metric.kind == kind]
        parts += ["", f"## {title}", "", "| metric | labels | meaning |", "|---|---|---|"]
        parts += [
            f"| `{PREFIX}{m.name}` | {', '.join(f'`{label}`' for label in m.labels)} | {m.help} |" for m in rows
        ]
    parts += [
        "",
        "## Several models",
        "",
        "With `--models`, each metric above is there for each model, and also:",
        "",
    ]
    parts += ["| metric | labels | meaning |", "|---|---|---|"]
    parts += [
        f"| `{PREFIX}{m.name}` | {', '.join(f'`{each}`' for each in m.labels)} | {m.help} |" for m in FLEET_METRICS
    ]
    parts += ["", *_vllm_section(), "", "## Buckets", "", "Upper bounds; the last one is always `+Inf`.", ""]
    by_buckets: dict[tuple[float, ...], list[str]] = {}
    for metric in METRICS:
        if metric.buckets:
            by_buckets.setdefault(metric.buckets, []).append(f"`{metric.name}`")
    parts += [f"- {', '.join(names)}: {_listed(buckets)}" for buckets, names in by_buckets.items()]
    return "\n".join([*parts, "", *_OTHER_WAYS]) + "\n"


def _vllm_section() -> list[str]:
    renamed = ", ".join(f"`{VLLM_PREFIX}{name}`" for name in _VLLM_OLD_NAMES.values())
    own = ", ".join(f"`{metric.name}`" for metric in METRICS if metric in _NOT_IN_VLLM)
    return [
        "## vLLM's names",
        "",
        "Names follow vLLM's after the prefix. With `--metrics-names vllm` each metric is there a second time under"
        f" `{VLLM_PREFIX}`, with the label `engine` that vLLM's have, so that dashboards and autoscalers made for"
        f" vLLM work as they are; also under the names that vLLM had before: {renamed}. vLLM has no {own}. Buckets"
        " are those below.",
    ]


def _listed(buckets: tuple[float, ...]) -> str:
    return " ".join(f"{bound:.10g}" for bound in buckets)
