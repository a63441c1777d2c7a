"""Start-up: `import quire`, `import torch`, and from `quire run` to the first token of the default model.

    python benchmarks/startup.py [--repeats 5]

Each is a fresh process; the best of several is reported.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Any

from report import compile_as_installed, environment, write_results
from rich.console import Console
from rich.table import Table

PROMPT = "What is the capital of France?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    compile_as_installed()
    bare = best(repeats, lambda: seconds([sys.executable, "-c", "pass"]))
    imports = {
        name: best(repeats, lambda name=name: seconds([sys.executable, "-c", f"import {name}"])) - bare
        for name in ("quire", "torch")
    }
    first = best(repeats, first_token)
    results: dict[str, Any] = {
        "import_quire_s": imports["quire"],
        "import_torch_s": imports["torch"],
        "run_to_first_token_s": first,
        "above_import_torch_s": first - bare - imports["torch"],
    }
    table = Table("start-up", "seconds", "limit")
    table.add_row("import quire", f"{imports['quire']:.3f}", "0.15")
    table.add_row("import torch", f"{imports['torch']:.3f}", "")
    table.add_row("quire run to first token", f"{first:.3f}", "")
    table.add_row("  above import torch", f"{results['above_import_torch_s']:.3f}", "3")
    Console().print(table)
    print(f"written to {write_results('startup', environment('torch', 'quire'), results)}")


def best(repeats: int, measure: Any) -> float:
    return min(measure() for _ in range(repeats))


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started


def first_token() -> float:
    """From starting the process to the first character on its standard output."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "quire", "run", PROMPT, "--max-tokens", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.read(1), "quire run printed nothing"
        elapsed = time.perf_counter() - started
        process.stdout.read()
    return elapsed


if __name__ == "__main__":
    main()
