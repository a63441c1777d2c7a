"""Replicas that share experts: the bits of one process, whoever has work, and one that is lost ends them all."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.child import processor_ticks
from quire.engine.core import EngineCore
from quire.engine.replicas import ReplicaClient, launch_replicas
from quire.parallel.connect import replica_group
from quire.parallel.replica_links import make_replica_links
from quire.planning.engine_plan import plan_memory
from quire.planning.stages import check_replicas
from quire.types.errors import ConfigError, EngineDeadError, EngineError
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan
from tests.e2e.tiny import LATENT, Answer, make_engine, make_model
from tests.engine.processes import Watch, pids
from tests.gpu.helpers import Job, make_jobs, run_jobs

SMALL: dict[str, Any] = {
    **{"model_type": "qwen2_moe", "num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 64},
    "num_hidden_layers": 2,
}
SHARED: dict[str, Any] = {"data_parallel_size": 2, "enable_expert_parallel": True}
SETTINGS: dict[str, Any] = {
    **{"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 48, "kv_cache_memory": 8 << 20},
    **{"device": "cpu", "num_threads": 1},
}
ALONE: list[tuple[dict[str, Any], str]] = [
    ({"pipeline_parallel_size": 2}, "set 1"),
    ({"elastic": True}, "set False"),
    ({"enable_eplb": True}, "set False"),
    ({"num_redundant_experts": 1}, "set 0"),
    ({"all2all_backend": "allgather_reducescatter"}, "set 'all_reduce'"),
    ({"executor": "multiproc"}, "set 'auto'"),
    ({"enable_lora": True, "lora_experts": True}, "set False"),
    ({"data_parallel_size": 64}, "set 63"),
]
CPU: Any = SimpleNamespace(uses_host_memory=True)
GPU: Any = SimpleNamespace(uses_host_memory=False, device="cuda")
LIMIT = 60.0  # seconds, on a busy machine


class Answers:
    def __init__(self, client: ReplicaClient) -> None:
        self.client = client
        self.found: dict[str, Answer] = {}

    def ask(self, job: Job, session: int = 0) -> None:
        params = job.params
        request = EngineRequest(
            request_id=job.name,
            token_ids=job.token_ids,
            params=params,
            seed=params.seed or 0,
            max_tokens=params.max_tokens or 16,
            eos_token_ids=(2,),
            session=session,
        )
        self.found[job.name] = Answer()
        self.client.add_request(request)

    def holder(self, name: str) -> int:
        return self.client._open[name].replica

    def have_ended(self, names: Iterable[str]) -> bool:
        return all(self.found[name].finish_reason is not None for name in names)

    async def read_until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT):
            while not condition():
                for output in (await self.client.get_outputs_async()).outputs:
                    self.found[output.request_id].add(output)

    async def finish(self) -> None:
        await self.read_until(lambda: self.have_ended(self.found))


def settings_of(model: Path, **settings: Any) -> EngineConfig:
    return EngineConfig.from_flat(model=str(model), **{**SETTINGS, **settings})


@asynccontextmanager
async def replicas(model: Path, **settings: Any) -> AsyncIterator[Answers]:
    client = launch_replicas(settings_of(model, **{**SHARED, **settings}))
    try:
        await client.wait_ready_async()
        yield Answers(client)
    finally:
        watches = [Watch(pid) for pid in pids(client)]
        await client.stop_async()
        client.shutdown()
        for watch in watches:
            watch.wait()


def long_job(name: str, max_tokens: int = 150) -> Job:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    return Job(name, [5 + len(name), 6, ord(name[-1])], params)


def alone(model: Path, jobs: list[Job], **settings: Any) -> dict[str, Answer]:
    core = make_engine(model, **{**SETTINGS, **settings})
    found = run_jobs(core, jobs, seed=3)
    core.shutdown()
    return found


def assert_equal(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in expected.items():
        assert found[name].error is None, found[name].error
        assert found[name].content() == answer.content(), name


def test_replicas_that_share_experts_give_the_bits_of_one_process(tmp_path: Path) -> None:
    """In turn: one replica has all work; both have, unevenly, with aborts; nobody has; and one of them is killed."""
    model = make_model(tmp_path / "model", **SMALL)
    jobs, lonely, doomed = make_jobs(12, longest=100), [long_job("x", 20), long_job("y", 30)], long_job("doomed", 240)
    expected = alone(model, [*jobs, *lonely])

    async def run() -> None:
        async with replicas(model) as answers:
            for job in lonely:
                answers.ask(job, session=7)
            assert len({answers.holder(job.name) for job in lonely}) == 1
            await answers.finish()
            answers.ask(doomed)
            for job in jobs:
                answers.ask(job, session=7 if len(job.name) == 1 else 0)
            assert {answers.holder(job.name) for job in jobs} == {0, 1}
            await answers.read_until(lambda: len(answers.found["doomed"].token_ids) > 2)
            answers.client.abort(["doomed"])
            await answers.finish()
            assert answers.found["doomed"].finish_reason == "abort"
            assert_equal(answers.found, expected)
            await rests(answers.client)
            with pytest.raises(EngineError, match="start the server with another -dp"):
                await answers.client.drain(0, 1.0)
            await killed(answers)

    asyncio.run(run())


async def rests(client: ReplicaClient) -> None:
    """Without work processes use next to no processor time."""
    async with asyncio.timeout(LIMIT):
        while True:
            before = [processor_ticks(pid) for pid in pids(client)]
            await asyncio.sleep(0.5)
            if all(processor_ticks(pid) - ticks <= 3 for pid, ticks in zip(pids(client), before, strict=True)):
                return


async def killed(answers: Answers) -> None:
    """Under load: the whole is dead in time, with the cause."""
    for name in ("l0", "l1"):
        answers.ask(long_job(name, 240))
    assert {answers.holder(name) for name in ("l0", "l1")} == {0, 1}
    await answers.read_until(lambda: all(answers.found[name].token_ids for name in ("l0", "l1")))
    begin = time.monotonic()
    os.kill(pids(answers.client)[1], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"replica 1 died, which held experts of all: .*SIGKILL"):
        await answers.finish()
    assert time.monotonic() - begin < 5


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ({**LATENT, "model_type": "deepseek_v3", "num_hidden_layers": 3}, {"data_parallel_size": 3}),
        (SMALL, {"quantization": "int8"}),
        ({**SMALL, "num_experts_per_tok": 2}, {"dtype": "bfloat16", "tp_exact": True}),
    ],
)
def test_every_kind_of_expert_is_shared(kind: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    model, jobs = make_model(tmp_path / "model", **kind), make_jobs(20, longest=60)
    expected = alone(model, jobs, **{name: value for name, value in settings.items() if "size" not in name})

    async def run() -> None:
        async with replicas(model, **settings) as answers:
            for job in jobs:
                answers.ask(job)
            await answers.finish()
            assert_equal(answers.found, expected)

    asyncio.run(run())


def test_a_step_that_fails_in_one_replica_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them in this process: the second takes part in steps of the first until one of its own fails."""
    model, links, cores = make_model(tmp_path / "model", **SMALL), make_replica_links(2), list[EngineCore]()
    for rank in range(2):
        monkeypatch.setattr("quire.parallel.replicas.replica_links", lambda rank=rank: [rank, *links])
        cores.append(make_engine(model, **SETTINGS, **SHARED))
    first, second = cores
    job = long_job("x", 8)
    assert_equal(run_jobs(first, [job], seed=1), alone(model, [job]))
    shared = r"replicas that share experts \(--enable-expert-parallel\) cannot"
    for change, advice in (
        (second.executor.sleep(1), "sleep; stop the server to free its memory"),
        (second.executor.update_weights(str(model)), "update their weights; start the server again with the new"),
    ):
        assert re.search(f"{shared} {advice}", str(change.exception()))
    error = second.executor.execute(StepPlan(10_000_000, [999], [5])).exception()
    assert isinstance(error, Exception)
    assert second.executor.is_sticky(error)
    with pytest.raises(EngineDeadError, match="a replica that holds some of the experts has failed"):
        run_jobs(first, [job], seed=1)


def test_a_replica_is_planned_with_its_share_of_the_experts(tmp_path: Path) -> None:
    def weights(**settings: Any) -> int:
        ledger = plan_memory(settings_of(model, **settings))
        return next(entry.num_bytes for entry in ledger.entries if entry.name == "weights")

    model = make_model(tmp_path / "model", **SMALL)
    of_expert = 2 * 3 * 64 * 64 * 4  # in two layers, as float32
    assert weights() - weights(**SHARED) == 3 * of_expert  # the first holds four of seven
    with pytest.raises(ConfigError, match=r"experts \(7\) is too small for 9 ranks; choose fewer"):
        weights(**{**SHARED, "data_parallel_size": 9})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            (extra, f"{[*extra][-1]} is .*, which replicas that share experts .* do not take; {fix}")
            for extra, fix in ALONE
        ),
    ],
)
def test_what_replicas_that_share_experts_cannot_do_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_flat(model="smollm2", **{**SHARED, **settings})


def test_what_the_model_or_the_process_does_not_allow_is_refused(tmp_path: Path) -> None:
    dense, experts = make_model(tmp_path / "dense", "llama", num_hidden_layers=1), make_model(tmp_path / "e", **SMALL)
    with pytest.raises(ConfigError, match="the model has no experts; leave it out"):
        plan_memory(settings_of(dense, **SHARED))
    with pytest.raises(ConfigError, match="but this is one engine; `quire serve` runs several"):
        make_engine(experts, **SETTINGS, **SHARED)
    group = replica_group(settings_of(experts, **SHARED).parallel)
    for platform, drafter, what in ((CPU, "eagle", r"speculative_config \(eagle\)"), (GPU, None, "device cuda")):
        with pytest.raises(ConfigError, match=f"{what} is not for replicas that share experts; share them by -tp"):
            check_replicas(group, platform, drafter)
    check_replicas(group, CPU, None)
