"""Run by test_engine_plan in a process of its own: an engine under `ulimit -v`, set once torch is imported."""

from __future__ import annotations

import resource
import sys

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.planning.engine_plan import plan_memory
from quire.platform.limits import RESERVED
from quire.types.errors import MemoryPlanError
from tests.planning.rss import status

MIB = 1 << 20


def allow(more: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + more, resource.RLIM_INFINITY))


def main(model: str) -> None:
    config = EngineConfig.from_flat(model=model, load_format="dummy")
    ledger = plan_memory(config)  # loads libraries
    allow(RESERVED + ledger.total - ledger.kv_bytes // 2)  # half of the default is not there
    engine = build_engine(config)
    print(plan_memory(config).format())
    print("---")
    allow(RESERVED + MIB)
    try:
        build_engine(config)
    except MemoryPlanError as error:
        print(error)
    del engine


if __name__ == "__main__":
    main(sys.argv[1])
