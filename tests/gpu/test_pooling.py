"""Models that pool, on a GPU: encoders and classifiers beside transformers, and the same whatever runs beside."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from tests.e2e.test_classifiers import make_classifier
from tests.e2e.test_encoders import ENCODERS, WHOLE, make_encoder
from tests.e2e.test_pooling import PROMPTS, pool, vector
from tests.e2e.tiny import make_engine
from tests.gpu.helpers import needs_gpu, tiny_model
from tests.runner.engines import run_eagerly, spy_on, worker_of

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", [*ENCODERS, "Gemma3Text"])
def test_hidden_states_are_those_of_transformers(name: str, dtype: str, tmp_path: Path) -> None:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}, later ones do")
    theirs = make_encoder(tmp_path, name)
    core = make_engine(tmp_path, device="cuda", dtype=dtype, max_model_len=150)
    outputs = pool(core, PROMPTS, WHOLE)
    for tokens, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).last_hidden_state[0].numpy()
        found = vector(output)
        cosines = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert cosines.min() > (0.999 if dtype == "float16" else 0.99999)


@pytest.mark.parametrize("name", ["Bert", "Qwen3"])
def test_classes_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = make_classifier(tmp_path, name, "SequenceClassification")
    core = make_engine(tmp_path, device="cuda", dtype="float32", max_model_len=150)
    pooler = worker_of(core).plan.pooler
    assert pooler is not None
    params = PoolingParams(task="classify", pooling=pooler.kind, head="classify", activation="softmax")
    for tokens, output in zip(PROMPTS, pool(core, PROMPTS, params), strict=True):
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens])).logits[0].softmax(0)
        np.testing.assert_allclose(vector(output), expected.numpy(), atol=1e-3)


@pytest.mark.parametrize("backend", ["triton", "triton_fixed"])
@pytest.mark.parametrize("name", ["Bert", "ModernBert", "Gemma3Text"])
def test_steps_are_graphs(name: str, backend: str, tmp_path: Path) -> None:
    """Of whole prompts, alone and beside others; a vector does not depend on which."""
    make_encoder(tmp_path, name)
    core = make_engine(tmp_path, device="cuda", dtype="float16", max_model_len=150, attention_backend=backend)
    spy, mean = spy_on(core), PoolingParams(pooling="mean")
    captured = [vector(output) for output in pool(core, PROMPTS, mean)]
    assert spy.ran
    assert not spy.refused
    alone = [vector(pool(core, [tokens], mean)[0]) for tokens in PROMPTS]
    run_eagerly(core)
    eager = [vector(output) for output in pool(core, PROMPTS, mean)]
    for mine, other, theirs in zip(captured, alone, eager, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-3)
        np.testing.assert_allclose(mine, other, atol=2e-3)
        assert backend == "triton" or np.array_equal(mine, other)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("backend", ["triton", "triton_fixed"])
@pytest.mark.parametrize("name", ["Bert", "ModernBert", "Gemma3Text"])
def test_tokens_at_the_end_that_no_token_attends_to(name: str, backend: str, dtype: str, tmp_path: Path) -> None:
    """As ColBERT's mask tokens: their vectors beside transformers, in graphs and eagerly, alone and in a batch."""
    theirs = make_encoder(tmp_path, name)
    core = make_engine(tmp_path, device="cuda", dtype=dtype, max_model_len=150, attention_backend=backend)
    prompts, attended = [PROMPTS[0][:17], PROMPTS[2], PROMPTS[4][:12]], 12
    spy, half = spy_on(core), PoolingParams(pooling="all", use_activation=False, attended_tokens=attended)
    outputs = pool(core, prompts[:1] + prompts[2:], half)
    captured = [vector(output) for output in outputs]
    assert not spy.refused
    for tokens, found in zip(prompts[:1] + prompts[2:], captured, strict=True):
        mask = torch.tensor([[1] * attended + [0] * (len(tokens) - attended)])
        with torch.inference_mode():
            expected = theirs(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0].numpy()
        cosines = (found * expected).sum(-1) / np.linalg.norm(found, axis=-1) / np.linalg.norm(expected, axis=-1)
        assert cosines.min() > (0.999 if dtype == "float16" else 0.99999)
    # Most of the second prompt sees no key through a window.
    together, alone = pool(core, prompts, half), [pool(core, [tokens], half)[0] for tokens in prompts]
    run_eagerly(core)
    eager = pool(core, prompts, half)
    for mine, other, one in zip(together, alone, eager, strict=True):
        assert np.isfinite(vector(mine)).all()
        np.testing.assert_allclose(vector(mine), vector(other), atol=2e-2)
        np.testing.assert_allclose(vector(mine), vector(one), atol=2e-2)
        assert backend == "triton" or mine.pooled == other.pooled


@pytest.mark.parametrize("backend", ["triton", "triton_fixed"])
def test_texts_and_vectors_of_one_engine(backend: str, tmp_path: Path) -> None:
    """Captured steps of both: as in engines that do one of the two, to the bit where the mode promises it."""
    folder = tiny_model(tmp_path)
    settings = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 512, "attention_backend": backend}
    core = make_engine(folder, runner="generate", convert="embed", **settings)
    spy, last = spy_on(core), PoolingParams(task="embed", pooling="last")
    plain = SamplingParams(temperature=0.0, max_tokens=12)
    for number, tokens in enumerate(PROMPTS):
        core.add_request(EngineRequest(request_id=f"v{number}", token_ids=tokens, params=last))
        core.add_request(EngineRequest(request_id=f"t{number}", token_ids=tokens, params=plain, max_tokens=12))
    found: dict[str, list[EngineOutput]] = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            assert output.error is None
            found.setdefault(output.request_id, []).append(output)
    assert spy.ran
    alone = pool(make_engine(folder, runner="pooling", **settings), PROMPTS, last)
    for number, output in enumerate(alone):
        np.testing.assert_allclose(vector(found[f"v{number}"][0]), vector(output), atol=0.02)
        assert sum(len(each.token_ids) for each in found[f"t{number}"]) == 12
        assert backend == "triton" or found[f"v{number}"][0].pooled == output.pooled
