"""NCCL as a group of one: the engine's steps with collectives in them are captured, and give the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.parallel.groups import ParallelGroup
from quire.types.sampling import SamplingParams
from quire.worker.inproc import InProcExecutor
from quire.worker.registry import EXECUTORS
from quire.worker.worker import Worker
from tests.e2e.tiny import Driver
from tests.gpu.helpers import engine, make_jobs, needs_gpu, run_jobs, tiny_model

pytestmark = needs_gpu


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from quire.parallel.nccl import start_nccl

    return start_nccl(torch.device("cuda"), 0, 1, str(tmp_path_factory.mktemp("nccl") / "store"))


def test_a_group_of_one_exchanges_with_itself(collectives: Any) -> None:
    x = torch.randn(5, 7, device="cuda", dtype=torch.bfloat16)
    assert torch.equal(collectives.all_reduce(x), x)
    assert torch.equal(collectives.all_gather(x, 7), x)
    assert torch.equal(collectives.gather_rows(collectives.reduce_scatter(x), 5), x)
    assert torch.equal(collectives.sum_by_shares(x), x)
    assert collectives.minimum([3, 1 << 40]) == [3, 1 << 40]


def test_collectives_are_captured(collectives: Any) -> None:
    x, out = torch.zeros(4, 8, device="cuda"), torch.zeros(4, 8, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        collectives.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out.copy_(collectives.all_reduce(x) + 1)
    x.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, torch.full_like(out, 4.0))


NUM_STEPS = 16


def decode_events(core: EngineCore) -> tuple[int, int]:
    """Kernels on the device, and waits of the host for it, of NUM_STEPS decode steps."""
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
    for _ in range(12):
        driver.step()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(NUM_STEPS):
            driver.step()
        torch.cuda.synchronize()
    driver.finish()
    events = profile.events() or []
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    waits = [event for event in events if event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize")]
    return len([event for event in kernels if "Memcpy" not in event.name and "Memset" not in event.name]), len(waits)


def test_collectives_add_few_launches_and_no_wait(collectives: Any, tmp_path: Path) -> None:
    """At most six kernels a layer, and the host waits no oftener."""
    model = tiny_model(tmp_path / "model")
    plain = engine(model)
    kernels, waits = decode_events(plain)
    plain.shutdown()
    group = ParallelGroup(0, 1, collectives)
    EXECUTORS.register("nccl-of-one", lambda config, report: InProcExecutor(Worker(config, report, group)))
    config = EngineConfig.from_flat(model=str(model), device="cuda", max_model_len=1024)
    core, _, _ = build_engine(config, executor_name="nccl-of-one")
    more_kernels, more_waits = decode_events(core)
    executor = core.executor
    assert isinstance(executor, InProcExecutor)
    assert executor._worker.model is not None
    layers = len(executor._worker.model.cached_layers())
    core.shutdown()
    print(f"{(more_kernels - kernels) / NUM_STEPS / layers:.2f} kernels a layer more; waits {waits}, {more_waits}")
    assert more_kernels - kernels <= 6 * layers * NUM_STEPS
    assert more_waits <= waits + 1


@pytest.mark.parametrize(("name", "threshold"), [("all_reduce", 0), ("reduce_scatter", 24)])
def test_an_engine_with_collectives_gives_the_same(
    collectives: Any, name: str, threshold: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Steps by rows too: captured ones, and eager ones of more tokens than are captured."""
    model, jobs = tiny_model(tmp_path / "model"), make_jobs(24, longest=100)
    plain = engine(model, deterministic=True)
    expected = run_jobs(plain, jobs, seed=1)
    plain.shutdown()
    group = ParallelGroup(0, 1, collectives, row_threshold=threshold)
    calls = 0
    counted = getattr(collectives, name)

    def count(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        result: torch.Tensor = counted(x)
        return result

    monkeypatch.setattr(collectives, name, count)
    EXECUTORS.register("nccl-of-one", lambda config, report: InProcExecutor(Worker(config, report, group)))
    config = EngineConfig.from_flat(model=str(model), device="cuda", max_model_len=1024, deterministic=True)
    core, _, _ = build_engine(config, executor_name="nccl-of-one")
    found = run_jobs(core, jobs, seed=2)
    steps_called = calls
    again = run_jobs(core, jobs, seed=2)
    core.shutdown()
    assert steps_called  # row-parallel layers do sum over the group
    for job, answer in expected.items():
        assert found[job].token_ids == answer.token_ids, job
        assert again[job].token_ids == answer.token_ids, job
