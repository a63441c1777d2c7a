"""Tensor parallel ranks in processes: the tokens of one, and an end in seconds when a rank is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from quire.config.engine import EngineConfig
from quire.config.env import child_environment
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.parallel.groups import ParallelGroup
from quire.parallel.shared_memory import SharedMemory, SharedMemoryCollectives, collective_bytes
from quire.planning.engine_plan import plan_memory
from quire.runner.kernel_list import KernelList
from quire.types.errors import ConfigError, EngineDeadError
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from quire.worker.multiproc import MultiProcExecutor
from quire.worker.rank_messages import Execute
from quire.worker.ring import CAPACITY, NOTICE
from quire.worker.worker import Worker
from tests.corpus.requests import corpus_jobs
from tests.e2e import draft_heads
from tests.e2e.draft_heads import Target
from tests.e2e.drafting import draft_always
from tests.e2e.test_lora import answers, make_adapter, mixed
from tests.e2e.tiny import LATENT, RECURRENT, Answer, Driver, make_engine, make_model, run_all
from tests.e2e.tiny_grammar import VOCABULARY
from tests.gpu.helpers import Job, make_jobs, run_jobs
from tests.worker.rank_changes import check_changes

SETTINGS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 96}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "dtype": "float32", "kv_cache_dtype": "float32"}
KINDS_LATENT: dict[str, Any] = {"model_type": "deepseek_v3", **LATENT}
LIMIT = 5.0  # seconds for an engine to notice that a rank is lost


def executor_of(core: EngineCore) -> MultiProcExecutor:
    assert isinstance(core.executor, MultiProcExecutor)
    return core.executor


def wait_until(condition: Callable[[], bool], limit: float = 10.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return status != "Z"


def assert_alike(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Equal tokens, and log-probabilities that sums in another order leave close."""
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
        assert found[name].finish_reason == answer.finish_reason, name
        pairs = [*zip(found[name].logprobs, answer.logprobs, strict=True)]
        pairs += [*zip(found[name].prompt_logprobs, answer.prompt_logprobs, strict=True)]
        for mine, theirs in pairs:
            torch.testing.assert_close(
                torch.tensor(mine.logprobs), torch.tensor(theirs.logprobs), atol=1e-3, rtol=1e-3
            )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks") / "base"
    return make_model(folder, "llama", max_position_embeddings=1024, num_attention_heads=8, head_dim=8)


@pytest.fixture(scope="module")
def two_ranks(model: Path) -> Iterator[EngineCore]:
    core = make_engine(model, tensor_parallel_size=2, **SETTINGS, **LORA)
    core.constraints.set_vocabulary(VOCABULARY)
    yield core
    pids = [process.pid for process in executor_of(core).ranks]
    core.shutdown()
    assert not any(map(is_alive, pids))


def test_two_ranks_give_the_tokens_of_one(two_ranks: EngineCore, model: Path) -> None:
    """With grammars, log-probabilities of outputs and prompts, penalties, and prefix hits."""
    one = make_engine(model, **SETTINGS, **LORA)
    one.constraints.set_vocabulary(VOCABULARY)
    expected = run_jobs(one, corpus_jobs(), seed=1)
    layout = one.executor.description.ledger.layout
    one.shutdown()
    assert any(answer.num_cached_tokens for answer in expected.values())
    assert_alike(run_jobs(two_ranks, corpus_jobs(), seed=1), expected)
    halves = two_ranks.executor.description.ledger.layout
    assert [pool.page_bytes * 2 for pool in halves.pools] == [pool.page_bytes for pool in layout.pools]


def test_two_ranks_sleep_and_change_their_weights(two_ranks: EngineCore, model: Path) -> None:
    check_changes(two_ranks, model)


def test_steps_by_rows_give_the_same_bits(two_ranks: EngineCore, model: Path) -> None:
    """Of prompts alone and beside decodes, odd numbers of tokens, prefix hits, after preemptions, with adapters."""
    adapters = [make_adapter(model, model.parent / name, seed) for seed, name in enumerate(("first", "second"))]
    layout = two_ranks.executor.description.ledger.layout
    small = {"max_model_len": 256, "kv_cache_memory": layout.bytes_for(256, 96) + layout.page_bytes}
    core = make_engine(model, tensor_parallel_size=2, sequence_parallel_threshold=5, **(SETTINGS | small), **LORA)
    core.constraints.set_vocabulary(VOCABULARY)
    long = SamplingParams(temperature=0.8, seed=4, max_tokens=90, ignore_eos=True, logprobs=2)
    growing = [Job(f"grows {index}", [5 + index, *range(3, 20)], long) for index in range(6)]  # beyond the cache
    jobs = [*make_jobs(24, longest=100), *growing]
    expected, found = run_jobs(two_ranks, jobs, 1), run_jobs(core, jobs, 2)
    assert any(answer.num_cached_tokens for answer in found.values())
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name
        assert found[name].prompt_logprobs == answer.prompt_logprobs, name
    expected, found = run_all(two_ranks, mixed(adapters)), run_all(core, mixed(adapters))
    assert {name: answer.content() for name, answer in found.items()} == {
        name: answer.content() for name, answer in expected.items()
    }
    num_preemptions = core.scheduler.stats().num_preemptions
    core.shutdown()
    assert num_preemptions > 0


def test_steps_by_rows_are_recorded(model: Path) -> None:
    """Ranks in threads: beside the kernel list of short steps there is one of steps by rows."""
    memory = SharedMemory(collective_bytes(4))
    config = EngineConfig.from_flat(model=str(model), max_num_batched_tokens=64, max_num_seqs=4, max_model_len=64)

    def recorded(rank: int) -> list[tuple[bool, bool, bool]]:
        links = SharedMemoryCollectives(memory, rank, 4)
        worker = Worker(config, group=ParallelGroup(rank, 4, links, row_threshold=24))
        assert worker._runner is not None
        found = [list(way._forwards) for way in worker._runner.ways if isinstance(way, KernelList)]
        return found[0]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(recorded, range(4))) == [[(False, False, False), (False, False, True)]] * 4
    memory.close()


def test_two_ranks_serve_adapters(two_ranks: EngineCore, model: Path) -> None:
    adapters = [make_adapter(model, model.parent / name, seed) for seed, name in enumerate(("first", "second"))]
    expected = answers(model, mixed(adapters), lora_dtype="auto")
    assert_alike(run_all(two_ranks, mixed(adapters)), expected)


def test_a_step_that_fails_on_all_ranks_is_contained(two_ranks: EngineCore) -> None:
    error = two_ranks.executor.execute(StepPlan(10_000_000, [999], [5])).exception()
    assert isinstance(error, Exception)
    assert not two_ranks.executor.is_sticky(error)
    assert_serves(two_ranks)


def test_a_step_that_fails_on_one_rank_is_contained(two_ranks: EngineCore) -> None:
    """The others do not wait for it."""
    driver = Driver(two_ranks)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    driver.step()
    bad = msgspec.msgpack.encode(Execute(StepPlan(10_000_001, [999], [5])))
    executor_of(two_ranks).ranks[1].send(NOTICE.pack(-1, len(bad), 0) + bad)
    answer = driver.finish()["a"]
    assert (len(answer.token_ids), answer.error) == (40, None)
    assert_serves(two_ranks)


def test_a_message_larger_than_the_ring_goes_beside_it(two_ranks: EngineCore) -> None:
    executor = executor_of(two_ranks)
    executor.send(Execute(StepPlan(10_000_002, [999], [5])), np.zeros(CAPACITY, dtype=np.uint8))
    assert isinstance(executor.wait_for(10_000_002), Exception)
    assert_serves(two_ranks)


def assert_serves(core: EngineCore) -> None:
    driver = Driver(core)
    driver.add("after", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    answer = driver.finish()["after"]
    assert (len(answer.token_ids), answer.error) == (3, None)


def run_exact(model: Path, size: int) -> dict[str, Answer]:
    rows = {"sequence_parallel_threshold": 19} if size > 1 else {}
    core = make_engine(model, tensor_parallel_size=size, tp_exact=True, **rows, **SETTINGS)
    core.constraints.set_vocabulary(VOCABULARY)
    try:
        return run_jobs(core, corpus_jobs(), seed=size)
    finally:
        core.shutdown()


@pytest.mark.parametrize(
    "size", [4, pytest.param(2, marks=pytest.mark.nightly), pytest.param(8, marks=pytest.mark.nightly)]
)
def test_exact_ranks_give_equal_bits(model: Path, size: int) -> None:
    """Four ranks share two KV heads, and hold the residual stream of longer steps by rows."""
    expected, found = run_exact(model, 1), run_exact(model, size)
    for name, answer in expected.items():
        assert found[name].content() == answer.content(), name
        assert found[name].prompt_logprobs == answer.prompt_logprobs, name


SPLIT = [
    ({"model_type": "llama", "num_attention_heads": 8, "head_dim": 8}, 4, 2),  # two KV heads
    pytest.param(KINDS_LATENT, 2, 2, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("kind", "size", "contexts"), SPLIT)
def test_ranks_that_split_contexts_give_the_tokens_of_one(
    kind: dict[str, Any], size: int, contexts: int, tmp_path: Path
) -> None:
    """Each keeps a part of every block: with the same memory, as many times more blocks."""
    model, jobs = make_model(tmp_path / "model", **kind), make_jobs(16, longest=100)
    settings = SETTINGS | {"max_model_len": 256, "kv_cache_memory": 1 << 20}
    one = make_engine(model, **settings)
    expected = run_jobs(one, jobs, seed=3)
    one.shutdown()
    core = make_engine(model, tensor_parallel_size=size, decode_context_parallel_size=contexts, **settings)
    assert_alike(run_jobs(core, jobs, seed=3), expected)
    split = core.executor.description.ledger
    core.shutdown()
    whole = plan_memory(EngineConfig.from_flat(model=str(model), tensor_parallel_size=size, **settings))
    assert [pool.page_bytes * contexts for pool in split.layout.pools] == [
        pool.page_bytes for pool in whole.layout.pools
    ]
    assert split.pool_blocks[0] >= contexts * whole.pool_blocks[0]


KINDS: dict[str, dict[str, Any]] = {
    "experts": {"model_type": "qwen2_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "recurrent": {"model_type": "qwen3_5_text", **RECURRENT},
    "int8": {"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "quantization": "int8"},
    "windows": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "sliding_window": 24},
    "full norm": {"model_type": "olmo2"},
    "sinks": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 24},
}


@pytest.mark.parametrize(
    "kind", [kind if kind in ("experts", "int8") else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_every_kind_of_layer_is_shared(kind: str, tmp_path: Path) -> None:
    sizes = dict(KINDS[kind])
    settings = SETTINGS | {"max_model_len": 256, "quantization": sizes.pop("quantization", "auto")}
    model, jobs = make_model(tmp_path / "model", **sizes), make_jobs(16, longest=100)
    found: list[dict[str, Answer]] = []
    for size in (1, 2):
        rows = {"sequence_parallel_threshold": 19} if size > 1 else {}
        core = make_engine(model, tensor_parallel_size=size, **rows, **settings)
        found.append(run_jobs(core, jobs, seed=3))
        core.shutdown()
    assert_alike(found[1], found[0])


def test_a_size_that_heads_do_not_allow_names_those_that_they_do(model: Path) -> None:
    config = EngineConfig.from_flat(model=str(model), tensor_parallel_size=3, **SETTINGS)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size is 3, but attention heads \(8\).*takes 1, 2, 4, 8$"):
        plan_memory(config)


@pytest.mark.nightly
def test_what_ranks_refuse_is_told_as_it_is(model: Path) -> None:
    config = EngineConfig.from_flat(model=str(model), tensor_parallel_size=3, **SETTINGS)
    with pytest.raises(ConfigError, match=r"^tensor_parallel_size is 3, but attention heads"):
        build_engine(config)


def test_contexts_of_heads_that_one_rank_holds_cannot_be_split(model: Path) -> None:
    config = EngineConfig.from_flat(model=str(model), tensor_parallel_size=2, decode_context_parallel_size=2)
    with pytest.raises(ConfigError, match=r"2 KV heads on 2 ranks a head is held by 1"):
        plan_memory(config)


def test_the_ledger_of_a_rank_has_its_share(model: Path) -> None:
    configs = [EngineConfig.from_flat(model=str(model), tensor_parallel_size=size, **SETTINGS) for size in (1, 4)]
    one, four = map(plan_memory, configs)
    assert four.entries[0].num_bytes < 0.4 * one.entries[0].num_bytes  # norms are whole on each
    assert four.layout.pools[0].page_bytes * 2 == one.layout.pools[0].page_bytes  # two KV heads for four ranks


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 0}, "must be at least 1"),
        ({"tensor_parallel_size": 64}, "at most 63 ranks"),
        ({"tensor_parallel_size": 2, "executor": "inproc"}, "2 ranks need processes"),
        ({"tensor_parallel_size": 3, "tp_exact": True}, "must be one of 1, 2, 4, 8"),
        ({"tp_exact": True, "enable_lora": True}, "does not take LoRA adapters"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 4}, r"must divide tensor_parallel_size \(2\)"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "tp_exact": True}, "does not fix sums"),
        ({"sequence_parallel_threshold": 512}, "there is one tensor parallel rank"),
        ({"tensor_parallel_size": 2, "sequence_parallel_threshold": -1}, "must be at least 0"),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 8}, "is 64 but an engine has at most 63 ranks"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="smollm2", **settings)


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("how", [pytest.param(signal.SIGKILL, marks=pytest.mark.nightly), signal.SIGSTOP])
def test_a_rank_that_is_lost_fails_the_engine(model: Path, rank: int, how: signal.Signals) -> None:
    core = make_engine(model, tensor_parallel_size=2, **SETTINGS)
    processes = executor_of(core).ranks
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True))
    driver.step()
    os.kill(processes[rank].pid, how)
    begin = time.monotonic()
    cause = "was killed by SIGKILL" if how == signal.SIGKILL else "has stood still"
    with pytest.raises(EngineDeadError, match=f"rank {rank} .*{cause}"):
        driver.finish()
    assert time.monotonic() - begin < LIMIT
    core.shutdown()
    assert not any(is_alive(process.pid) for process in processes)


def test_ranks_do_not_outlive_their_engine(model: Path) -> None:
    """Which is killed while it works."""
    script = f"""
        from quire.types.sampling import SamplingParams
        from quire.config.engine import EngineConfig
        from quire.engine.build import build_engine
        from quire.types.request import EngineRequest
        config = EngineConfig.from_flat(model={str(model)!r}, tensor_parallel_size=2, max_model_len=512)
        core, _, _ = build_engine(config)
        print(*(process.pid for process in core.executor.ranks), flush=True)
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        while True:
            core.add_request(EngineRequest(request_id="a", token_ids=[5], params=params, seed=0, max_tokens=400))
            while core.has_work():
                core.step()
    """
    environment = child_environment(PYTHONPATH=str(Path(__file__).parents[2]))
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as engine:
        assert engine.stdout is not None
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert len(pids) == 2
        engine.kill()
    wait_until(lambda: not any(map(is_alive, pids)), LIMIT)


def test_an_idle_engine_hears_that_a_rank_is_gone(two_ranks: EngineCore) -> None:
    """The last test of the group, which it ends."""
    loop = EngineLoop(two_ranks)
    os.kill(executor_of(two_ranks).ranks[1].pid, signal.SIGKILL)
    assert loop.wait()  # else for ever
    with pytest.raises(EngineDeadError, match="rank 1"):
        loop.run_once()


@pytest.mark.parametrize("name", ["eagle3", pytest.param("draft_model", marks=pytest.mark.nightly)])
def test_two_ranks_draft(name: str, tmp_path: Path) -> None:
    """Hidden states of all tokens reach a head on every rank, out of recorded steps, and all ranks propose alike."""
    target = make_model(tmp_path / "target", "llama", num_attention_heads=8, head_dim=8)
    if name == "eagle3":
        draft, _ = draft_heads.eagle3(tmp_path / "head", Target(target))
    else:
        draft = target
    config = {"method": name, "model": str(draft), "num_speculative_tokens": 3}
    cores = [make_engine(target, max_model_len=512, dtype="float32")]
    cores.append(
        make_engine(
            target,
            max_model_len=512,
            dtype="float32",
            tensor_parallel_size=2,
            sequence_parallel_threshold=7,  # what the head reads is gathered
            speculative_config=config,
        )
    )
    draft_always(cores[1])
    found = []
    for core in cores:
        driver = Driver(core)
        for index, length in enumerate((1, 7, 30)):
            params = SamplingParams(temperature=0.7 * index, seed=index, max_tokens=16, ignore_eos=True)
            driver.add(str(index), [(5 + 3 * place + index) % 190 + 3 for place in range(length)], params)
        found.append(driver.finish())
        stats = core.scheduler.stats()
        core.shutdown()
    assert_alike(found[1], found[0])
    assert stats.num_draft_tokens > 20
    if name == "draft_model":
        assert stats.num_accepted_tokens > 0.9 * stats.num_draft_tokens, "a target that drafts for itself is right"
