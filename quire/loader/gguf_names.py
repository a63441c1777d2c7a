"""What GGUF calls things: per architecture, the tensor names and how values differ from Hugging Face's.

Adding an architecture is one entry of ARCHITECTURES (and, where its config has keys of its own, one function in
gguf_config.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GgufArchitecture:
    hf_architecture: str  # for config["architectures"]
    model_type: str  # Hugging Face's name of the config
    layer_names: dict[str, str] = field(default_factory=dict)
    """GGUF name in a block -> HF name in a layer. One that ends in $ is that of a tensor, without weight or bias."""
    # The converter reorders each head's q and k rows from rotate-half to interleaved pairs.
    interleaved_qk: bool = False
    # The converter adds 1 to norm weights, because HF's module computes x * (1 + weight).
    norms_plus_one: bool = False
    layers: str = "model.layers"
    model_names: dict[str, str] | None = None  # of tensors outside of blocks; None: those of decoders
    is_encoder: bool = False


_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_MODEL_NAMES["token_embd_norm"] = "model.norm"  # LFM2's, which is the last norm
# Tables of rope factors: read into the config, not weights of a layer.
ROPE_TABLES = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GATED_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}

# Each of the three has the matrices of all experts.
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.all.gate_proj",
    "ffn_up_exps": "mlp.experts.all.up_proj",
    "ffn_down_exps": "mlp.experts.all.down_proj",
}
_CHOICE_BIAS = {"exp_probs_b": "mlp.gate.e_score_correction_bias$"}
_NEXT_TOKENS = {
    f"nextn.{name}": f"nextn.{name}"
    for name in ("eh_proj", "embed_tokens", "enorm", "hnorm", "shared_head_head", "shared_head_norm")
}


def _shared(name: str) -> dict[str, str]:
    return {f"ffn_{kind}_shexp": f"mlp.{name}.{kind}_proj" for kind in ("gate", "up", "down")}


_LLAMA = _ATTENTION | _GATED_MLP | _PRE_NORMS
_GEMMA = (
    _ATTENTION | _GATED_MLP | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"} | _POST_NORMS
)
_LATE_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_GPT_OSS = _ATTENTION | _EXPERTS | _LATE_NORMS | {"ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks"}
_GLM4_MOE = (
    _ATTENTION
    | _GATED_MLP
    | _LATE_NORMS
    | _QK_NORMS
    | _EXPERTS
    | _CHOICE_BIAS
    | _NEXT_TOKENS
    | _shared("shared_experts")
)
_DEEPSEEK = (
    _GATED_MLP
    | _PRE_NORMS
    | _EXPERTS
    | _CHOICE_BIAS
    | _NEXT_TOKENS
    | _shared("shared_experts")
    | {
        "attn_q": "self_attn.q_proj",
        "attn_q_a": "self_attn.q_a_proj",
        "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj",  # before files had keys and values apart
        "attn_k_b": "self_attn.k_b_proj",
        "attn_v_b": "self_attn.v_b_proj",
        "attn_output": "self_attn.o_proj",
    }
)
_HUNYUAN_MOE = (
    _LLAMA
    | _EXPERTS
    | _shared("shared_mlp")
    | {
        "ffn_gate_inp": "mlp.gate.wg",
        "attn_q_norm": "self_attn.query_layernorm",
        "attn_k_norm": "self_attn.key_layernorm",
    }
)
_LFM2 = {
    **{"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj"},
    **{"attn_output": "self_attn.out_proj", "attn_norm": "operator_norm", "ffn_norm": "ffn_norm"},
    **{"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
    **{"ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2"},
    **{f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
}
_STATE_SPACE = {
    **{
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
    **{"ssm_dt": "mamba.dt_bias$", "ssm_a": "mamba.A_log$", "ssm_d": "mamba.D$"},
}
_PHI3 = _PRE_NORMS | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

_BERT = {
    **{f"attn_{short}": f"attention.self.{name}" for short, name in (("q", "query"), ("k", "key"), ("v", "value"))},
    **{"attn_output": "attention.output.dense", "attn_output_norm": "attention.output.LayerNorm"},
    **{"ffn_up": "intermediate.dense", "ffn_down": "output.dense", "layer_output_norm": "output.LayerNorm"},
}
_NOMIC_BERT = {
    **{"attn_qkv": "attn.Wqkv", "attn_output": "attn.out_proj", "attn_output_norm": "norm1"},
    **{"ffn_up": "mlp.fc11", "ffn_gate": "mlp.fc12", "ffn_down": "mlp.fc2", "layer_output_norm": "norm2"},
}
_ENCODER_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}

# Mistral, Mixtral and SmolLM2 models are written as "llama".
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", _LLAMA | _EXPERTS, interleaved_qk=True),
    "bert": GgufArchitecture(
        *("BertModel", "bert", _BERT), layers="encoder.layer", model_names=_ENCODER_NAMES, is_encoder=True
    ),
    "nomic-bert": GgufArchitecture(
        *("NomicBertModel", "nomic_bert", _NOMIC_BERT),
        layers="encoder.layers",
        model_names=_ENCODER_NAMES,
        is_encoder=True,
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", _LLAMA | _QK_NORMS),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", "gemma2", _GEMMA, norms_plus_one=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA | _QK_NORMS, norms_plus_one=True),
    "phi3": GgufArchitecture("Phi3ForCausalLM", "phi3", _PHI3),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", _ATTENTION | _GATED_MLP | _POST_NORMS | _QK_NORMS),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", _LLAMA, interleaved_qk=True),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", _LLAMA, interleaved_qk=True),
    "granitemoe": GgufArchitecture("GraniteMoeForCausalLM", "granitemoe", _LLAMA | _EXPERTS, interleaved_qk=True),
    "qwen2moe": GgufArchitecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        _LLAMA | _EXPERTS | _shared("shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
    ),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", _LLAMA | _QK_NORMS | _EXPERTS),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", "olmoe", _LLAMA | _QK_NORMS | _EXPERTS),
    "gpt-oss": GgufArchitecture("GptOssForCausalLM", "gpt_oss", _GPT_OSS),
    "minimax-m2": GgufArchitecture(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        _LLAMA | _QK_NORMS | _EXPERTS | {"exp_probs_b": "mlp.e_score_correction_bias$"},
    ),
    "phimoe": GgufArchitecture("PhiMoEForCausalLM", "phimoe", _LLAMA | _EXPERTS | {"attn_qkv": "self_attn.qkv_proj"}),
    "ernie4_5-moe": GgufArchitecture(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", _LLAMA | _EXPERTS | _CHOICE_BIAS | _shared("shared_experts")
    ),
    "hunyuan-moe": GgufArchitecture("HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", _HUNYUAN_MOE),
    "dots1": GgufArchitecture(
        "Dots1ForCausalLM", "dots1", _LLAMA | _QK_NORMS | _EXPERTS | _CHOICE_BIAS | _shared("shared_experts")
    ),
    "deepseek2": GgufArchitecture("DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK),  # or V2, by its keys
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", "glm4_moe", _GLM4_MOE),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM", "lfm2", _LFM2),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _LLAMA | _EXPERTS | _shared("shared") | _STATE_SPACE,
        interleaved_qk=True,
    ),
}

_BLOCK_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<stem>((nextn|shortconv)\.)?\w+?)(\.(?P<kind>weight|bias))?")


def hf_tensor_name(architecture: GgufArchitecture, gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if this architecture has no place for it."""
    if match := _BLOCK_NAME.fullmatch(gguf_name):
        stem = architecture.layer_names.get(match["stem"])
        if stem is None:
            return None
        name = stem[:-1] if stem.endswith("$") else f"{stem}.{match['kind']}"
        return f"{architecture.layers}.{match['layer']}.{name}"
    stem, _, kind = gguf_name.rpartition(".")
    names = _MODEL_NAMES if architecture.model_names is None else architecture.model_names
    if stem in names and kind in ("weight", "bias"):
        return f"{names[stem]}.{kind}"
    return None
