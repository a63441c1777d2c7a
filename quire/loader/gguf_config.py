"""Builds a Hugging Face config from GGUF metadata. Torch-free; what a file does not say is what ggml assumes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.loader.config_schema import MAX_EXPERTS, MAX_LAYERS
from quire.loader.gguf_file import GgufFile
from quire.loader.gguf_keys import GgufKeys, experts, experts_alone, granite, shortest
from quire.loader.gguf_latent import LATENT_KEYS, deepseek_experts
from quire.loader.gguf_names import ARCHITECTURES, GgufArchitecture
from quire.loader.gguf_recurrent import RECURRENT_KEYS, STATES_ALONE
from quire.types.errors import CheckpointError

DEFAULT_ROPE_THETA = 10000.0


def architecture_of(file: GgufFile) -> tuple[str, GgufArchitecture]:
    """The file's architecture name and what is known about it."""
    name = file.metadata.get("general.architecture")
    if name is None:
        raise CheckpointError(f"{file.path} has no metadata key general.architecture; convert the model again")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise CheckpointError(
            f"{file.path} has the GGUF architecture {name!r}; supported: {', '.join(ARCHITECTURES)}"
        )
    return name, ARCHITECTURES[name]


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The keys that config.json of the same model would have."""
    name, architecture = architecture_of(file)
    keys = GgufKeys(file, name)
    recurs, alone = name in RECURRENT_KEYS, name in STATES_ALONE
    num_heads = 1 if alone else keys.count("attention.head_count", skips_zero=recurs)
    hidden_size = keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads)
    is_latent = keys.get("attention.kv_lora_rank") is not None
    if not is_latent and keys.count("attention.value_length", head_dim) != head_dim:
        raise CheckpointError(
            f"{file.path}: {name}.attention.value_length is {keys.get('attention.value_length')} but heads have "
            f"{head_dim} key values; such models are not supported"
        )
    config: dict[str, Any] = {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.model_type,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden_size,
        "intermediate_size": 1 if alone else keys.count("feed_forward_length", skips_zero=recurs),
        "num_hidden_layers": keys.count("block_count", at_most=MAX_LAYERS),
        "num_attention_heads": num_heads,
        "num_key_value_heads": 1 if alone else keys.count("attention.head_count_kv", num_heads, skips_zero=recurs),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": _rope_theta(keys),
        "rope_scaling": _rope_scaling(keys),
        **_special_tokens(file),
    }
    if keys.get("pooling_type") is not None:
        config["pooling_type"] = keys.get("pooling_type")
    if architecture.is_encoder:
        return _encoder(keys, config)
    eps = keys.get("attention.layer_norm_epsilon") if recurs else None  # of Nemotron-H
    config["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon", eps)
    rotary_dim = keys.count("rope.dimension_count", head_dim)
    if rotary_dim != head_dim and not is_latent:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    if name in _OWN_KEYS:
        _OWN_KEYS[name](keys, config)
    return config


def _encoder(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    types = keys.file.tensors.get("token_types.weight")
    if keys.architecture in _ENCODERS_KEYS:
        config |= _ENCODERS_KEYS[keys.architecture](keys)
    return config | {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "type_vocab_size": 0 if types is None else types.shape[0],
        "hidden_act": "silu" if "blk.0.ffn_gate.weight" in keys.file.tensors else "gelu",
    }


def _modern_bert(keys: GgufKeys) -> dict[str, Any]:
    window = int(keys.number("attention.sliding_window", 0))
    return {
        "hidden_activation": "gelu",
        "norm_eps": keys.number("attention.layer_norm_epsilon"),
        "norm_bias": "output_norm.bias" in keys.file.tensors,
        "attention_bias": "blk.0.attn_qkv.bias" in keys.file.tensors,
        "local_attention": window or 128,
        "global_attn_every_n_layers": keys.count("attention.sliding_window_pattern", 3) if window else 1,
        "global_rope_theta": float(keys.number("rope.freq_base", 160_000.0)),
        "local_rope_theta": float(keys.number("rope.freq_base_swa", DEFAULT_ROPE_THETA)),
    }


def _nomic_bert_moe(keys: GgufKeys) -> dict[str, Any]:
    tensors = keys.file.tensors
    return {
        "activation_function": "gelu",
        "qkv_proj_bias": "blk.0.attn_qkv.bias" in tensors,
        "mlp_fc1_bias": "blk.0.ffn_up.bias" in tensors,
        "mlp_fc2_bias": "blk.0.ffn_down.bias" in tensors,
        "num_experts": keys.count("expert_count", at_most=MAX_EXPERTS),
        "moe_top_k": keys.count("expert_used_count"),
        "moe_every_n_layers": keys.count("moe_every_n_layers"),
        "moe_bias": False,  # llama.cpp's files leave it out
    }


_ENCODERS_KEYS = {"modern-bert": _modern_bert, "nomic-bert-moe": _nomic_bert_moe}


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path} has no matrix token_embd.weight; convert the model again")
    return embedding.shape[0]


def _rope_theta(keys: GgufKeys) -> float:
    theta = float(keys.number("rope.freq_base", DEFAULT_ROPE_THETA))
    if not theta > 1.0:
        raise keys.wrong("rope.freq_base", theta, "above 1")
    return theta


def _rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    same = keys.floats("rope_freqs.weight")
    if same is not None:
        # llama3 scaling, stored as the factors it leads to: longrope with equal tables says just that.
        return _longrope(same, same, 1.0, original)
    long, short = keys.floats("rope_factors_long.weight"), keys.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        return _longrope(short, long, keys.number("rope.scaling.attn_factor", 1.0), original)
    kind = keys.text("rope.scaling.type", "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0, 1):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise CheckpointError(
            f"{keys.file.path}: {keys.architecture}.rope.scaling.type is {kind!r}; supported: none, linear, yarn, "
            f"and longrope with its factor tensors"
        )
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def _longrope(short: list[float], long: list[float], attention_factor: float, original: int) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": attention_factor,
        "original_max_position_embeddings": original,
    }


def _special_tokens(file: GgufFile) -> dict[str, int]:
    ids = {}
    for kind, gguf_kind in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        value = file.metadata.get(f"tokenizer.ggml.{gguf_kind}_token_id")
        if isinstance(value, int):
            ids[f"{kind}_token_id"] = value
    return ids


def _layer_types(keys: GgufKeys, num_layers: int, default_period: int) -> list[str]:
    """Every period-th layer sees everything, the others a window; newer files may list the layers one by one."""
    key = "attention.sliding_window_pattern"
    listed = keys.get(key)
    if isinstance(listed, list) and len(listed) >= num_layers:
        slides = listed[:num_layers]
    else:
        period = keys.count(key, default_period)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


def _gemma(keys: GgufKeys, config: dict[str, Any], period: int, layers_of_27b: int) -> None:
    # GGUF does not store the attention scale; only the 27B models do not use the head size.
    by_hidden = config["num_hidden_layers"] == layers_of_27b
    config |= {
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if by_hidden
        else config["head_dim"],
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _layer_types(keys, config["num_hidden_layers"], period),
        "sliding_window": keys.number("attention.sliding_window", 0) or None,
    }


def _gemma2(keys: GgufKeys, config: dict[str, Any]) -> None:
    _gemma(keys, config, period=2, layers_of_27b=46)
    config["sliding_window"] = config["sliding_window"] or 4096
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)


def _gemma3(keys: GgufKeys, config: dict[str, Any]) -> None:
    _gemma(keys, config, period=6, layers_of_27b=62)
    if config["sliding_window"] is None:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    config["rope_theta"] = float(keys.number("rope.freq_base", 1_000_000.0))
    config["rope_local_base_freq"] = float(keys.number("rope.freq_base_swa", DEFAULT_ROPE_THETA))
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 0.0) or None
    config["attn_logit_softcapping"] = None


def _gemma_embedding(keys: GgufKeys, config: dict[str, Any]) -> None:
    _gemma3(keys, config)
    config["use_bidirectional_attention"] = True


def _phi3(keys: GgufKeys, config: dict[str, Any]) -> None:
    config["sliding_window"] = keys.number("attention.sliding_window", 0) or None
    config["original_max_position_embeddings"] = keys.count(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )


def _olmo2(keys: GgufKeys, config: dict[str, Any]) -> None:
    # OLMo 3 is written under the same name; only it has a window.
    if window := keys.number("attention.sliding_window", 0):
        config |= {
            "architectures": ["Olmo3ForCausalLM"],
            "model_type": "olmo3",
            "sliding_window": window,
            "layer_types": _layer_types(keys, config["num_hidden_layers"], 4),
        }


def _smollm3(keys: GgufKeys, config: dict[str, Any]) -> None:
    interval = 4  # ggml's constant: no file can say another
    config["no_rope_layer_interval"] = interval
    config["no_rope_layers"] = [int((i + 1) % interval != 0) for i in range(config["num_hidden_layers"])]


def _llama(keys: GgufKeys, config: dict[str, Any]) -> None:
    if keys.get("expert_count"):
        experts_alone(keys, config)
        config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}


def _qwen2_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    experts(keys, config)
    width = keys.count("expert_shared_feed_forward_length", config["intermediate_size"])
    config |= {"norm_topk_prob": False, "shared_expert_intermediate_size": width}
    config["qkv_bias"] = config["attention_bias"]


def _qwen3_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    experts(keys, config)
    config["norm_topk_prob"] = True


def _granite_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    granite(keys, config)
    experts_alone(keys, config)
    if keys.get("expert_shared_feed_forward_length"):
        raise CheckpointError(
            f"{keys.file.path}: {keys.architecture}.expert_shared_feed_forward_length is set; Granite models with a "
            f"shared expert are not supported"
        )


def _gpt_oss(keys: GgufKeys, config: dict[str, Any]) -> None:
    experts_alone(keys, config)
    config |= {
        "sliding_window": keys.count("attention.sliding_window", 128),
        "layer_types": _layer_types(keys, config["num_hidden_layers"], 2),
    }


def _phi_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    experts_alone(keys, config)
    _phi3(keys, config)
    config["lm_head_bias"] = "output.bias" in keys.file.tensors


def _ernie_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    experts(keys, config)
    config |= {
        "moe_num_experts": config["num_local_experts"],
        "moe_k": config["num_experts_per_tok"],
        "moe_num_shared_experts": int(keys.number("expert_shared_count", 0)),
        "moe_layer_start_index": int(keys.number("leading_dense_block_count", 0)),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
        "use_bias": config["attention_bias"],
    }


def _hunyuan_moe(keys: GgufKeys, config: dict[str, Any]) -> None:
    experts_alone(keys, config)
    config |= {"num_experts": config["num_local_experts"], "moe_topk": config["num_experts_per_tok"]}


def _llama4(keys: GgufKeys, config: dict[str, Any]) -> None:
    """What files do not say is what ggml assumes of the published models."""
    num_layers, width = config["num_hidden_layers"], config["intermediate_size"]
    experts_alone(keys, config)
    config |= {
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "intermediate_size_mlp": width,
        "interleave_moe_layer_step": keys.count("interleave_moe_layer_step", 1),
        "attention_chunk_size": 8192,
        "use_qk_norm": config["num_local_experts"] != 128,
    }
    if keys.get("attention.sliding_window") == 0:  # every layer sees everything and rotates
        config |= {"layer_types": ["full_attention"] * num_layers, "no_rope_layers": [1] * num_layers}


_OWN_KEYS: dict[str, Callable[[GgufKeys, dict[str, Any]], None]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma-embedding": _gemma_embedding,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "smollm3": _smollm3,
    "granite": granite,
    "granitemoe": _granite_moe,
    "llama": _llama,
    "qwen2moe": _qwen2_moe,
    "qwen3moe": _qwen3_moe,
    "olmoe": experts_alone,
    "llama4": _llama4,
    "gpt-oss": _gpt_oss,
    "minimax-m2": experts_alone,
    "phimoe": _phi_moe,
    "ernie4_5-moe": _ernie_moe,
    "hunyuan-moe": _hunyuan_moe,
    "dots1": deepseek_experts,
    "glm4moe": deepseek_experts,
    **LATENT_KEYS,
    **RECURRENT_KEYS,
}


# Keys under general.sampling., and what generation_config.json calls them.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def sampling_from_gguf(file: GgufFile) -> dict[str, Any]:
    """The keys of generation_config.json that say how to sample, as far as the file suggests any."""
    suggested = {name: file.metadata.get(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {name: shortest(value) for name, value in suggested.items() if value is not None}
