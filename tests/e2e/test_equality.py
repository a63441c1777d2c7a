"""A request's tokens and logprobs are the same bits alone, batched, chunked, preempted and on any prefix hit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.kernels.cpu import library
from quire.planning.engine_plan import plan_memory
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import LATENT, VOCAB, Answer, Driver, make_engine, make_model, run_alone

MODELS = {
    "llama": {"model_type": "llama"},
    "gemma3": {  # sliding and full layers, soft-capped, tied
        "model_type": "gemma3_text",
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    },
    "experts": {  # beside a shared one, whose result a gate weighs
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "chunked": {  # beside layers that see everything, rotate nothing and scale queries by position; experts
        "model_type": "llama4_text",
        **{"attention_chunk_size": 24, "floor_scale": 16, "num_local_experts": 4, "intermediate_size_mlp": 96},
    },
    "latent": {"model_type": "deepseek_v3", **LATENT},  # one compressed vector a token, beside experts in groups
    "recurrent": {  # beside gated attention; states and KV blocks
        "model_type": "qwen3_5_text",
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_value_heads": 4},
        "linear_num_key_heads": 2,
    },
}


@pytest.fixture(scope="module", params=[*MODELS, "llama, torch ops"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Through the native kernels, and one also through the torch references, which keep the same promise."""
    name, _, torch_ops = request.param.partition(", ")
    with pytest.MonkeyPatch.context() as patch:
        if torch_ops:
            patch.setattr(library, "load", lambda: None)
        yield make_model(tmp_path_factory.mktemp(name), **MODELS[name])


def engine(model: Path, **settings: Any) -> EngineCore:
    """The native kernels share their work among threads; torch's threads would only spin."""
    return make_engine(model, num_threads=1 if library.load() is None else 2, **settings)


@pytest.fixture(scope="module")
def reference(model: Path) -> EngineCore:
    """Each request alone, its prompt in one chunk, nothing cached."""
    return engine(model, enable_prefix_caching=False, max_num_batched_tokens=512)


Case = tuple[list[int], SamplingParams]


def make_cases(count: int, seed: int, longest: int = 100, outputs: int = 40) -> list[Case]:
    """Random prompts, half of them greedy and half sampled with a seed, all with logprobs."""
    rng = random.Random(seed)
    cases = []
    for index in range(count):
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, longest))]
        sampled = {"temperature": rng.choice([0.7, 1.0, 1.5]), "seed": rng.getrandbits(64)}
        sampled |= rng.choice([{}, {"top_k": 20}, {"top_p": 0.9}, {"repetition_penalty": 1.3}])
        greedy = {"temperature": 0.0, "seed": 0}
        params = SamplingParams(
            **(greedy if index % 2 else sampled),
            max_tokens=rng.randint(outputs // 2, outputs),
            logprobs=3,
            ignore_eos=index % 3 == 0,
        )
        cases.append((prompt, params))
    return cases


def answers_alone(reference: EngineCore, cases: list[Case]) -> list[Answer]:
    return [run_alone(reference, prompt, params) for prompt, params in cases]


def run_with_arrivals(core: EngineCore, cases: list[Case], seed: int) -> list[Answer]:
    rng = random.Random(seed)
    driver = Driver(core)
    for index, (prompt, params) in enumerate(cases):
        driver.add(str(index), prompt, params)
        for _ in range(rng.choice([0, 0, 0, 1, 2, 5])):
            driver.step()
    answers = driver.finish()
    return [answers[str(index)] for index in range(len(cases))]


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    assert [answer.content() for answer in found] == [answer.content() for answer in expected]


@pytest.mark.parametrize("steps_in_flight", [1, 3])
@pytest.mark.parametrize("batch", [2, 16])
def test_in_a_batch_with_random_arrivals(
    model: Path, reference: EngineCore, batch: int, steps_in_flight: int
) -> None:
    cases = make_cases(batch, seed=batch)
    core = engine(model, max_num_seqs=batch, steps_in_flight=steps_in_flight)
    assert_same(run_with_arrivals(core, cases, seed=batch), answers_alone(reference, cases))


@pytest.mark.parametrize("chunk", [1, 3, 16, 33, 64])
def test_in_chunks(model: Path, reference: EngineCore, chunk: int) -> None:
    cases = make_cases(4, seed=chunk)
    core = engine(model, max_num_batched_tokens=chunk, max_num_seqs=min(chunk, 4))
    assert_same(run_with_arrivals(core, cases, seed=chunk), answers_alone(reference, cases))


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_with_forced_preemption(model: Path, reference: EngineCore, steps_in_flight: int) -> None:
    cases = make_cases(8, seed=5, longest=20, outputs=90)  # they fit when they start, and not when they have grown
    layout = plan_memory(EngineConfig.from_flat(model=str(model))).layout
    core = engine(
        model,
        kv_cache_memory=layout.bytes_for(140, 64) + layout.page_bytes,
        max_model_len=140,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        steps_in_flight=steps_in_flight,
    )
    assert_same(run_with_arrivals(core, cases, seed=5), answers_alone(reference, cases))
    assert core.scheduler.stats().num_preemptions > 0


def test_on_full_partial_and_evicted_prefix_hits(model: Path, reference: EngineCore) -> None:
    rng = random.Random(9)
    base = [rng.randrange(3, VOCAB) for _ in range(96)]
    tail = [rng.randrange(3, VOCAB) for _ in range(30)]
    params = SamplingParams(temperature=0.8, seed=4, max_tokens=12, logprobs=2)
    layout = plan_memory(EngineConfig.from_flat(model=str(model))).layout
    core = engine(
        model,
        kv_cache_memory=layout.bytes_for(200, 128) + 5 * min(pool.page_bytes for pool in layout.pools),
        max_model_len=200,
        max_num_batched_tokens=128,
    )
    expected = {
        name: run_alone(reference, prompt, params) for name, prompt in (("base", base), ("part", base[:50] + tail))
    }
    cold = run_alone(core, base, params)
    full = run_alone(core, base, params)
    run_alone(core, base[:50] + tail[::-1], params)  # states are kept where another prompt left the first one
    part = run_alone(core, base[:50] + tail, params)
    assert (cold.num_cached_tokens, full.num_cached_tokens) == (0, 80)
    assert 0 < part.num_cached_tokens <= 48
    for seed in range(6):  # other prompts push the blocks out
        run_alone(core, make_cases(1, seed=100 + seed, longest=150)[0][0] * 2, SamplingParams(max_tokens=1))
    evicted = run_alone(core, base, params)
    assert evicted.num_cached_tokens < 80
    assert_same([cold, full, evicted], [expected["base"]] * 3)
    assert_same([part], [expected["part"]])


def test_prompt_logprobs_do_not_depend_on_chunks(model: Path, reference: EngineCore) -> None:
    prompt, _ = make_cases(1, seed=3)[0]
    prompt = (prompt * 5)[:70]
    params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2)
    whole = run_alone(reference, prompt, params)
    assert len(whole.prompt_logprobs) == len(prompt) - 1
    assert [entry.token_ids[0] for entry in whole.prompt_logprobs] == prompt[1:]
    core = engine(model, max_num_batched_tokens=7, max_num_seqs=2)
    run_alone(core, prompt, SamplingParams(max_tokens=1))  # cached, and yet not reused
    chunked = run_alone(core, prompt, params)
    assert chunked.prompt_logprobs == whole.prompt_logprobs
    assert chunked.num_cached_tokens == 0
