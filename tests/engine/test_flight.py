"""The flight recorder: its file outlives the process, and says what each request was doing."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.structured import GrammarSource
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


def small(folder: Path, **limits: Any) -> tuple[EngineCore, EngineLoop, Callable[[str], str]]:
    """An engine for prompts of 8 tokens, and what `quire explain` would say of one of its requests now."""
    made = replace(setup(random.Random(3), depth=1), speculative=None, caches_prefixes=False, policy="fcfs", **limits)
    log = flight_log(EngineConfig.from_flat(dump_dir=str(folder)), made.max_num_seqs)
    core = EngineCore(made.make_scheduler(), Device(made, frozenset({"bad"})), 1, log=log)

    def said(name: str) -> str:
        (dump,) = folder.iterdir()
        (line,) = (line for line in explain(Flight(dump)) if line.startswith(f"request {name}: "))
        return line

    return core, EngineLoop(core), said


def ask(name: str, max_tokens: int = 30, **fields: Any) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    token_ids = [*name.encode(), *[5] * 8][:8]
    return EngineRequest(request_id=name, token_ids=token_ids, params=params, max_tokens=max_tokens, **fields)


def test_why_requests_wait_is_said(tmp_path: Path) -> None:
    core, loop, said = small(tmp_path, max_num_seqs=2, max_num_batched_tokens=40, pool_blocks=(40,))
    core.log.took(ask("bound", grammar=GrammarSource("regex", "a+"), adapter=AdapterRef("a", "digest", "a")))
    core.log.ready("other", "grammar")
    assert "its grammar and its adapter was not ready" in said("bound")
    core.log.ready("bound", "grammar")
    assert "s: its adapter was not ready" in said("bound")
    core.log.ready("bound", "adapter")
    for name in ("a", "b", "c"):
        loop.submit(ask(name))
    for _ in range(3):
        loop.run_once()
    assert "all 2 rows were taken" in said("c")
    core.hold.pause(True)
    assert "s: the engine was paused" in said("c")
    assert re.search(r"waited after step \d, with \d outputs: the engine was paused", said("a"))
    core.hold.pause(False)
    assert "all 2 rows were taken" in said("c")


def test_short_blocks_and_preempted_requests_are_said(tmp_path: Path) -> None:
    core, loop, said = small(tmp_path, max_num_seqs=4, max_num_batched_tokens=40, pool_blocks=(11,), max_model_len=40)
    for name in ("a", "b", "c", "d"):
        loop.submit(ask(name, 2 if name == "a" else 30))
    while core.scheduler.state.blocked is None:
        loop.run_once()
    assert "had ended after step 2, with 2 outputs" in said("a")
    why = r"KV blocks were short, \d of 10 were free"
    assert re.search(rf"was preempted after step \d+, with \d+ outputs, and waited: {why} ", said("d"))
    loop.submit(ask("late"))
    loop.run_once()
    assert re.search(rf"waited for [\d.]+ s: {why} ", said("late"))


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


def test_a_full_disk_leaves_no_file_that_looks_like_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert make_flight_recorder(tmp_path, FlightInfo(1, 0.0, 4, "m", "0")) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_dump_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("hello")
    with pytest.raises(TraceError, match="is not a dump"):
        Flight(tmp_path / "other")
    with pytest.raises(TraceError, match="cannot be read"):
        Flight(tmp_path / "none")
