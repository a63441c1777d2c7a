"""LoRA adapters over checkpoints of every quantized format, and many more adapters than slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire.loader.adapter_files import CONFIG_FILE, WEIGHTS_FILE, adapter_ref
from quire.types.request import AdapterRef
from tests.e2e.test_lora import SETTINGS, ask
from tests.e2e.tiny import make_engine, make_model, run_all
from tests.loader.quantized.test_checkpoints import NAMES, ROOT


def write_adapter(config: dict[str, Any], folder: Path, seed: int, rank: int, layers: int) -> AdapterRef:
    """On q_proj and down_proj of the first layers of a model with Llama's names."""
    generator = torch.Generator().manual_seed(seed)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries = heads * (config.get("head_dim") or hidden // heads)
    shapes = {"self_attn.q_proj": (queries, hidden), "mlp.down_proj": (hidden, config["intermediate_size"])}
    tensors = {}
    for layer in range(layers):
        for name, (outputs, inputs) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator)
            tensors[f"{stem}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return adapter_ref(folder.name, str(folder))


EVERY_CHANGE = ("awq", "bnb-nf4", "ct-mxfp4", "fp8-block", "gptq")
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in NAMES if name not in EVERY_CHANGE]


@pytest.mark.parametrize("name", [*EVERY_CHANGE, *NIGHTLY])
def test_quantized_checkpoints_take_adapters(tmp_path: Path, name: str) -> None:
    """Together is alone, rows without one are those of an engine without, and the adapter changes what is said."""
    config = json.loads((ROOT / name / "config.json").read_text())
    ref = write_adapter(config, tmp_path / "it", 1, 4, 1)
    prompts = [[5, 9, 13, 7, 21, 4] * 3, [8, 3]]
    requests = [ask(f"{i}-{j}", p, a) for i, p in enumerate(prompts) for j, a in enumerate([None, ref])]
    settings: dict[str, Any] = {"max_model_len": 64, "max_loras": 2}
    core = make_engine(ROOT / name, enable_lora=True, **settings)
    together = run_all(core, requests)
    alone = {request.request_id: run_all(core, [request])[request.request_id] for request in requests}
    core.executor.shutdown()
    assert [answer.error for answer in together.values()] == [None] * 4
    assert {key: one.content() for key, one in together.items()} == {key: one.content() for key, one in alone.items()}
    plain = make_engine(ROOT / name, **settings)
    without = run_all(plain, [request for request in requests if request.adapter is None])
    plain.executor.shutdown()
    assert all(answer.content() == together[key].content() for key, answer in without.items())
    assert together["0-0"].logprobs != together["0-1"].logprobs


def test_two_hundred_adapters_share_thirty_two_slots(tmp_path: Path) -> None:
    model = make_model(tmp_path / "base", "llama")
    config = json.loads((model / "config.json").read_text())
    refs = [write_adapter(config, tmp_path / f"it{index}", index, 1, 1) for index in range(200)]
    requests = [ask(ref.name, [5, 9, 33, 7, 21], ref, temperature=0.8) for ref in refs]
    sizes = {"max_loras": 32, "max_lora_rank": 1, "max_cpu_loras": 40, "max_num_seqs": 48}
    core = make_engine(model, **{**SETTINGS, **sizes})
    found = run_all(core, requests)
    assert [answer.error for answer in found.values()] == [None] * 200
    assert len({str(answer.content()) for answer in found.values()}) > 150, "each says something of its own"
    for request in requests[::29]:
        assert run_all(core, [request])[request.request_id].content() == found[request.request_id].content()
    core.check_integrity()
    core.executor.shutdown()
