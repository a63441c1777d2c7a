"""Adapters that are loaded, used and unloaded again and again: answers stay theirs, and nothing grows."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.engine.adapters import AdapterReader
from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.frontend.controls import ClientControls
from quire.loader.adapter_files import CONFIG_FILE, WEIGHTS_FILE
from quire.sched.adapters import AdapterSlots
from quire.server.adapter_loading import AdapterLoader, LoadAdapter, UnloadAdapter
from quire.server.adapters import ServedAdapters
from quire.server.context import EngineProvider
from quire.types.messages import Command
from quire.worker.inproc import InProcExecutor
from tests.e2e.test_lora import PROMPTS, SETTINGS, ask
from tests.e2e.tiny import make_engine, make_model, run_all

ADAPTERS, SLOTS, KEPT = 5, 2, 3
RANK = 4


def write_adapters(model: Path, root: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for index in range(ADAPTERS):
        tensors = {}
        for name, weight in load_file(model / "model.safetensors").items():
            if name.endswith("_proj.weight"):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator)
                tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator)
        (root / f"it{index}").mkdir(parents=True)
        save_file(tensors, root / f"it{index}" / WEIGHTS_FILE)


class Asked:
    """Sends verbs to a core that nobody else drives."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    async def call_async(self, verb: str, argument: object = None, limit: float | None = None) -> Any:
        reply = obey(self._core, Command(0, verb, argument))
        assert reply.error is None, reply
        return reply.value


def sizes(core: EngineCore) -> dict[str, int]:
    """Everything that may hold adapters, or something of them."""
    executor, slots = core.executor, core.scheduler.state.adapters
    (reader,) = (found for found in core.parked.conditions if isinstance(found, AdapterReader))
    assert isinstance(executor, InProcExecutor)
    assert isinstance(slots, AdapterSlots)
    return {
        "in host memory": len(executor._worker.adapters),
        "read": len(reader._reading),
        "open": len(reader._open) + len(reader._asked) + reader._users.total(),
        "counted": len(reader._users),
        "resident": len(slots._resident),
        "running": slots._running.total(),
        "counted slots": len(slots._running),
        "free blocks": -core.scheduler.state.kv.num_free_blocks,
    }


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("cycles", [40, pytest.param(1000, marks=pytest.mark.nightly)])
async def test_nothing_grows_with_cycles(tmp_path: Path, cycles: int) -> None:
    model = make_model(tmp_path / "base", "llama")
    write_adapters(model, tmp_path / "adapters")
    core = make_engine(model, **{**SETTINGS, "max_loras": SLOTS, "max_cpu_loras": KEPT, "max_lora_rank": RANK})
    provider = cast(EngineProvider, SimpleNamespace(engine=ClientControls(cast(Any, Asked(core)))))
    served = ServedAdapters()
    loader = AdapterLoader(served, provider, str(tmp_path / "adapters"), ["base"])
    said: dict[int, object] = {}  # by what the adapter computes
    found: list[tuple[dict[str, int], int, int]] = []
    for cycle in range(cycles):
        index = cycle % ADAPTERS
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 1 + index, "cycle": cycle}  # so no digest comes twice
        (tmp_path / "adapters" / f"it{index}" / CONFIG_FILE).write_text(json.dumps(config))
        ref = await loader.load(LoadAdapter(f"now-{cycle}", f"it{index}"))
        assert served.get(f"now-{cycle}") == ref
        requests = [ask(f"{cycle}-{n}", PROMPTS[1], adapter) for n, adapter in enumerate((ref, None))]
        answers = run_all(core, requests)
        await loader.unload(UnloadAdapter(f"now-{cycle}"))
        for key, answer in ((index, answers[f"{cycle}-0"]), (-1, answers[f"{cycle}-1"])):
            assert answer.error is None
            assert said.setdefault(key, answer.content()) == answer.content()
        core.check_integrity()
        if cycle + 1 in (cycles // 4, cycles):
            found.append((sizes(core), num_tensors(), resident_bytes()))
    core.executor.shutdown()
    (first, first_tensors, first_bytes), (last, last_tensors, last_bytes) = found
    assert len({str(content) for content in said.values()}) == ADAPTERS + 1, "each says something of its own"
    assert last == first
    assert (last["in host memory"], last["resident"], last["open"], last["running"]) == (KEPT, SLOTS, 0, 0)
    assert last_tensors <= first_tensors
    assert last_bytes - first_bytes < 16 << 20
    assert not served.names
