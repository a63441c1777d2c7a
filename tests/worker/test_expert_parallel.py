"""Ranks that hold whole experts: the tokens of one, by either exchange, with copies, and while experts move."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.planning.engine_plan import plan_memory
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import Answer, Driver, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY
from tests.gpu.helpers import Job, constrained, make_jobs, run_jobs
from tests.worker.test_multiproc import KINDS, LIMIT, SETTINGS, assert_alike, executor_of, is_alive, wait_until

EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64}
SMALL: dict[str, Any] = {"model_type": "qwen2_moe", **EXPERTS, "num_hidden_layers": 2}
SPLIT: dict[str, Any] = {"enable_expert_parallel": True}
MOVING: dict[str, Any] = {**SPLIT, "num_redundant_experts": 4, "enable_eplb": True, "eplb_interval": 6}
EXACT: dict[str, Any] = {**MOVING, "tp_exact": True}
MOVED = "moved by their load"  # in the log of the first rank

COMMON: dict[str, Any] = SETTINGS | {"max_model_len": 256}

NIGHTLY: list[Any] = [
    (4, {**SMALL, "num_experts": 7}, SPLIT),
    (2, {**SMALL, "quantization": "int8"}, MOVING),
    (2, KINDS["sinks"], {**MOVING, "num_redundant_experts": 0}),  # its experts have biases
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("experts") / "model", **SMALL)


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> Iterator[EngineCore]:
    """Layers take turns in every step."""
    core = make_engine(model, tensor_parallel_size=2, **{**MOVING, "eplb_interval": 1}, **COMMON)
    yield core
    core.shutdown()


def answers_of(model: Path, jobs: list[Job], **settings: Any) -> dict[str, Answer]:
    core = make_engine(model, **settings)
    core.constraints.set_vocabulary(VOCABULARY)
    found = run_jobs(core, jobs, seed=3)
    core.shutdown()
    return found


def test_ranks_that_hold_whole_experts_give_the_tokens_of_one(two_ranks: EngineCore, model: Path) -> None:
    """With copies of some, while experts move under load."""
    jobs = make_jobs(16, longest=100)
    assert_alike(run_jobs(two_ranks, jobs, seed=3), answers_of(model, jobs, **COMMON))


def test_a_rank_that_is_lost_while_experts_move_fails_the_engine(two_ranks: EngineCore) -> None:
    """The last test of the engine, which it ends: with the second rank stopped, the first waits for it in a move."""
    processes, driver = executor_of(two_ranks).ranks, Driver(two_ranks)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True))
    driver.step()
    os.kill(processes[1].pid, signal.SIGSTOP)
    wait_until(lambda: Path(f"/proc/{processes[1].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    begin = time.monotonic()
    os.kill(processes[1].pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 .*was killed by SIGKILL"):
        driver.finish()
    assert time.monotonic() - begin < LIMIT
    two_ranks.shutdown()
    assert not any(is_alive(process.pid) for process in processes)


@pytest.mark.nightly
@pytest.mark.parametrize(("size", "kind", "settings"), NIGHTLY)
def test_every_kind_of_expert_is_held_whole(
    size: int, kind: dict[str, Any], settings: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kind = dict(kind)
    common = COMMON | {"quantization": kind.pop("quantization", "auto")}
    model, jobs = make_model(tmp_path / "model", **kind), make_jobs(16, longest=100)
    expected = answers_of(model, jobs, **common)
    core = make_engine(model, tensor_parallel_size=size, **settings, **common)
    assert_alike(run_jobs(core, jobs, seed=3), expected)
    core.shutdown()
    assert (MOVED in capfd.readouterr().err) == ("enable_eplb" in settings)


@pytest.mark.parametrize("backend", ["all_to_all", "allgather_reducescatter"])
@pytest.mark.parametrize(
    ("size", "kind"),
    [
        (4, {**SMALL, "num_attention_heads": 8, "head_dim": 8}),
        pytest.param(2, {**SMALL, "quantization": "int8", "hidden_size": 128}, marks=pytest.mark.nightly),
        pytest.param(2, {**KINDS["sinks"], "num_local_experts": 8}, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_exchange_results_of_slots_give_the_bits_of_one(
    size: int, kind: dict[str, Any], backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With exact sums, three experts a token and copies of some, while experts move under load; as kernel lists."""
    kind = dict(kind)
    common = COMMON | {"quantization": kind.pop("quantization", "auto")}
    model, jobs = make_model(tmp_path / "model", **kind), constrained(make_jobs(16, longest=100))
    expected = answers_of(model, jobs, tp_exact=True, **common)
    rows = {"sequence_parallel_threshold": 19, "all2all_backend": backend}
    found = answers_of(model, jobs, tensor_parallel_size=size, **rows, **EXACT, **common)
    said = capfd.readouterr().err
    assert MOVED in said
    assert "steps run eagerly" not in said
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name
        assert found[name].error is None


def test_a_reduce_scatter_gives_the_bits_of_an_all_reduce(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """On two ranks, in steps that are held by rows and in others, which are kernel lists."""
    jobs = make_jobs(12, longest=60)
    ranks = COMMON | SPLIT | {"tensor_parallel_size": 2, "sequence_parallel_threshold": 32}
    expected = answers_of(model, jobs, **ranks)
    found = answers_of(model, jobs, **ranks, all2all_backend="allgather_reducescatter")
    assert "steps run eagerly" not in capfd.readouterr().err
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name
        assert found[name].error is None


def test_loads_are_counted_in_recorded_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token comes to as many experts of each layer as it is to have."""
    monkeypatch.setattr("quire.runner.experts.EVERY", 2)
    core = make_engine(make_model(tmp_path / "model", **SMALL), expert_load_stats=True, **SETTINGS)
    driver = Driver(core)
    for name in ("a", "b"):
        driver.add(name, [5, 6, 7, 8, 9], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    told: dict[int, list[int]] = {}
    steps: list[int] = []
    while core.has_unfinished():
        outputs = core.step()
        assert outputs.stats is not None
        steps.append(outputs.stats.step_tokens)
        for layer, counts in outputs.stats.expert_load.items():
            told[layer] = [*map(sum, zip(told.get(layer, [0] * len(counts)), counts, strict=True))]
    core.shutdown()
    assert list(told) == [0, 1]
    copied = len(steps) - 1 if len(steps) % 2 == 0 else len(steps) - 2  # what was copied last and read since
    assert [len(counts) for counts in told.values()] == [8, 8]
    assert sum(told[0]) == 3 * sum(steps[:copied])
    assert sum(told[1]) == 3 * 2 * copied  # the last layer computes tokens that are sampled from alone


def plan(model: Path, **settings: Any) -> None:
    plan_memory(EngineConfig.from_flat(model=str(model), **settings))


def test_what_a_model_does_not_allow_is_refused(tmp_path: Path) -> None:
    dense, experts = make_model(tmp_path / "dense", "llama", num_hidden_layers=1), make_model(tmp_path / "e", **SMALL)
    ranks = {"tensor_parallel_size": 2, **SPLIT}
    with pytest.raises(ConfigError, match="the model has no experts; leave it out"):
        plan(dense, **ranks)
    with pytest.raises(ConfigError, match=r"is 3, but 8 experts .* multiple of 2 ranks.*; set 4$"):
        plan(experts, **ranks, num_redundant_experts=3)
    with pytest.raises(ConfigError, match=r"is 20, but 8 experts .*no expert twice on one; set 8"):
        plan(experts, **ranks, num_redundant_experts=20)
    with pytest.raises(ConfigError, match="added up as one rank does it; set --enable-expert-parallel and"):
        plan(experts, **ranks, tp_exact=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_expert_parallel": True}, "set -tp 2 or more"),
        ({"all2all_backend": "all_to_all"}, "all2all_backend is 'all_to_all', .*; set --enable-expert-parallel"),
        ({"num_redundant_experts": 2}, "num_redundant_experts is 2, .*; set --enable-expert-parallel"),
        ({"enable_eplb": True}, "enable_eplb is True, .*; set --enable-expert-parallel"),
        ({"tensor_parallel_size": 2, **SPLIT, "num_redundant_experts": -2}, "must be at least 0 and 1"),
        ({"tensor_parallel_size": 2, **SPLIT, "enable_eplb": True, "eplb_interval": 0}, "must be at least 0 and 1"),
        (
            {"tensor_parallel_size": 2, **MOVING, "enable_lora": True, "lora_experts": True},
            "does not take adapters on experts",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="smollm2", **settings)
