"""Hybrid models over random traces: one bit pattern per request, whatever is cut, cached, drafted or preempted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.engine.core import EngineCore
from quire.layers.state import StateCache
from quire.planning.engine_plan import plan_memory
from quire.types.sampling import SamplingParams
from tests.e2e.broken import BAD, broken_copy
from tests.e2e.drafting import Oracle, draft_with
from tests.e2e.test_equality import MODELS
from tests.e2e.tiny import VOCAB, Answer, Driver, make_engine, make_model, run_alone
from tests.runner.engines import worker_of

LONGEST = 140
EMBEDDINGS = {"mamba2": "backbone.embeddings.weight"}
NIGHTLY = pytest.mark.nightly
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {k: v for k, v in MODELS["recurrent"].items() if k != "model_type"},
    "mamba2": {"num_hidden_layers": 2, "state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "lfm2": {
        **{"layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False},
        "tie_word_embeddings": False,
    },
}


class Trace:
    """Requests that share prefixes with each other, and settings of an engine, all drawn from a seed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        bases = [[draw.randrange(3, VOCAB) for _ in range(70)] for _ in range(2)]
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        for index in range(8):
            tail = [draw.randrange(3, VOCAB) for _ in range(draw.randint(1, 20))]
            prompt = draw.choice(bases)[: draw.choice([0, 16, 33, 48, 64, 70])] + tail
            sampled = {"temperature": draw.choice([0.0, 0.8]), "seed": draw.getrandbits(60), "logprobs": 2}
            params = SamplingParams(max_tokens=draw.randint(4, 40), ignore_eos=True, **sampled)
            self.requests[str(index)] = prompt, params
        layout = plan_memory(EngineConfig.from_flat(model=str(folder))).layout
        chunk = draw.choice([5, 17, 64])
        self.settings: dict[str, Any] = {
            "max_num_batched_tokens": chunk,
            "max_num_seqs": min(chunk, draw.choice([2, 5, 8])),
            "steps_in_flight": draw.choice([1, 2, 3]),
            "num_threads": draw.choice([1, 2]),
            "max_model_len": LONGEST,
            # Most traces have no room for all requests at once, and little for checkpoints.
            "kv_cache_memory": layout.bytes_for(LONGEST, chunk) * draw.choice([2, 3, 8]) + 4 * layout.page_bytes,
            "state_cache_size": draw.choice([None, 0, 3 * max(pool.page_bytes for pool in layout.pools)]),
        }
        self.wrong = draw.choice([None, 0.0, 0.3, 1.0])  # share of drafts that do not hold; None: no speculation

    def run(self, core: EngineCore) -> dict[str, Answer]:
        driver = Driver(core)
        for name, (prompt, params) in self.requests.items():
            driver.add(name, prompt, params)
            for _ in range(self.draw.choice([0, 1, 4])):
                driver.step()
                core.scheduler.check_integrity()
        return driver.finish()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(tmp_path_factory.mktemp(name), name, **keys) for name, keys in HYBRIDS.items()}


def check(folder: Path, seed: int) -> EngineCore:
    trace = Trace(folder, seed)
    plain = make_engine(
        folder, enable_prefix_caching=False, max_num_batched_tokens=512, max_num_seqs=1, num_threads=2
    )
    expected = trace.run(plain)
    drafts = {} if trace.wrong is None else {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}
    core = make_engine(folder, **trace.settings, **drafts)
    if trace.wrong is not None:
        known = {name: answer.token_ids for name, answer in expected.items()}
        draft_with(core, Oracle(known, VOCAB, wrong=trace.wrong, seed=seed))
    for _ in range(2):  # the second time from what is cached
        found = trace.run(core)
        for name, answer in expected.items():
            assert found[name].content() == answer.content(), (trace.settings, trace.wrong, name)
    return core


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=NIGHTLY) for seed in range(2, 30))])
def test_any_trace_gives_the_bits_of_requests_alone(folders: dict[str, Path], name: str, seed: int) -> None:
    check(folders[name], seed)


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", *(pytest.param(name, marks=NIGHTLY) for name in ("mamba2", "lfm2"))]
)
def test_checkpoints_that_are_evicted_give_no_wrong_state(folders: dict[str, Path], name: str) -> None:
    """Conversations in turns, with room for the states of two requests and hardly a checkpoint."""
    folder = folders[name]
    layout = plan_memory(EngineConfig.from_flat(model=str(folder))).layout
    states = sum(pool.page_bytes for pool in layout.pools if pool.per_row)
    small = {"state_cache_size": states, "kv_cache_memory": layout.bytes_for(400, 64) + 8 * states}
    core = make_engine(folder, max_num_batched_tokens=64, max_num_seqs=2, max_model_len=400, **small)
    cold = make_engine(folder, enable_prefix_caching=False, max_num_batched_tokens=512)
    lost: list[int] = []  # groups of blocks that can be found no more
    core.scheduler.kv.listeners.append(lambda group, _, found: None if found else lost.append(group))
    draw, cached = random.Random(5), 0
    histories = [[draw.randrange(3, VOCAB) for _ in range(40)] for _ in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)
    for _ in range(5):
        driver = Driver(core)
        order = draw.sample(range(4), draw.choice([2, 3]))
        for index in order:
            histories[index] += [draw.randrange(3, VOCAB) for _ in range(draw.randint(3, 25))]
            driver.add(str(index), histories[index], params)
            for _ in range(draw.choice([0, 3, 20])):
                driver.step()
        answers = driver.finish()
        for index in order:
            assert answers[str(index)].content() == run_alone(cold, histories[index], params).content()
            cached += answers[str(index)].num_cached_tokens
            histories[index] += answers[str(index)].token_ids
    state_group = next(group.index for group in layout.groups if group.kind == "state")
    assert state_group in lost
    assert cached > 0


@pytest.mark.parametrize("name", HYBRIDS)
def test_poisoned_rows_fail_alone_and_leave_no_trace(folders: dict[str, Path], name: str) -> None:
    """A token whose embedding is NaN, in prompts that share their beginning with good ones, in a small cache."""
    folder, embeddings = folders[name], EMBEDDINGS.get(name, "model.embed_tokens.weight")
    layout = plan_memory(EngineConfig.from_flat(model=str(folder))).layout
    small = {"max_model_len": LONGEST, "kv_cache_memory": 3 * layout.bytes_for(LONGEST, 16), "max_num_seqs": 3}
    core = make_engine(broken_copy(folder, embeddings, [BAD], torch.nan), max_num_batched_tokens=16, **small)
    plain = make_engine(folder, enable_prefix_caching=False, max_num_seqs=1)
    draw = random.Random(11)
    shared = [draw.randrange(BAD + 1, VOCAB) for _ in range(40)]
    params = SamplingParams(
        temperature=0.0, max_tokens=8, ignore_eos=True, allowed_token_ids=[*range(BAD + 1, VOCAB)]
    )
    driver, prompts = Driver(core), {}
    for index in range(9):
        tail = [draw.randrange(BAD + 1, VOCAB) for _ in range(12)]
        is_bad = index % 3 == 1
        prompts[str(index)] = shared[: draw.choice([20, 40])] + [BAD] * is_bad + tail, is_bad
        driver.add(str(index), prompts[str(index)][0], params)
        for _ in range(draw.choice([1, 4, 9])):
            driver.step()
    answers = driver.finish()
    for index, (prompt, is_bad) in prompts.items():
        if is_bad:
            assert (answers[index].finish_reason, answers[index].token_ids) == ("error", [])
        else:
            assert answers[index].content() == run_alone(plain, prompt, params).content()
    again = run_alone(core, [*shared, BAD + 1], params)
    assert again.num_cached_tokens > 0
    assert again.content() == run_alone(plain, [*shared, BAD + 1], params).content()
    assert all(layer.cache.isfinite().all() for layer in worker_of(core).model.cached_layers())


def test_states_take_what_the_ledger_says(folders: dict[str, Path]) -> None:
    core = make_engine(folders["qwen3_5_text"], max_num_seqs=4)
    worker = worker_of(core)
    line = next(entry for entry in worker.description.ledger.entries if entry.name == "states")
    storages = [
        layer.cache.untyped_storage() for layer in worker.model.cached_layers() if isinstance(layer, StateCache)
    ]
    held = {storage.data_ptr(): storage.nbytes() for storage in storages}
    assert sum(held.values()) == line.num_bytes
