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
from tests.models.harness import build, load, run_chunks
from tests.models.zoo import norm_by_groups

TOKENS = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(40)).tolist()
SIZES = {
    **{"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT},
    **{"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD, "tie_word_embeddings": True},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_CONV = {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
_EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_NEMOTRON = {
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16},
    **{"layers_block_type": ["mamba", "attention", "mlp"], "conv_kernel": 4, "use_conv_bias": True},
    **{"mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5, "time_step_min": 1e-9, "tie_word_embeddings": False},
}
_DELTA = {
    **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 32},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 4},
    **{"linear_num_key_heads": 2, "linear_conv_kernel_dim": 4},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "lfm2": ("lfm2", _CONV),
    "lfm2moe": ("lfm2_moe", {**_CONV, **_EXPERTS, "num_dense_layers": 1, "use_expert_bias": True}),
    "granitehybrid": (
        "granitemoehybrid",
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            **{**_MAMBA2, "num_local_experts": 0, "mamba_n_groups": 2},
            **{"shared_intermediate_size": 96, "attention_multiplier": 0.25, "embedding_multiplier": 2.0},
            **{"logits_scaling": 2.0, "residual_multiplier": 0.5},
        },
    ),
    "falcon-h1": (
        "falcon_h1",
        {
            **{**_MAMBA2, "mamba_d_ssm": 128, "mamba_d_head": 16, "mamba_rms_norm": True, "head_dim": 16},
            **{"mamba_norm_before_gate": False, "key_multiplier": 0.6, "mlp_multipliers": [0.8, 1.3]},
            **{"ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7], "embedding_multiplier": 2.0, "ssm_in_multiplier": 1.1},
            **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7, "ssm_out_multiplier": 0.6},
            **{"lm_head_multiplier": 0.8, "tie_word_embeddings": False},
        },
    ),
    "nemotron_h": ("nemotron_h", _NEMOTRON),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            **{**_NEMOTRON, **_EXPERTS, "layers_block_type": ["mamba", "attention", "moe"], "n_routed_experts": 8},
            **{"moe_shared_expert_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.5},
        },
    ),
    "mamba": ("mamba", {"state_size": 16, "time_step_rank": 4, "layer_norm_epsilon": 1e-5, "intermediate_size": 128}),
    "mamba2": (
        "mamba2",
        {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 2, "expand": 2, "layer_norm_epsilon": 1e-5},
    ),
    "jamba": (
        "jamba",
        {
            **{"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 1},
            **{"expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 16, "mamba_dt_rank": 4},
        },
    ),
    "qwen35": ("qwen3_5_text", _DELTA),
    "qwen35moe": ("qwen3_5_moe_text", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 48}),
    "qwen3next": (
        "qwen3_next",
        {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": True},
    ),
    "kimi-linear": (
        "kimi_linear",
        {
            **{**_EXPERTS, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
            **{"q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
            **{"v_head_dim": 16, "num_key_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4},
            **{"n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_group": 1},
            **{"topk_group": 1, "norm_topk_prob": True, "tie_word_embeddings": False},
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            **{"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
            **{"v_head_dim": 64, "num_key_value_heads": 4, "hidden_size": 256, "head_dim": 24},
        },
    ),
}
ALONE = ("mamba", "mamba2")


def write(name: str, path: Path, together: bool = False) -> PreTrainedModel:
    """A tiny random model, as llama.cpp's converter would write it; `together`: as it wrote Qwen3-Next at first."""
    model_type, keys = MODELS[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **keys})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.uniform_(0.5, 1.5).mul_(1024).round_().div_(1024)  # which 1 can be added to and taken from
            elif parameter.dim() > 1 and "A_log" not in key:
                parameter.normal_(0, 0.3 if "embed" in key else 1.5 / parameter.shape[-1] ** 0.5)
    norm_by_groups(model)
    writer = gguf.GGUFWriter(path, name)
    write_sizes(writer, name, config)
    write_tokenizer(writer)
    for key, tensor in model.state_dict().items():
        for stem, part in Converted(name, config, together).tensors(key, tensor):
            _add_tensor(writer, stem, part, None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_sizes(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    def get(*names: str, default: Any = None) -> Any:
        return next((value for each in names if (value := getattr(config, each, None)) is not None), default)

    attends = {"full_attention": 2, "attention": 2}
    types = get("layers_block_type", "layer_types") or ["attention" if n == 1 else "mamba" for n in range(3)]
    writer.add_block_count(3)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(VOCAB_SIZE)
    eps = get("norm_eps", "layer_norm_epsilon", "rms_norm_eps")
    (writer.add_layer_norm_eps if name.startswith("nemotron") else writer.add_layer_norm_rms_eps)(eps)
    if name in ALONE:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
    else:
        widths = [{"mlp": 96, "moe": 32}.get(kind, 0) for kind in types]
        writer.add_feed_forward_length(widths if name.startswith("nemotron") else 96)
        writer.add_head_count(4)
        uniform = name in ("qwen35", "qwen35moe", "qwen3next", "falcon-h1", "minicpm3")
        heads = 4 if name == "minicpm3" else 2
        attends |= {"full_attention": 1} if name == "kimi-linear" else {}
        writer.add_head_count_kv(heads if uniform else [attends.get(kind, 0) for kind in types])
        writer.add_rope_freq_base(10000.0)
    if "lfm2" in name:
        writer.add_shortconv_l_cache(3)
    elif name == "minicpm3":
        writer.add_q_lora_rank(32)
        writer.add_kv_lora_rank(32)
        writer.add_key_length(24)
        writer.add_rope_dimension_count(8)
    elif name == "kimi-linear":
        writer.add_kv_lora_rank(32)
        writer.add_key_length(40)
        writer.add_value_length(32)
        writer.add_key_length_mla(24)
        writer.add_value_length_mla(16)
        writer.add_rope_dimension_count(8)
        writer.add_ssm_conv_kernel(4)
        writer.add_kda_head_dim(16)
    elif name.startswith("qwen3"):
        writer.add_key_length(32)
        writer.add_value_length(32)
        writer.add_rope_dimension_count(16)
        if name != "qwen3next":
            writer.add_rope_dimension_sections([4, 2, 2, 0])
        writer.add_full_attention_interval(2)
        write_states(writer, inner=64, state=16, rank=4, groups=2)
    elif name in ("mamba", "jamba"):
        write_states(writer, inner=128, state=16, rank=4, groups=None)
    else:
        write_states(writer, inner=128, state=16, rank=8, groups=get("n_groups", "mamba_n_groups"))
    if name == "granitehybrid":
        writer.add_attention_scale(0.25)
        writer.add_embedding_scale(2.0)
        writer.add_residual_scale(0.5)
        writer.add_logit_scale(2.0)
        writer.add_rope_scaling_finetuned(False)
    if name in ("granitehybrid", "nemotron_h", "nemotron_h_moe", "falcon-h1"):
        writer.add_rope_dimension_count(16)
    if name.startswith("nemotron") or name == "falcon-h1":
        writer.add_key_length(16)
        writer.add_value_length(16)
    if "num_experts_per_tok" in MODELS[name][1]:
        writer.add_expert_count(4 if name == "jamba" else 8)
        writer.add_expert_used_count(2 if name == "jamba" else 3)
        writer.add_expert_feed_forward_length(96 if name == "jamba" else 32)
        writer.add_expert_shared_feed_forward_length(48)
        writer.add_expert_shared_count(1)
        writer.add_leading_dense_block_count(1 if name in ("lfm2moe", "kimi-linear") else 0)
        softmax = name in ("jamba", "qwen35moe", "qwen3next")
        kind = gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID
        writer.add_expert_gating_func(kind)
        if name in ("nemotron_h_moe", "kimi-linear"):
            writer.add_expert_weights_norm(True)
            writer.add_expert_weights_scale(1.5)
        if name == "nemotron_h_moe":
            writer.add_expert_group_count(1)
            writer.add_expert_group_used_count(1)


def write_states(writer: gguf.GGUFWriter, inner: int, state: int, rank: int, groups: int | None) -> None:
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    if groups is not None:
        writer.add_ssm_group_count(groups)


class Converted:
    """Tensors of transformers as llama.cpp's converter leaves them."""

    def __init__(self, name: str, config: Any, together: bool) -> None:
        self.name, self.config, self.together = name, config, together
        self.architecture = ARCHITECTURES[name]
        self.stems = {hf.rstrip("$"): stem for stem, hf in self.architecture.layer_names.items()}
        outside = self.architecture.model_names or {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
        self.outside = {hf: stem for stem, hf in outside.items()} | {
            "model.embedding_norm": "token_embd_norm", "lm_head": "output", "model.embeddings": "token_embd",
            "model.norm_f": "output_norm",
        }  # fmt: skip

    def tensors(self, key: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        if ".layers." not in key:
            stem, _, kind = key.rpartition(".")
            if stem == "lm_head" and self.config.tie_word_embeddings:
                return []
            return [(f"{self.outside[stem]}.{kind}", self.changed(key, tensor))]
        _, _, layer, rest = key.replace("forget_gate.", "").split(".", 3)
        block = f"blk.{layer}."
        if rest.endswith(("input_linear.weight", "experts.gate_up_proj")):
            gate, up = tensor.chunk(2, dim=-2)
            kind = "_exps" if "experts" in rest else ""
            return [(f"{block}ffn_gate{kind}.weight", gate), (f"{block}ffn_up{kind}.weight", up)]
        if rest.endswith("output_linear.weight"):
            return [(f"{block}ffn_down.weight", tensor)]
        if self.name == "kimi-linear" and rest.endswith("kv_b_proj.weight"):
            keys, values = tensor.view(4, -1, 32).split((16, 16), dim=1)
            return [
                (f"{block}attn_k_b.weight", keys.mT.contiguous()),
                (f"{block}attn_v_b.weight", values.contiguous()),
            ]
        if rest == "self_attn.conv1d.weight":
            return [
                (f"{block}ssm_conv1d_{kind}.weight", part[None])
                for kind, part in zip("qkv", tensor.chunk(3), strict=True)
            ]
        if rest.endswith("in_proj_qkvz.weight") and not self.together:
            # Of each head of keys: its queries, keys, the values of two heads and their gates.
            parts = [part.flatten(0, 1) for part in tensor.view(2, 96, -1).split((16, 16, 32, 32), dim=1)]
            return [(f"{block}attn_qkv.weight", torch.cat(parts[:3])), (f"{block}attn_gate.weight", parts[3])]
        for part in ("up", "down"):
            if rest.endswith(f"experts.{part}_proj"):
                return [(f"{block}ffn_{part}_exps.weight", tensor)]
        tensor = self.changed(rest, tensor)
        stem, _, kind = rest.rpartition(".")
        if rest.endswith(("A_log", ".D")):
            return [(f"{block}{self.stems[rest]}", tensor)]
        if rest.endswith("dt_bias"):
            return [(f"{block}ssm_dt.bias", tensor)]
        if rest.endswith(("expert_bias", "e_score_correction_bias")):
            return [(f"{block}exp_probs_b.bias", tensor)]
        if rest in self.stems:
            return [(f"{block}{self.stems[rest]}", tensor)]
        return [(f"{block}{self.stems[stem]}.{kind}", tensor)]

    def changed(self, key: str, tensor: Tensor) -> Tensor:
        if "A_log" in key:
            tensor = -tensor.exp()
        if key.endswith(("A_log", ".D")) and tensor.dim() == 1 and self.name not in ("mamba", "jamba"):
            tensor = tensor if self.name.startswith("qwen") else tensor[:, None]
        if "conv" in key and tensor.dim() == 3:
            tensor = tensor.squeeze(1)
        if self.name == "granitehybrid" and key.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = tensor.unflatten(0, (-1, 2, 8)).transpose(1, 2).flatten(0, 2)  # heads of 16
        if self.name == "kimi-linear" and "A_log" in key:
            tensor = tensor.view(1, 1, -1, 1)
        groups = getattr(self.config, "n_groups", None) or getattr(self.config, "mamba_n_groups", 1)
        if key.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.view(groups, -1)
        if self.name.startswith("qwen35"):
            tensor = self.tiled(key, tensor)
        if self.name.startswith("qwen3") and key.endswith("norm.weight") and "linear_attn" not in key:
            tensor = tensor + 1
        return self.scaled(key, tensor) if self.name == "falcon-h1" else tensor

    def tiled(self, key: str, tensor: Tensor) -> Tensor:
        """Heads of values, of which two share a head of keys: first one of each, then the other of each."""

        def rows(values: Tensor) -> Tensor:
            return values.view(2, 2, -1, *values.shape[1:]).transpose(0, 1).reshape(values.shape)

        if "out_proj" in key:
            return rows(tensor.T).T
        if "in_proj_qkv" in key or "conv1d" in key:
            return torch.cat((tensor[:64], rows(tensor[64:])))
        return rows(tensor) if any(part in key for part in ("in_proj_", "A_log", "dt_bias")) else tensor

    def scaled(self, key: str, tensor: Tensor) -> Tensor:
        """Falcon-H1's factors are part of its weights."""
        config = self.config
        factors = {
            **{"down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0]},
            **{
                "k_proj": config.key_multiplier * config.attention_in_multiplier,
                "out_proj": config.ssm_out_multiplier,
            },
            **{"q_proj": config.attention_in_multiplier, "v_proj": config.attention_in_multiplier},
            **{"o_proj": config.attention_out_multiplier, "lm_head": config.lm_head_multiplier},
            "embed_tokens": config.embedding_multiplier,
        }
        if "in_proj" in key:
            sizes = [128, 128, 16, 16, 8]
            parts = zip(tensor.split(sizes), config.ssm_multipliers, strict=True)
            return torch.cat([part * factor for part, factor in parts]) * config.ssm_in_multiplier
        return tensor * next((factor for part, factor in factors.items() if part in key), 1.0)


@pytest.mark.parametrize("name", MODELS)
def test_floats_compute_what_llama_cpp_and_transformers_compute(tmp_path: Path, name: str) -> None:
    theirs = write(name, tmp_path / "model.gguf")
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    model = build(checkpoint.config, 64)
    load_weights(model, checkpoint)
    logits = run_chunks(model, TOKENS, [13, 1, 20])
    if name != "falcon-h1":  # the factors in its weights are rounded
        theirs.save_pretrained(tmp_path / "folder")
        assert torch.equal(logits, run_chunks(load(tmp_path / "folder", 64), TOKENS, [13, 1, 20]))
    with torch.no_grad():
        torch.testing.assert_close(logits, theirs(torch.tensor([TOKENS])).logits[0], rtol=0, atol=1e-3)
    found, oracle = logits.log_softmax(-1), LlamaCpp(tmp_path / "model.gguf", VOCAB_SIZE)
    error = 2e-2 if name.startswith("qwen3") else 1e-3  # its form of the delta rule adds up otherwise
    for length in (1, 7, 40):
        expected = oracle.next_token_logprobs(TOKENS[:length])
        torch.testing.assert_close(found[length - 1], expected, rtol=0, atol=error)


def test_older_files_of_qwen3_next_have_projections_together(tmp_path: Path) -> None:
    theirs = write("qwen3next", tmp_path / "model.gguf", together=True)
    theirs.save_pretrained(tmp_path / "folder")
    checkpoint = GgufCheckpoint(tmp_path / "model.gguf")
    assert "model.layers.0.linear_attn.in_proj_qkvz.weight" in checkpoint.tensors()
    model = build(checkpoint.config, 64)
    load_weights(model, checkpoint)
    logits = run_chunks(model, TOKENS, [13, 1, 20])
    assert torch.equal(logits, run_chunks(load(tmp_path / "folder", 64), TOKENS, [13, 1, 20]))
