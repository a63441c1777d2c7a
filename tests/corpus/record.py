"""Records the corpus anew: `python -m tests.corpus.record --reason "..."`, on the CPU and, where there is one, a GPU.

A refactoring changes no digest. Recording again needs a reason: other kernels, or another version of torch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("recorded.json")


def child(path: str, out: Path) -> None:
    """Run the corpus in a process of its own: the instruction sets of Quire and torch are chosen once per process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path == "cuda":
        environment |= {"QUIRE_TEST_GPU": "1"}  # tests see a GPU only if they are told to
    else:
        environment |= {"QUIRE_CPU_ISA": path, "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run(
        [sys.executable, "-m", "tests.corpus.record", "--path", path, "--out", out], env=environment, check=True
    )


def run(path: str) -> dict[str, Any]:
    """Digests of one kernel path, by model and request; every schedule must give the same."""
    import torch

    from tests.corpus.requests import run_corpus

    settings = {"device": "cuda", "deterministic": True} if path == "cuda" else {"device": "cpu"}
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model, schedule, digests in run_corpus(Path(folder), **settings):
            expected = found.setdefault(model, digests)
            differing = [key for key in expected if digests[key] != expected[key]]
            assert not differing, f"{model}, {schedule}: requests {differing} differ from another schedule"
    version = torch.__version__.split("+")[0]
    where = torch.cuda.get_device_name() if path == "cuda" else f"math {math_digest()}"
    return {f"{path}, torch {version}, {where}": found}


def math_digest() -> str:
    """Four digits over what functions of torch and NumPy give here: libraries choose their code by the processor."""
    import numpy as np
    import torch

    x = torch.linspace(-9.0, 9.0, 4096, dtype=torch.float32)
    parts = [x.cos(), x.sin(), x.exp(), x.tanh(), 10000.0 ** (-x.abs() / 9), x.view(64, 64).log_softmax(-1)]
    drawn = np.random.Generator(np.random.Philox(1)).normal(size=1 << 16)
    values = torch.cat([part.flatten() for part in parts]).numpy()
    return hashlib.sha256(values.tobytes() + drawn.tobytes()).hexdigest()[:4]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reason", help="why digests may change; kept in the file")
    parser.add_argument("--paths", nargs="+", default=["portable", "avx2", "avx512vnni"])
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RECORDED)
    arguments = parser.parse_args()
    if arguments.path:
        arguments.out.write_text(json.dumps(run(arguments.path)))
        return
    if not arguments.reason:
        parser.error("--reason is missing: say which kernels or versions changed")
    recorded = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"reasons": [], "digests": {}}
    for path in arguments.paths:
        with tempfile.TemporaryDirectory() as folder:
            child(path, Path(folder) / "out.json")
            recorded["digests"] |= json.loads((Path(folder) / "out.json").read_text())
    recorded["reasons"].append(arguments.reason)
    arguments.out.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
