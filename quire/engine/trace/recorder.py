"""TraceRecorder: the StepLog that writes a trace. What it cannot write ends the trace and never a request."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

import msgspec

from quire.config.engine import EngineConfig
from quire.engine.setup import SchedulerSetup
from quire.engine.step_log import NO_LOG, StepLog
from quire.engine.trace import records
from quire.engine.trace.file import TraceWriter
from quire.sched.drafters.forced import Forced
from quire.types.messages import ToEngine
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult
from quire.utils.log import get_logger
from quire.utils.version import VERSION

logger = get_logger(__name__)


class TraceRecorder(StepLog):
    """The file is made when the first message comes: an engine that only stands by writes none."""

    def __init__(self, path: Path, header: records.Header, size: int) -> None:
        self._path = path
        self._header = header
        self._size = size
        self._writer: TraceWriter | None = None
        self._is_over = False
        self._pending: list[records.Record] = []  # since the last write
        self._rolling = records.RollingHash()
        self._plans: dict[int, tuple[int, int, int, int]] = {}  # of steps in flight
        self._rows: list[int] = []  # of the newest plan
        self._forced: dict[str, Forced] = {}  # that the next plan is made with
        self._began: float | None = None
        self._salt = secrets.token_bytes(16) if header.redacted else b""

    def took(self, message: ToEngine) -> None:
        at = self._since(time.monotonic())
        if not self._salt:
            self._pending.append(records.Took(message, at))
        elif isinstance(message, EngineRequest):
            self._pending.append(records.redacted(message, at, self._header.setup.layout.block_size, self._salt))

    def begin(self, now: float) -> None:
        if self._began is None and not self._pending:
            return  # idle, before anything came
        self._pending.append(records.Begin(self._since(now)))

    def ready(self, request_id: str, condition: str) -> None:
        if not self._salt:
            self._pending.append(records.Ready(request_id, condition))

    def forced(self, request_id: str, forced: Forced) -> None:
        if not self._salt:
            self._forced[request_id] = forced

    def planned(self, plan: StepPlan) -> None:
        digests = self._plans[plan.step_id] = records.plan_digests(plan)
        rows = None if plan.rows == self._rows else plan.rows
        self._rows = plan.rows
        starts = [(start.row, self._name(start.request_id)) for start in plan.starts]
        self._pending.append(records.Planned(plan.step_id, digests, rows, starts, self._forced))
        self._forced = {}
        self._write()

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        digests = records.result_digests(result)
        rolling = self._rolling.add(self._plans.pop(plan.step_id), result.token_ids, digests)
        token_ids = [[0] * len(row) for row in result.token_ids] if self._salt else result.token_ids
        self._pending.append(records.Finished(plan.step_id, seconds, token_ids, digests, rolling))
        self._write()

    def failed(self, plan: StepPlan, error: Exception) -> None:
        self._plans.clear()  # those planned on top of it are dropped with it
        self._pending.append(records.Failed(plan.step_id, "" if self._salt else f"{type(error).__name__}: {error}"))
        self._write()

    def close(self) -> None:
        if self._writer is not None:
            self._pending.append(records.Ended())
            self._write()
            self._writer.close()

    def _name(self, request_id: str) -> str:
        return records.redacted_name(request_id, self._salt) if self._salt else request_id

    def _since(self, now: float) -> float:
        if self._began is None:
            self._began = now
        return max(0.0, now - self._began)

    def _write(self) -> None:
        pending, self._pending = self._pending, []
        if self._is_over:
            return
        try:
            if self._writer is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._writer = TraceWriter(self._path, self._header, self._size)
            if self._writer.write(pending):
                self._rows = []  # a segment says them anew: the ones before it may be gone when it is read
        except (OSError, msgspec.MsgspecError) as error:
            self._is_over = True
            logger.warning("the trace %s ends here: %s; serving goes on without it", self._path, error)


def make_recorder(
    config: EngineConfig, setup: SchedulerSetup, model_digest: str, kernel_path: dict[str, str]
) -> StepLog:
    """What the settings ask for; nothing by default."""
    if config.tracing.trace is None:
        return NO_LOG
    header = records.Header(
        format=records.FORMAT,
        version=VERSION,
        life=secrets.token_hex(8),
        segment=0,
        began=time.time(),
        config=config,
        setup=setup,
        model_digest=model_digest,
        kernel_path=kernel_path,
        redacted=config.tracing.trace_redact,
    )
    return TraceRecorder(Path(config.tracing.trace).expanduser(), header, config.tracing.trace_size)
