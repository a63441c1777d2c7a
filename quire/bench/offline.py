"""`bench latency` and `bench throughput`: measure the engine in this process, without a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire.bench.data import Sample, load_samples
from quire.bench.options import DataOptions, LatencyOptions
from quire.bench.records import RequestRecord
from quire.bench.stats import Distribution, Summary, distribution, per_second, summarize
from quire.types.errors import ConfigError
from quire.types.outputs import RequestOutput
from quire.types.sampling import SamplingParams

if TYPE_CHECKING:
    from quire.frontend.llm import LLM


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one batch that was run several times, with new prompts each time."""

    batch_size: int
    input_len: int
    output_len: int
    repeats: int
    batch_ms: Distribution  # from the call to the last token of the last request
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    output_tokens_per_s: float  # of the median batch

    def to_dict(self) -> dict[str, Any]:
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain


@dataclass(frozen=True)
class ThroughputResult:
    summary: Summary
    records: list[RequestRecord]


def bench_latency(llm: LLM, options: LatencyOptions, *, seed: int) -> LatencySummary:
    """Run one batch `repeats` times. Prompts are new every time, so that no prefix is found in the cache."""
    batch_size, rounds = options.batch_size, options.warmup + options.repeats
    data = DataOptions(
        input_len=options.input_len,
        output_len=options.output_len,
        num_prompts=batch_size * rounds,
        token_ids=True,
        seed=seed,
    )
    samples = load_samples(data, tokenizer=llm.get_tokenizer())
    times: list[float] = []
    records: list[RequestRecord] = []
    for number in range(rounds):
        batch = samples[number * batch_size : (number + 1) * batch_size]
        seconds, outputs = _generate(llm, batch, ignore_eos=True, use_tqdm=False)
        if number >= options.warmup:
            times.append(seconds)
            records += to_records(outputs)
    batch_ms = distribution(times, 1000)
    assert batch_ms is not None
    return LatencySummary(
        batch_size=batch_size,
        input_len=options.input_len,
        output_len=options.output_len,
        repeats=options.repeats,
        batch_ms=batch_ms,
        ttft_ms=distribution((record.ttft for record in records), 1000),
        tpot_ms=distribution((record.tpot for record in records), 1000),
        output_tokens_per_s=per_second(batch_size * options.output_len, batch_ms.p50 / 1000),
    )


def bench_throughput(llm: LLM, data: DataOptions, *, warmup: int, ignore_eos: bool) -> ThroughputResult:
    """Give the engine all prompts at once and wait for the last answer."""
    samples = load_samples(data, extra=warmup, tokenizer=llm.get_tokenizer())
    split = len(samples) - warmup
    if warmup:
        _generate(llm, samples[split:], ignore_eos, use_tqdm=False)
    _, outputs = _generate(llm, samples[:split], ignore_eos, use_tqdm=True)
    records = to_records(outputs)
    return ThroughputResult(summarize(records), records)


def _generate(
    llm: LLM, samples: Sequence[Sample], ignore_eos: bool, use_tqdm: bool
) -> tuple[float, list[RequestOutput]]:
    params = [
        SamplingParams(temperature=0.0, max_tokens=sample.output_len, ignore_eos=ignore_eos) for sample in samples
    ]
    conversations = [sample.messages for sample in samples if sample.messages is not None]
    begin = time.perf_counter()
    if conversations:
        if len(conversations) < len(samples):
            raise ConfigError("the file mixes prompts and conversations; measure them in two runs")
        outputs = llm.chat(conversations, params, use_tqdm=use_tqdm)
    else:
        prompts: list[Any] = [sample.text if sample.token_ids is None else sample.token_ids for sample in samples]
        outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return time.perf_counter() - begin, outputs


def to_records(outputs: Sequence[RequestOutput]) -> list[RequestRecord]:
    """The engine's own times, counted from the arrival of the first request."""
    begin = min((output.metrics.arrival_time for output in outputs), default=0.0)
    records = []
    for index, output in enumerate(outputs):
        metrics = output.metrics
        start = metrics.arrival_time - begin
        first = None if metrics.first_token_time is None else metrics.first_token_time - begin
        end = start if metrics.finished_time is None else metrics.finished_time - begin
        records.append(
            RequestRecord(
                index=index,
                due=start,
                start=start,
                first_token=first,
                last_token=end,
                end=end,
                prompt_tokens=len(output.prompt_token_ids),
                output_tokens=sum(len(completion.token_ids) for completion in output.outputs),
                cached_tokens=output.num_cached_tokens,
            )
        )
    return records
