"""Prompts of embeddings: those of tokens give what the tokens give, alone, chunked, batched, preempted and cached."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, RequestError, SamplingParams
from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.client import InProcClient
from quire.engine.loop import EngineLoop
from quire.frontend.text_model import load_text_model
from quire.planning.engine_plan import plan_memory
from tests.e2e.tiny import make_model

PROMPTS = [[5, 9, 33, 100], [*range(20, 90)], [7, 7, 150] * 9]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), model_type="llama")


@pytest.fixture(scope="module")
def table(model: Path) -> np.ndarray:
    weights = AutoModelForCausalLM.from_pretrained(model).get_input_embeddings().weight
    return weights.detach().numpy()  # type: ignore[no-any-return]


def answers(llm: LLM, prompts: list[Any]) -> list[Any]:
    return [
        (output.outputs[0].token_ids, output.outputs[0].logprobs)
        for output in llm.generate(prompts, PARAMS, use_tqdm=False)
    ]


def encoded(array: torch.Tensor) -> dict[str, Any]:
    data = array.contiguous().view(torch.uint8).numpy().tobytes()
    dtype = str(array.dtype).removeprefix("torch.")
    return {"data": base64.b64encode(data).decode(), "shape": list(array.shape), "dtype": dtype}


@pytest.mark.parametrize("chunk", [512, 16])
def test_the_embeddings_of_tokens_give_what_the_tokens_give(model: Path, table: np.ndarray, chunk: int) -> None:
    settings = {"enable_prompt_embeds": True, "max_num_batched_tokens": chunk, "max_num_seqs": 8}
    with LLM(str(model), skip_tokenizer_init=True, **settings) as llm:
        expected = answers(llm, PROMPTS)
        given = [{"prompt_embeds": table[prompt]} for prompt in PROMPTS]
        assert answers(llm, given) == expected
        assert answers(llm, [*given, *PROMPTS]) == expected * 2
        (again,) = llm.generate([given[1]], PARAMS, use_tqdm=False)
        assert again.num_cached_tokens == 64, "the digest of the embeddings names their blocks"
        other = table[PROMPTS[1]].copy()
        other[0, 0] += 1.0
        (changed,) = llm.generate([{"prompt_embeds": other}], PARAMS, use_tqdm=False)
        assert changed.num_cached_tokens == 0
        assert changed.outputs[0].logprobs != again.outputs[0].logprobs
        half = torch.tensor(table[PROMPTS[0]]).bfloat16()
        assert answers(llm, [{"prompt_embeds": encoded(half)}]) == answers(
            llm, [{"prompt_embeds": half.float().numpy()}]
        )


def test_preempted_prompts_of_embeddings_give_the_same(model: Path, table: np.ndarray) -> None:
    layout = plan_memory(EngineConfig.from_flat(model=str(model))).layout
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=70, logprobs=1, ignore_eos=True)
    given = [{"prompt_embeds": table[[*range(start, start + 30)]]} for start in (10, 50, 90)]
    settings = {"enable_prompt_embeds": True, "enable_prefix_caching": False, "max_num_seqs": 4, "max_model_len": 128}
    found = []
    for blocks in (64, sum(layout.blocks_for(128, 64)) + 3):
        config = EngineConfig.from_flat(
            model=str(model), skip_tokenizer_init=True, kv_cache_memory=blocks * layout.page_bytes, **settings
        )
        core, info, _ = build_engine(config)
        client = InProcClient(core, EngineLoop(core, debug_checks=True), info)
        with LLM.from_client(client, load_text_model(config.model)) as llm:
            outputs = llm.generate(given, params, use_tqdm=False)
            found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
            preempted = core.scheduler.stats().num_preemptions
    assert preempted > 0
    assert found[0] == found[1]


def test_what_cannot_be_read_is_refused(model: Path, table: np.ndarray) -> None:
    good = encoded(torch.tensor(table[PROMPTS[0]]))
    with LLM(str(model), skip_tokenizer_init=True, enable_prompt_embeds=True) as llm:
        for wrong in (
            np.full((2, 64), np.nan, dtype=np.float32),
            np.zeros((2, 63), dtype=np.float32),
            np.zeros((0, 64), dtype=np.float32),
            np.zeros((512, 64), dtype=np.float32),
            np.zeros((2, 64), dtype=np.int32),
            encoded(torch.full((2, 64), torch.inf).bfloat16()),
            {**good, "data": good["data"][:-4]},
            {**good, "data": "!" * len(good["data"])},
            {**good, "dtype": "object"},
            {**good, "shape": [4, 64, 1]},
            {**good, "shape": [-4, 64]},
            {**good, "extra": 1},
            "gASVCgAAAAAAAACMBXBvc2l4",
        ):
            with pytest.raises(RequestError):
                llm.generate({"prompt_embeds": wrong}, PARAMS, use_tqdm=False)
        with pytest.raises(RequestError, match="leave one"):
            llm.generate({"prompt_embeds": table[[5]], "prompt_token_ids": [5]}, PARAMS, use_tqdm=False)
        with pytest.raises(RequestError, match="prompt_logprobs"):
            llm.generate({"prompt_embeds": table[[5]]}, SamplingParams(prompt_logprobs=1), use_tqdm=False)
    with (
        LLM(str(model), skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match="--enable-prompt-embeds"),
    ):
        llm.generate({"prompt_embeds": good}, PARAMS, use_tqdm=False)
