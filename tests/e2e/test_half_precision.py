"""Engines that compute in 16 bits on a CPU: the tokens are those of the model's own logits, however a step runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.config.engine import EngineConfig
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.worker.direct import DirectModel
from tests.e2e.tiny import VOCAB, make_engine, make_model, run_all

PROMPTS = [[5], list(range(10, 17)), list(range(40, 70))]
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    # As good as greedy, by the kernel that draws.
    "drawn": SamplingParams(temperature=1e-4, seed=1),
    "masked": SamplingParams(temperature=0.0, allowed_token_ids=list(range(VOCAB))),
    # The steps of such requests compute every token of a prompt, and select those that are sampled.
    "prompt_logprobs": SamplingParams(temperature=0.0, prompt_logprobs=0),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tokens_are_those_of_the_logits(dtype: str, tmp_path: Path) -> None:
    model = make_model(tmp_path, "llama")
    direct = DirectModel(EngineConfig.from_flat(model=str(model), dtype=dtype))
    with torch.inference_mode():
        logits = [direct.logits(prompt)[-1].float() for prompt in PROMPTS]
    core = make_engine(model, dtype=dtype)
    for name, params in KINDS.items():
        answers = run_all(
            core,
            [
                EngineRequest(request_id=str(index), token_ids=prompt, params=params, seed=1, max_tokens=2)
                for index, prompt in enumerate(PROMPTS)
            ],
        )
        for index, scores in enumerate(logits):
            answer = answers[str(index)]
            assert len(answer.token_ids) == 2, (name, answer)
            # Logits in 16 bits may have two that are all but the highest.
            assert scores[answer.token_ids[0]] > scores.max() - 0.02 * scores.std(), name
    core.shutdown()
