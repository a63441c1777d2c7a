"""Recorded schedules are replayed to the same hash, and what is not as it was is found and named."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from quire.engine.trace.records import Failed, Finished, Header, Planned, plan_digests
from quire.replay.requests import RequestRuns, minimize, recorded_requests
from quire.replay.steps import replay_steps
from quire.replay.trace import Trace, read_frames
from quire.replay.turns import recorded_outputs
from quire.types.errors import TraceError
from quire.types.sampling import SamplingParams
from quire.types.step import AdapterLoad, RowStart, StepPlan
from tests.fakes import generate_alone
from tests.replay.runs import core_for, record


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Hundreds of steps fail on purpose."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


def last_hash(trace: Trace) -> str:
    return [record.rolling for record in trace.records() if isinstance(record, Finished)][-1].hex()


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_random_schedules_are_replayed_to_the_recorded_hash(count: int, tmp_path: Path) -> None:
    num_steps = num_preempted = num_drafted = 0
    for seed in range(count):
        trace, poisoned = record(seed, tmp_path / str(seed), num_requests=5)
        replayed = core_for(trace, poisoned)
        report = replay_steps(trace.records(), replayed)
        assert report.difference is None, f"seed {seed}: {report.difference}"
        assert report.crashed_step is None
        assert report.rolling == last_hash(trace)
        num_steps += report.num_steps
        has_failed = any(isinstance(r, Failed) for r in trace.records())  # which preempts, too
        num_preempted += replayed.scheduler.state.num_preemptions > 0 and not has_failed
        num_drafted += any(len(ids) > 1 for r in trace.records() if isinstance(r, Finished) for ids in r.token_ids)
    assert num_steps > 8 * count
    assert num_preempted > count // 70
    assert num_drafted > count // 5


@pytest.mark.parametrize("seed", range(12))
def test_a_planted_difference_is_found_and_named(tmp_path: Path, seed: int) -> None:
    trace, poisoned = record(seed, tmp_path / "trace", depth=1)
    ends = [r.step_id for r in trace.records() if isinstance(r, Finished) and any(r.token_ids)]
    wrong = random.Random(seed).choice(ends)
    report = replay_steps(trace.records(), core_for(trace, poisoned, wrong=wrong))
    assert report.difference is not None
    assert report.difference.step_id == wrong
    assert report.difference.part == "token_ids of the result"
    owners: dict[int, str] = {}
    rows: list[int] = []
    for plan in (r for r in trace.records() if isinstance(r, Planned) and r.step_id <= wrong):
        owners.update(plan.starts)
        rows = plan.rows or rows
    (end,) = (r for r in trace.records() if isinstance(r, Finished) and r.step_id == wrong)
    index = next(index for index, ids in enumerate(end.token_ids) if ids)  # whose first token is another one
    assert report.difference.request_ids == (owners[rows[index]],)


def test_another_schedule_is_a_difference_of_the_plan(tmp_path: Path) -> None:
    trace, poisoned = record(3, tmp_path / "trace")

    def smaller(log: object) -> object:
        core = core_for(trace, poisoned)(log)  # type: ignore[arg-type]
        core.scheduler._state.limits = replace(core.scheduler._state.limits, max_num_seqs=1, max_num_batched_tokens=3)
        return core

    report = replay_steps(trace.records(), smaller)  # type: ignore[arg-type]
    assert report.difference is not None
    assert "plan" in report.difference.part


def test_a_crash_is_replayed_up_to_the_step_before_it(tmp_path: Path) -> None:
    trace, poisoned = record(5, tmp_path / "trace", dies=9, depth=1)
    report = replay_steps(trace.records(), core_for(trace, poisoned))
    assert report.difference is None
    assert report.crashed_step == 9
    assert report.num_steps == 9
    assert report.crashed_requests
    with pytest.raises(SystemExit):
        replay_steps(trace.records(), core_for(trace, poisoned, dies=9), into_crash=True)


def test_a_torn_last_record_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace, poisoned = record(4, path)
    whole = path.read_bytes()
    lengths = set()
    for cut in (1, 7, 40, 200):
        path.write_bytes(whole[:-cut])
        report = replay_steps(Trace(path).records(), core_for(trace, poisoned))
        assert report.difference is None
        lengths.add(report.num_steps)
    assert len(lengths) > 1


def test_a_trace_is_its_owners_alone_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace"
    trace, _ = record(1, path, num_requests=60, trace_size=16 << 10)
    files = sorted(path.parent.iterdir())
    assert len(files) == 4
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files)
    assert sum(file.stat().st_size for file in files) < 40 << 10  # every segment has its header
    assert not trace.is_whole
    assert next(read_frames(path.with_name("trace.1")), None).life == trace.header.life  # type: ignore[union-attr]


def test_segments_make_one_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace, poisoned = record(1, path, num_requests=40, trace_size=48 << 10)
    assert trace.is_whole
    assert trace.header.segment > 0
    assert replay_steps(trace.records(), core_for(trace, poisoned)).difference is None


def test_a_crash_in_several_segments_is_replayed_after_the_next_life_began(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    crashed, poisoned = record(1, path, num_requests=40, trace_size=48 << 10, dies=60, depth=1)
    assert (crashed.is_whole, crashed.header.segment) == (True, 1)
    record(2, path, trace_size=48 << 10)
    (tmp_path / "trace.7").write_text("no trace, and no segment of this one")
    found = Trace(tmp_path / "trace.1")
    assert found.header.life == crashed.header.life
    assert found.is_whole
    report = replay_steps(found.records(), core_for(found, poisoned))
    assert (report.difference, report.crashed_step) == (None, 60)
    assert Trace(path).is_whole
    assert Trace(path).header.life != found.header.life


def test_a_redacted_trace_holds_no_tokens_and_is_not_replayed(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    trace, poisoned = record(1, path, trace_redact=True)
    content = path.read_bytes()
    assert b"\xa2r1" not in content  # no request id either
    with pytest.raises(TraceError, match="redacted"):
        replay_steps(trace.records(), core_for(trace, poisoned))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello")
    with pytest.raises(TraceError, match="is not a trace"):
        Trace(tmp_path / "other")
    with pytest.raises(TraceError, match="cannot be read"):
        Trace(tmp_path / "none")


def test_a_full_disk_ends_the_trace_and_not_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, room = os.write, 3000

    def write(file: int, content: bytes) -> int:
        nonlocal room
        room -= len(content)
        if room < 0:
            raise OSError(28, "No space left on device")
        return real(file, content)

    with monkeypatch.context() as patch:
        patch.setattr("quire.engine.trace.file.os.write", write)
        trace, poisoned = record(2, tmp_path / "trace", num_requests=30)  # runs to its end
    report = replay_steps(trace.records(), core_for(trace, poisoned))
    assert report.difference is None
    assert report.num_steps < 30


def test_recorded_outputs_are_what_each_request_was_given(tmp_path: Path) -> None:
    trace, _ = record(7, tmp_path / "trace", depth=1)
    outputs = recorded_outputs(trace.records())
    for one in recorded_requests(trace):
        expected, _, _ = generate_alone(one.request, 48)
        given = outputs.get(one.request.request_id, [])
        assert given == expected[: len(given)]
    assert sum(map(len, outputs.values())) > 20


def test_the_smallest_set_that_fails_is_found(tmp_path: Path) -> None:
    trace, _ = record(11, tmp_path / "trace", num_requests=24)
    runs = RequestRuns(core_for(trace, frozenset({"r17"})).plain())
    left = minimize(recorded_requests(trace), lambda some: runs.run(some) is not None)
    assert [one.request.request_id for one in left] == ["r17"]


def test_a_pair_that_fails_only_together_is_found(tmp_path: Path) -> None:
    trace, _ = record(11, tmp_path / "trace", num_requests=24)

    def wrong(some: object) -> bool:
        names = {one.request.request_id for one in some}  # type: ignore[attr-defined]
        return {"r3", "r20"} <= names

    left = minimize(recorded_requests(trace), wrong)
    assert [one.request.request_id for one in left] == ["r3", "r20"]


def test_requests_without_trouble_are_not_minimized(tmp_path: Path) -> None:
    trace, _ = record(12, tmp_path / "trace")
    runs = RequestRuns(core_for(trace).plain())
    with pytest.raises(TraceError, match="without a failure"):
        minimize(recorded_requests(trace), lambda some: runs.run(some) is not None)


def test_a_header_says_how_the_engine_was_set_up(tmp_path: Path) -> None:
    trace, _ = record(1, tmp_path / "trace")
    header = next(read_frames(tmp_path / "trace"))
    assert isinstance(header, Header)
    assert (header.kernel_path["instruction_set"], header.model_digest) == ("avx2", "digest")
    assert header.setup == trace.header.setup


def test_every_field_of_a_plan_is_in_its_digests() -> None:
    start = RowStart(1, "r", [1], 1, 0, SamplingParams(), 0, ())
    fields: dict[str, Any] = {
        "rows": [1],
        "num_tokens": [1],
        "freed_rows": [1],
        "starts": [start],
        "block_rows": [1],
        "block_groups": [1],
        "block_indices": [1],
        "block_ids": [1],
        "draft_token_ids": {1: [2]},
        "mask_slots": {1: 0},
        "adapter_loads": [AdapterLoad(0, "a")],
        "num_proposals": {1: 2},
    }
    assert {*fields, "step_id"} == set(StepPlan.__struct_fields__), "a new field must be in the digests"
    whole = StepPlan(0, **fields)
    for name, value in fields.items():
        changed = msgspec.structs.replace(whole, **{name: type(value)()})
        assert plan_digests(changed) != plan_digests(whole), name
