"""Sleep, wake and other weights of an engine with ranks: all that its answers must be like those before."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.engine.core import EngineCore
from quire.types.sampling import SamplingParams
from tests.e2e.test_control import begin, contents, finish, settle, tell
from tests.e2e.test_lora import ask, make_adapter
from tests.e2e.tiny import Driver, run_all

WEIGHTS = "model.safetensors"


def check_changes(core: EngineCore, model: Path) -> None:
    """The engine was started with the weights of `model` and has them again at the end."""
    adapter = make_adapter(model, model.parent / "changing", 7)
    prompts = [[5, 9, 33, 7, 21, 4, 60] * 9, [8, 3], [17, 90, 4, 4, 4, 12]]
    requests = [
        ask(f"{i}-{j}", prompt, one) for i, prompt in enumerate(prompts) for j, one in enumerate([None, adapter])
    ]
    expected = contents(run_all(core, requests))
    for level in (1, 2):
        driver = begin(core, requests[:4], 5)
        assert tell(core, "sleep", level).error is None
        assert settle(driver).asleep == level
        for request in requests[4:]:  # they wait
            driver.submit(request)
        assert tell(core, "wake").error is None
        assert settle(driver).asleep == 0
        assert contents(finish(driver)) == expected
    copy, other, damaged = (shutil.copytree(model, model.parent / name) for name in ("copy", "other", "damaged"))
    weights = load_file(model / WEIGHTS)
    save_file({name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in weights.items()}, other / WEIGHTS)
    (damaged / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:-8])
    driver = Driver(core)
    tell(core, "update_weights", {"path": str(other)})
    assert (state := settle(driver)).error is None
    assert len(state.weights) == 32
    assert contents(run_all(core, requests)) != expected
    tell(core, "update_weights", {"path": str(damaged)})
    assert "rank 0: " in str(settle(driver).error)
    assert settle(driver).weights == state.weights
    tell(core, "update_weights", {"path": str(copy)})
    assert settle(driver).error is None
    assert contents(run_all(core, requests)) == expected, "as a fresh start with these weights"
    assert core.executor.failure is None
    driver.add("last", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    assert driver.finish()["last"].error is None
