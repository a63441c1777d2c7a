"""The flight recorder: its file outlives the process, and says what each request was doing."""

from __future__ import annotations

import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.config.engine import EngineConfig
from quire.engine.build import flight_log
from quire.engine.core import EngineCore
from quire.engine.flight import (
    KEPT,
    NUM_STEPS,
    FlightInfo,
    FlightRecorder,
    dump_path,
    make_flight_recorder,
)
from quire.engine.loop import EngineLoop
from quire.replay.dumps import Flight, explain
from quire.types.errors import TraceError
from tests.replay.runs import Device, drive, request, setup

KILLED = """
import os, random, signal, sys
from pathlib import Path
from tests.engine.test_flight import make
core, loop = make(Path(sys.argv[1]), 3)
from tests.replay.runs import request
for i in range(6):
    loop.submit(request(random.Random(i), f"r{i}"))
for _ in range(5):
    loop.run_once()
os.kill(os.getpid(), signal.SIGKILL)
"""


def make(folder: Path, seed: int, dies: int = -1) -> tuple[EngineCore, EngineLoop]:
    made = setup(random.Random(seed), depth=1)
    log = flight_log(EngineConfig.from_flat(dump_dir=str(folder)), made.max_num_seqs)
    assert isinstance(log, FlightRecorder)
    core = EngineCore(made.make_scheduler(), Device(made, frozenset({"r4"}), dies=dies), 1, log=log)
    return core, EngineLoop(core)


def test_a_killed_process_leaves_its_last_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (dump,) = tmp_path.iterdir()
    assert stat.S_IMODE(dump.stat().st_mode) == 0o600
    flight = Flight(dump)
    assert [step.step_id for step in flight.steps] == [0, 1, 2, 3, 4]
    assert {one.request_id for one in flight.requests} == {f"r{i}" for i in range(6)}
    assert main(["explain", str(dump)]) == 0
    said = capsys.readouterr().out
    assert f"engine process {flight.info.pid}, smollm2" in said
    assert said.count("request r") == 6


def test_the_step_that_never_ended_is_named_with_what_each_request_did(tmp_path: Path) -> None:
    core, loop = make(tmp_path, 3, dies=4)
    for i in range(8):
        loop.submit(request(random.Random(i), f"r{i}"))
    with pytest.raises(SystemExit):
        _run(loop)
    (dump,) = tmp_path.iterdir()
    lines = explain(Flight(dump))
    assert lines[1] == "it was computing a step (step 4)"
    assert lines[2].startswith("step 4 with ")
    assert "never ended; steps before it took" in lines[2]
    rows = Flight(dump).steps[-1].rows
    for name, count, _ in rows:
        (line,) = (line for line in lines if line.startswith(f"request {name}: "))
        assert "decoded a token in step 4" in line or f"computed {count} tokens of its prompt in step 4" in line
    assert any("waited for" in line for line in lines)
    assert core.log is not None


def _run(loop: EngineLoop) -> None:
    while True:
        loop.run_once()


def test_an_engine_that_ends_in_good_order_leaves_nothing(tmp_path: Path) -> None:
    core, _ = make(tmp_path, 5)
    assert len(list(tmp_path.iterdir())) == 1
    drive(core, random.Random(5), 12)
    assert list(tmp_path.iterdir()) == []


def test_the_last_thousand_steps_are_kept(tmp_path: Path) -> None:
    core, loop = make(tmp_path, 5)
    draw = random.Random(1)
    number = 0
    while True:
        if not loop.has_unfinished():
            loop.submit(request(draw, f"n{number}"))
            number += 1
        loop.run_once()
        if core.scheduler._next_step_id > NUM_STEPS + 50:
            break
    (dump,) = tmp_path.iterdir()
    steps = Flight(dump).steps
    assert len(steps) == NUM_STEPS
    assert steps[-1].step_id - steps[0].step_id == NUM_STEPS - 1


def test_few_dumps_are_kept(tmp_path: Path) -> None:
    for pid in range(4_000_000, 4_000_000 + 2 * KEPT):
        assert make_flight_recorder(tmp_path, FlightInfo(pid, time.time(), 4, "m", "0")) is not None
    assert len(list(tmp_path.iterdir())) == KEPT
    assert dump_path(tmp_path, 4_000_000 + 2 * KEPT - 1).exists()


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert make_flight_recorder(tmp_path / "file", FlightInfo(1, 0.0, 4, "m", "0")) is None
    assert "are not kept" in caplog.text


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello")
    with pytest.raises(TraceError, match="is not a dump"):
        Flight(tmp_path / "other")
    with pytest.raises(TraceError, match="cannot be read"):
        Flight(tmp_path / "none")
