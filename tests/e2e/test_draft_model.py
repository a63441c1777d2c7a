"""A draft model changes when tokens come and never which, and is always right where it is the target itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.planning.engine_plan import plan_memory
from quire.platform.cpu import CpuPlatform
from quire.runner.proposers.draft_model import DraftModel
from quire.runner.runner import Runner
from quire.types.errors import ConfigError, ModelError
from quire.types.sampling import SamplingParams
from tests.e2e.draft_heads import SPARSE
from tests.e2e.drafting import EAGER, Counting, assert_same, draft_always, engine, run
from tests.e2e.tiny import LATENT, Answer, Driver, make_engine, make_model
from tests.runner.engines import Spy, capture_steps, run_eagerly, spy_on, worker_of

GEMMA: dict[str, Any] = {
    "sliding_window": 24,
    "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
# What a drafter does not know of a request, so that it may propose other tokens.
UNKNOWN = {"grammar", "thinking"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("draft_model")
    return {
        "llama": make_model(folder / "llama", "llama"),
        "small": make_model(
            folder / "small", "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
        ),
        "gemma3": make_model(folder / "gemma3", "gemma3_text", **GEMMA),
        "latents": make_model(folder / "latents", "deepseek_v3", **LATENT),
        "sparse": make_model(folder / "sparse", "deepseek_v32", **SPARSE),
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, dict[str, Answer]]:
    return {name: run(engine(models[name])) for name in ("llama", "gemma3", "latents", "sparse")}


def drafting(target: Path, draft: Path, **settings: Any) -> tuple[EngineCore, Counting]:
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    core = engine(target, speculative_config=config, **settings)
    draft_always(core)
    return core, Counting(core)


def proposing_runner(core: EngineCore) -> Runner:
    proposer = worker_of(core).runner.proposer
    assert isinstance(proposer, DraftModel)
    return proposer._runner


def propose_eagerly(core: EngineCore) -> None:
    proposing_runner(core).ways = proposing_runner(core).ways[-1:]


@pytest.mark.parametrize(
    ("target", "draft", "depth"),
    [
        ("llama", "small", 3),
        ("gemma3", "llama", 2),
        ("latents", "small", 3),
        ("gemma3", "latents", 2),
        ("sparse", "latents", 2),
    ],
)
def test_tokens_are_those_of_no_speculation(
    models: dict[str, Path], expected: dict[str, dict[str, Answer]], target: str, draft: str, depth: int
) -> None:
    core, counted = drafting(models[target], models[draft], steps_in_flight=depth)
    assert_same(run(core, seed=depth), expected[target])
    assert counted.num_drafts > 100


@pytest.mark.parametrize("ways", ["kernel list", "eager"])
@pytest.mark.parametrize("target", ["llama", "gemma3"])
def test_a_target_that_drafts_for_itself_is_always_right(
    models: dict[str, Path],
    expected: dict[str, dict[str, Answer]],
    target: str,
    ways: str,
) -> None:
    """That proves its positions, its keys and values, and its noise: also behind chunks, prefix hits and drafts."""
    core, counted = drafting(models[target], models[target], max_num_batched_tokens=24, max_num_seqs=8)
    if ways == "eager":
        run_eagerly(core)
        propose_eagerly(core)
    assert_same(run(core, seed=1), expected[target])
    assert counted.num_drafts > 100
    assert {str(name).partition(",")[0] for name in counted.rejected} <= UNKNOWN


@pytest.mark.parametrize(("target", "draft"), [("gemma3", "gemma3"), ("latents", "small"), ("llama", "latents")])
def test_captured_steps_give_the_same(
    models: dict[str, Path], target: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a target and a drafter that keep different forms."""
    settings: dict[str, Any] = {"attention_backend": "torch_ref", "max_num_batched_tokens": 24, "max_num_seqs": 8}
    expected = run(engine(models[target], attention_backend="torch_ref"), left_out=EAGER)
    capture_steps(monkeypatch)
    core, counted = drafting(models[target], models[draft], **settings)
    spies = spy_on(core), Spy(proposing_runner(core).ways[0])
    proposing_runner(core).ways[0] = spies[1]
    assert_same(run(core, seed=1, left_out=EAGER), expected)
    assert counted.num_drafts > 100
    assert all(len(spy.ran) > 10 for spy in spies)
    if target == draft:
        assert {str(name).partition(",")[0] for name in counted.rejected} <= UNKNOWN


def test_without_grammars_every_draft_holds(models: dict[str, Path]) -> None:
    core, counted = drafting(models["llama"], models["llama"])
    driver = Driver(core)
    for index in range(6):
        params = SamplingParams(temperature=0.9 * (index % 2), seed=index, max_tokens=40, ignore_eos=True)
        driver.add(str(index), list(range(5, 9 + 5 * index)), params)
    driver.finish()
    assert counted.num_accepted == counted.num_drafts > 150
    assert counted.num_steps < 20


def test_results_may_come_late(
    models: dict[str, Path], expected: dict[str, dict[str, Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CpuPlatform, "asynchronous", True)
    core, counted = drafting(models["llama"], models["small"], steps_in_flight=2)
    run_eagerly(core)
    propose_eagerly(core)
    assert_same(run(core, seed=3), expected["llama"])
    assert counted.num_drafts > 100


def test_preempted_requests_go_on(models: dict[str, Path]) -> None:
    config = {"method": "draft_model", "model": str(models["llama"]), "num_speculative_tokens": 4}
    layout = plan_memory(EngineConfig.from_flat(model=str(models["llama"]), speculative_config=config)).layout
    blocks = sum(layout.blocks_for(140, 64)) + 2
    small = {"kv_cache_memory": blocks * layout.page_bytes, "max_model_len": 140, "max_num_batched_tokens": 64}
    expected = run(engine(models["llama"], max_model_len=140), outputs=80)
    core, counted = drafting(models["llama"], models["llama"], max_num_seqs=8, **small)
    assert_same(run(core, outputs=80), expected)
    assert core.scheduler.stats().num_preemptions > 0
    assert {str(name).partition(",")[0] for name in counted.rejected} <= UNKNOWN


def test_the_measured_lengths_draft_too(models: dict[str, Path], expected: dict[str, dict[str, Answer]]) -> None:
    config = {"method": "draft_model", "model": str(models["llama"]), "num_speculative_tokens": 4}
    core = engine(models["llama"], speculative_config=config)
    assert_same(run(core), expected["llama"])


def test_a_sleeping_engine_wakes_with_its_drafter(models: dict[str, Path]) -> None:
    core, _ = drafting(models["llama"], models["llama"])
    worker = worker_of(core)
    for level in (1, 2):
        worker.sleep(level)
        worker.wake()
    driver = Driver(core)
    driver.add("a", [5, 6, 7], SamplingParams(max_tokens=30, ignore_eos=True, temperature=0.0))
    driver.finish()
    stats = core.scheduler.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 10


def test_a_folder_that_is_no_model_is_named(models: dict[str, Path], tmp_path: Path) -> None:
    """Such as that of a Medusa head, whose method is another."""
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    with pytest.raises(ModelError, match=f'speculative_config: model {tmp_path}: the model config has no "architect'):
        make_engine(models["llama"], speculative_config={"method": "draft_model", "model": str(tmp_path)})


def test_what_does_not_fit_is_refused_by_name(models: dict[str, Path], tmp_path: Path) -> None:
    def refused(match: str, change: Callable[[dict[str, Any]], None], **settings: Any) -> None:
        config: dict[str, Any] = {"method": "draft_model", "model": str(models["small"])}
        change(config)
        with pytest.raises(ConfigError, match=match):
            make_engine(models["llama"], speculative_config=config, **settings)

    other = make_model(tmp_path / "vocab", "llama", vocab_size=150)
    short = make_model(tmp_path / "short", "llama", max_position_embeddings=64)
    states = make_model(tmp_path / "states", "mamba", state_size=8, expand=2)
    refused("vocabulary of 150 tokens and its target one of 199", lambda config: config.update(model=str(other)))
    refused("trained for 64 tokens .* --max-model-len 64", lambda config: config.update(model=str(short)))
    refused("has recurrent layers", lambda config: config.update(model=str(states)))
    refused("method draft_model needs model", lambda config: config.pop("model"))
    refused("draft_tensor_parallel_size is 2", lambda config: config.update(draft_tensor_parallel_size=2))
