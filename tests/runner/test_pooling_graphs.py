"""Pooling steps as CUDA graphs, with a pool that runs the work anew, in Triton's interpreter: same as eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.engine.core import EngineCore
from quire.types.sampling import PoolingParams
from tests.e2e.test_encoders import make_encoder
from tests.e2e.test_pooling import pool, vector
from tests.e2e.tiny import VOCAB, make_engine, make_model
from tests.kernels.triton.paged import needs_triton
from tests.runner.engines import Rerun, capture_steps, run_eagerly, spy_on

pytestmark = needs_triton
LENGTHS = (10, 1, 4, 18)
PROMPTS = [[3 + (7 * at + 11 * n) % (VOCAB - 3) for at in range(length)] for n, length in enumerate(LENGTHS)]


def engine(folder: Path, **settings: Any) -> EngineCore:
    fixed = {"attention_backend": "triton", "max_num_seqs": 4, "max_model_len": 64, "kv_cache_memory": 1 << 20}
    return make_engine(folder, **{**fixed, "runner": "pooling", "enable_prefix_caching": False, **settings})


def close(mine: list[Any], theirs: list[Any], atol: float) -> None:
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(vector(one), vector(other), atol=atol)


@pytest.mark.parametrize(
    "kind", ["mean", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("last", "all"))]
)
def test_a_decoder_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Steps in which rows end, go on and begin; a step may have one token of each row."""
    folder = make_model(tmp_path, "llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    capture_steps(monkeypatch, mixed=(16,))
    core = engine(folder, max_num_batched_tokens=16)
    spy, params = spy_on(core), PoolingParams(pooling=kind)
    captured = pool(core, PROMPTS[2:], params) + pool(core, PROMPTS[1:2], params)
    assert spy.ran
    assert not spy.refused
    run_eagerly(core)
    close(captured, pool(core, PROMPTS[2:], params) + pool(core, PROMPTS[1:2], params), 1e-5)


def test_a_full_step_computes_the_tokens_that_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last layer's tokens, those that "last" reads; for "mean", which reads all, another graph."""
    folder = make_model(tmp_path, "llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    capture_steps(monkeypatch, mixed=(4,))
    core = engine(folder, max_num_batched_tokens=18)
    spy = spy_on(core)
    every = [PoolingParams(pooling=kind) for kind in ("last", "mean")]
    captured = [output for params in every for output in pool(core, PROMPTS[3:], params)]
    assert not spy.refused
    assert Rerun.captured == 2
    run_eagerly(core)
    close(captured, [output for params in every for output in pool(core, PROMPTS[3:], params)], 1e-5)


def test_an_encoder_of_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph, whatever prompts a step of its size holds; what was captured without pairs computes them too."""
    make_encoder(tmp_path, "Bert", num_hidden_layers=1)
    capture_steps(monkeypatch, mixed=(16, 64))
    core = engine(tmp_path, dtype="float16", max_num_batched_tokens=64)
    spy, mean = spy_on(core), PoolingParams(pooling="mean")
    pair = PoolingParams(pooling="mean", second_text_at=2)
    asked = ((PROMPTS[:3], mean), (PROMPTS[:3], pair), (PROMPTS[2:3], pair), (PROMPTS[2:3], mean))
    captured = [output for prompts, params in asked for output in pool(core, prompts, params)]
    assert not spy.refused
    assert Rerun.captured == 1, "of 16 tokens"
    run_eagerly(core)
    close(captured, [output for prompts, params in asked for output in pool(core, prompts, params)], 2e-3)
    assert not np.allclose(vector(captured[6]), vector(captured[7]), atol=1e-2)


@pytest.mark.parametrize(("name", "backend"), [("Bert", "triton"), ("ModernBert", "triton_fixed")])
def test_prompts_that_are_not_attended_to_whole(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of their own, which serves any of them, beside others or not; others keep their bits."""
    make_encoder(tmp_path, name, num_hidden_layers=2)
    capture_steps(monkeypatch, mixed=(16,))
    core = engine(tmp_path, dtype="float16", max_model_len=16, max_num_batched_tokens=16, attention_backend=backend)
    spy, whole, half = spy_on(core), PoolingParams(pooling="all"), PoolingParams(pooling="all", attended_tokens=9)
    prompts = PROMPTS[:3]
    plain = pool(core, prompts, whole)
    captured = pool(core, prompts, half)
    assert not spy.refused
    assert Rerun.captured == 2
    same = [one.pooled == other.pooled for one, other in zip(plain, captured, strict=True)]
    assert same == [False, True, True], "two prompts are shorter than what is attended to"
    assert [pool(core, [tokens], half)[0].pooled for tokens in prompts] == [output.pooled for output in captured]
    assert Rerun.captured == 2
    run_eagerly(core)
    assert [output.pooled for output in pool(core, prompts, half)] == [output.pooled for output in captured]
    close(captured, pool(engine(tmp_path, attention_backend="cpu_native"), prompts, half), 5e-3)


@pytest.mark.parametrize(("name", "dtype"), [("Bert", "float32"), ("MPNet", "float16")])
def test_what_no_graph_can_hold_runs_eagerly(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel for each prompt, in float32, and biases of scores."""
    make_encoder(tmp_path, name, num_hidden_layers=1)
    capture_steps(monkeypatch)
    pool(engine(tmp_path, dtype=dtype), PROMPTS[:2], PoolingParams(pooling="mean"))
    assert Rerun.captured == 0


def test_what_is_prepared_is_not_captured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_encoder(tmp_path, "Bert", num_hidden_layers=1)
    capture_steps(monkeypatch, mixed=(16, 64))
    core = engine(tmp_path, dtype="float16", max_num_batched_tokens=64)
    while core.capture_next():
        pass
    assert Rerun.captured == 2
    pool(core, PROMPTS[:3], PoolingParams(pooling="cls"))
    assert Rerun.captured == 2
