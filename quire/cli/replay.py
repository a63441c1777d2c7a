"""`quire replay FILE`: run a trace of --trace again; EQUAL, or the first step, request and part that differ."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import env
from quire.config.env import import_path
from quire.types.errors import TraceError

if TYPE_CHECKING:
    from quire.replay.requests import RecordedRequest, Trouble
    from quire.replay.steps import ReplayReport

EXIT_DIFFERS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", type=Path, help="a trace that --trace has written; its older segments lie beside it")
    add("--model", metavar="NAME", help="where the recorded model lies here, if under another name")
    add("--crash", action="store_true", help="run the step too that the recorded engine died in")
    add(
        "--requests",
        metavar="IDS",
        type=Path,
        help="a file of request ids, one per line: run only these, and compare what each is given",
    )
    add(
        "--minimize",
        metavar="IDS",
        type=Path,
        help="find the smallest set of requests that still fails, differs or crashes, and write its ids there",
    )


def run(args: argparse.Namespace) -> int:
    from quire.replay.engine import check_trace
    from quire.replay.trace import Trace

    trace = Trace(args.file)
    config = check_trace(trace, args.model)
    from quire.replay.engine import make_core, make_executor, make_replayed_core
    from quire.replay.requests import RequestRuns, commands, recorded_requests
    from quire.replay.steps import replay_steps

    executor = make_executor(trace.header, config)
    try:
        if args.requests is not None:
            runs = RequestRuns(make_core(trace.header, config, executor), commands(trace))
            return _report_requests(runs.run(_chosen(recorded_requests(trace), args.requests)))
        report = replay_steps(
            trace.records(), partial(make_replayed_core, trace.header, config, executor), into_crash=args.crash
        )
        _print(report)
        if args.minimize is not None:
            runs = RequestRuns(make_core(trace.header, config, executor), commands(trace))
            crashes = partial(_crashes, args.file, args.model)
            goes_wrong = crashes if report.crashed_step is not None else lambda some: runs.run(some) is not None
            _minimize(recorded_requests(trace), goes_wrong, args.minimize)
    finally:
        executor.shutdown()
    return EXIT_DIFFERS if report.difference is not None else 0


def _report_requests(trouble: Trouble | None) -> int:
    print("EQUAL" if trouble is None else f"DIFFERENT\nrequest {trouble.request_id}: {trouble.detail}")
    return 0 if trouble is None else EXIT_DIFFERS


def _chosen(requests: Sequence[RecordedRequest], path: Path) -> list[RecordedRequest]:
    wanted = dict.fromkeys(_read_ids(path))
    found = [one for one in requests if one.request.request_id in wanted]
    if len(found) < len(wanted):
        missing = next(iter(wanted.keys() - {one.request.request_id for one in found}))
        raise TraceError(f"the trace has no request {missing!r}, which {str(path)!r} names")
    return found


def _read_ids(path: Path) -> list[str]:
    try:
        return [line for line in path.read_text().splitlines() if line]
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{str(path)!r} cannot be read: {error}") from error


def _minimize(
    requests: Sequence[RecordedRequest], goes_wrong: Callable[[Sequence[RecordedRequest]], bool], path: Path
) -> None:
    from quire.replay.requests import minimize

    left = minimize(requests, goes_wrong, say=lambda line: print(line, flush=True))
    path.write_text("".join(f"{one.request.request_id}\n" for one in left))
    print(f"the smallest set that goes wrong has {len(left)} of {len(requests)} requests; their ids are in {path}")


def _crashes(file: Path, model: str | None, some: Sequence[RecordedRequest]) -> bool:
    """Whether a process that runs these requests dies; it is not this one."""
    with tempfile.NamedTemporaryFile("w", suffix=".ids") as ids:
        ids.write("".join(f"{one.request.request_id}\n" for one in some))
        ids.flush()
        command = [sys.executable, "-P", "-m", "quire", "replay", str(file), "--requests", ids.name]
        command += [] if model is None else ["--model", model]
        environment = env.child_environment(**import_path())
        return subprocess.run(command, capture_output=True, env=environment).returncode != 0


def _print(report: ReplayReport) -> None:
    what = f"{report.num_steps} steps, {report.num_requests} requests, hash {report.rolling}"
    pace = f"{report.seconds:.2f} s, recorded in {report.recorded_seconds:.2f} s"
    if report.difference is not None:
        print(f"DIFFERENT after {what}\n{report.difference}")
        return
    print(f"EQUAL: {what} ({pace})")
    if report.crashed_step is not None:
        open_ones = ", ".join(report.crashed_requests)
        print(f"the recorded engine died in step {report.crashed_step}, with these requests open: {open_ones}")
