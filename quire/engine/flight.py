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
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.engine.step_log import StepLog
from quire.types.messages import AbortRequests, ToEngine
from quire.types.request import EngineRequest
from quire.types.step import StepPlan, StepResult
from quire.utils.log import get_logger

if TYPE_CHECKING:
    from quire.engine.core import EngineCore
    from quire.sched.scheduler import Scheduler

logger = get_logger(__name__)

MAGIC = b"quire-flight-2\n\0"
NUM_STEPS = 1000
NUM_NAMES = 2048  # requests that are remembered by name
KEPT = 8  # dumps of dead engines in a folder
HEADER_SIZE = 4096
STATE = struct.Struct("<BqdQ")  # phase, newest step, when, number of requests taken
SCHEDULER = struct.Struct("<BBII")  # index in HOLDS, index in BLOCKS, KV blocks that were free, and all of them
NAME = struct.Struct("<80sdIIIBBxx")  # request id, arrival, tokens, prompt tokens, most outputs, where it is, NEEDS
STEP = struct.Struct("<qddBII")  # step id, planned, finished, outcome, rows, tokens
NAMES_AT = HEADER_SIZE + STATE.size + SCHEDULER.size
PHASES = ("idle", "planning a step", "computing a step", "applying a result")
HOLDS = ("", "paused", "asleep", "sleep", "wake", "update_weights")  # words of StepLog.held
BLOCKS = ("", "KV blocks", "retries")  # what keeps waiting requests from being admitted
NEEDS = ("grammar", "adapter")  # a bit each: conditions that a parked request waits for
WAITING, RUNNING, ENDED, ABORTED, PREEMPTED = range(5)
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
        self._slot = STEP.size + 5 * info.max_num_seqs
        size = NAMES_AT + NUM_NAMES * NAME.size + NUM_STEPS * self._slot
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)  # a full disk must not end the engine by a signal later
            self._map = mmap.mmap(file, size)
        except OSError:
            path.unlink()  # an empty file would look like what a dead engine left
            raise
        finally:
            os.close(file)
        header = MAGIC + msgspec.json.encode(info)
        self._map[: len(header)] = header
        self._num_names = 0
        self._name_of: dict[str, int] = {}  # request -> its slot among the names
        self._owners = array("H", bytes(2 * info.max_num_seqs))  # row -> slot of its name
        self._row_requests: dict[int, str] = {}
        self._rows: list[int] = []
        self._row_names = b""
        self._scheduler: Scheduler | None = None
        self._tell(0, -1)

    def attach(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler

    def held(self, word: str) -> None:
        self._map[HEADER_SIZE + STATE.size] = HOLDS.index(word)
        self._note_left(self._row_requests, RUNNING)

    def ready(self, request_id: str, condition: str) -> None:
        if request_id in self._name_of and condition in NEEDS:
            self._map[self._name_at(self._name_of[request_id]) + NAME.size - 3] &= ~(1 << NEEDS.index(condition))

    def took(self, message: ToEngine) -> None:
        if isinstance(message, EngineRequest):
            self._add_name(message)
        elif isinstance(message, AbortRequests):
            for name in message.request_ids:
                if name in self._name_of:
                    self._map[self._name_at(self._name_of[name]) + NAME.size - 4] = ABORTED

    def begin(self, now: float) -> None:
        self._map[HEADER_SIZE] = 1

    def planned(self, plan: StepPlan) -> None:
        if plan.freed_rows:
            self._note_left(plan.freed_rows, PREEMPTED)
        for start in plan.starts:
            slot = self._name_of.get(start.request_id, 0)
            self._owners[start.row], self._row_requests[start.row] = slot, start.request_id
            self._set_place(slot, RUNNING)
        if plan.starts or plan.rows != self._rows:
            self._rows = plan.rows
            self._row_names = array("H", [self._owners[row] for row in plan.rows]).tobytes()
        at, count = self._step_at(plan.step_id), len(plan.rows)
        STEP.pack_into(self._map, at, plan.step_id, time.time(), 0.0, PLANNED, count, sum(plan.num_tokens))
        at += STEP.size
        self._map[at : at + 2 * count] = self._row_names
        at += 2 * count
        self._map[at : at + 2 * count] = array("H", [min(n, 65535) for n in plan.num_tokens]).tobytes()
        self._map[at + 2 * count : at + 3 * count] = bytes(count)
        self._tell(2, plan.step_id)
        if self._scheduler is not None:
            state = self._scheduler.state
            why = 2 if state.retries else 1 if state.blocked is not None else 0
            blocks = state.kv.num_free_blocks, state.kv.num_blocks
            struct.pack_into("<BII", self._map, HEADER_SIZE + STATE.size + 1, why, *blocks)

    def finished(self, plan: StepPlan, result: StepResult, seconds: float) -> None:
        at, count = self._step_at(plan.step_id), len(plan.rows)
        struct.pack_into("<dB", self._map, at + 16, time.time(), FINISHED)
        end = at + STEP.size + 5 * count
        self._map[end - count : end] = bytes(map(len, result.token_ids))
        self._tell(3, plan.step_id)

    def failed(self, plan: StepPlan, error: Exception) -> None:
        struct.pack_into("<dB", self._map, self._step_at(plan.step_id) + 16, time.time(), FAILED)
        self._tell(3, plan.step_id)

    def close(self) -> None:
        self._map.close()
        self.path.unlink(missing_ok=True)

    def _note_left(self, rows: Iterable[int], place: int) -> None:
        """Requests of these rows have ended, or are at `place` if the scheduler still has them."""
        known = () if self._scheduler is None else self._scheduler.state.requests
        for row in rows:
            slot, name = self._owners[row], self._row_requests.get(row)
            if self._map[self._name_at(slot) + NAME.size - 4] == RUNNING:
                self._set_place(slot, place if name in known else ENDED)

    def _tell(self, phase: int, step_id: int) -> None:
        STATE.pack_into(self._map, HEADER_SIZE, phase, step_id, time.time(), self._num_names)

    def _add_name(self, request: EngineRequest) -> None:
        slot = self._num_names % NUM_NAMES
        self._num_names += 1
        at = self._name_at(slot)
        old = NAME.unpack_from(self._map, at)[0].rstrip(b"\0").decode(errors="replace")
        if self._name_of.get(old) == slot:
            del self._name_of[old]
        name = request.request_id.encode()[:80]
        self._name_of[name.decode(errors="replace")] = slot
        tokens, prompt = len(request.token_ids), len(request.token_ids) - request.num_given_outputs
        most = min(request.max_tokens, (1 << 32) - 1)
        needs = (request.grammar is not None) | (request.adapter is not None) << 1
        NAME.pack_into(self._map, at, name, time.time(), tokens, prompt, most, WAITING, needs)

    def _set_place(self, slot: int, place: int) -> None:
        self._map[self._name_at(slot) + NAME.size - 4] = place

    def _name_at(self, slot: int) -> int:
        return NAMES_AT + slot * NAME.size

    def _step_at(self, step_id: int) -> int:
        return NAMES_AT + NUM_NAMES * NAME.size + step_id % NUM_STEPS * self._slot


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
