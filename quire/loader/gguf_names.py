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
    layer_names: dict[str, str] = field(default_factory=dict)  # GGUF name in a block -> HF name in a layer
    # The converter reorders each head's q and k rows from rotate-half to interleaved pairs.
    interleaved_qk: bool = False
    # The converter adds 1 to norm weights, because HF's module computes x * (1 + weight).
    norms_plus_one: bool = False


_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
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

_LLAMA = _ATTENTION | _GATED_MLP | _PRE_NORMS
_GEMMA = (
    _ATTENTION | _GATED_MLP | {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm"} | _POST_NORMS
)
_PHI3 = _PRE_NORMS | {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}

# Mistral and SmolLM2 models are written as "llama".
ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", _LLAMA, interleaved_qk=True),
    "qwen2": GgufArchitecture("Qwen2ForCausalLM", "qwen2", _LLAMA),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", _LLAMA | _QK_NORMS),
    "gemma2": GgufArchitecture("Gemma2ForCausalLM", "gemma2", _GEMMA, norms_plus_one=True),
    "gemma3": GgufArchitecture("Gemma3ForCausalLM", "gemma3_text", _GEMMA | _QK_NORMS, norms_plus_one=True),
    "phi3": GgufArchitecture("Phi3ForCausalLM", "phi3", _PHI3),
    "olmo2": GgufArchitecture("Olmo2ForCausalLM", "olmo2", _ATTENTION | _GATED_MLP | _POST_NORMS | _QK_NORMS),
    "smollm3": GgufArchitecture("SmolLM3ForCausalLM", "smollm3", _LLAMA, interleaved_qk=True),
    "granite": GgufArchitecture("GraniteForCausalLM", "granite", _LLAMA, interleaved_qk=True),
}

_BLOCK_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<stem>\w+)\.(?P<kind>weight|bias)")


def hf_tensor_name(architecture: GgufArchitecture, gguf_name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor; None if this architecture has no place for it."""
    if match := _BLOCK_NAME.fullmatch(gguf_name):
        stem = architecture.layer_names.get(match["stem"])
        return None if stem is None else f"model.layers.{match['layer']}.{stem}.{match['kind']}"
    stem, _, kind = gguf_name.rpartition(".")
    if stem in _MODEL_NAMES and kind in ("weight", "bias"):
        return f"{_MODEL_NAMES[stem]}.{kind}"
    return None
