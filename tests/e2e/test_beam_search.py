"""Beam search through a real engine, against transformers' own, and through the APIs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from quire import LLM, BeamSearchParams
from tests.e2e.tiny import make_model

PROMPTS = [[5, 9, 33, 100], [7, 7, 150], [*range(20, 60)]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"), model_type="llama")


@pytest.mark.parametrize("limit", [None, 2])
def test_the_beams_are_those_of_transformers(model: Path, limit: int | None) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model).eval()
    params = BeamSearchParams(beam_width=4, max_tokens=10, ignore_eos=True)
    with LLM(str(model), skip_tokenizer_init=True, kv_cache_dtype="float32") as llm:
        found = llm.beam_search(PROMPTS, params, concurrency_limit=limit)
    for prompt, output in zip(PROMPTS, found, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            num_beams=4,
            num_return_sequences=4,
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_scores=True,
        )
        assert [sequence.tokens for sequence in output.sequences] == expected.sequences.tolist()
        scores = [sequence.cum_logprob / 10 for sequence in output.sequences]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        assert {sequence.finish_reason for sequence in output.sequences} == {"length"}
