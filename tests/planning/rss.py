"""Run by test_engine_plan in a process of its own: the memory that an engine over dummy weights really takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import torch

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.planning.engine_plan import plan_memory
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams


def status(name: str) -> int:
    match = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def main(settings: dict[str, object], prompt_lens: list[int]) -> None:
    config = EngineConfig.from_flat(load_format="dummy", **settings)
    # Buffers and code of libraries, which the first plan loads, are not the engine's.
    torch.mm(torch.ones(64, 64), torch.ones(64, 64))
    ledger = plan_memory(config)
    before, code = status("VmRSS"), status("RssFile")
    core, info, _ = build_engine(config)
    for index, length in enumerate(prompt_lens):
        token_ids = [(7 * index + position) % info.vocab_size for position in range(length)]
        params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=5, repetition_penalty=1.1)
        core.add_request(EngineRequest(request_id=str(index), token_ids=token_ids, params=params, max_tokens=2))
    while core.has_work():
        assert not any(output.error for output in core.step().outputs)
    taken = {entry.name: entry.num_bytes for entry in ledger.entries}
    # Nor is code that is mapped later: how much of a file comes with a page of it is the system's affair.
    code = status("RssFile") - code
    peak = status("VmHWM") - before - code
    print(json.dumps({"planned": ledger.total, "peak": peak, "entries": taken, "code": code}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
