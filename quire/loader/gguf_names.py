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
    # Heads of values that share a head of keys lie apart: first one of each head of keys, then the next of each.
    tiled_values: bool = False
    is_encoder: bool = False
    # In Hugging Face's tensors the matrices of all experts are one below the other, all as wide as hidden states.
    flat_experts: bool = False
    others: tuple[str, ...] = ()  # for config["architectures"] too, as a file's keys say


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
_MIXED = {name: stem.replace("mamba.", "mixer.") for name, stem in _STATE_SPACE.items()} | {"attn_norm": "norm"}
_SCAN = {
    **{
        name: f"{name_of}$" if name in ("ssm_a", "ssm_d") else name_of
        for name, name_of in (
            *(("ssm_in", "in_proj"), ("ssm_conv1d", "conv1d"), ("ssm_x", "x_proj"), ("ssm_dt", "dt_proj")),
            *(("ssm_a", "A_log"), ("ssm_d", "D"), ("ssm_out", "out_proj"), ("ssm_dt_norm", "dt_layernorm")),
            *(("ssm_b_norm", "b_layernorm"), ("ssm_c_norm", "c_layernorm")),
        )
    }
}
_NEMOTRON_H = ("NemotronHForCausalLM", "nemotron_h")
_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_FORWARD = {
    **{"attn_norm": "input_layernorm", "ffn_norm": "pre_ff_layernorm"},
    **{f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in ("gate", "up", "down")},
}
_BARE_NORM = {"ffn_norm": "pre_ff_layernorm.weight$"}  # which files name without its kind
_FINAL = {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"}
_FORWARD_EXPERTS = {f"ffn_{kind}_exps": f"feed_forward.experts.all.{kind}_proj" for kind in ("gate", "up", "down")}
_LLAMA4 = {
    **{**_ATTENTION, **_PRE_NORMS, **_FORWARD_EXPERTS, "ffn_gate_inp": "feed_forward.router"},
    **{f"ffn_{kind}": f"feed_forward.{kind}_proj" for kind in ("gate", "up", "down")},
    **{f"ffn_{kind}_shexp": f"feed_forward.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")},
}
_NEMOTRON = {
    **_MIXED,
    **{name: stem.replace("self_attn.", "mixer.") for name, stem in _ATTENTION.items()},
    **{f"ffn_{kind}": f"mixer.{kind}_proj" for kind in ("up", "down")},
    **{f"ffn_{kind}_exps": f"mixer.experts.all.{kind}_proj" for kind in ("up", "down")},
    **{f"ffn_{kind}_shexp": f"mixer.shared_experts.{kind}_proj" for kind in ("up", "down")},
    **{"ffn_gate_inp": "mixer.gate", "exp_probs_b": "mixer.gate.e_score_correction_bias$"},
    **{"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"},
}
_DELTA = {
    **_ATTENTION,
    **_QK_NORMS,
    **_LATE_NORMS,
    **{"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"},
    **{"ssm_beta": "linear_attn.in_proj_b", "ssm_alpha": "linear_attn.in_proj_a", "ssm_conv1d": "linear_attn.conv1d"},
    **{"ssm_a": "linear_attn.A_log$", "ssm_dt": "linear_attn.dt_bias$", "ssm_norm": "linear_attn.norm"},
    "ssm_out": "linear_attn.out_proj",
}
_KIMI = {
    **_DEEPSEEK,
    **_ATTENTION,
    **{f"ssm_conv1d_{kind}": f"self_attn.{kind}_conv1d" for kind in "qkv"},
    **{f"ssm_{kind}_{part}": f"self_attn.{kind}_{part}_proj" for kind in "fg" for part in "ab"},
    **{"ssm_beta": "self_attn.b_proj", "ssm_a": "self_attn.A_log$", "ssm_dt": "self_attn.dt_bias$"},
    "ssm_norm": "self_attn.o_norm",
}
_INDEXER = {
    f"indexer.{name}": f"self_attn.indexer.{name_of}"
    for name, name_of in (("k_norm", "k_norm"), ("proj", "weights_proj"), ("attn_k", "wk"), ("attn_q_b", "wq_b"))
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
_NOMIC_EXPERTS = {
    "ffn_gate_inp": "mlp.router.layer",
    "ffn_up_exps": "mlp.experts.mlp.w1$",
    "ffn_down_exps": "mlp.experts.mlp.w2$",
}
_MODERN_BERT = {
    **{"attn_norm": "attn_norm", "attn_qkv": "attn.Wqkv", "attn_output": "attn.Wo"},
    **{"ffn_norm": "mlp_norm", "ffn_up": "mlp.Wi", "ffn_down": "mlp.Wo"},
}
_MODERN_NAMES = {
    "token_embd": "embeddings.tok_embeddings",
    "token_embd_norm": "embeddings.norm",
    "output_norm": "final_norm",
}
_ENCODER_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}

_GATED_SHARED = _EXPERTS | _shared("shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}

# Mistral, Mixtral and SmolLM2 models are written as "llama".
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        *("LlamaForCausalLM", "llama", _LLAMA | _EXPERTS), interleaved_qk=True, others=("MixtralForCausalLM",)
    ),
    "bert": GgufArchitecture(
        *("BertModel", "bert", _BERT), layers="encoder.layer", model_names=_ENCODER_NAMES, is_encoder=True
    ),
    "nomic-bert": GgufArchitecture(
        *("NomicBertModel", "nomic_bert", _NOMIC_BERT),
        layers="encoder.layers",
        model_names=_ENCODER_NAMES,
        is_encoder=True,
    ),
    "nomic-bert-moe": GgufArchitecture(
        *("NomicBertModel", "nomic_bert", _NOMIC_BERT | _NOMIC_EXPERTS | {"ffn_up": "mlp.fc1"}),
        layers="encoder.layers",
        model_names=_ENCODER_NAMES,
        is_encoder=True,
        flat_experts=True,
    ),
    "modern-bert": GgufArchitecture(
        *("ModernBertModel", "modernbert", _MODERN_BERT), layers="layers", model_names=_MODERN_NAMES, is_encoder=True
    ),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", _LLAMA | _QK_NORMS),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", "gemma2", _GEMMA, norms_plus_one=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA | _QK_NORMS, norms_plus_one=True),
    "gemma-embedding": GgufArchitecture("Gemma3TextModel", "gemma3_text", _GEMMA | _QK_NORMS, norms_plus_one=True),
    "phi3": GgufArchitecture("Phi3ForCausalLM", "phi3", _PHI3),
    "olmo2": GgufArchitecture(
        *("Olmo2ForCausalLM", "olmo2", _ATTENTION | _GATED_MLP | _POST_NORMS | _QK_NORMS),
        others=("Olmo3ForCausalLM",),
    ),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", _LLAMA, interleaved_qk=True),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", _LLAMA, interleaved_qk=True),
    "granitemoe": GgufArchitecture("GraniteMoeForCausalLM", "granitemoe", _LLAMA | _EXPERTS, interleaved_qk=True),
    "qwen2moe": GgufArchitecture("Qwen2MoeForCausalLM", "qwen2_moe", _LLAMA | _GATED_SHARED),
    "qwen3moe": GgufArchitecture("Qwen3MoeForCausalLM", "qwen3_moe", _LLAMA | _QK_NORMS | _EXPERTS),
    "olmoe": GgufArchitecture("OlmoeForCausalLM", "olmoe", _LLAMA | _QK_NORMS | _EXPERTS),
    "llama4": GgufArchitecture("Llama4ForCausalLM", "llama4_text", _LLAMA4),
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
    "deepseek2": GgufArchitecture(
        "DeepseekV3ForCausalLM", "deepseek_v3", _DEEPSEEK, others=("DeepseekV2ForCausalLM",)
    ),
    "deepseek32": GgufArchitecture("DeepseekV32ForCausalLM", "deepseek_v32", _DEEPSEEK | _INDEXER),
    "glm4moe": GgufArchitecture("Glm4MoeForCausalLM", "glm4_moe", _GLM4_MOE),
    "glm-dsa": GgufArchitecture("GlmMoeDsaForCausalLM", "glm_moe_dsa", _DEEPSEEK | _INDEXER),
    "minicpm3": GgufArchitecture("MiniCPM3ForCausalLM", "minicpm3", _DEEPSEEK),
    "lfm2": GgufArchitecture("Lfm2ForCausalLM", "lfm2", _LFM2),
    "lfm2moe": GgufArchitecture(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        _LFM2 | _FORWARD_EXPERTS | {"ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias$"},
    ),
    "falcon-h1": GgufArchitecture(
        "FalconH1ForCausalLM", "falcon_h1", _ATTENTION | _FORWARD | _STATE_SPACE | _BARE_NORM, model_names=_FINAL
    ),
    "nemotron_h": GgufArchitecture(*_NEMOTRON_H, _NEMOTRON, layers="backbone.layers", model_names=_BACKBONE),
    "nemotron_h_moe": GgufArchitecture(*_NEMOTRON_H, _NEMOTRON, layers="backbone.layers", model_names=_BACKBONE),
    "mamba": GgufArchitecture(
        "MambaForCausalLM",
        "mamba",
        {name: f"mixer.{stem}" for name, stem in _SCAN.items()} | {"attn_norm": "norm"},
        layers="backbone.layers",
        model_names=_BACKBONE,
        others=("FalconMambaForCausalLM",),
    ),
    "mamba2": GgufArchitecture(
        "Mamba2ForCausalLM", "mamba2", _MIXED, layers="backbone.layers", model_names=_BACKBONE
    ),
    "jamba": GgufArchitecture(
        "JambaForCausalLM",
        "jamba",
        _ATTENTION
        | _FORWARD
        | _FORWARD_EXPERTS
        | {"ffn_gate_inp": "feed_forward.router"}
        | {name: f"mamba.{stem}" for name, stem in _SCAN.items()},
        model_names=_FINAL,
    ),
    "qwen35": GgufArchitecture(
        "Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA | _GATED_MLP, norms_plus_one=True, tiled_values=True
    ),
    "qwen35moe": GgufArchitecture(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _DELTA | _GATED_SHARED, norms_plus_one=True, tiled_values=True
    ),
    "qwen3next": GgufArchitecture(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        _DELTA | _GATED_SHARED | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
        norms_plus_one=True,
    ),
    "kimi-linear": GgufArchitecture("KimiLinearForCausalLM", "kimi_linear", _KIMI),
    "granitehybrid": GgufArchitecture(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        _LLAMA | _EXPERTS | _shared("shared") | _STATE_SPACE,
        interleaved_qk=True,
    ),
}

_BLOCK_NAME = re.compile(
    r"blk\.(?P<layer>\d+)\.(?P<stem>((indexer|nextn|shortconv)\.)?\w+?)(\.(?P<kind>weight|bias))?"
)


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
