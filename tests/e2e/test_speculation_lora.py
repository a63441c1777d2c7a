"""Drafters with weights beside adapters: the target alone has adapters, and gives the tokens of no speculation."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from quire.types.request import AdapterRef, EngineRequest
from tests.e2e import draft_heads
from tests.e2e.draft_heads import Target
from tests.e2e.drafting import Counting, assert_same, draft_always
from tests.e2e.test_lora import PROMPTS, SETTINGS, ask, make_adapter
from tests.e2e.test_speculation_covering import know_every_third
from tests.e2e.tiny import Answer, make_engine, make_model, run_all
from tests.runner.engines import capture_steps, run_eagerly, spy_on

METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
LAYERS = {  # the second adapter is on the head too, which eagle and mtp share with their target
    "llama": [["q_proj", "v_proj", "down_proj"], ["o_proj", "gate_proj", "lm_head"]],
    "mtp": [["q_a_proj", "q_b_proj", "o_proj"], ["kv_a_proj_with_mqa", "o_proj", "lm_head"]],
}


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[AdapterRef]]]:
    """Models, each with two adapters."""
    folder = tmp_path_factory.mktemp("speculation_lora")
    models = {"llama": make_model(folder / "llama", "llama"), "mtp": draft_heads.mtp_deepseek(folder / "mtp")[0]}
    return {
        name: (
            model,
            [
                make_adapter(model, folder / f"{name} {seed}", seed, target_modules=layers)
                for seed, layers in enumerate(LAYERS[name])
            ],
        )
        for name, model in models.items()
    }


@pytest.fixture(scope="module")
def expected(targets: dict[str, tuple[Path, list[AdapterRef]]]) -> dict[tuple[str, str], dict[str, Answer]]:
    """By target and attention backend."""
    found = {}
    for (name, (model, adapters)), backend in product(targets.items(), ("cpu_native", "torch_ref")):
        settings = {**SETTINGS, "attention_backend": backend}
        core = make_engine(model, **settings, speculative_config={"method": "none"})
        answers = found[name, backend] = run_all(core, requests(adapters))
        assert len({tuple(answer.token_ids) for answer in answers.values()}) > 8, "adapters change answers"
    return found


def requests(adapters: list[AdapterRef]) -> list[EngineRequest]:
    return [
        ask(f"{index}-{number}", prompt, adapter, temperature=0.8 * (number % 2))
        for number, prompt in enumerate(PROMPTS)
        for index, adapter in enumerate([None, *adapters])
    ]


@pytest.mark.parametrize("way", ["kernel list", "eager", "captured"])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_no_speculation(
    targets: dict[str, tuple[Path, list[AdapterRef]]],
    expected: dict[tuple[str, str], dict[str, Answer]],
    method: str,
    way: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = "torch_ref" if way == "captured" else "cpu_native"
    if way == "captured":
        capture_steps(monkeypatch)
    name = "mtp" if method == "mtp" else "llama"
    model, adapters = targets[name]
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(model)
    elif method != "mtp":
        config["model"] = str(getattr(draft_heads, method)(tmp_path / "head", Target(model))[0])
    core = make_engine(model, **{**SETTINGS, "attention_backend": backend}, speculative_config=config)
    if way == "eager":
        run_eagerly(core)
    spy = spy_on(core)
    draft_always(core)
    know_every_third(core, expected[name, backend], monkeypatch)
    counted = Counting(core)
    assert_same(run_all(core, requests(adapters)), expected[name, backend])
    assert counted.num_drafts > 40
    assert counted.num_accepted > counted.num_drafts / 5
    assert way != "captured" or sum(shape.sampling.drafted for shape in spy.ran) > 5


def test_a_target_that_drafts_for_itself_is_right_about_rows_without_an_adapter(
    targets: dict[str, tuple[Path, list[AdapterRef]]], expected: dict[tuple[str, str], dict[str, Answer]]
) -> None:
    """In a batch with others that have one: the drafter has none, and does not see theirs."""
    model, adapters = targets["llama"]
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    core = make_engine(model, **SETTINGS, speculative_config=config)
    draft_always(core)
    counted = Counting(core)
    assert_same(run_all(core, requests(adapters)), expected["llama", "cpu_native"])
    assert counted.rejected, "drafts of rows with an adapter are another model's"
    assert not any(str(name).startswith("0-") for name in counted.rejected)
