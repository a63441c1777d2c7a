"""Pooling through the whole engine: the bits of a vector depend on its prompt alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

from quire.engine.core import EngineCore
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams
from tests.e2e.tiny import VOCAB, make_engine, make_model
from tests.runner.engines import run_eagerly, spy_on, worker_of

KINDS = ("cls", "last", "mean", "all")
PROMPTS = [
    [3 + (7 * i + 11 * n) % (VOCAB - 3) for i in range(length)] for n, length in enumerate((150, 1, 64, 65, 17))
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


def pooling_engine(folder: Path, **settings: Any) -> EngineCore:
    return make_engine(folder, **{"runner": "pooling", "max_model_len": 256, **settings})


def pool(core: EngineCore, prompts: list[list[int]], params: PoolingParams) -> list[EngineOutput]:
    """The outputs of prompts that are there at the same time, in their order."""
    for number, tokens in enumerate(prompts):
        assert core.add_request(EngineRequest(request_id=str(number), token_ids=tokens, params=params)) == []
    found: dict[str, EngineOutput] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            assert output.finish_reason is not None, "a request that pools is heard of once"
            found[output.request_id] = output
        core.check_integrity()
    return [found[str(number)] for number in range(len(prompts))]


def vector(output: EngineOutput) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert output.pooled is not None, output.error
    return np.frombuffer(output.pooled.data, np.float32).reshape(output.pooled.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_has_the_same_bits_alone_in_a_batch_and_in_chunks(decoder: Path, kind: str) -> None:
    params = PoolingParams(pooling=kind)
    core = pooling_engine(decoder, enable_prefix_caching=False)
    alone = [pool(core, [tokens], params)[0].pooled for tokens in PROMPTS]
    assert [output.pooled for output in pool(core, PROMPTS, params)] == alone
    chunked = pooling_engine(decoder, enable_prefix_caching=False, max_num_batched_tokens=23, max_num_seqs=3)
    assert [output.pooled for output in pool(chunked, PROMPTS, params)] == alone
    assert chunked.scheduler.kv.num_free_blocks == chunked.scheduler.kv.num_blocks, "all blocks were given back"


def test_step_tags_choose_tokens(decoder: Path) -> None:
    """Also of tokens that come in several chunks, of which some have no tag."""
    tag = PROMPTS[0][40]
    places = [at for at, token in enumerate(PROMPTS[0]) if token == tag]
    assert 0 < len(places) < 20
    params = PoolingParams(pooling="step", step_tag_id=tag)
    for settings in ({}, {"max_num_batched_tokens": 23}):
        core = pooling_engine(decoder, enable_prefix_caching=False, **settings)
        whole = vector(pool(core, PROMPTS[:1], PoolingParams(pooling="all"))[0])
        assert np.array_equal(vector(pool(core, PROMPTS[:1], params)[0]), whole[places])


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_recorded_on_cpus(decoder: Path, kind: str) -> None:
    core = pooling_engine(decoder, max_num_batched_tokens=40)
    recorded = [output.pooled for output in pool(core, PROMPTS, PoolingParams(pooling=kind))]
    run_eagerly(core)
    assert [output.pooled for output in pool(core, PROMPTS, PoolingParams(pooling=kind))] == recorded
    core = pooling_engine(decoder, max_num_batched_tokens=40)
    spy = spy_on(core)
    pool(core, PROMPTS, PoolingParams(pooling=kind))
    assert spy.ran
    assert not spy.refused


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_made_of_the_models_hidden_states(decoder: Path, kind: str) -> None:
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(decoder)(torch.tensor(PROMPTS[:1])).last_hidden_state[0]
    expected = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0), "all": hidden}[kind]
    core = pooling_engine(decoder)
    raw = vector(pool(core, PROMPTS[:1], PoolingParams(pooling=kind, use_activation=False))[0])
    np.testing.assert_allclose(raw, expected.numpy(), atol=1e-4)
    unit = vector(pool(core, PROMPTS[:1], PoolingParams(pooling=kind))[0])
    np.testing.assert_allclose(unit, raw / np.linalg.norm(raw, axis=-1, keepdims=True), atol=1e-6)
    short = vector(pool(core, PROMPTS[:1], PoolingParams(pooling=kind, dimensions=8))[0])
    np.testing.assert_allclose(short, raw[..., :8] / np.linalg.norm(raw[..., :8], axis=-1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize(("kind", "cached"), [("last", 144), ("mean", 0)])
def test_a_prefix_is_reused_where_the_vector_does_not_need_it(decoder: Path, kind: str, cached: int) -> None:
    params = PoolingParams(pooling=kind)
    core = pooling_engine(decoder, max_num_batched_tokens=50)
    first, second = (pool(core, PROMPTS[:1], params)[0] for _ in range(2))
    assert first.pooled == second.pooled
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)


def test_a_vector_that_is_not_finite_fails_alone(decoder: Path) -> None:
    core = pooling_engine(decoder)
    worker_of(core).model.model.norm.weight.data[0] = float("nan")
    (output,) = pool(core, PROMPTS[1:2], PoolingParams(pooling="last"))
    assert output.finish_reason == "error"
    assert "NaN" in (output.error or "")
