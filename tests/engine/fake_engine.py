"""A fake engine process: the real process, loop, core and scheduler over the checking fake of tests/fakes.py.

It imports no torch, so it starts in a moment.

What it does is told by the model's name, as words separated by commas:
  fail-at-start   a wrong model: starting again would not help
  die-at-start    exits with status 3 without a word
  hang-at-start   never becomes ready
  ends-late       its device takes 1.5 s to end, and says that it has
  slow            a step takes 2 ms
  long            a context of 4096 tokens
An adapter in the folder DAMAGED cannot be read; others can.
A prompt of one token tells a step: POISON fails, STICKY loses the device, STALL never ends, EXIT ends the process.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import Future

from quire.config.engine import EngineConfig
from quire.engine.adapters import AdapterReader
from quire.engine.core import EngineCore
from quire.engine.loop import EngineLoop
from quire.engine.process import serve
from quire.kv.layout import LayerKV, plan_layout
from quire.kv.manager import KVCacheManager
from quire.sched.scheduler import Scheduler
from quire.sched.state import Limits
from quire.types.errors import AdapterError, ModelNotFoundError
from quire.types.messages import EngineInfo
from quire.types.request import AdapterRef
from quire.types.step import StepPlan
from quire.utils.phases import ReportPhase
from quire.worker.executor import Executor
from tests.fakes import VOCAB_SIZE, FakeExecutor, FakeStep, FakeStepError

COMMAND = (sys.executable, "-m", "tests.engine.fake_engine")
MAX_NUM_SEQS = 64
DAMAGED = "damaged"
STICKY, STALL, EXIT, POISON = 40, 41, 42, 43


class FakeDevice(Executor):
    def __init__(self, fake: FakeExecutor, step_time: float, ends_late: bool) -> None:
        self._ends_late = ends_late
        self._fake = fake
        self._step_time = step_time

    def execute(self, plan: StepPlan) -> FakeStep:
        future = FakeStep()
        orders = {start.token_ids[0] for start in plan.starts if start.num_prompt_tokens == 1}
        if EXIT in orders:
            os._exit(9)
        if STALL in orders:
            print("stalling", file=sys.stderr, flush=True)
            threading.Event().wait()
        if self._step_time:
            time.sleep(self._step_time)
        if orders & {STICKY, POISON}:
            future.set_exception(FakeStepError("lost" if STICKY in orders else "poisoned"))
        else:
            future.set_result(self._fake.execute(plan))
        return future

    def read_adapter(self, ref: AdapterRef) -> Future[int]:
        reading: Future[int] = Future()
        if ref.path == DAMAGED:
            reading.set_exception(AdapterError(f"{DAMAGED} is truncated; download it again"))
        else:
            reading.set_result(1)
        return reading

    def forget_adapter(self, digest: str) -> None:
        return None

    def is_sticky(self, error: Exception) -> bool:
        return str(error) == "lost"

    def shutdown(self) -> None:
        self._step_time = 0.0
        if self._ends_late:
            time.sleep(1.5)
            print("the device has ended", file=sys.stderr, flush=True)


def build(config: EngineConfig, report: ReportPhase) -> tuple[EngineLoop, EngineInfo]:
    words = config.model.model.split(",")
    report("import")
    if "fail-at-start" in words:
        raise ModelNotFoundError(f"no model {config.model.model!r}; give another")
    if "die-at-start" in words:
        print("about to die", file=sys.stderr, flush=True)
        os._exit(3)
    if "hang-at-start" in words:
        threading.Event().wait()
    max_model_len = 4096 if "long" in words else 64
    for progress in (0.0, 0.5, 1.0):
        report("weights", progress)
    report("KV")
    num_blocks = MAX_NUM_SEQS * max_model_len // 16 + 1
    layout = plan_layout([LayerKV("full", None, 4)], 16)
    scheduler = Scheduler(
        Limits(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=256,
            long_prefill_token_threshold=128,
            max_model_len=max_model_len,
        ),
        policy="fcfs",
        kv=KVCacheManager(layout, num_blocks, True),
    )
    fake = FakeExecutor(layout, num_blocks, MAX_NUM_SEQS)
    device = FakeDevice(fake, 0.002 if "slow" in words else 0.0, "ends-late" in words)
    info = EngineInfo(VOCAB_SIZE, max_model_len, 16, num_blocks, MAX_NUM_SEQS)
    core = EngineCore(scheduler, device, 1, conditions=[AdapterReader(device, max_kept=1)])
    return EngineLoop(core, debug_checks=True), info


if __name__ == "__main__":
    sys.exit(serve(build))
