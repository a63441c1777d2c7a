"""Sleep and other weights on a GPU: memory goes back to the system, and answers are those of a fresh start."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM, SamplingParams
from tests.e2e.tiny import make_model
from tests.gpu.helpers import needs_gpu

pytestmark = needs_gpu
PROMPT = {"prompt_token_ids": [5, 9, 33, 7, 21, 4, 60] * 9}


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_gives_memory_back(tmp_path: Path, level: int) -> None:
    folder = make_model(tmp_path / "base", "llama", hidden_size=1024, head_dim=128, num_attention_heads=8)
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM(str(folder), skip_tokenizer_init=True, device="cuda", kv_cache_memory=1 << 30) as llm:
        before = llm.generate(PROMPT, params)[0].outputs[0].token_ids
        awake = torch.cuda.memory_reserved()
        llm.sleep(level)
        assert awake - torch.cuda.memory_reserved() > 900 << 20, "at least the KV blocks are free"
        llm.wake_up()
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == before
        llm.update_weights(str(folder))
        assert llm.generate(PROMPT, params)[0].outputs[0].token_ids == before
