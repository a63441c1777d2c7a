"""Twenty thousand random requests through one engine, its bookkeeping checked all the while."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import VOCAB
from tests.gpu.helpers import engine, needs_gpu, tiny_model

pytestmark = [needs_gpu, pytest.mark.timeout(240)]

REQUESTS = 20_000
CHECK_EVERY = 50


def random_params(rng: random.Random) -> SamplingParams:
    kind = rng.random()
    if kind < 0.7:
        return SamplingParams(temperature=0.0)
    if kind < 0.9:
        return SamplingParams(temperature=rng.uniform(0.2, 1.5))
    return SamplingParams(temperature=0.9, top_k=rng.choice([0, 5, 40]), top_p=0.9, repetition_penalty=1.1)


def test_twenty_thousand_requests(tmp_path: Path) -> None:
    core = engine(tiny_model(tmp_path), kv_cache_memory=4 << 20, max_num_seqs=256)
    rng = random.Random(0)
    stems = [[rng.randrange(3, VOCAB) for _ in range(200)] for _ in range(20)]
    expected: dict[str, int] = {}
    produced: dict[str, int] = {}
    ended: dict[str, str] = {}
    arrived = steps = 0
    started = time.monotonic()
    while arrived < REQUESTS or core.has_work():
        while arrived < REQUESTS and len(expected) - len(ended) < 400:
            stem = rng.choice(stems)[: rng.choice([0, 0, 30, 200])]
            prompt = [*stem, *(rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40)))]
            name, count = str(arrived), rng.choice([1, 4, 8, 12, 12, 40])
            expected[name], produced[name] = count, 0
            arrived += 1
            core.add_request(
                EngineRequest(
                    request_id=name, token_ids=prompt, params=random_params(rng), max_tokens=count, seed=arrived
                )
            )
        if rng.random() < 0.05:
            for output in core.abort([str(rng.randrange(arrived))]):
                ended[output.request_id] = "abort"
        for output in core.step().outputs:
            assert output.error is None
            assert all(0 <= token < VOCAB for token in output.token_ids)
            produced[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                ended[output.request_id] = output.finish_reason
        steps += 1
        if steps % CHECK_EVERY == 0:
            core.scheduler.check_integrity()
    core.scheduler.check_integrity()
    assert core.scheduler.stats().num_preemptions > 0
    assert len(ended) == REQUESTS
    for name, reason in ended.items():
        assert reason == "abort" or produced[name] == expected[name]
    assert time.monotonic() - started < 240
    core.shutdown()
