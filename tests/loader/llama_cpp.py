"""llama.cpp, through xllamacpp, as an independent reader of GGUF files: the oracle of the tests."""

from __future__ import annotations

from pathlib import Path

import torch
import xllamacpp
from torch import Tensor


class LlamaCpp:
    """One GGUF file loaded by llama.cpp, everything it can keep in float32."""

    def __init__(self, path: Path, vocab_size: int, context: int = 256) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = context
        params.n_parallel = 1
        params.warmup = False
        params.verbosity = -1
        params.cpuparams.n_threads = 1
        params.cpuparams_batch.n_threads = 1
        params.cache_type_k = xllamacpp.ggml_type.GGML_TYPE_F32
        params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._vocab_size = vocab_size
        self._server = xllamacpp.Server(params)

    def next_token_logprobs(self, prompt: list[int]) -> Tensor:
        """Log-probabilities of the token after a prompt of token ids, [vocab_size] float32."""
        reply = self._server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": 1,
                "logprobs": self._vocab_size,
                "temperature": 0.0,
                "cache_prompt": False,
                # Some letter must be sampled: the server gives no logprobs with half a UTF-8 character. The bias
                # acts in the sampler only; the logprobs are those of the model.
                "logit_bias": [[65, 1000.0]],
            }
        )
        entries = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        values = torch.full((self._vocab_size,), float("nan"))
        for entry in entries:
            values[entry["id"]] = entry["logprob"]
        return values
