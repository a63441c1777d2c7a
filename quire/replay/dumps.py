"""What an engine that died left of its last steps (quire/engine/flight.py), read and told. For `quire explain`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from quire.engine.flight import (
    ABORTED,
    BLOCKS,
    FAILED,
    FINISHED,
    HEADER_SIZE,
    HOLDS,
    MAGIC,
    NAME,
    NAMES_AT,
    NEEDS,
    NUM_NAMES,
    NUM_STEPS,
    PHASES,
    PLANNED,
    PREEMPTED,
    RUNNING,
    SCHEDULER,
    STATE,
    STEP,
    WAITING,
    FlightInfo,
)
from quire.types.errors import TraceError


class RequestFlight(msgspec.Struct):
    """A request as the dump knows it."""

    request_id: str
    arrival: float
    num_tokens: int
    num_prompt_tokens: int
    max_tokens: int
    place: int
    needs: tuple[str, ...]  # conditions that it was parked for


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
        self.info = msgspec.json.decode(content[len(MAGIC) : HEADER_SIZE].rstrip(b"\0"), type=FlightInfo)
        phase, self.step_id, self.at, _ = STATE.unpack_from(content, HEADER_SIZE)
        self.phase = PHASES[min(phase, len(PHASES) - 1)]
        hold, block, self.num_free_blocks, self.num_blocks = SCHEDULER.unpack_from(content, HEADER_SIZE + STATE.size)
        self.hold, self.block = HOLDS[hold], BLOCKS[block]
        self.requests: list[RequestFlight] = []
        by_slot: dict[int, str] = {}
        for slot in range(NUM_NAMES):
            raw, arrival, tokens, prompt, most, place, bits = NAME.unpack_from(content, NAMES_AT + slot * NAME.size)
            if raw.strip(b"\0"):
                needs = tuple(name for index, name in enumerate(NEEDS) if bits >> index & 1)
                by_slot[slot] = raw.rstrip(b"\0").decode(errors="replace")
                self.requests.append(RequestFlight(by_slot[slot], arrival, tokens, prompt, most, place, needs))
        self.requests.sort(key=lambda request: request.arrival)
        self.steps = sorted(self._steps(content, by_slot), key=lambda step: step.step_id)

    def _steps(self, content: bytes, by_slot: dict[int, str]) -> Iterator[StepFlight]:
        slot_size, begin = STEP.size + 5 * self.info.max_num_seqs, NAMES_AT + NUM_NAMES * NAME.size
        for slot in range(NUM_STEPS):
            at = begin + slot * slot_size
            step_id, planned, finished, outcome, count, _ = STEP.unpack_from(content, at)
            if not planned:
                continue
            at += STEP.size
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
        return f"waited for {flight.at - request.arrival:.1f} s: {_why(request, len(in_last), flight)} ({size})"
    if request.place == PREEMPTED:
        why = _why(request, len(in_last), flight)
        return f"was preempted after step {last_step}, with {outputs} outputs, and waited: {why} ({size})"
    is_computing = bool(flight.steps) and flight.steps[-1].outcome == PLANNED
    if request.place == RUNNING and flight.hold and not is_computing:
        return f"waited after step {last_step}, with {outputs} outputs: {_HELD[flight.hold]} ({size})"
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
    return f"had ended after step {last_step}, with {outputs} outputs ({size})"


_HELD = {
    "paused": "the engine was paused",
    "asleep": "the engine was asleep",
    "sleep": "the engine was going to sleep",
    "wake": "the engine was waking",
    "update_weights": "the engine was getting other weights",
}


def _why(request: RequestFlight, num_running: int, flight: Flight) -> str:
    """Why a request waited, in the order in which the engine looks at it."""
    if request.needs:
        return f"its {' and its '.join(request.needs)} was not ready"
    if flight.hold:
        return _HELD[flight.hold]
    if flight.block == "retries":
        return "a step had failed, and its requests ran alone first"
    if num_running >= flight.info.max_num_seqs:
        return f"all {num_running} rows were taken"
    if flight.block:
        return f"KV blocks were short, {flight.num_free_blocks} of {flight.num_blocks} were free"
    return "it was not its turn"
