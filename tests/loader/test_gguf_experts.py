"""Mixtures of experts in GGUF files: Quire's model of a file computes what llama.cpp computes from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.layers.experts import GroupedLinear
from quire.layers.quant.packed import PackedGrouped
from quire.loader.gguf import GgufCheckpoint
from quire.loader.gguf_names import ARCHITECTURES
from quire.loader.mapper import load_weights, planned_bytes
from quire.models.base import CausalLM
from quire.types.errors import CheckpointError
from tests.loader.gguf_experts import EXPERT_MODELS, write_expert_gguf
from tests.loader.gguf_tiny import VOCAB_SIZE
from tests.loader.llama_cpp import LlamaCpp
from tests.models.harness import build, run_chunks
from tests.models.harness import load as load_folder

TOKENS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(40)).tolist()


def load(path: Path) -> CausalLM:
    checkpoint = GgufCheckpoint(path)
    model = build(checkpoint.config, 64)
    load_weights(model, checkpoint)
    return model


@pytest.mark.parametrize("name", [name for name in EXPERT_MODELS if not name.endswith("-wide")])
def test_floats_compute_what_llama_cpp_and_transformers_compute(tmp_path: Path, name: str) -> None:
    theirs = write_expert_gguf(name, tmp_path / "model.gguf")
    logits = run_chunks(load(tmp_path / "model.gguf"), TOKENS, [13, 1, 20])
    (architecture,) = GgufCheckpoint(tmp_path / "model.gguf").config["architectures"]
    known = ARCHITECTURES[EXPERT_MODELS[name].arch]
    assert architecture in (known.hf_architecture, *known.others), "the table of models does not tell of it"
    theirs.save_pretrained(tmp_path / "folder")
    assert torch.equal(logits, run_chunks(load_folder(tmp_path / "folder", 64), TOKENS, [13, 1, 20]))
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(torch.tensor([TOKENS])).logits[0], rtol=0, atol=1e-3)
    # llama.cpp routes phimoe as Mixtral, not by sparse mixer, scores groups of V2 as V3 does, and knows V2-Lite by
    # its 27 layers; it crashes where layers share a choice of keys.
    if name in ("phimoe", "deepseek-v2-groups", "deepseek-v2-lite", "glm-dsa-shared"):
        return
    found, oracle = logits.log_softmax(-1), LlamaCpp(tmp_path / "model.gguf", VOCAB_SIZE)
    for length in (1, 7, 40):
        expected = oracle.next_token_logprobs(TOKENS[:length])
        torch.testing.assert_close(found[length - 1], expected, rtol=0, atol=1e-3)


def test_renormalized_softmax_weights_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp divides them by their sum, transformers' DeepSeek-V2 never does; no published file asks for it."""
    spec = EXPERT_MODELS["deepseek-v2"]
    asks = replace(spec, config={**spec.config, "norm_topk_prob": True})
    monkeypatch.setitem(EXPERT_MODELS, "deepseek-v2", asks)
    write_expert_gguf("deepseek-v2", tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"deepseek2\.expert_weights_norm is True; it must be false"):
        GgufCheckpoint(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "quant"),
    [
        ("qwen3moe", "Q8_0"),
        ("deepseek-v3", "Q8_0"),
        ("gpt-oss", "MXFP4"),
        ("qwen3moe-wide", "Q4_K"),
        ("qwen3moe-wide", "Q6_K"),
    ],
)
def test_experts_stay_packed_and_compute_what_they_decode_to(tmp_path: Path, name: str, quant: str) -> None:
    write_expert_gguf(name, tmp_path / "model.gguf", quant)
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    model, decoded = load(tmp_path / "model.gguf"), build(checkpoint.config, 64)
    grouped = [layer for layer in model.modules() if isinstance(layer, GroupedLinear)]
    stored = sum(info.num_bytes for key, info in checkpoint.tensors().items() if ".experts." in key)
    assert all(isinstance(layer.method, PackedGrouped) for layer in grouped)
    # Codes of six bits are kept in eight.
    assert sum(layer.method.num_bytes for layer in grouped) < 1.6 * stored
    checkpoint.stored = checkpoint.get  # type: ignore[method-assign, assignment]
    load_weights(decoded, checkpoint)
    expected, found = (run_chunks(each, TOKENS, [13, 1, 20]) for each in (decoded, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 * float(expected.std()))


def test_the_plan_knows_the_bytes_of_packed_experts(tmp_path: Path) -> None:
    write_expert_gguf("qwen3moe-wide", tmp_path / "model.gguf", "Q4_K")
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    with torch.device("meta"):
        planned = planned_bytes(build(checkpoint.config, 64), checkpoint.tensors())
    model = load(tmp_path / "model.gguf")
    methods = {module.method for module in model.modules() if hasattr(module, "method")}
    others = sum(parameter.nbytes for name, parameter in model.named_parameters() if ".method." not in name)
    assert planned == sum(method.num_bytes for method in methods) + others
