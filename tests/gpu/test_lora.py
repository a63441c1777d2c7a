"""LoRA adapters on a GPU: captured steps with any mix of them, on all layers, heads, embeddings and experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.loader.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_ref
from quire.types.request import AdapterRef, EngineRequest
from quire.types.sampling import SamplingParams
from tests.e2e.tiny import EXPERTS, Answer, make_engine, make_model, run_all
from tests.gpu.helpers import SIZES, needs_gpu

pytestmark = needs_gpu
PROMPTS = [[5, 9, 33, 7, 21, 4, 60] * 5, [8, 3], [17, 90, 4, 4, 4, 12]]
SETTINGS: dict[str, Any] = {"enable_lora": True, "deterministic": True, "kv_cache_memory": 64 << 20}


def save_adapter(model: Path, folder: Path, seed: int, rank: int) -> AdapterRef:
    """As PEFT saves it, on every matrix but a router's."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.1

    for name, weight in load_file(model / "model.safetensors").items():
        base = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("embed_tokens.weight"):
            tensors[f"{base}.lora_embedding_A"] = drawn(rank, len(weight))
            tensors[f"{base}.lora_embedding_B"] = drawn(weight.shape[1], rank)
        elif weight.dim() == 2 and not name.endswith("mlp.gate.weight"):
            tensors[f"{base}.lora_A.weight"] = drawn(rank, weight.shape[1])
            tensors[f"{base}.lora_B.weight"] = drawn(weight.shape[0], rank)
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return adapter_ref(folder.name, str(folder))


def ask(name: str, prompt: list[int], adapter: AdapterRef | None, temperature: float) -> EngineRequest:
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2, temperature=temperature)
    return EngineRequest(request_id=name, token_ids=prompt, params=params, max_tokens=12, adapter=adapter, seed=7)


def contents(answers: dict[str, Answer]) -> dict[str, object]:
    assert {answer.error for answer in answers.values()} == {None}
    return {name: answer.content() for name, answer in answers.items()}


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_mixed_batch_is_each_alone_bitwise(tmp_path: Path, kind: str) -> None:
    """Slots of two ranks; three adapters for two slots of one of them. Rows without an adapter are as without any."""
    experts = {**EXPERTS, "moe_intermediate_size": 128} if kind == "qwen3_moe" else {}
    model = make_model(tmp_path / "base", kind, tie_word_embeddings=False, **{**SIZES, **experts})
    ranks = {1: 8, 2: 8, 3: 24}
    adapters = [save_adapter(model, tmp_path / f"a{seed}", seed, rank) for seed, rank in ranks.items()]
    requests = [
        ask(f"{index}-{number}", prompt, adapter, 0.8 * (index % 2))
        for number, prompt in enumerate(PROMPTS)
        for index, adapter in enumerate([None, *adapters])
    ]
    settings = {**SETTINGS, "lora_slots": "8x1,32x1", "lora_experts": kind == "qwen3_moe"}
    core = make_engine(model, **settings)
    together = contents(run_all(core, requests))
    assert contents(run_all(core, requests)) == together, "captured now, and from the prefix cache"
    alone = {request.request_id: contents(run_all(core, [request]))[request.request_id] for request in requests}
    core.executor.shutdown()
    assert alone == together
    assert len({str(together[f"{index}-0"]) for index in range(4)}) == 4, "every adapter says something else"
    plain = make_engine(model, **{**SETTINGS, "enable_lora": False})
    expected = contents(run_all(plain, [request for request in requests if request.adapter is None]))
    plain.executor.shutdown()
    assert expected == {name: together[name] for name in expected}
