"""Configs of models with latent attention, and with DeepSeek's experts, from GGUF metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.loader.gguf_keys import GgufKeys, experts

_SOFTMAX, _SIGMOID = 1, 2  # as expert_gating_func numbers them


def deepseek_experts(keys: GgufKeys, config: dict[str, Any]) -> None:
    """Experts by the keys of DeepSeek-V3, which others took over."""
    experts(keys, config)
    nextn = keys.get("nextn_predict_layers")
    config |= {
        "num_hidden_layers": config["num_hidden_layers"] - (nextn if isinstance(nextn, int) else 0),
        "n_routed_experts": config["num_local_experts"],
        "n_shared_experts": int(keys.number("expert_shared_count", 0)),
        "first_k_dense_replace": int(keys.number("leading_dense_block_count", 0)),
        "norm_topk_prob": bool(keys.get("expert_weights_norm")),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.file.tensors,
        "sliding_window": None,
    }


def latent_sizes(keys: GgufKeys, config: dict[str, Any]) -> None:
    """Files that have keys and values of latent attention apart state lengths of heads under names of their own."""
    rope_dim = keys.count("rope.dimension_count")
    head_dim = keys.count("attention.key_length_mla", config["head_dim"])
    q_rank = keys.get("attention.q_lora_rank")
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rope_dim,
        "q_lora_rank": q_rank if isinstance(q_rank, int) and q_rank > 0 else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head_dim - rope_dim,
        "v_head_dim": keys.count("attention.value_length_mla", keys.count("attention.value_length", head_dim)),
    }


def needs_sigmoid(keys: GgufKeys) -> None:
    if keys.count("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise keys.wrong("expert_gating_func", keys.get("expert_gating_func"), f"{_SIGMOID}, which is sigmoid")


def _deepseek(keys: GgufKeys, config: dict[str, Any]) -> None:
    deepseek_experts(keys, config)
    latent_sizes(keys, config)
    is_v2 = keys.count("expert_gating_func", _SOFTMAX) == _SOFTMAX
    if is_v2 and config["norm_topk_prob"]:
        raise keys.wrong(
            "expert_weights_norm", True, "false with softmax scores: DeepSeek-V2 does not divide weights"
        )
    config |= {
        "architectures": ["DeepseekV2ForCausalLM" if is_v2 else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v2" if is_v2 else "deepseek_v3",
        "topk_method": "group_limited_greedy" if config["n_group"] > 1 else "greedy",  # that V2 reads
    }
    _scaling(keys, config)


def _scaling(keys: GgufKeys, config: dict[str, Any]) -> None:
    weight = keys.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
    if config["rope_scaling"] is not None and weight:
        config["rope_scaling"] |= {"mscale": weight, "mscale_all_dim": weight}


def _sparse(keys: GgufKeys, config: dict[str, Any]) -> None:
    """DeepSeek-V3.2 and GLM-5."""
    deepseek_experts(keys, config)
    latent_sizes(keys, config)
    needs_sigmoid(keys)
    _scaling(keys, config)
    layers = range(config["num_hidden_layers"])
    listed = keys.get("attention.indexer.types")
    own = (
        listed
        if isinstance(listed, list)
        else [f"blk.{n}.indexer.attn_k.weight" in keys.file.tensors for n in layers]
    )
    config |= {
        "index_n_heads": keys.count("attention.indexer.head_count"),
        "index_head_dim": keys.count("attention.indexer.key_length"),
        "index_topk": keys.count("attention.indexer.top_k"),
        "indexer_types": ["full" if has_one else "shared" for has_one in own[: len(layers)]],
    }


def _minicpm3(keys: GgufKeys, config: dict[str, Any]) -> None:
    rope_dim = keys.count("rope.dimension_count")
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "q_lora_rank": keys.count("attention.q_lora_rank"),
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": keys.count("attention.key_length") - rope_dim,
        "head_dim": rope_dim,
    }


LATENT_KEYS: dict[str, Callable[[GgufKeys, dict[str, Any]], None]] = {
    "deepseek2": _deepseek,
    "deepseek32": _sparse,
    "glm-dsa": _sparse,
    "minicpm3": _minicpm3,
}
