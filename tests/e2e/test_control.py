"""Sleep, wake, other weights, a pause, limits: a running engine's answers are those of a fresh start."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from inspect import get_annotations
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quire import LLM, EngineError, LoRARequest, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.client import InProcClient
from quire.engine.control import obey
from quire.engine.core import EngineCore
from quire.frontend.async_engine import AsyncEngine
from quire.server.control.verbs import VERBS
from quire.types.control import EngineState
from quire.types.errors import EngineUnavailableError
from quire.types.messages import Command, Reply
from quire.types.request import AdapterRef, EngineRequest
from quire.worker.worker import Worker
from tests.e2e.draft_heads import mtp_qwen35
from tests.e2e.test_lora import SETTINGS, ask, make_adapter
from tests.e2e.tiny import Answer, Driver, make_engine, make_model, run_all
from tests.runner.engines import worker_of

PROMPTS = [[5, 9, 33, 7, 21, 4, 60] * 9, [8, 3], [17, 90, 4, 4, 4, 12], [120, 7, 66, 3, 9, 10, 11, 12, 13, 14] * 4]
LIMIT = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("control") / "base", "llama")


@pytest.fixture(scope="module")
def other(model: Path) -> Path:
    """The same model after more training."""
    changed = AutoModelForCausalLM.from_pretrained(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += 0.1 * torch.randn_like(weight)
    changed.save_pretrained(model.parent / "other")
    return model.parent / "other"


@pytest.fixture(scope="module")
def adapters(model: Path) -> list[AdapterRef]:
    return [make_adapter(model, model.parent / f"adapter{seed}", seed) for seed in (1, 2, 3)]


@pytest.fixture
def core(model: Path) -> Iterator[EngineCore]:
    core = make_engine(model, **SETTINGS)
    yield core
    core.executor.shutdown()


def load(adapters: list[AdapterRef]) -> list[EngineRequest]:
    return [
        ask(f"{index}-{number}", prompt, adapter, temperature=0.9 * (index % 2))
        for number, prompt in enumerate(PROMPTS)
        for index, adapter in enumerate([None, *adapters])
    ]


def tell(core: EngineCore, verb: str, argument: Any = None) -> Reply:
    return obey(core, Command(0, verb, argument))


def settle(driver: Driver) -> EngineState:
    """Drive the engine until a change has ended."""
    end = time.monotonic() + LIMIT
    state: EngineState = tell(driver.core, "state").value
    while state.changing is not None:
        assert time.monotonic() < end
        if driver.core.has_work():
            driver.step()
        state = tell(driver.core, "state").value
    return state


def fresh(model: Path, requests: list[EngineRequest]) -> dict[str, Answer]:
    core = make_engine(model, **SETTINGS)
    try:
        return run_all(core, requests)
    finally:
        core.executor.shutdown()


def begin(core: EngineCore, requests: list[EngineRequest], steps: int) -> Driver:
    driver = Driver(core)
    for request in requests:
        driver.submit(request)
    while steps:
        if core.has_work():
            driver.step()
            steps -= 1
    return driver


def finish(driver: Driver) -> dict[str, Answer]:
    while driver.core.has_unfinished():
        if driver.core.has_work():
            driver.step()
    return driver.answers


def contents(answers: dict[str, Answer]) -> dict[str, object]:
    return {name: answer.content() for name, answer in answers.items()}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_under_load_changes_no_answer(
    core: EngineCore, model: Path, adapters: list[AdapterRef], level: int
) -> None:
    requests = load(adapters)
    driver = begin(core, requests[:10], 5)
    assert tell(core, "sleep", level).error is None
    assert settle(driver).asleep == level
    for request in requests[10:]:  # they wait
        driver.submit(request)
    while core.has_work():
        driver.step()
    assert core.has_unfinished()
    assert core.stats().num_running == 0
    assert "sleeps" in str(tell(core, "update_weights", {"path": str(model)}).error)
    assert tell(core, "sleep", 2).error is None  # from level 1 the weights can still be dropped
    assert settle(driver).asleep == 2
    assert "wake it first" in str(tell(core, "sleep", 1).error)
    assert tell(core, "wake").error is None
    assert settle(driver).asleep == 0
    assert contents(finish(driver)) == contents(fresh(model, requests))
    assert contents(run_all(core, load(adapters))) == contents(driver.answers), "slots and caches are as before"


def test_weights_are_replaced_while_requests_run(
    core: EngineCore, model: Path, other: Path, adapters: list[AdapterRef]
) -> None:
    requests = load(adapters)
    before = run_all(core, requests)  # its prefixes are cached
    driver = begin(core, [ask("open", PROMPTS[0], None)], 4)
    given = list(driver.answers["open"].token_ids)
    assert 0 < len(given) < 12
    assert tell(core, "update_weights", {"path": str(other)}).error is None
    state = settle(driver)
    assert (state.error, len(state.weights)) == (None, 32)
    after = finish(driver)["open"]
    assert after.token_ids[: len(given)] == given
    resumed = msgspec.structs.replace(ask("open", [*PROMPTS[0], *given], None), num_prompt_tokens=len(PROMPTS[0]))
    assert fresh(other, [resumed])["open"].token_ids == after.token_ids[len(given) :], (
        "from there on they are the new"
    )
    now = run_all(core, requests)
    assert contents(now) == contents(fresh(other, requests))
    assert contents(now) != contents(before)
    tell(core, "update_weights", {"path": str(model)})
    settle(driver)
    assert contents(run_all(core, requests)) == contents(before)


@pytest.mark.parametrize("choice", ["drain", "abort"])
def test_what_becomes_of_open_requests(core: EngineCore, model: Path, other: Path, choice: str) -> None:
    old, new = [ask(f"old{i}", prompt, None) for i, prompt in enumerate(PROMPTS)], ask("new", PROMPTS[1], None)
    driver = begin(core, old, 3)
    assert tell(core, "update_weights", {"path": str(other), "requests": choice}).error is None
    driver.submit(new)
    driver.submit(ask("late", PROMPTS[2], None))
    driver._collect(core.abort(["late"]))
    assert "under way" in str(tell(core, "sleep", 1).error)
    settle(driver)
    answers = finish(driver)
    assert answers.pop("late").finish_reason == "abort"
    assert answers.pop("new").content() == fresh(other, [new])["new"].content()
    expected = fresh(model, old)
    if choice == "drain":
        assert contents(answers) == contents(expected)
    else:
        assert {answer.finish_reason for answer in answers.values()} == {"abort"}
        assert all(answers[name].token_ids == expected[name].token_ids[:3] for name in answers)


def test_weights_that_do_not_fit_change_nothing(core: EngineCore, model: Path, tmp_path: Path) -> None:
    wide = make_model(tmp_path / "wide", "llama", hidden_size=96, head_dim=24)
    deeper = make_model(tmp_path / "deeper", "llama", num_hidden_layers=5)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in model.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (deeper / "config.json").write_bytes((model / "config.json").read_bytes())
    request = ask("it", PROMPTS[0], None)
    driver = begin(core, [request], 3)
    for path, words in [
        (wide, "hidden_size"),
        (deeper, "unexpected"),
        (damaged, "model.safetensors"),
        (tmp_path / "none", "none"),
    ]:
        tell(core, "update_weights", {"path": str(path)})
        state = settle(driver)
        assert words in str(state.error)
        assert state.weights == ""
    assert contents(finish(driver)) == contents(fresh(model, [request]))


def test_a_pause_and_limits(core: EngineCore, model: Path) -> None:
    requests = load([])
    driver = begin(core, requests, 2)
    assert tell(core, "pause", True).error is None
    while core.has_work():
        driver.step()
    assert core.has_unfinished()
    assert tell(core, "state").value.is_paused
    assert tell(core, "set_limits", {"max_num_seqs": 1, "max_num_batched_tokens": 16}).value.max_num_seqs == 1
    tell(core, "pause", False)
    assert contents(finish(driver)) == contents(fresh(model, requests))
    driver = begin(core, requests, 2)
    assert core.stats().num_running == 1
    for wrong in ({"max_num_seqs": 0}, {"max_num_seqs": 10_000}, {"max_num_batched_tokens": 10**6}):
        assert "at most" in str(tell(core, "set_limits", wrong).error)
    assert "must be one of" in str(tell(core, "set_log_level", "loud").error)
    tell(core, "set_limits", {"max_num_seqs": 4})
    driver.step()
    driver.step()
    assert core.stats().num_running > 1
    assert contents(finish(driver)) == contents(fresh(model, requests))


def test_the_same_from_python(model: Path, other: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    with LLM(str(model), dtype="float32", skip_tokenizer_init=True) as llm:
        old = llm.generate(prompt, params)[0].outputs[0].token_ids
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(EngineError, match="wake_up"):
                llm.generate(prompt, params)
            llm.wake_up()
            assert llm.generate(prompt, params)[0].outputs[0].token_ids == old
        llm.update_weights(str(other))
        new = llm.generate(prompt, params)[0].outputs[0].token_ids
        trained = {name: load_file(folder / "model.safetensors") for name, folder in (("old", model), ("new", other))}
        llm.push_weights(trained["old"].items())
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == old
        llm.sleep(2)
        llm.wake_up()
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == old, "they are what it wakes with"
        llm.push_weights((name, tensor) for name, tensor in trained["new"].items())
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == new
        with pytest.raises(EngineError, match="norm"):
            llm.push_weights([(name, t) for name, t in trained["old"].items() if name != "model.norm.weight"])
        llm.wake_up()  # it is awake: what failed before is not said of this
        assert new != old
        assert llm.set_limits(max_num_seqs=2).max_num_seqs == llm.state().max_num_seqs == 2
        short = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
        for choice, expected in (("drain", 8), ("abort", 1)):
            stream = llm.stream(prompt, SamplingParams(max_tokens=8, **short))
            pieces = [next(stream).outputs[0]]
            llm.update_weights(str(other), choice)
            pieces += [output.outputs[0] for output in stream]
            assert sum(len(piece.token_ids) for piece in pieces) == expected
            assert pieces[-1].finish_reason == ("length" if choice == "drain" else "abort")
        with pytest.raises(EngineError, match="was not done"):
            llm.update_weights("nowhere/at/all")
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == new


def test_the_head_of_other_weights_drafts_for_them(tmp_path: Path) -> None:
    """An MTP module is in the checkpoint of its target, so that it is replaced with it."""
    model, _ = mtp_qwen35(tmp_path / "base")
    shutil.copytree(model, tmp_path / "other")
    tensors = load_file(model / "model.safetensors")
    changed = {name: tensor * 1.5 if name.startswith("mtp.") else tensor for name, tensor in tensors.items()}
    save_file(changed, tmp_path / "other" / "model.safetensors")
    settings = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}, "dtype": "float32"}

    def head(core: EngineCore) -> dict[str, torch.Tensor]:
        drafter = worker_of(core).model.drafter
        return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}

    cores = [make_engine(folder, **settings) for folder in (model, tmp_path / "other")]
    before, expected = map(head, cores)
    driver = Driver(cores[0])
    for verb, argument in (("update_weights", {"path": str(tmp_path / "other")}), ("sleep", 2), ("wake", None)):
        tell(cores[0], verb, argument)
        assert settle(driver).error is None
    found = head(cores[0])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert any(not torch.equal(found[name], tensor) for name, tensor in before.items())
    for core in cores:
        core.executor.shutdown()


async def test_the_same_from_async_python(model: Path, other: Path, adapters: list[AdapterRef]) -> None:
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False, output_kind="final_only"
    )
    prompt = {"prompt_token_ids": PROMPTS[0]}
    settings = {"model": str(model), "dtype": "float32", "skip_tokenizer_init": True, "enable_lora": True}
    async with AsyncEngine.from_config(EngineConfig.from_flat(**settings)) as engine:

        async def ask_it() -> list[int]:
            return [output async for output in engine.generate(prompt, params)][-1].outputs[0].token_ids

        old = await ask_it()
        await engine.push_weights(load_file(other / "model.safetensors").items(), "drain")
        assert await ask_it() != old
        await engine.push_weights(load_file(model / "model.safetensors").items())
        assert await ask_it() == old
        adapter = LoRARequest("it", lora_path=adapters[0].path)
        await engine.load_adapter(adapter)
        core = cast(InProcClient, engine._client)._core
        assert list(worker_of(core).adapters) == [adapters[0].digest]
        await engine.unload_adapter(adapter)
        assert not worker_of(core).adapters
        await engine.sleep()
        with pytest.raises(EngineUnavailableError, match="when it is awake"):  # a server answers 503 with Retry-After
            await engine.load_adapter(adapter)


IN_PYTHON = {"wake": "wake_up", "apply-pushed-weights": "push_weights"}
OF_SERVERS = {"status", "restart-engine", "replicas", "drain-replica", "restore-replica"}
"""About processes that a server keeps running."""


@pytest.mark.parametrize("name", sorted(set(VERBS) - OF_SERVERS))
@pytest.mark.parametrize("face", [LLM, AsyncEngine])
def test_every_admin_verb_is_there_in_python(face: type, name: str) -> None:
    attributes = {name for base in face.__mro__ for name in get_annotations(base)}
    assert IN_PYTHON.get(name, name.replace("-", "_")) in attributes | set(dir(face))


@pytest.mark.parametrize("engine_process", [False, True])
def test_graphs_are_captured_before_they_are_needed(model: Path, engine_process: bool) -> None:
    """On a CPU: kernel lists, of which an engine has one for decode steps."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}
    answers = []
    for captures in (True, False):
        with LLM(str(model), skip_tokenizer_init=True, engine_process=engine_process) as llm:
            if captures:
                llm.capture_graphs()
                if not engine_process:
                    assert llm.collective_rpc(lambda worker: worker.runner.capture_next()) == [False], "all are"
            answers.append(llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids)
            if captures:
                llm.capture_graphs()
    assert answers[0] == answers[1]


def test_a_trainer_reaches_the_worker(model: Path) -> None:
    """Between two steps of an open stream, whose answer goes on from its tokens."""
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": PROMPTS[0]}

    def scale(worker: Worker, factor: float, *, name: str) -> float:
        assert worker.model is not None
        weight = dict(worker.model.named_parameters())[name]
        with torch.no_grad():
            weight.mul_(factor)
        return float(weight[0])

    with LLM(str(model), dtype="float32", skip_tokenizer_init=True) as llm:
        stream = llm.stream(prompt, params)
        given = list(next(stream).outputs[0].token_ids)
        (found,) = llm.collective_rpc(lambda worker: worker.model.model.norm.weight[0].item())
        assert llm.collective_rpc(scale, (1.0,), {"name": "model.norm.weight"}) == [found]
        given += [token for output in stream for token in output.outputs[0].token_ids]
        llm.reset_prefix_cache()
        assert llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids == given
        with pytest.raises(ZeroDivisionError):
            llm.collective_rpc(lambda worker: 1 // 0)
        llm.sleep(1)
        with pytest.raises(EngineError, match="sleeps"):
            llm.collective_rpc(scale)
