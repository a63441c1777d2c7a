"""Offline measurements over a fake engine: fresh prompts every time, exact counts, times in order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.bench.offline import LatencySummary, bench_latency, bench_throughput
from quire.bench.options import DataOptions, LatencyOptions
from quire.frontend.llm import LLM
from quire.types.errors import ConfigError
from tests.frontend.fake_client import FakeClient, text_model


def make() -> tuple[LLM, FakeClient]:
    fake = FakeClient()
    return LLM.from_client(fake, text_model()), fake


def latency(llm: LLM, **changes: Any) -> LatencySummary:
    shape = {"batch_size": 3, "input_len": 10, "output_len": 6, "repeats": 2, "warmup": 1}
    return bench_latency(llm, LatencyOptions(**{**shape, **changes}), seed=0)


def test_latency_runs_fresh_batches_and_leaves_out_the_warm_up() -> None:
    llm, fake = make()
    summary = latency(llm)
    assert len(fake.added) == 9
    assert len({tuple(request.token_ids) for request in fake.added}) == 9
    assert {len(request.token_ids) for request in fake.added} == {10}
    assert {request.max_tokens for request in fake.added} == {6}
    assert summary.batch_ms.count == 2
    assert summary.ttft_ms is not None
    assert summary.tpot_ms is not None
    assert summary.ttft_ms.count == summary.tpot_ms.count == 6
    assert summary.ttft_ms.max <= summary.batch_ms.max
    assert summary.output_tokens_per_s == pytest.approx(18 / summary.batch_ms.p50 * 1000)


@pytest.mark.parametrize(("name", "value"), [("batch_size", 0), ("repeats", 0), ("warmup", -1), ("input_len", 0)])
def test_latency_names_a_bad_number(name: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {value}"):
        latency(make()[0], **{name: value})


def test_throughput_counts_every_token() -> None:
    llm, fake = make()
    data = DataOptions(num_prompts=7, input_len=20, output_len=5, token_ids=True, range_ratio=0.5)
    result = bench_throughput(llm, data, warmup=2, ignore_eos=True)
    assert len(fake.added) == 9
    measured = fake.added[2:]
    assert result.summary.completed == 7
    assert result.summary.prompt_tokens == sum(len(request.token_ids) for request in measured)
    assert result.summary.output_tokens == sum(request.max_tokens for request in measured)
    for record in result.records:
        assert record.first_token is not None
        assert 0 <= record.start <= record.first_token <= record.end


def test_throughput_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}], "output_len": 3}\n' * 2)
    llm, fake = make()
    data = DataOptions(dataset_name="jsonl", dataset_path=path)
    assert bench_throughput(llm, data, warmup=0, ignore_eos=False).summary.output_tokens == 6
    assert bytes(fake.added[0].token_ids) == b"[user]hi\n[assistant]"
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "hi"}\n')
    with pytest.raises(ConfigError, match="mixes prompts and conversations"):
        bench_throughput(llm, data, warmup=0, ignore_eos=False)
