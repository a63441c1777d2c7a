"""The program that `bench startup` starts anew each time: prints when it reached each phase, as one JSON line.

Run as `python -m quire.bench.startup_probe '{"model": ...}'`. The clock is the machine's, shared by all processes.
"""

from __future__ import annotations

import json
import sys
import time

REFUSED = 3  # the exit code if the last line of stderr says what the user can change


def main() -> None:
    times = {"interpreter": time.monotonic()}
    settings = json.loads(sys.argv[1])
    import torch  # noqa: F401  (its share of the start is a figure of its own)

    times["import torch"] = time.monotonic()
    from quire import LLM, SamplingParams
    from quire.types.errors import QuireError

    times["import quire"] = time.monotonic()
    try:
        llm = LLM(**settings)
        times["ready"] = time.monotonic()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        for _ in llm.stream("The capital of France is", params):
            times.setdefault("first token", time.monotonic())
    except QuireError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        sys.exit(REFUSED)
    print(json.dumps(times))


if __name__ == "__main__":
    main()
