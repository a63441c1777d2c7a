"""What a step costs besides the model: from schedule() entry to EngineOutputs built, with a fake result.

Run: python benchmarks/engine_overhead.py [--steps 1000] [--output benchmarks/results/engine_overhead.json]
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from pathlib import Path

from quire.bench.report import environment, write_report
from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.scheduler import Scheduler
from quire.sched.state import Limits
from quire.sched.step_times import Prior, StepTimes
from quire.sched.time_shares import make_shares
from quire.types.outputs import EngineOutputs
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import StepPlan, StepResult

BLOCK_SIZE = 16
PROMPT_TOKENS = 1024
VOCAB_SIZE = 32_000

Times = tuple[float, float]  # wall, CPU


def make_scheduler(num_seqs: int, num_blocks: int) -> Scheduler:
    layout = plan_layout([LayerKV("full", None, 1024)] * 24, BLOCK_SIZE)
    return Scheduler(
        Limits(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=1 << 20,
            long_prefill_token_threshold=1 << 20,
            max_model_len=1 << 17,
        ),
        policy="fcfs",
        kv=KVCacheManager(layout, num_blocks),
    )


def make_request(name: str, token_ids: list[int], max_tokens: int) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return EngineRequest(
        request_id=name, token_ids=token_ids, params=params, eos_token_ids=(2,), max_tokens=max_tokens
    )


def fake_result(plan: StepPlan, token: int) -> StepResult:
    return StepResult(plan.step_id, [[token] for _ in plan.rows])


def step(scheduler: Scheduler, token: int) -> Times:
    """One step; seconds spent in the scheduler, on the wall clock and of this thread's CPU time."""
    begin, cpu_begin = time.perf_counter(), time.thread_time()
    plan = scheduler.schedule()
    planned, cpu_planned = time.perf_counter(), time.thread_time()
    assert plan is not None
    result = fake_result(plan, token)
    resumed, cpu_resumed = time.perf_counter(), time.thread_time()
    EngineOutputs(scheduler.update(plan, result), scheduler.stats())
    end, cpu_end = time.perf_counter(), time.thread_time()
    return end - resumed + planned - begin, cpu_end - cpu_resumed + cpu_planned - cpu_begin


def steady_decode(num_requests: int, num_steps: int) -> list[Times]:
    """Every request decodes in every step; prompt lengths differ, so block crossings spread over steps."""
    draw = random.Random(0)
    warm_up = 32
    longest = 64 + num_steps + warm_up
    scheduler = make_scheduler(num_requests, num_requests * (longest // BLOCK_SIZE + 2) + 1)
    for index in range(num_requests):
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(draw.randint(1, 64))]
        scheduler.add_request(make_request(str(index), prompt, num_steps + warm_up + 1))
    for _ in range(warm_up):
        step(scheduler, 7)
    times = [step(scheduler, 7) for _ in range(num_steps)]
    assert scheduler.num_running == num_requests
    scheduler.check_integrity()
    return times


def warm_admission(num_requests: int, num_steps: int, *, shared: bool) -> list[Times]:
    """Every step admits new prompts whose blocks are all cached but the last."""
    draw = random.Random(0)
    num_prompts = 1 if shared else num_requests
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)] for _ in range(num_prompts)]
    scheduler = make_scheduler(num_requests, 2 * num_requests * PROMPT_TOKENS // BLOCK_SIZE)
    times = []
    for number in range(num_steps + 1):
        for index in range(num_requests):
            scheduler.add_request(make_request(f"{number}-{index}", prompts[index % num_prompts], 2))
        times.append(step(scheduler, 7))
        assert scheduler.num_running == num_requests
        scheduler.abort([f"{number}-{index}" for index in range(num_requests)])
    stats = scheduler.stats()
    assert stats.prefix_hits >= num_steps * num_requests * (PROMPT_TOKENS - BLOCK_SIZE)
    return times[1:]


def crowded(num_waiting: int, num_steps: int) -> list[Times]:
    """Sixteen requests decode, prompts take all the time that steps have for them, and others wait for their turn."""
    draw = random.Random(0)
    layout = plan_layout([LayerKV("full", None, 1024)] * 24, BLOCK_SIZE)
    prior = Prior(0.006, 0.002, 0.001, 5e-7)
    scheduler = Scheduler(
        Limits(max_num_seqs=256, max_num_batched_tokens=512, long_prefill_token_threshold=256, max_model_len=1 << 17),
        policy="fcfs",
        kv=KVCacheManager(layout, 100_000),
        shares=make_shares(0.08, "balanced", StepTimes(prior)),
    )

    def timed() -> Times:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        plan = scheduler.schedule()
        planned, cpu_planned = time.perf_counter() - begin, time.thread_time() - cpu_begin
        assert plan is not None
        newest = scheduler.state.in_flight[-1]
        result = StepResult(plan.step_id, [[] if i in newest.chunks else [7] for i in range(len(plan.rows))])
        seconds = StepTimes(prior).of(newest.work)
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        EngineOutputs(scheduler.update(plan, result, seconds), scheduler.stats())
        return planned + time.perf_counter() - begin, cpu_planned + time.thread_time() - cpu_begin

    for index in range(16):
        scheduler.add_request(make_request(f"decodes {index}", [3] * 8, 1 << 16))
    for _ in range(60):
        timed()
    for index in range(num_waiting):
        prompt = [draw.randrange(3, VOCAB_SIZE) for _ in range(200 + draw.randrange(8))]
        scheduler.add_request(make_request(f"waits {index}", prompt, 100))
    return [timed() for _ in range(num_steps)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="steps per case")
    parser.add_argument("--output", type=Path, default=None, help="write the numbers as JSON to this file")
    arguments = parser.parse_args()
    steps = arguments.steps
    cases = {
        "decode, 256 requests": (0.8, lambda: steady_decode(256, steps)),
        "decode, 1024 requests": (3.0, lambda: steady_decode(1024, steps)),
        "admit 256 cached 1k prompts, all different": (25.0, lambda: warm_admission(256, steps, shared=False)),
        "admit 256 cached 1k prompts, all equal": (25.0, lambda: warm_admission(256, steps, shared=True)),
        "16 decode, prompts fill steps, 4096 wait": (0.8, lambda: crowded(4096, min(steps, 500))),
    }
    results = {}
    print(f"{'step':<44}{'median ms':>10}{'CPU ms':>9}{'p99 ms':>9}{'limit ms':>10}")
    for name, (limit, run) in cases.items():
        times = run()
        wall = sorted(1000 * seconds for seconds, _ in times)
        # On a machine that others use too, CPU time is what the wall clock would show if it were idle.
        cpu = statistics.median(1000 * seconds for _, seconds in times)
        median, p99 = statistics.median(wall), wall[int(0.99 * (len(wall) - 1))]
        results[name] = {
            "median_ms": round(median, 4),
            "median_cpu_ms": round(cpu, 4),
            "p99_ms": round(p99, 4),
            "limit_ms": limit,
            "steps": len(times),
        }
        print(f"{name:<44}{median:>10.3f}{cpu:>9.3f}{p99:>9.3f}{limit:>10.1f}")
        gc.collect()
    if arguments.output is not None:
        write_report(arguments.output, environment("quire"), results, block_size=BLOCK_SIZE)


if __name__ == "__main__":
    main()
