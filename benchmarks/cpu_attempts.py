"""Commits of this repository beside each other on the default model: what each attempt at more speed gave.

    python benchmarks/cpu_attempts.py COMMIT [COMMIT ...] [--rounds 3] [--threads 2] [--only decode batch] [--fresh]

Makes a worktree per commit in a temporary folder, compiles its kernels, loads each commit in a process of its own and
measures them by turns, with the cores' float32 matmuls in every turn. Prints a table of best and median, and writes
results/cpu/attempts/COMMIT.json, to which a later run adds its rounds unless it is told to begin afresh.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu_probes import GemmPeak, Probe, ProbeError, Prompts, best, engine_rows, loaded
from report import RESULTS, environment
from rich.console import Console
from rich.table import Table

from quire.bench.report import write_report

HERE = Path(__file__).parent
ATTEMPTS = RESULTS / "cpu" / "attempts"
ROWS = {
    "decode": "one stream, tok/s",
    "ttft": "first of 128, ms",
    "prefill": "1,024 tokens, tok/s",
    "batch": "32 at once, tok/s",
    "gemm_best": "float32 matmul, GFLOP/s",
    "gemm_sustained": "the same over 100 ms",
}
# Compiles what the first use would, if the commit has kernels; fails if another copy of Quire would be measured.
PREPARE = """
import importlib.util, sys, quire
assert quire.__file__.startswith(sys.argv[1]), quire.__file__
if importlib.util.find_spec("quire.kernels") and importlib.util.find_spec("quire.kernels.cpu"):
    from quire.kernels.cpu import library
    assert library.load() is not None, "the kernels could not be built"
"""


@dataclass
class Attempt:
    commit: str
    subject: str
    tree: Path
    values: dict[str, list[float]] = field(default_factory=lambda: {row: [] for row in ROWS})

    @property
    def path(self) -> Path:
        return ATTEMPTS / f"{self.commit}.json"

    @property
    def environment(self) -> dict[str, str]:
        return {"PYTHONPATH": str(self.tree)}

    def load_earlier_rounds(self) -> None:
        if self.path.is_file():
            for row, found in json.loads(self.path.read_text())["results"].items():
                self.values[row] = found["all"]

    def summary(self) -> dict[str, dict[str, Any]]:
        return {
            row: {"best": best(row, found), "median": statistics.median(found), "all": found}
            for row, found in self.values.items()
            if found
        }


def git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(HERE), *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"git {arguments[0]} failed: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Attempt]:
    """A worktree of the commit with its kernels compiled."""
    short, _, subject = git("log", "-1", "--format=%h %s", commit).partition(" ")
    tree = folder / short
    git("worktree", "add", "--detach", str(tree), short)
    try:
        attempt = Attempt(short, subject, tree)
        argv = [sys.executable, "-c", PREPARE, str(tree)]
        if subprocess.run(argv, env=os.environ | attempt.environment, cwd=tree).returncode != 0:
            raise SystemExit(f"{short} ({subject}) could not be prepared")
        yield attempt
    finally:
        git("worktree", "remove", "--force", str(tree))


def start(attempt: Attempt, threads: int) -> AbstractContextManager[Probe]:
    argv = [sys.executable, str(HERE / "cpu_probe.py"), "quire", "smollm2", str(threads)]
    given = attempt.environment | {"OMP_NUM_THREADS": str(threads)}
    return loaded(attempt.commit, argv, given, attempt.tree.with_suffix(".log"))


def measure(attempts: list[Attempt], probes: list[Probe], rows: list[str], rounds: int, threads: int) -> None:
    prompts, gemm = Prompts(), GemmPeak(threads)
    for probe in probes:
        probe.generate(prompts(1, 128), 8)  # whatever an engine does only once
    for number in range(rounds):
        for attempt, probe in zip(attempts, probes, strict=True):
            measure_turn(attempt, probe, rows, gemm, prompts)
            print(f"round {number + 1}, {attempt.commit}: " + shown(attempt, -1), flush=True)
            write(attempt)


def measure_turn(attempt: Attempt, probe: Probe, rows: list[str], gemm: GemmPeak, prompts: Prompts) -> None:
    """Add one value of each row to the attempt's, and what the cores' matmuls reached just before."""
    runs = engine_rows(prompts)
    gemm.measure()
    attempt.values["gemm_best"].append(gemm.best[-1])
    attempt.values["gemm_sustained"].append(gemm.sustained[-1])
    for row in rows:
        attempt.values[row].append(runs[row](probe))


def write(attempt: Attempt) -> None:
    described = environment("torch") | {"commit": attempt.commit, "subject": attempt.subject, "dirty": False}
    write_report(attempt.path, described, attempt.summary())


def shown(attempt: Attempt, index: int) -> str:
    return ", ".join(f"{row} {found[index]:,.1f}" for row, found in attempt.values.items() if found)


def show(attempts: list[Attempt]) -> None:
    table = Table("commit", *ROWS.values(), title="best (median) of each commit", show_lines=False)
    for attempt in attempts:
        found = attempt.summary()
        cells = [f"{found[row]['best']:,.1f} ({found[row]['median']:,.1f})" if row in found else "-" for row in ROWS]
        table.add_row(f"{attempt.commit} {attempt.subject[:44]}", *cells)
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", nargs="+", choices=list(ROWS)[:4], default=list(ROWS)[:4], help="rows to measure")
    parser.add_argument("--fresh", action="store_true", help="forget earlier rounds of these commits")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-attempts-") as name, ExitStack() as stack:
        attempts, probes = [], []
        for commit in args.commits:
            attempt = stack.enter_context(checked_out(commit, Path(name)))
            try:
                probes.append(stack.enter_context(start(attempt, args.threads)))
            except ProbeError as error:
                print(f"left out: {error}", flush=True)
                continue
            attempts.append(attempt)
            if not args.fresh:
                attempt.load_earlier_rounds()
        measure(attempts, probes, args.only, args.rounds, args.threads)
    show(attempts)


if __name__ == "__main__":
    main()
