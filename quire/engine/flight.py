"""FlightRecorder: the last 1,000 steps in a file that outlives the process, however it ends. For `quire explain`.

The file is mapped into memory: what is written there is the system's to keep, so that SIGKILL loses nothing and a
step costs microseconds. Holds counts, times and request ids, never tokens. It is removed when the engine ends in
good order.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from quire.engine.step_log import StepLog
from quire.types.errors import TraceError
from quire.types.messages import AbortRequests, ToEngine
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult
from quire.utils.log import get_logger

logger = get_logger(__name__)

MAGIC = b"quire-flight-1\n\0"
NUM_STEPS = 1000
NUM_NAMES = 2048  # requests that are remembered by name
KEPT = 8  # dumps of dead engines in a folder
_HEADER_SIZE = 4096
_STATE = struct.Struct("<BqdQ")  # phase, newest step, when, number of requests taken
_NAME = struct.Struct("<80sdIIIBxxx")  # request id, arrival, tokens, prompt tokens, most outputs, where it is
_STEP = struct.Struct("<qddBII")  # step id, planned, finished, outcome, rows, tokens
PHASES = ("idle", "planning a step", "computing a step", "applying a result")
WAITING, RUNNING, LEFT, ABORTED = range(4)
PLANNED, FINISHED, FAILED = range(3)


class FlightInfo(msgspec.Struct):
    pid: int
    began: float
    max_num_seqs: int
    model: str
    version: str


class FlightRecorder(StepLog):
    def __init__(self, path: Path, info: FlightInfo) -> None:
        """Make the file, readable by its owner only; OSError if that cannot be."""
        self.path = path
        self._slot = _STEP.size + 5 * info.max_num_seqs
        size = _HEADER_SIZE + _STATE.size + NUM_NAMES * _NAME.size + NUM_STEPS * self._slot
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # a full disk must not end the engine by a signal later
            self._map = mmap.mmap(file, size)
        finally:
            os.close(file)
        header = MAGIC + msgspec.json.encode(info)
        self._map[: len(header)] = header
        self._num_names = 0
        self._name_of: dict[str, int] = {}  # request -> its slot among the names
        self._owners = array("H", bytes(2 * info.max_num_seqs))  # row -> slot of its name
        self._rows: list[int] = []
        self._row_names = b""
        self._tell(0, -1)

    def took(self, message: ToEngine) -> None:
        if isinstance(message, EngineRequest):
            self._add_name(message)
        elif isinstance(message, AbortRequests):
            for name in message.request_ids:
                if name in self._name_of:
                    self._map[self._name_at(self._name_of[name]) + _NAME.size - 4] = ABORTED

    def begin(self, now: float) -> None:
        self._map[_HEADER_SIZE] = 1

    def planned(self, plan: StepPlan) -> None:
        for row in plan.freed_rows:
            self._set_place(self._owners[row], LEFT)
        for start in plan.starts:
            slot = self._name_of.get(start.request_id, 0)
            self._owners[start.row] = slot
            self._set_place(slot, RUNNING)
        if plan.starts or plan.rows != self._rows:
            self._rows = plan.rows
            self._row_names = array("H", [self._owners[row] for row in plan.rows]).tobytes()
        at, count = self._step_at(plan.step_id), len(plan.rows)
        _STEP.pack_into(self._map, at, plan.step_id, time.time(), 0.0, PLANNED, count, sum(plan.num_tokens))
        at += _STEP.size
        self._map[at : at + 2 * count] = self._row_names
        at += 2 * count
        self._map[at : at + 2 * count] = array("H", [min(n, 65535) for n in plan.num_tokens]).tobytes()
        self._map[at + 2 * count : at + 3 * count] = bytes(count)
        self._tell(2, plan.step_id)

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        at, count = self._step_at(plan.step_id), len(plan.rows)
        struct.pack_into("<dB", self._map, at + 16, time.time(), FINISHED)
        end = at + _STEP.size + 5 * count
        self._map[end - count : end] = bytes(map(len, result.token_ids))
        self._tell(3, plan.step_id)

    def failed(self, plan: StepPlan, error: Exception) -> None:
        struct.pack_into("<dB", self._map, self._step_at(plan.step_id) + 16, time.time(), FAILED)
        self._tell(3, plan.step_id)

    def close(self) -> None:
        self._map.close()
        self.path.unlink(missing_ok=True)

    def _tell(self, phase: int, step_id: int) -> None:
        _STATE.pack_into(self._map, _HEADER_SIZE, phase, step_id, time.time(), self._num_names)

    def _add_name(self, request: EngineRequest) -> None:
        slot = self._num_names % NUM_NAMES
        self._num_names += 1
        at = self._name_at(slot)
        old = _NAME.unpack_from(self._map, at)[0].rstrip(b"\0").decode(errors="replace")
        if self._name_of.get(old) == slot:
            del self._name_of[old]
        name = request.request_id.encode()[:80]
        self._name_of[name.decode(errors="replace")] = slot
        tokens, prompt = len(request.token_ids), len(request.token_ids) - request.num_given_outputs
        most = min(request.max_tokens, (1 << 32) - 1)
        _NAME.pack_into(self._map, at, name, time.time(), tokens, prompt, most, WAITING)

    def _set_place(self, slot: int, place: int) -> None:
        self._map[self._name_at(slot) + _NAME.size - 4] = place

    def _name_at(self, slot: int) -> int:
        return _HEADER_SIZE + _STATE.size + slot * _NAME.size

    def _step_at(self, step_id: int) -> int:
        return _HEADER_SIZE + _STATE.size + NUM_NAMES * _NAME.size + step_id % NUM_STEPS * self._slot


class RequestFlight(msgspec.Struct):
    """A request as the dump knows it."""

    request_id: str
    arrival: float
    num_tokens: int
    num_prompt_tokens: int
    max_tokens: int
    place: int


class StepFlight(msgspec.Struct):
    step_id: int
    planned_at: float
    finished_at: float
    outcome: int
    rows: list[tuple[str, int, int]]  # request, tokens computed, tokens sampled


class Flight:
    """A dump, read."""

    def __init__(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise TraceError(f"the dump {str(path)!r} cannot be read: {error.strerror}") from error
        if not content.startswith(MAGIC):
            raise TraceError(f"{str(path)!r} is not a dump of an engine; give a file of --dump-dir")
        self.info = msgspec.json.decode(content[len(MAGIC) : _HEADER_SIZE].rstrip(b"\0"), type=FlightInfo)
        phase, self.step_id, self.at, _ = _STATE.unpack_from(content, _HEADER_SIZE)
        self.phase = PHASES[min(phase, len(PHASES) - 1)]
        names = _HEADER_SIZE + _STATE.size
        self.requests: list[RequestFlight] = []
        by_slot: dict[int, str] = {}
        for slot in range(NUM_NAMES):
            raw, arrival, tokens, prompt, most, place = _NAME.unpack_from(content, names + slot * _NAME.size)
            if raw.strip(b"\0"):
                by_slot[slot] = raw.rstrip(b"\0").decode(errors="replace")
                self.requests.append(RequestFlight(by_slot[slot], arrival, tokens, prompt, most, place))
        self.requests.sort(key=lambda request: request.arrival)
        self.steps = sorted(self._steps(content, names, by_slot), key=lambda step: step.step_id)

    def _steps(self, content: bytes, names: int, by_slot: dict[int, str]) -> Iterator[StepFlight]:
        slot_size, begin = _STEP.size + 5 * self.info.max_num_seqs, names + NUM_NAMES * _NAME.size
        for slot in range(NUM_STEPS):
            at = begin + slot * slot_size
            step_id, planned, finished, outcome, count, _ = _STEP.unpack_from(content, at)
            if not planned:
                continue
            at += _STEP.size
            owners, tokens = array("H"), array("H")
            owners.frombytes(content[at : at + 2 * count])
            tokens.frombytes(content[at + 2 * count : at + 4 * count])
            sampled = content[at + 4 * count : at + 5 * count]
            rows = [(by_slot.get(o, "?"), n, s) for o, n, s in zip(owners, tokens, sampled, strict=True)]
            yield StepFlight(step_id, planned, finished, outcome, rows)


def explain(flight: Flight) -> list[str]:
    """What the engine and each of its requests were doing, a line each."""
    info, last = flight.info, flight.steps[-1] if flight.steps else None
    lines = [
        f"engine process {info.pid}, {info.model}, Quire {info.version}, ran for {flight.at - info.began:.1f} s",
        f"it was {flight.phase}" + (f" (step {flight.step_id})" if flight.step_id >= 0 else ""),
    ]
    if last is not None and last.outcome == PLANNED:
        times = [step.finished_at - step.planned_at for step in flight.steps if step.outcome == FINISHED]
        usual = f"; steps before it took {1000 * sorted(times)[len(times) // 2]:.1f} ms" if times else ""
        total = sum(count for _, count, _ in last.rows)
        lines.append(f"step {last.step_id} with {len(last.rows)} requests and {total} tokens never ended{usual}")
    failed = [step.step_id for step in flight.steps if step.outcome == FAILED]
    if failed:
        lines.append(f"steps that failed: {', '.join(map(str, failed[-10:]))}")
    in_last = {} if last is None else {name: (count, sampled) for name, count, sampled in last.rows}
    computed = _sums(flight.steps)
    for request in flight.requests:
        lines.append(f"request {request.request_id}: {_doing(request, in_last, computed, flight)}")
    return lines


def _sums(steps: Iterable[StepFlight]) -> dict[str, tuple[int, int, int]]:
    """Of each request: tokens computed, tokens sampled, and its last step, as far as the dump goes back."""
    found: dict[str, tuple[int, int, int]] = {}
    for step in steps:
        for name, count, sampled in step.rows:
            tokens, outputs, _ = found.get(name, (0, 0, -1))
            found[name] = (tokens + count, outputs + sampled, step.step_id)
    return found


def _doing(
    request: RequestFlight,
    in_last: dict[str, tuple[int, int]],
    sums: dict[str, tuple[int, int, int]],
    flight: Flight,
) -> str:
    _, outputs, last_step = sums.get(request.request_id, (0, 0, -1))
    size = f"{request.num_prompt_tokens} prompt tokens, at most {request.max_tokens} outputs"
    if request.place == WAITING:
        running = len(in_last)
        why = f"all {running} rows are taken" if running >= flight.info.max_num_seqs else "it was not its turn"
        return f"waited for {flight.at - request.arrival:.1f} s, {why} ({size})"
    if request.place == ABORTED:
        return f"was aborted after {outputs} outputs ({size})"
    if request.request_id in in_last and request.place == RUNNING:
        count, _ = in_last[request.request_id]
        what = "decoded a token" if count == 1 and outputs else f"computed {count} tokens of its prompt"
        return f"{what} in step {flight.step_id}, after {outputs} outputs ({size})"
    if request.place == RUNNING:
        return (
            f"ran, and was not in step {flight.step_id}; its last was {last_step}, after {outputs} outputs ({size})"
        )
    return f"had ended or was preempted after step {last_step}, with {outputs} outputs ({size})"


def dump_path(folder: Path, pid: int) -> Path:
    return folder / f"engine-{pid}.flight"


def make_flight_recorder(folder: Path, info: FlightInfo) -> FlightRecorder | None:
    """One in this folder, where the dumps of some dead engines are kept; None, with a warning, if it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        dumps = sorted(folder.glob("engine-*.flight"), key=lambda path: path.stat().st_mtime)
        for old in dumps[: max(0, len(dumps) - KEPT + 1)]:
            if not _lives(old):
                old.unlink(missing_ok=True)
        path = dump_path(folder, info.pid)
        path.unlink(missing_ok=True)
        return FlightRecorder(path, info)
    except OSError as error:
        logger.warning("the engine's last steps are not kept in %s: %s", folder, error)
        return None


def _lives(dump: Path) -> bool:
    """Whether the engine that a file belongs to is still there."""
    pid = dump.stem.removeprefix("engine-")
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
