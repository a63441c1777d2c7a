"""Long prompts in deterministic mode: at once, in chunks and after a prefix hit, which take different kernels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from quire.types.sampling import SamplingParams
from tests.e2e.tiny import VOCAB, make_model
from tests.gpu.helpers import ROOMY_CACHE, SIZES, Job, engine, needs_gpu, run_jobs

pytestmark = needs_gpu
LENGTHS = (2048, 2500, 3001, 2049)
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=3, ignore_eos=True)


def test_the_same_bits_at_once_and_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.attention.triton_fixed import FixedTritonAttention
    from quire.kernels.triton.whole_attention import whole_attention

    taken: list[int] = []

    def spy(query: Tensor, *rest: Any) -> None:
        taken.append(query.shape[0])
        whole_attention(query, *rest)

    monkeypatch.setattr(FixedTritonAttention, "attend_whole", staticmethod(spy))
    model = make_model(tmp_path, "qwen3", **{**SIZES, "max_position_embeddings": 4096})
    rng = random.Random(0)
    jobs = [Job(str(n), [rng.randrange(3, VOCAB) for _ in range(n)], PARAMS) for n in LENGTHS]
    shared = {"deterministic": True, "dtype": "bfloat16", "max_model_len": 4096, "kv_cache_memory": ROOMY_CACHE}
    found = []
    for tokens in (4096, 8192, 700):
        core = engine(model, **shared, max_num_batched_tokens=tokens)
        for seed in range(2):  # the second time most of a prompt is in the cache
            answers = run_jobs(core, jobs, seed)
            assert all(answer.error is None for answer in answers.values())
            found.append({name: answer.content() for name, answer in answers.items()})
        core.shutdown()
    assert taken, "some prompts were computed whole"
    assert all(one == found[0] for one in found)
