"""Tiny random models, made with transformers, and a plain way to drive an engine over them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from quire.config.engine import EngineConfig
from quire.engine.build import build_engine
from quire.engine.core import EngineCore
from quire.types.outputs import EngineOutput
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.step import TokenLogprobs

VOCAB = 199

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


# DeepSeek's keys: latent attention, and experts in groups after a dense layer.
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
RECURRENT: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 4},
    "linear_num_key_heads": 2,
}
LATENT: dict[str, Any] = {
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    **{"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
}


def make_model(folder: Path, model_type: str, **overrides: Any) -> Path:
    config = AutoConfig.for_model(model_type, **{**SIZES, **overrides})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_engine(model: Path, **settings: Any) -> EngineCore:
    core, _, _ = build_engine(EngineConfig.from_flat(model=str(model), **settings))
    return core


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_without_state: int = 0
    finish_reason: str | None = None
    error: str | None = None

    def add(self, output: EngineOutput) -> None:
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs += output.prompt_logprobs or []
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_without_state += output.num_without_state
        self.finish_reason, self.error = output.finish_reason, output.error

    def content(self) -> object:
        """What must be equal, to the last bit, however the request was run."""
        return self.token_ids, self.logprobs, self.finish_reason


PARKED_LIMIT = 120.0  # seconds: a grammar compiles in one, unless the machine is busy


class Driver:
    """Submits requests to a core at chosen steps and collects their answers, checking integrity all the while."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.answers: dict[str, Answer] = {}

    def add(self, request_id: str, token_ids: list[int], params: SamplingParams, **fields: Any) -> None:
        request = EngineRequest(
            request_id=request_id,
            token_ids=token_ids,
            params=params,
            seed=params.seed or 0,
            max_tokens=params.max_tokens or 16,
            eos_token_ids=(2,),
            **fields,
        )
        self.submit(request)

    def submit(self, request: EngineRequest) -> None:
        self.answers[request.request_id] = Answer()
        self._collect(self.core.add_request(request))

    def step(self) -> None:
        self._collect(self.core.step().outputs)
        self.core.scheduler.check_integrity()

    def finish(self) -> dict[str, Answer]:
        """Step until every request has ended, also those that are parked for a while."""
        deadline = time.monotonic() + PARKED_LIMIT
        while self.core.has_unfinished():
            if self.core.has_work():
                self.step()
            else:
                assert time.monotonic() < deadline, "a request stays parked"
                time.sleep(0.001)
        return self.answers

    def _collect(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            self.answers[output.request_id].add(output)


def run_alone(core: EngineCore, token_ids: list[int], params: SamplingParams) -> Answer:
    driver = Driver(core)
    driver.add("alone", token_ids, params)
    return driver.finish()["alone"]


def run_all(core: EngineCore, requests: Iterable[EngineRequest]) -> dict[str, Answer]:
    """The answers to requests that arrive at once; some of them may be parked for a while."""
    driver = Driver(core)
    for request in requests:
        driver.submit(request)
    return driver.finish()
