"""The one check command: everything about the source that a program can judge, short of running the tests.

Usage: python tools/check.py [--fix]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Without its cache, which goes stale when a module appears that others imported before.
LINT_IMPORTS = (
    "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_logo=True, no_cache=True))"
)


@dataclass(frozen=True)
class Check:
    name: str
    arguments: tuple[str, ...]  # to this Python
    shown: bool = False  # what it prints is of interest when it passes too


@dataclass(frozen=True)
class Outcome:
    check: Check
    passed: bool
    seconds: float
    output: str


CHECKS = (
    Check("types", ("-m", "mypy", "--strict", "--num-workers", "2", "quire")),
    Check("lint", ("-m", "ruff", "check", "--no-cache", ".")),
    Check("format", ("-m", "ruff", "format", "--check", ".")),
    Check("imports", ("-c", LINT_IMPORTS)),
    Check("source rules", ("tools/source_rules.py",)),
    Check("generated docs", ("tools/gen_docs.py", "--check")),
    Check("line budget", ("tools/line_budget.py",), shown=True),
)

FIXES = (
    Check("lint", ("-m", "ruff", "check", "--no-cache", "--fix", ".")),
    Check("format", ("-m", "ruff", "format", ".")),
    Check("generated docs", ("tools/gen_docs.py",)),
)


def run(check: Check, root: Path = ROOT) -> Outcome:
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *check.arguments], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return Outcome(check, done.returncode == 0, time.perf_counter() - begin, done.stdout)


def table(outcomes: list[Outcome]) -> str:
    width = max(len(outcome.check.name) for outcome in outcomes)
    return "\n".join(
        f"{outcome.check.name:<{width}}  {'pass' if outcome.passed else 'FAIL'}  {outcome.seconds:6.1f} s"
        for outcome in outcomes
    )


def report(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        if not outcome.passed:
            print(f"--- {outcome.check.name}\n{outcome.output.rstrip()}\n")
        elif outcome.check.shown:
            print(f"{outcome.output.rstrip()}\n")
    print(table(outcomes))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--fix", action="store_true", help="repair what can be repaired first")
    if parser.parse_args(arguments).fix:
        for fix in FIXES:
            run(fix)
    with ThreadPoolExecutor(max_workers=2) as pool:
        outcomes = list(pool.map(run, CHECKS))
    report(outcomes)
    return 0 if all(outcome.passed for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
