"""The corpus: requests over every sampling feature, and tiny models whose weights are the same on every machine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from quire.types.sampling import SamplingParams
from tests.e2e.tiny import VOCAB, Answer, make_engine, make_model
from tests.e2e.tiny_grammar import VOCABULARY
from tests.gpu.helpers import Job, constrained, make_jobs, run_jobs, shaped

_WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 32}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_WIDE},
    "qwen3": {"model_type": "qwen3", **_WIDE},
    "gemma3": {
        "model_type": "gemma3_text",
        **_WIDE,
        "sliding_window": 24,
        "query_pre_attn_scalar": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
# How the same requests are run; none of it may change a bit.
SCHEDULES: dict[str, dict[str, Any]] = {
    "one at a time": {"max_num_seqs": 1, "steps_in_flight": 1},
    "chunks": {"max_num_seqs": 8, "max_num_batched_tokens": 48, "steps_in_flight": 2},
    "preempted": {
        "max_num_seqs": 16,
        "max_num_batched_tokens": 128,
        "kv_cache_memory": 1 << 20,
        "steps_in_flight": 3,
    },
}


def corpus_model(folder: Path, name: str) -> Path:
    """A model whose weights come from NumPy, so that no version of torch or transformers changes them."""
    make_model(folder, max_position_embeddings=1024, **MODELS[name])
    path = folder / "model.safetensors"
    weights = load_file(path)
    for key in weights:
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
        values = np.random.Generator(np.random.Philox(seed)).normal(size=tuple(weights[key].shape)) * 0.25
        weights[key] = torch.from_numpy((values + ("norm" in key and name != "gemma3")).astype(np.float32))
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def corpus_jobs() -> list[Job]:
    """Greedy and sampled requests that share prefixes, those that shape logits, and those under grammars."""
    plain = make_jobs(12, seed=1, longest=120)
    edited = shaped(make_jobs(16, seed=2, longest=120))
    masked = constrained(shaped(make_jobs(12, seed=3, longest=60)))
    scored = [
        msgspec.structs.replace(job.params, prompt_logprobs=2, logprobs=4) for job in make_jobs(3, seed=4, longest=40)
    ]
    prompts = [
        Job("", [3 + 5 * index % (VOCAB - 3) for index in range(20 + 31 * one)], params)
        for one, params in enumerate(scored)
    ]
    many = Job(
        "", [9, 10, 11], SamplingParams(temperature=0.0, max_tokens=4, logit_bias=dict.fromkeys(range(3, 190), 0.5))
    )
    long_word = Job(
        "",
        [9, 10],
        SamplingParams(temperature=0.7, seed=5, max_tokens=6, bad_words_token_ids=(tuple(range(20, 31)),)),
    )
    jobs = [*plain, *edited, *masked, *prompts, many, long_word]
    return [Job(f"{index:02d}", job.token_ids, job.params, job.grammar) for index, job in enumerate(jobs)]


LOGPROBS = attrgetter("logprobs", "prompt_logprobs")


def digest(answer: Answer) -> str:
    """Sixteen digits over all that was answered, log-probabilities to the bit."""
    logprobs = [[(at.token_ids, at.logprobs, at.rank) for at in told] if told else told for told in LOGPROBS(answer)]
    content = (answer.token_ids, *logprobs, answer.finish_reason, answer.error)
    return hashlib.sha256(msgspec.msgpack.encode(content)).hexdigest()[:16]


def run_corpus(folder: Path, **settings: Any) -> Iterator[tuple[str, str, dict[str, str]]]:
    """(model, schedule, digest of each request) for every model and schedule."""
    for name in MODELS:
        model = corpus_model(folder / name, name)
        for schedule, limits in SCHEDULES.items():
            core = make_engine(model, **{"max_model_len": 512, **limits, **settings})
            core.constraints.set_vocabulary(VOCABULARY)
            answers = run_jobs(core, corpus_jobs(), seed=7)
            yield name, schedule, {key: digest(answers[key]) for key in sorted(answers)}
            core.shutdown()
