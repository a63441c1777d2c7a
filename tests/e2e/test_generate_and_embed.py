"""An engine that generates and embeds (--runner generate --convert embed): each as if the other were not there."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from quire import LLM
from quire.engine.core import EngineCore
from quire.types.errors import ConfigError, RequestError
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import PoolingParams, SamplingParams
from tests.e2e import draft_heads
from tests.e2e.draft_heads import Target
from tests.e2e.drafting import Counting, draft_always
from tests.e2e.test_pooling import PROMPTS, pool, vector
from tests.e2e.tiny import make_engine, make_model
from tests.kernels.triton.paged import needs_triton
from tests.runner.engines import capture_steps, run_eagerly, spy_on, worker_of

LAST = PoolingParams(task="embed", pooling="last")
BOTH: dict[str, Any] = {"runner": "generate", "convert": "embed", "max_model_len": 256}
TEXTS = [
    SamplingParams(max_tokens=9, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=5, temperature=0.9, seed=3, top_k=7),
    SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0),
    SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.3),
]
LONG = [
    SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=30, temperature=0.9, seed=3, ignore_eos=True),
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


def text_request(number: int) -> EngineRequest:
    params = TEXTS[number % len(TEXTS)]
    fields: dict[str, Any] = {"seed": params.seed or 0, "max_tokens": params.max_tokens}
    return EngineRequest(request_id=f"text {number}", token_ids=PROMPTS[number % 5][:70], params=params, **fields)


def vector_request(number: int) -> EngineRequest:
    return EngineRequest(request_id=f"vector {number}", token_ids=PROMPTS[number % 5], params=LAST)


def run(core: EngineCore, requests: list[EngineRequest], rng: random.Random) -> dict[str, list[EngineOutput]]:
    """All outputs of requests that come while others run."""
    found: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
    coming = list(requests)
    while coming or core.has_unfinished():
        for _ in range(rng.randrange(3)):
            if coming:
                assert core.add_request(coming.pop()) == []
        for output in core.step().outputs:
            assert output.error is None
            found[output.request_id].append(output)
        core.check_integrity()
    return found


def told(outputs: list[EngineOutput]) -> tuple[list[int], str | None, list[Any], list[Any]]:
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    of_prompt = [entry for output in outputs for entry in output.prompt_logprobs or ()]
    return tokens, outputs[-1].finish_reason, logprobs, of_prompt


@pytest.mark.parametrize(("budget", "caching"), [(512, True), (23, False)])
def test_texts_and_vectors_do_not_depend_on_each_other(decoder: Path, budget: int, caching: bool) -> None:
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": 4, "enable_prefix_caching": caching}
    core = make_engine(decoder, **BOTH, **settings)
    texts, vectors = [text_request(number) for number in range(10)], [vector_request(number) for number in range(10)]
    rng = random.Random(budget)
    mixed = rng.sample(texts + vectors, 20)
    found = run(core, mixed, rng)
    alone = run(make_engine(decoder, max_model_len=256, **settings), texts, rng)
    kept = str(worker_of(core).plan.kv_dtype).removeprefix("torch.")  # an engine that only pools keeps float32
    expected = pool(make_engine(decoder, runner="pooling", max_model_len=256, kv_cache_dtype=kept), PROMPTS, LAST)
    for request in texts:
        assert told(found[request.request_id]) == told(alone[request.request_id])
    for number, request in enumerate(vectors):
        (output,) = found[request.request_id]
        assert output.pooled == expected[number % 5].pooled
        assert output.token_ids == []


@pytest.mark.nightly
@needs_triton
def test_captured_steps_give_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixed steps, and decode steps in which a prompt of one token is pooled."""
    folder = make_model(tmp_path, "llama", num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1)
    capture_steps(monkeypatch, mixed=(16,))
    given = {
        "attention_backend": "triton",
        "max_num_seqs": 4,
        "kv_cache_memory": 1 << 20,
        "max_num_batched_tokens": 16,
    }
    core = make_engine(folder, **{**BOTH, **given, "max_model_len": 64, "enable_prefix_caching": False})
    spy = spy_on(core)
    plain = SamplingParams(max_tokens=4, temperature=0.0)
    requests = [
        EngineRequest(request_id="text", token_ids=PROMPTS[4][:9], params=plain, max_tokens=4),
        EngineRequest(request_id="vector", token_ids=PROMPTS[2][:12], params=LAST),
    ]
    late = EngineRequest(request_id="late", token_ids=PROMPTS[1], params=LAST)

    def both() -> dict[str, list[EngineOutput]]:
        found = run(core, requests, random.Random(0))
        assert core.add_request(requests[0]) == []
        outputs = core.step().outputs
        core.add_request(late)
        while core.has_unfinished():
            outputs += core.step().outputs
        return found | {"late": [output for output in outputs if output.request_id == "late"]}

    captured = both()
    assert spy.ran
    assert not spy.refused
    run_eagerly(core)
    eager = both()
    assert told(captured["text"]) == told(eager["text"])
    for name in ("vector", "late"):
        np.testing.assert_allclose(vector(captured[name][0]), vector(eager[name][0]), atol=1e-5)


def test_from_python(decoder: Path) -> None:
    with LLM(str(decoder), load_format="auto", skip_tokenizer_init=True, **BOTH) as llm:
        (text,) = llm.generate({"prompt_token_ids": PROMPTS[0]}, SamplingParams(max_tokens=3, ignore_eos=True))
        (embedded,) = llm.embed({"prompt_token_ids": PROMPTS[0]})
        assert len(text.outputs[0].token_ids) == 3
        assert np.linalg.norm(embedded.outputs.embedding) == pytest.approx(1)
        with pytest.raises(RequestError, match="start it with --convert classify"):
            llm.classify({"prompt_token_ids": PROMPTS[0]})


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle", "medusa"])
@pytest.mark.parametrize("kind", ["last", "mean"])
def test_drafts_change_neither_texts_nor_vectors(decoder: Path, tmp_path: Path, method: str, kind: str) -> None:
    """Also of rows that pool in a step that verifies drafts of others."""
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 4}
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 3}
    if method == "draft_model":
        config["model"] = str(decoder)
    elif method != "ngram":
        config["model"] = str(getattr(draft_heads, method)(tmp_path / "head", Target(decoder))[0])
    core = make_engine(decoder, **BOTH, **settings, speculative_config=config)
    draft_always(core)
    counted, pooled = Counting(core), PoolingParams(task="embed", pooling=kind)
    texts = [replace(text_request(number), max_tokens=30, params=LONG[number % 2]) for number in range(6)]
    vectors = [replace(vector_request(number), params=pooled) for number in range(10)]
    rng = random.Random(7)
    found = run(core, rng.sample(texts + vectors, 16), rng)
    alone = run(make_engine(decoder, max_model_len=256, **settings), texts, rng)
    kept = str(worker_of(core).plan.kv_dtype).removeprefix("torch.")
    expected = pool(make_engine(decoder, runner="pooling", max_model_len=256, kv_cache_dtype=kept), PROMPTS, pooled)
    for request in texts:
        assert told(found[request.request_id]) == told(alone[request.request_id])
    for number, request in enumerate(vectors):
        assert found[request.request_id][0].pooled == expected[number % 5].pooled
    assert counted.num_drafts > 10
    assert counted.num_pooled_beside > 0


def test_what_does_not_go_together_is_refused(decoder: Path, tmp_path: Path) -> None:
    head, _ = draft_heads.eagle3(tmp_path / "head", Target(decoder), taps=(0, 1, 1))
    with pytest.raises(ConfigError, match="eagle3, whose heads read other hidden states"):
        make_engine(decoder, **BOTH, speculative_config={"method": "eagle3", "model": str(head)})
    with pytest.raises(ConfigError, match="set --runner pooling, or leave one out"):
        make_engine(decoder, runner="generate", convert="classify")
