"""An executor as a user would add one: a worker in a process of its own, and msgspec bytes over a pipe."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from quire.config.engine import EngineConfig
from quire.types.errors import EngineError
from quire.types.masks import Masks
from quire.types.step import StepPlan, StepResult
from quire.utils.phases import ReportPhase, ignore_phase
from quire.worker.description import WorkerDescription
from quire.worker.executor import Executor
from quire.worker.inproc import InProcStep, make_inproc_executor

LIMIT = 60.0  # seconds


class Execute(msgspec.Struct, tag=True, frozen=True):
    plan: StepPlan


class Sample(msgspec.Struct, tag=True, frozen=True):
    masks: bytes
    count: int


class Prepare(msgspec.Struct, tag=True, frozen=True):
    pass


class Described(msgspec.Struct, tag=True, frozen=True):
    description: WorkerDescription


class Done(msgspec.Struct, tag=True, frozen=True):
    result: StepResult


class Failed(msgspec.Struct, tag=True, frozen=True):
    step_id: int
    reason: str
    is_sticky: bool


class Prepared(msgspec.Struct, tag=True, frozen=True):
    more: bool


ToWorker = Execute | Sample | Prepare
FromWorker = Described | Done | Failed | Prepared


def run_worker(pipe: Connection, config: bytes) -> None:
    """The other process: until the pipe is closed."""
    executor = make_inproc_executor(msgspec.json.decode(config, type=EngineConfig), ignore_phase)
    decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(message: FromWorker) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(message))

    def answer(plan: StepPlan, step: InProcStep) -> None:
        error = step.exception()
        if isinstance(error, Exception):
            send(Failed(plan.step_id, f"{type(error).__name__}: {error}", executor.is_sticky(error)))
        else:
            send(Done(step.result()))

    send(Described(executor.description))
    while True:
        try:
            message = decoder.decode(pipe.recv_bytes())
        except EOFError:
            break
        match message:
            case Execute(plan):
                step = executor.execute(plan)
                if not plan.mask_slots:
                    answer(plan, step)
            case Sample(data, count):
                masks: Future[Masks] = Future()
                masks.set_result(np.frombuffer(data, dtype=np.int32).reshape(count, -1))
                step.sample(masks)
                answer(plan, step)
            case Prepare():
                send(Prepared(executor.capture_next()))
    executor.shutdown()


class WorkerStepError(Exception):
    def __init__(self, reason: str, *, is_sticky: bool) -> None:
        super().__init__(reason)
        self.is_sticky = is_sticky


class PipeStep:
    def __init__(self, executor: PipeExecutor, step_id: int) -> None:
        self._executor, self._step_id = executor, step_id
        self._answer: Done | WorkerStepError | None = None

    def sample(self, masks: Future[Masks]) -> None:
        found = masks.result()
        self._executor.send(Sample(found.tobytes(), len(found)))

    def done(self) -> bool:
        return self._answer is not None or self._executor.has_answer(self._step_id)

    def exception(self) -> BaseException | None:
        if self._answer is None:
            self._answer = self._executor.wait_for(self._step_id)
        return None if isinstance(self._answer, Done) else self._answer

    def result(self) -> StepResult:
        error = self.exception()
        if error is not None:
            raise error
        assert isinstance(self._answer, Done)
        return self._answer.result


class PipeExecutor(Executor):
    def __init__(self, config: EngineConfig, report: ReportPhase) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=run_worker, args=(other, msgspec.json.encode(config)), daemon=True)
        self.process.start()
        other.close()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._answers: dict[int, Done | WorkerStepError] = {}
        self._prepared: Prepared | None = None
        described = self._receive()
        assert isinstance(described, Described)
        self.description = described.description

    def execute(self, plan: StepPlan) -> PipeStep:
        self.send(Execute(plan))
        return PipeStep(self, plan.step_id)

    def capture_next(self) -> bool:
        self.send(Prepare())
        while self._prepared is None:
            self._take_one()
        prepared, self._prepared = self._prepared, None
        return prepared.more

    def is_sticky(self, error: Exception) -> bool:
        return isinstance(error, WorkerStepError) and error.is_sticky

    def shutdown(self) -> None:
        self._pipe.close()
        self.process.join(LIMIT)

    def send(self, message: ToWorker) -> None:
        with suppress(OSError):  # whoever asks for the result will hear that the worker is gone
            self._pipe.send_bytes(msgspec.msgpack.encode(message))

    def has_answer(self, step_id: int) -> bool:
        while self._pipe.poll() and self._is_alive():
            self._take_one()
        return step_id in self._answers

    def wait_for(self, step_id: int) -> Done | WorkerStepError:
        while step_id not in self._answers:
            try:
                self._take_one()
            except EOFError:
                return WorkerStepError("the worker is gone", is_sticky=True)
        return self._answers.pop(step_id)

    def _is_alive(self) -> bool:
        return self.process.is_alive()

    def _take_one(self) -> None:
        match self._receive():
            case Done(result) as done:
                self._answers[result.step_id] = done
            case Failed(step_id, reason, is_sticky):
                self._answers[step_id] = WorkerStepError(reason, is_sticky=is_sticky)
            case Prepared() as prepared:
                self._prepared = prepared

    def _receive(self) -> FromWorker:
        if not self._pipe.poll(LIMIT):
            raise EngineError(f"the worker has said nothing for {LIMIT:g} s")
        try:
            return self._decoder.decode(self._pipe.recv_bytes())
        except ConnectionResetError as error:
            raise EOFError from error
