"""Steps as lists of kernel calls: where a model's steps can be recorded they are, and no token depends on it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire.cli.main import main
from quire.engine.core import EngineCore
from quire.kernels.cpu import library
from quire.layers.quant.base import GroupedMethod
from quire.runner.kernel_list import KernelList
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import Driver, make_engine, make_model
from tests.runner.engines import run_eagerly, runner_of, spy_on, worker_of

pytestmark = pytest.mark.skipif(library.load() is None, reason="needs a C++ compiler")

SLIDING: dict[str, Any] = {"sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {5: 2.0}, "allowed_token_ids": list(range(3, 90))},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": [7, 9]},
]


def answers(core: EngineCore, **params: Any) -> dict[str, object]:
    """Prompts of all lengths, most of which arrive together; they leave one after the other."""
    driver = Driver(core)
    for index in range(5):
        prompt = [(3 + 7 * index + 5 * place) % 190 for place in range(1 + 9 * index)]
        driver.add(str(index), prompt, SamplingParams(max_tokens=6 + 5 * index, ignore_eos=True, seed=1, **params))
        if index == 3:
            for _ in range(4):
                driver.step()
    return {name: answer.content() for name, answer in driver.finish().items()}


@pytest.mark.parametrize(
    ("model_type", "overrides", "is_recorded"),
    [
        ("llama", {}, True),
        ("qwen2", SLIDING, True),
        ("qwen3", {}, True),
        ("gemma2", {}, True),
        ("granite", {}, True),
        ("olmo2", {}, False),
        ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 48}, True),
        ("gpt_oss", {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 16}, True),
    ],
)
def test_tokens_and_logprobs_are_those_of_eager_steps(
    model_type: str, overrides: dict[str, Any], is_recorded: bool, tmp_path: Path
) -> None:
    model = make_model(tmp_path, model_type, **overrides)
    core, eager = (make_engine(model, max_num_batched_tokens=32) for _ in range(2))
    way = runner_of(core).ways[0]
    assert isinstance(way, KernelList)
    assert way.is_recorded == is_recorded
    spy = spy_on(core)
    run_eagerly(eager)
    assert answers(core, temperature=0.0, logprobs=1) == answers(eager, temperature=0.0, logprobs=1)
    sizes = {shape.num_rows for shape in spy.ran if shape.is_decode}
    assert sizes >= {1, 2, 3, 4} if is_recorded else not sizes


def test_quantized_experts_give_the_tokens_of_eager_steps(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "qwen3_moe", **EXPERTS)
    assert main(["quantize", str(model), "--scheme", "w4a16", "--out", str(tmp_path / "out")]) == 0
    for folder, settings in ((tmp_path / "out", {}), (model, {"quantization": "fp8"})):
        core, eager = (make_engine(folder, max_num_batched_tokens=32, **settings) for _ in range(2))
        loaded = worker_of(core).model
        assert loaded is not None
        kept = {method.kept for method in loaded.modules() if isinstance(method, GroupedMethod)}
        assert kept == ({"e4m3"} if settings else {"code4_min_f32"})
        spy = spy_on(core)
        run_eagerly(eager)
        assert answers(core, temperature=0.0, logprobs=1) == answers(eager, temperature=0.0, logprobs=1)
        assert {shape.num_rows for shape in spy.ran if shape.is_decode} >= {1, 2, 3, 4}


def test_every_kind_of_sampling_is_that_of_eager_steps(tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    core, eager = make_engine(model), make_engine(model)
    spy = spy_on(core)
    run_eagerly(eager)
    for params in SAMPLING:
        assert answers(core, **params) == answers(eager, **params)
    assert not spy.refused


def test_bits_at_every_size(tmp_path: Path) -> None:
    core, eager = (make_engine(make_model(tmp_path, "llama"), max_num_batched_tokens=64) for _ in range(2))
    run_eagerly(eager)
    rng = random.Random(0)
    for length in (1, 2, 11, 12, 13, 31, 63):
        prompts = [[rng.randrange(1, 60) for _ in range(length)], [1, 2, 3]]
        found = []
        for engine in (core, eager):
            driver = Driver(engine)
            for index, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3)
                driver.add(f"{length}-{index}", prompt, params)
            found.append({name: answer.content() for name, answer in driver.finish().items()})
        assert found[0] == found[1]


def test_steps_whose_tokens_are_all_wanted_run_eagerly(tmp_path: Path) -> None:
    """A recording computes the last layer for the tokens that are sampled from, and a chunk may have none."""
    core = make_engine(make_model(tmp_path, "llama"), max_num_batched_tokens=16)
    spy = spy_on(core)
    driver = Driver(core)
    prompt = [(7 * i) % 60 for i in range(40)]
    driver.add("a", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    driver.finish()
    assert [shape.num_samples for shape in spy.ran] == [0, 0, 1]
    driver.add("b", prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1))
    driver.finish()
    assert (len(spy.ran), len(spy.refused)) == (3, 3)


def test_a_prompt_of_single_token_chunks_is_not_taken_for_decoding(tmp_path: Path) -> None:
    """A step of one token may also be a part of a prompt, after which more of it follows."""
    model = make_model(tmp_path, "llama")
    found = []
    for tokens in (1, 64):
        core = make_engine(model, max_num_batched_tokens=tokens, max_num_seqs=1)
        spy, driver = spy_on(core), Driver(core)
        driver.add("a", [5, 6, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
        found.append(driver.finish()["a"].token_ids)
        assert sum(shape.is_decode for shape in spy.ran) == (5 if tokens == 1 else 4)
    assert found[0] == found[1]


def test_a_recording_leaves_nothing_behind(tmp_path: Path) -> None:
    """Rows and tables are empty again, and whatever lies in the blocks it used is finite."""
    core = make_engine(make_model(tmp_path, "llama"))
    while core.capture_next():
        pass
    rows = runner_of(core).rows
    assert int(rows.token_ids[rows.scratch_row, 0]) == 0
    assert rows.num_tokens.tolist() == rows.num_computed.tolist() == [0] * (rows.scratch_row + 1)
    assert int(runner_of(core).tables.tables.count_nonzero()) == 0
    for layer in worker_of(core).model.attention_layers():
        assert bool(layer.cache.float().isfinite().all())


def test_an_engine_with_room_for_a_few_tokens_records_nothing(tmp_path: Path) -> None:
    core = make_engine(make_model(tmp_path, "llama"), max_model_len=8)
    assert len(runner_of(core).ways) == 1
    driver = Driver(core)
    driver.add("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    assert len(driver.finish()["a"].token_ids) == 4
