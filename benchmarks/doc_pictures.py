"""Makes the pictures of docs/guides/benchmarking.md with the tool that they show, on the default model.

python benchmarks/doc_pictures.py [--num-prompts 64]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from peers import DEFAULT_FOLDER, running

IMAGES = Path(__file__).parents[1] / "docs" / "images"
CONCURRENCIES = ("1", "2", "4", "8", "16")
LIMITS = ("ttft:1000", "tpot:50")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-prompts", type=int, default=64, help="requests of each point")
    args = parser.parse_args()
    with running("quire", DEFAULT_FOLDER) as server, tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "quire", "bench", "sweep", "--base-url", server.url),
                *("--experiment-name", "smollm2", "--output-dir", folder),
                *("--concurrencies", *CONCURRENCIES, "--num-prompts", str(args.num_prompts), "--warmup", "4"),
                *("--goodput", *LIMITS),
            ],
            check=True,
        )
        made = Path(folder) / "smollm2"
        shutil.copy(made / "sweep-curve.svg", IMAGES / "bench-curve.svg")
        shutil.copy(made / f"concurrency-{CONCURRENCIES[-1]}-timeline.svg", IMAGES / "bench-timeline.svg")
    print(f"written to {IMAGES}")


if __name__ == "__main__":
    main()
