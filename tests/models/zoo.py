"""Tiny random models made by transformers: one per architecture and RoPE variant, large enough in spread that a
wrong flag changes the logits."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

LENGTH = 48  # longer than the sliding window, the RoPE original length and one attention tile row
SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = {"sliding_window": 8}
# What configs of latent attention call things.
LATENT_KEYS: dict[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 12,
    "v_head_dim": 20,
}
# What configs of mixtures of experts, and of latent attention, call things.
EXPERT_KEYS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1},
    **LATENT_KEYS,
}
# What configs of recurrent models call their sizes.
STATE_KEYS: dict[str, Any] = {
    **{"mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_head_dim": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    **{"ssm_state_size": 16, "conv_kernel": 4, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]},
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


@dataclass(frozen=True)
class Tiny:
    name: str
    config: str  # the transformers config class
    keys: dict[str, Any] = field(default_factory=dict)
    max_model_len: int = 64

    def make(self, folder: Path) -> nn.Module:
        """Build, save into `folder` and return the transformers model. Norms and biases are made random too."""
        config = getattr(transformers, self.config)(**{**SIZES, **self.keys})
        torch.manual_seed(sum(self.name.encode()))
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "norm" in name or name.endswith(("bias", "sinks")):
                    parameter.add_(torch.randn_like(parameter) * 0.3)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.add_(torch.randn_like(buffer) * 0.3)
        norm_by_groups(model)
        model.save_pretrained(folder)
        if "zero_expert_num" in self.keys:
            _drop_identities(folder, config.n_routed_experts)
        return model


_BY_GROUPS = ("MambaRMSNormGated", "BambaRMSNormGated", "GraniteMoeHybridRMSNormGated")


def norm_by_groups(model: nn.Module) -> None:
    """Make transformers before 5.23 compute the norm behind Mamba-2 as it is defined: for each group by itself.

    mamba_ssm's group_size is the width over n_groups, as in llama.cpp and in transformers since 5.23; before, these
    three models were normalized over all groups at once.
    """
    for mixer in model.modules():
        norm = getattr(mixer, "norm", None)
        if type(norm).__name__ in _BY_GROUPS and not hasattr(norm, "group_size"):
            norm.forward = partial(_grouped_norm, norm, mixer.n_groups)


def _grouped_norm(norm: Any, groups: int, hidden: Tensor, gate: Tensor) -> Tensor:
    gated = (hidden.float() * nn.functional.silu(gate.float())).unflatten(-1, (groups, -1))
    scale = torch.rsqrt(gated.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * (gated * scale).flatten(-2).to(hidden.dtype)


def _drop_identities(folder: Path, count: int) -> None:
    """transformers also writes gates of experts that have none; published checkpoints do not have them."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    extra = [name for name in tensors if (at := re.search(r"experts\.(\d+)\.", name)) and int(at[1]) >= count]
    save_file({name: tensor for name, tensor in tensors.items() if name not in extra}, path, {"format": "pt"})


def rope(rope_type: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10_000.0, **keys}}


FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.4 * i for i in range(8)]}
GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
}

ARCHITECTURES = [
    Tiny("llama", "LlamaConfig"),
    Tiny("llama-tied-biases", "LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    Tiny("llama-head-dim", "LlamaConfig", {"head_dim": 32, "num_key_value_heads": 1}),
    Tiny("mistral", "MistralConfig", {**WINDOW}),
    Tiny("mistral-full", "MistralConfig", {"sliding_window": None}),
    Tiny("qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
    Tiny("qwen2-sliding", "Qwen2Config", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}),
    Tiny("qwen3", "Qwen3Config", {"head_dim": 32}),
    Tiny(
        "qwen3-sliding", "Qwen3Config", {**WINDOW, "head_dim": 16, "use_sliding_window": True, "max_window_layers": 1}
    ),
    Tiny(
        "gemma2",
        "Gemma2Config",
        {
            **WINDOW,
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 6.0,
        },
    ),
    Tiny(
        "gemma3",
        "Gemma3TextConfig",
        {**WINDOW, "head_dim": 32, "query_pre_attn_scalar": 24, "layer_types": ALTERNATING},
    ),
    Tiny(
        "gemma3-linear",
        "Gemma3TextConfig",
        {**WINDOW, "head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ALTERNATING, **GEMMA3_ROPE},
    ),
    Tiny("phi3", "Phi3Config", {**WINDOW}),
    Tiny("phi3-partial", "Phi3Config", {**rope("default", partial_rotary_factor=0.5)}),
    Tiny("olmo2", "Olmo2Config"),
    Tiny("smollm3", "SmolLM3Config", {"tie_word_embeddings": True}),
    Tiny("smollm3-sliding", "SmolLM3Config", {**WINDOW, "use_sliding_window": True, "no_rope_layer_interval": 2}),
    Tiny(
        "granite",
        "GraniteConfig",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
]

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
ROUTED_EXPERTS = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2},
    **{
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
    },
}
ERNIE = {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 24, "tie_word_embeddings": False}
PHI_MOE = {"attention_bias": True, "lm_head_bias": True, "router_jitter_noise": 0.3}
LLAMA4 = {
    **{"num_local_experts": 8, "intermediate_size": 24, "intermediate_size_mlp": 40, "head_dim": 16},
    **{"attention_chunk_size": 12, "floor_scale": 8, "attn_scale": 0.5, "no_rope_layer_interval": 3},
}
MIXTURES = [
    Tiny("qwen3-moe", "Qwen3MoeConfig", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    Tiny("qwen3-moe-dense", "Qwen3MoeConfig", {**EXPERTS, "mlp_only_layers": [0], "decoder_sparse_step": 2}),
    Tiny("qwen2-moe", "Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 40}),
    Tiny("mixtral", "MixtralConfig", {**LOCAL_EXPERTS, **WINDOW}),
    Tiny("olmoe", "OlmoeConfig", {**EXPERTS, "intermediate_size": 24}),
    Tiny(
        "granite-moe",
        "GraniteMoeConfig",
        {
            **LOCAL_EXPERTS,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
        },
    ),
    Tiny("gpt-oss", "GptOssConfig", {**LOCAL_EXPERTS, **WINDOW, "head_dim": 16}),
    Tiny("minimax-m2", "MiniMaxM2Config", {**LOCAL_EXPERTS, "head_dim": 32, "rotary_dim": 16}),
    Tiny("llama4", "Llama4TextConfig", LLAMA4),
    Tiny("llama4-dense", "Llama4TextConfig", {**LLAMA4, "interleave_moe_layer_step": 2, "use_qk_norm": False}),
    Tiny("phi-moe", "PhimoeConfig", {**LOCAL_EXPERTS, "num_experts_per_tok": 2, **PHI_MOE}),
    Tiny("ernie-moe", "Ernie4_5_MoeConfig", {**ERNIE, "use_bias": True}),
    Tiny("ernie-moe-tied", "Ernie4_5_MoeConfig", {**ERNIE, "tie_word_embeddings": True, "moe_layer_interval": 2}),
    Tiny(
        "hunyuan-moe", "HunYuanMoEV1Config", {"num_experts": 8, "moe_topk": 3, "head_dim": 16, "attention_bias": True}
    ),
    Tiny("dots1", "Dots1Config", {**ROUTED_EXPERTS, **WINDOW, "max_window_layers": 2}),
    Tiny("glm4-moe", "Glm4MoeConfig", {**ROUTED_EXPERTS, "use_qk_norm": True, "attention_bias": True}),
]

LATENT = {**LATENT_KEYS, "num_key_value_heads": 4, "rope_interleave": True}
LATENT_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=16, mscale=0.9, mscale_all_dim=0.7)
# Fewer keys than the sequence has; so many heads that hardly any scores are equal, of which transformers takes any.
INDEX = {"index_topk": 12, "index_head_dim": 16, "index_n_heads": 16}
GROUPS = {"topk_method": "group_limited_greedy"}
LONGCAT = {
    **{**LATENT_KEYS, "num_hidden_layers": 4, "num_key_value_heads": 4, "head_dim": 12, "n_routed_experts": 8},
    **{"moe_topk": 3, "zero_expert_num": 4, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 96},
    **{"routed_scaling_factor": 1.5, "qk_head_dim": 28},
}
LATENTS = [
    Tiny("deepseek-v2", "DeepseekV2Config", {**ROUTED_EXPERTS, **LATENT, **LATENT_YARN, **GROUPS}),
    Tiny("deepseek-v2-lite", "DeepseekV2Config", {**ROUTED_EXPERTS, **LATENT, "q_lora_rank": None}),
    Tiny("deepseek-v3", "DeepseekV3Config", {**ROUTED_EXPERTS, **LATENT, **LATENT_YARN, "attention_bias": True}),
    Tiny("deepseek-v3-halves", "DeepseekV3Config", {**ROUTED_EXPERTS, **LATENT, "rope_interleave": False}),
    Tiny("kimi-k2", "DeepseekV3Config", {**ROUTED_EXPERTS, **LATENT, "n_group": 1, "topk_group": 1}),
    Tiny("glm4-moe-lite", "Glm4MoeLiteConfig", {**ROUTED_EXPERTS, **LATENT}),
    Tiny("deepseek-v32", "DeepseekV32Config", {**ROUTED_EXPERTS, **LATENT, **LATENT_YARN, **INDEX}),
    Tiny("glm-moe-dsa", "GlmMoeDsaConfig", {**ROUTED_EXPERTS, **LATENT, **INDEX, "indexer_types": ["full"] * 4}),
    Tiny(
        "glm-moe-dsa-shared",  # two layers attend to the keys that the one before them chooses, the last among them
        "GlmMoeDsaConfig",
        {**ROUTED_EXPERTS, **LATENT, **INDEX, "indexer_types": ["full", "shared", "full", "shared"]},
    ),
    Tiny("longcat-flash", "LongcatFlashConfig", LONGCAT),
    Tiny("minicpm3", "MiniCPM3Config", {**LATENT, "dim_model_base": 24, "tie_word_embeddings": True}),
]

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = [
    Tiny("rope-linear", "LlamaConfig", {**rope("linear", factor=4.0)}),
    # transformers stretches to the longest position it has seen, so the sequence fills max_model_len.
    Tiny("rope-dynamic", "LlamaConfig", {**rope("dynamic", factor=3.0), "max_position_embeddings": 16}, LENGTH),
    Tiny("rope-dynamic-unstretched", "LlamaConfig", {**rope("dynamic", factor=3.0)}),
    Tiny("rope-llama3", "LlamaConfig", {**rope("llama3", factor=8.0, original_max_position_embeddings=32, **LLAMA3)}),
    Tiny("rope-yarn", "LlamaConfig", {**rope("yarn", factor=4.0, original_max_position_embeddings=16)}),
    Tiny(
        "rope-yarn-mscale",
        "LlamaConfig",
        {
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=0.9,
                mscale_all_dim=0.5,
                beta_fast=16,
                beta_slow=2,
                truncate=False,
            )
        },
    ),
    Tiny("rope-yarn-qwen2", "Qwen2Config", {**rope("yarn", factor=2.0, original_max_position_embeddings=32)}),
    Tiny("rope-longrope-long", "Phi3Config", {**rope("longrope", **FACTORS), "original_max_position_embeddings": 16}),
    Tiny(
        "rope-longrope-short",
        "Phi3Config",
        {**rope("longrope", **FACTORS), "original_max_position_embeddings": LENGTH},
        LENGTH,
    ),
    Tiny(
        "rope-longrope-partial",
        "Phi3Config",
        {
            **rope(
                "longrope",
                partial_rotary_factor=0.5,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[2.0, 2.5, 3.0, 4.0],
            ),
            "original_max_position_embeddings": 16,
        },
    ),
]

CONVS = {
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_multiple_of": 16,
    "tie_word_embeddings": True,
}
LINEAR = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
DELTA = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 24, "head_dim": 32},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "initializer_range": 0.1,  # more, and transformers' own chunks differ from its recurrence by 1e-4
}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 40}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
PURE = {"num_hidden_layers": 3, "state_size": 16, "intermediate_size": 128}
KIMI = {
    **{**LATENT_KEYS, "q_lora_rank": None, "num_key_value_heads": 4, "n_group": 4, "topk_group": 2},
    **{"num_local_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2},
    **{"linear_head_dim": 16, "linear_num_heads": 3, "initializer_range": 0.1},
    **{"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]},
}
# As the published config names things.
KIMI_PUBLISHED = {
    **{**KIMI, "layer_types": None, "linear_head_dim": 128},
    "linear_attn_config": {
        **{"full_attn_layers": [1, 4], "kda_layers": [2, 3], "head_dim": 24, "num_heads": 2},
        "short_conv_kernel_size": 3,
    },
}
BAILING = {
    **{key: value for key, value in KIMI.items() if not key.startswith(("linear_", "q_lora"))},
    **{"head_dim": 16, "first_k_dense_replace": 1, "num_mtp_layers": 0},
}
MINIMAX = {
    **{**LOCAL_EXPERTS, "head_dim": 24, "block_size": 16, "layer_types": LINEAR, "full_attn_alpha_factor": 1.3},
    **{"full_attn_beta_factor": 0.7, "linear_attn_alpha_factor": 1.2, "linear_attn_beta_factor": 0.6},
    **{"mlp_alpha_factor": 0.9, "mlp_beta_factor": 1.1},
}
NEMOTRON = {
    **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"]},
    **{"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "head_dim": 16},
}
NEMOTRON_MOE = {
    **{**NEMOTRON, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"]},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
    **{"moe_shared_expert_intermediate_size": 40, "n_group": 4, "topk_group": 2},
}
RECURRENT = [
    Tiny("lfm2", "Lfm2Config", {**CONVS}),
    Tiny("lfm2-conv-bias", "Lfm2Config", {**CONVS, "conv_bias": True, "conv_L_cache": 4}),
    Tiny("lfm2-moe", "Lfm2MoeConfig", {**CONVS, **EXPERTS, "num_dense_layers": 1}),
    Tiny("qwen3-next", "Qwen3NextConfig", {**DELTA, **SHARED}),
    Tiny("qwen3.5", "Qwen3_5TextConfig", {**DELTA}),
    Tiny("qwen3.5-moe", "Qwen3_5MoeTextConfig", {**DELTA, **SHARED}),
    Tiny("kimi-linear", "KimiLinearConfig", KIMI),
    Tiny("kimi-linear-published", "KimiLinearConfig", KIMI_PUBLISHED),
    Tiny("bailing-hybrid", "BailingHybridConfig", BAILING),
    Tiny("bailing-hybrid-unbounded", "BailingHybridConfig", {**BAILING, "kda_safe_gate": False}),
    Tiny("minimax", "MiniMaxConfig", MINIMAX),
    Tiny("mamba", "MambaConfig", {**PURE}),
    Tiny("falcon-mamba", "FalconMambaConfig", {**PURE}),
    Tiny("mamba2", "Mamba2Config", {**PURE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 16}),
    Tiny("bamba", "BambaConfig", {**MAMBA2, "mamba_n_groups": 1, "attn_layer_indices": [1]}),
    Tiny("jamba", "JambaConfig", {**EXPERTS, "attn_layer_period": 4, "attn_layer_offset": 1}),
    Tiny(
        "falcon-h1",
        "FalconH1Config",
        {
            **{**MAMBA2, "mamba_d_ssm": 96, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
            **{"ssm_multipliers": [0.9, 0.8, 1.2, 1.1, 0.7], "mlp_multipliers": [0.8, 1.3], "key_multiplier": 0.6},
            **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.7, "lm_head_multiplier": 0.8},
            **{"ssm_in_multiplier": 1.1, "ssm_out_multiplier": 0.6, "embedding_multiplier": 2.0},
        },
    ),
    Tiny("falcon-h1-no-norm", "FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64}),
    Tiny("nemotron-h", "NemotronHConfig", NEMOTRON),
    Tiny("nemotron-h-moe", "NemotronHConfig", {**NEMOTRON_MOE}),
    Tiny("nemotron-h-latent-moe", "NemotronHConfig", {**NEMOTRON_MOE, "moe_latent_size": 40, "mlp_bias": True}),
    Tiny("granite-hybrid", "GraniteMoeHybridConfig", {**MAMBA2, "layer_types": LINEAR, "num_local_experts": 0}),
    Tiny(
        "granite-hybrid-moe",
        "GraniteMoeHybridConfig",
        {
            **MAMBA2,
            **LOCAL_EXPERTS,
            **{"layer_types": LINEAR, "position_embedding_type": "rope", "shared_intermediate_size": 40},
            **{"residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5},
        },
    ),
]
