"""Recurrent models in GGUF files: Quire's model of a file computes what llama.cpp computes from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire.loader.gguf import GgufCheckpoint
from quire.loader.gguf_names import ARCHITECTURES
from quire.loader.mapper import load_weights
from tests.loader.gguf_tiny import BOS, CONTEXT, EOS, PAD, VOCAB_SIZE, _add_tensor, write_tokenizer
from tests.loader.llama_cpp import LlamaCpp
from tests.models.harness import build, run_chunks

TOKENS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(40)).tolist()
SIZES = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT},
    **{"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": True},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "granitehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **{"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "num_local_experts": 0},
            **{"shared_intermediate_size": 96, "attention_multiplier": 0.25, "embedding_multiplier": 2.0},
            **{"logits_scaling": 2.0, "residual_multiplier": 0.5},
        },
    ),
}


def write(name: str, path: Path) -> PreTrainedModel:
    """A tiny random model, as llama.cpp's converter would write it."""
    model_type, keys = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **keys})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() > 1:
                parameter.normal_(0, 0.3 if "embed" in key else 1.5 / parameter.shape[-1] ** 0.5)
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(3)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv([2 if kind == "full_attention" else 0 for kind in keys["layer_types"]])
    writer.add_layer_norm_rms_eps(config.norm_eps if name == "lfm2" else config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB_SIZE)
    if name == "lfm2":
        writer.add_shortconv_l_cache(3)
    else:
        writer.add_ssm_conv_kernel(4)
        writer.add_ssm_inner_size(128)
        writer.add_ssm_state_size(16)
        writer.add_ssm_time_step_rank(8)
        writer.add_ssm_group_count(1)
        writer.add_attention_scale(0.25)
        writer.add_embedding_scale(2.0)
        writer.add_residual_scale(0.5)
        writer.add_logit_scale(2.0)
        writer.add_rope_dimension_count(16)
        writer.add_rope_scaling_finetuned(False)
    write_tokenizer(writer)
    hf_names = {hf.rstrip("$"): stem for stem, hf in ARCHITECTURES[name].layer_names.items()}
    for key, tensor in model.state_dict().items():
        for stem, part in _converted(key, tensor, hf_names):
            _add_tensor(writer, stem, part, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _converted(key: str, tensor: Tensor, hf_names: dict[str, str]) -> list[tuple[str, Tensor]]:
    if not key.startswith("model.layers."):
        names = {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.embedding_norm.weight": "token_embd_norm.weight",
        }
        names["model.norm.weight"] = "output_norm.weight"
        return [(names[key], tensor)] if key in names else []
    _, _, layer, rest = key.split(".", 3)
    block = f"blk.{layer}."
    if rest == "mamba.A_log":
        return [(f"{block}ssm_a", -tensor.exp()[:, None])]
    if rest == "mamba.D":
        return [(f"{block}ssm_d", tensor[:, None])]
    if rest == "mamba.dt_bias":
        return [(f"{block}ssm_dt.bias", tensor)]
    if rest == "mamba.norm.weight":
        return [(f"{block}ssm_norm.weight", tensor[None])]
    if rest == "shared_mlp.input_linear.weight":
        gate, up = tensor.chunk(2)
        return [(f"{block}ffn_gate.weight", gate), (f"{block}ffn_up.weight", up)]
    if rest == "shared_mlp.output_linear.weight":
        return [(f"{block}ffn_down.weight", tensor)]
    stem, _, kind = rest.rpartition(".")
    if "conv" in stem and tensor.dim() == 3:
        tensor = tensor.squeeze(1)
    return [(f"{block}{hf_names[stem]}.{kind}", tensor)]


@pytest.mark.parametrize("name", MODELS)
def test_floats_compute_what_llama_cpp_and_transformers_compute(tmp_path: Path, name: str) -> None:
    theirs = write(name, tmp_path / "model.gguf")
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    model = build(checkpoint.config, 64)
    load_weights(model, checkpoint)
    logits = run_chunks(model, TOKENS, [13, 1, 20])
    if name == "lfm2":  # of Granite, rows of queries and keys are in another order there, which is one without RoPE
        with torch.no_grad():
            torch.testing.assert_close(logits, theirs(torch.tensor([TOKENS])).logits[0], rtol=0, atol=1e-3)
    found, oracle = logits.log_softmax(-1), LlamaCpp(tmp_path / "model.gguf", VOCAB_SIZE)
    for length in (1, 7, 40):
        expected = oracle.next_token_logprobs(TOKENS[:length])
        torch.testing.assert_close(found[length - 1], expected, rtol=0, atol=1e-3)
